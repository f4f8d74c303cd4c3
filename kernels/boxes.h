#pragma once
#include "host.h"

// What loops with sums, and loops over rows, share. The space is cut into boxes by its sizes alone (opgraph/loops/boxes.py).
// Any thread may do any box: within one, rows run in the order of memory, and each sum collects its addends in cells, one
// for each of its results that the box reaches. What several boxes contribute to is added up afterwards, box by box, so
// the bits never depend on the number of threads.
//
// Cells are doubles: a sum of floats is as good as exact. A sum of doubles carries what each addition rounded off.

namespace og {

enum { lanes = 32, few = 12, max_cells = 4096, small_work = 2048, stretch = 2048, max_spread = 4 };

// sum + rest = sum + x, exactly but for the last addition (Knuth, The art of computer programming 2, 4.2.2).
OG_FN void add_exactly(double& sum, double& rest, double x) {
  const double total = sum + x, moved = total - sum;
  rest += (sum - (total - moved)) + (x - moved);
  sum = total;
}

// A double overflows, or meets an infinity, without a rest.
OG_FN double whole(double sum, double rest) { return sum - sum == 0 ? sum + rest : sum; }

// ---- cells -----------------------------------------------------------------------------------------------------------

// `rests` cells further lies what additions rounded off, where addends are doubles.
OG_FN void add_each(double* __restrict cell, i64, const float* __restrict x, i64 n) {
  for (i64 i = 0; i < n; ++i) cell[i] += (double)x[i];
}
OG_FN void add_each(double* __restrict cell, i64 rests, const double* __restrict x, i64 n) {
  OG_VECTORIZE
  for (i64 i = 0; i < n; ++i) add_exactly(cell[i], cell[i + rests], x[i]);
}

template <class T> constexpr i64 planes() { return sizeof(T) == sizeof(double) ? 2 : 1; }

// Adds the cells of one box to those of the boxes before it.
OG_FN void add_cells(double* __restrict cell, const double* __restrict x, i64 n, float) {
  for (i64 i = 0; i < n; ++i) cell[i] += x[i];
}
OG_FN void add_cells(double* __restrict cell, const double* __restrict x, i64 n, double) {
  OG_VECTORIZE
  for (i64 i = 0; i < n; ++i) {
    add_exactly(cell[i], cell[i + n], x[i]);
    cell[i + n] += x[i + n];
  }
}

// ---- boxes -----------------------------------------------------------------------------------------------------------

// One sum: its operand, cells in a box, where these stand among those of all sums, where they are left for the second
// stage among those of a box (-1: the box completes them), and strides of the cells. Each result is the sum of `group`
// neighbouring cells of the last axis, or of those that lie `tile` apart, where that is not 0.
struct Sum {
  i64 operand, cells, scratch, left, group, tile;
  const i64* strides;
};

// An operand that is spread over a stretch of the last axis before that is walked: element c of the axis is its element
// c / period * outer + c % period * inner.
struct Spread {
  i64 operand, period, outer, inner, bytes;
};

struct Boxes {
  Space space;
  i64 count, leaves, spreads;  // boxes, the doubles that one leaves for the second stage, operands to spread
  const i64 *box, *counts, *spread, *sums;
  double* work;

  OG_FN Sum sum(int k) const {
    const i64* at = sums + k * (6 + space.rank);
    return {at[0], at[1], at[2], at[3], at[4], at[5], at + 6};
  }
  OG_FN i64 extent(i64 axis, i64 chunk) const {
    const i64 left = space.dims[axis] - chunk * box[axis];
    return left < box[axis] ? left : box[axis];
  }
};

// Where a walk through a box stands: along each axis, in each operand, and in the cells of each sum.
template <class F> struct Place {
  i64 chunk[max_rank], extent[max_rank], at[max_rank], offset[F::operands], step[F::operands], rests[F::sums + 1];
  double* cell[F::sums + 1];

  // The first place of box `number`, its cells in `cells`.
  OG_FN void start(const Boxes& boxes, i64 number) {
    const Space& space = boxes.space;
    const i64 rank = space.rank;
    for (int k = 0; k < F::operands; ++k) {
      offset[k] = 0;
      step[k] = space.strides[k * rank + rank - 1];
    }
    for (i64 d = rank - 1, rest = number; d >= 0; --d) {
      chunk[d] = rest % boxes.counts[d];
      rest /= boxes.counts[d];
      extent[d] = boxes.extent(d, chunk[d]);
      at[d] = 0;
      for (int k = 0; k < F::operands; ++k) offset[k] += chunk[d] * boxes.box[d] * space.strides[k * rank + d];
    }
    for (int k = 0; k < F::sums; ++k) cell[k] = nullptr;
  }
  // The cells of sum k.
  OG_FN void start_cells(const Sum& sum, int k, double* cells) {
    cell[k] = cells;
    rests[k] = sum.cells;
    for (i64 i = 0; i < sum.cells * planes<typename F::Addend>(); ++i) cells[i] = 0;
  }
  // How many places there are along axes [begin, end).
  OG_FN i64 count(i64 begin, i64 end) const {
    i64 product = 1;
    for (i64 d = begin; d < end; ++d) product *= extent[d];
    return product;
  }
  // The next place along axes [begin, end), like an odometer; after the last one back to the first, and false.
  OG_FN bool next(const Boxes& boxes, i64 begin, i64 end) {
    const Space& space = boxes.space;
    for (i64 d = end - 1; d >= begin; --d) {
      const bool inside = ++at[d] < extent[d];
      const i64 moved = inside ? 1 : 1 - extent[d];
      for (int k = 0; k < F::operands; ++k) offset[k] += moved * space.strides[k * space.rank + d];
      for (int k = 0; k < F::sums; ++k) cell[k] += moved * boxes.sum(k).strides[d];
      if (inside) return true;
      at[d] = 0;
    }
    return false;
  }
};

// Writes the results of one box (or of all boxes that stand at these places along the axes that the sum keeps).
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
      F::total(k, boxes.space.base[sum.operand], to + i * strides[last], total);
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

// The totals of what boxes contributed to, in the order of the boxes, added up in the memory of the first of them.
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

// layout: that of og::launch; then number of boxes, doubles that each leaves for the second stage, number of operands to
// spread (of rows: axes of a row), extents of a box, boxes along each axis, and spread operands and sums as og::Spread and
// og::Sum have them. base has one entry more than there are operands: memory for what the boxes leave, null where
// `small_work` doubles suffice.
template <class F> OG_FN Boxes boxes_at(void* const* base, const i64* layout, i64 spreads, double* small) {
  const i64 rank = layout[0];
  const Space space = {base, rank, layout[1], layout[1 + rank], layout + 2, layout + 2 + rank};
  const i64* more = layout + 2 + rank + F::operands * rank;
  const i64 *box = more + 3, *counts = box + rank, *spread = counts + rank;
  double* work = base[F::operands] ? (double*)base[F::operands] : small;
  return {space, more[0], more[1], spreads, box, counts, spread, spread + 5 * spreads, work};
}

// Boxes [begin, end) by work(number). All of them mean the second stage too, and begin < 0 means that alone.
template <class F, class Work>
OG_FN void each_box(const Boxes& boxes, i64 begin, i64 end, i64 threads, Parallel parallel, const Work& work) {
  if (begin >= 0) in_threads(work, begin, end, threads, parallel);
  if (begin < 0 || (begin == 0 && end == boxes.count)) {
    for (int k = 0; k < F::sums; ++k) totals<F>(boxes, k);
  }
}

}  // namespace og
