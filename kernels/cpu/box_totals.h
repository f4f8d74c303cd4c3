#pragma once
#include "cpu/boxes.h"

// Distributes boxes to threads, and adds up their cells to totals once all boxes of a total are done.

namespace og {

/// True if the results of a functor's sums depend on the number of addends: means.
template <class F, class = void> struct counts_of {
  static constexpr bool value = false;
};
template <class F> struct counts_of<F, ignored<decltype(F::counts)>> {
  static constexpr bool value = F::counts;
};

// Writes the results of one box, or of all boxes at these places along the axes that the sum keeps.
template <class F> void deliver(const Boxes& boxes, int k, const i64* chunk, const double* cells) {
  const Sum sum = boxes.sum(k);
  const i64 rank = boxes.space.rank, last = rank - 1;
  const i64* strides = boxes.space.strides + sum.operand * rank;
  i64 extent[max_rank], at[max_rank], to = 0, cell = 0;
  for (i64 d = 0; d < rank; ++d) {
    extent[d] = strides[d] == 0 ? 1 : boxes.extent(d, chunk[d]);
    to += strides[d] == 0 ? 0 : chunk[d] * boxes.box[d] / (d == last ? sum.group : 1) * strides[d];
    at[d] = 0;
  }
  const i64 results = sum.tile ? sum.tile : extent[last] / sum.group;
  i64 all = sum.tile ? sum.tile : strides[last] == 0 ? 1 : boxes.space.inner / sum.group;
  for (i64 d = 0; d < last; ++d) all *= strides[d] == 0 ? 1 : boxes.space.dims[d];
  const i64 count = boxes.space.size / all;
  const i64 apart = sum.tile ? sum.tile : 1, folded = extent[last] / results;
  const i64 step = sum.tile ? 1 : sum.group * sum.strides[last];
  for (;;) {
    for (i64 i = 0; i < results; ++i) {
      const double* value = cells + cell + i * step;
      double total = value[0], rest = 0;
      if (planes<typename F::Addend>() == 2) {
        rest = value[sum.cells];
        for (i64 j = 1; j < folded; ++j) {
          add_exactly(total, rest, value[j * apart]);
          rest += value[j * apart + sum.cells];
        }
        total = whole(total, rest);
      } else {
        for (i64 j = 1; j < folded; ++j) total += value[j * apart];
      }
      if constexpr (counts_of<F>::value) {
        total_of<F>(k, boxes.space.base[sum.operand], to + i * strides[last], total, count);
      } else {
        total_of<F>(k, boxes.space.base[sum.operand], to + i * strides[last], total);
      }
    }
    i64 d = last - 1;
    for (; d >= 0; --d) {
      to += strides[d];
      cell += sum.strides[d];
      if (++at[d] < extent[d]) break;
      at[d] = 0;
      to -= extent[d] * strides[d];
      cell -= extent[d] * sum.strides[d];
    }
    if (d < 0) return;
  }
}

// ---- the second stage -------------------------------------------------------------------------------------------------

// Adds up the cells of boxes with the same results, in the order of the boxes, in the memory of the first.
template <class F> void totals(const Boxes& boxes, int k) {
  const Sum sum = boxes.sum(k);
  if (sum.left < 0) return;
  const i64 rank = boxes.space.rank;
  const i64* strides = boxes.space.strides + sum.operand * rank;
  i64 chunk[max_rank];
  for (i64 d = 0; d < rank; ++d) chunk[d] = 0;
  for (;;) {
    double* cells = nullptr;
    for (i64 d = 0; d >= 0;) {
      i64 number = 0;
      for (i64 axis = 0; axis < rank; ++axis) number = number * boxes.counts[axis] + chunk[axis];
      double* more = boxes.work + number * boxes.leaves + sum.left;
      if (cells == nullptr) {
        cells = more;
      } else {
        add_cells(cells, more, sum.cells, typename F::Addend(0));
      }
      for (d = rank - 1; d >= 0; --d) {
        if (strides[d] != 0) continue;
        if (++chunk[d] < boxes.counts[d]) break;
        chunk[d] = 0;
      }
    }
    deliver<F>(boxes, k, chunk, cells);
    i64 d = rank - 1;
    for (; d >= 0; --d) {
      if (strides[d] == 0) continue;
      if (++chunk[d] < boxes.counts[d]) break;
      chunk[d] = 0;
    }
    if (d < 0) return;
  }
}

// ---- threads ---------------------------------------------------------------------------------------------------------

template <class Work> struct Takers {
  const Work* work;
  i64 next, end;
};
template <class Work> void take(void* data) {
  Takers<Work>* takers = (Takers<Work>*)data;
  for (;;) {
    const i64 number = __atomic_fetch_add(&takers->next, 1, __ATOMIC_RELAXED);
    if (number >= takers->end) return;
    (*takers->work)(number);
  }
}

// work(begin), ... work(end - 1), each by any thread.
template <class Work> OG_FN void in_threads(const Work& work, i64 begin, i64 end, i64 threads, Parallel parallel) {
  Takers<Work> takers = {&work, begin, end};
  if (threads > 1 && parallel != nullptr && end - begin > 1) {
    parallel(take<Work>, &takers, (unsigned)threads, 0);
  } else {
    take<Work>(&takers);
  }
}

// ---- launching -------------------------------------------------------------------------------------------------------

// layout: that of og::launch; then the number of boxes, the number of doubles that each leaves for the second stage,
// the number of operands to spread (loops over rows: the number of axes of a row), the extents of a box, the number of
// boxes along each axis, and the spread operands and sums in the format of og::Spread and og::Sum. base has one entry
// more than there are operands: memory for the cells that boxes leave, or null if `small_work` doubles suffice.
template <class F> OG_FN Boxes boxes_at(void* const* base, const i64* layout, i64 spreads, double* small) {
  const i64 rank = layout[0];
  const Space space = {base, rank, layout[1], layout[1 + rank], layout + 2, layout + 2 + rank};
  const i64* more = layout + 2 + rank + F::operands * rank;
  const i64 *box = more + 3, *counts = box + rank, *spread = counts + rank;
  double* work = base[F::operands] ? (double*)base[F::operands] : small;
  return {space, more[0], more[1], spreads, box, counts, spread, spread + 5 * spreads, work};
}

// Boxes [begin, end), by work(number). If these are all, the second stage follows; begin < 0: the second stage alone.
template <class F, class Work>
OG_FN void each_box(const Boxes& boxes, i64 begin, i64 end, i64 threads, Parallel parallel, const Work& work) {
  if (begin >= 0) in_threads(work, begin, end, threads, parallel);
  if (begin < 0 || (begin == 0 && end == boxes.count)) {
    for (int k = 0; k < F::sums; ++k) totals<F>(boxes, k);
  }
}

}  // namespace og
