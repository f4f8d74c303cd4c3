#pragma once
#include "host.h"

// The CPU skeleton of a loop with sums. The space is cut into boxes by its sizes alone (opgraph/loops/boxes.py). Any
// thread may do any box: within one, rows run in the order of memory, and each sum collects its addends in cells, one for
// each of its results that the box reaches. What several boxes contribute to is added up afterwards, box by box, so the
// bits never depend on the number of threads.
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

// ---- a row that is added up ------------------------------------------------------------------------------------------

// Addends come in strips of whole lanes, the last one filled up with zeros. Plain loops over lanes: GCC vectorises these
// for any machine; with vector types instead it took three times as long on some (GCC 12, AVX2).
template <class T> struct Row {
  double sum = 0, rest = 0;
  OG_FN void add(const T* x, i64 n) {
    double lane[lanes];
    if constexpr (sizeof(T) == sizeof(double)) {
      double rests[lanes];
      for (int l = 0; l < lanes; ++l) lane[l] = rests[l] = 0;
      for (i64 i = 0; i < n; i += lanes)
        for (int l = 0; l < lanes; ++l) add_exactly(lane[l], rests[l], x[i + l]);
      for (int half = lanes / 2; half > 0; half /= 2) {
        for (int l = 0; l < half; ++l) {
          add_exactly(lane[l], rests[l], lane[l + half]);
          rests[l] += rests[l + half];
        }
      }
      add_exactly(sum, rest, lane[0]);
      rest += rests[0];
    } else {
      for (int l = 0; l < lanes; ++l) lane[l] = 0;
      for (i64 i = 0; i < n; i += lanes)
        for (int l = 0; l < lanes; ++l) lane[l] += (double)x[i + l];
      for (int half = lanes / 2; half > 0; half /= 2)
        for (int l = 0; l < half; ++l) lane[l] += lane[l + half];
      sum += lane[0];
    }
  }
  // A strip that is shorter than a tree is worth.
  OG_FN void add_few(const T* x, i64 n) {
    for (i64 i = 0; i < n; ++i) {
      if constexpr (sizeof(T) == sizeof(double)) {
        add_exactly(sum, rest, x[i]);
      } else {
        sum += (double)x[i];
      }
    }
  }
  OG_FN void into(double* cell, i64 rests) const {
    if constexpr (sizeof(T) == sizeof(double)) {
      add_exactly(cell[0], cell[rests], sum);
      cell[rests] += rest;
    } else {
      *cell += sum;
    }
  }
};

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

template <int v> struct Number { static constexpr int value = v; };

// f(0), f(1), ... f(n - 1), each with a constant.
template <int n, int k = 0, class F> OG_FN void each(F&& f) {
  if constexpr (k < n) {
    f(Number<k>{});
    each<n, k + 1>(f);
  }
}

template <class F> OG_FN void row(const F f, i64 width, double* const* cell, const i64* rests) {
  using Addend = typename F::Addend;
  alignas(64) Addend addend[F::sums + 1][strip];
  Row<Addend> total[F::sums + 1];
  for (i64 first = 0; first < width; first += strip) {
    const i64 n = width - first < strip ? width - first : strip;
    const i64 filled = (n + lanes - 1) / lanes * lanes;
    for (int k = 0; k < F::sums; ++k)
      for (i64 i = n; i < filled; ++i) addend[k][i] = 0;
#if OG_LANES
    if constexpr (has_lanes<F>::value) {
      i64 i = 0;
      for (; i + lane_count <= n; i += lane_count) f.lanes(first + i, lane_count, &addend[0][i]);
      if (i < n) f.lanes(first + i, n - i, &addend[0][i]);
    } else
#endif
    if constexpr (halves_of<F>::count != 0) {
      alignas(64) float room[halves_of<F>::count][strip];
      f.widen(room, first, n);
      OG_VECTORIZE
      for (i64 i = 0; i < n; ++i) f.staged(room, first + i, i, &addend[0][i]);
      f.narrow(room, first, n);
    } else {
      OG_VECTORIZE
      for (i64 i = 0; i < n; ++i) f.element(first + i, &addend[0][i]);
    }
    each<F::sums>([&](auto k) {
      if constexpr (F::adds_row(k.value)) {
        if (n <= few) {
          total[k.value].add_few(addend[k.value], n);
        } else {
          total[k.value].add(addend[k.value], filled);
        }
      } else {
        add_each(cell[k.value] + first, rests[k.value], addend[k.value], n);
      }
    });
  }
  each<F::sums>([&](auto k) {
    if constexpr (F::adds_row(k.value)) total[k.value].into(cell[k.value], rests[k.value]);
  });
}

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

template <class T> OG_FN void spread_over(void* to, const void* from, const Spread& s, i64 first, i64 n) {
  const T* row = (const T*)from + first / s.period * s.outer;
  for (i64 c = 0, i = first % s.period; c < n; ++c) {
    ((T*)to)[c] = row[i * s.inner];
    if (++i == s.period) {
      i = 0;
      row += s.outer;
    }
  }
}

template <class F> void one_box(const Boxes& boxes, i64 number, double* scratch) {
  constexpr int n = F::operands, m = F::sums;
  const Space& space = boxes.space;
  const i64 rank = space.rank;
  i64 chunk[max_rank], extent[max_rank], at[max_rank], step[n], offset[n], rests[m + 1];
  double* cell[m + 1];
  void* base[n];
  for (int k = 0; k < n; ++k) {
    base[k] = space.base[k];
    offset[k] = 0;
    step[k] = space.strides[k * rank + rank - 1];
  }
  i64 rows = 1;
  for (i64 d = rank - 1, rest = number; d >= 0; --d) {
    chunk[d] = rest % boxes.counts[d];
    rest /= boxes.counts[d];
    extent[d] = boxes.extent(d, chunk[d]);
    at[d] = 0;
    if (d < rank - 1) rows *= extent[d];
    for (int k = 0; k < n; ++k) offset[k] += chunk[d] * boxes.box[d] * space.strides[k * rank + d];
  }
  for (int k = 0; k < m; ++k) {
    const Sum sum = boxes.sum(k);
    cell[k] = scratch + sum.scratch;
    rests[k] = sum.cells;
    for (i64 i = 0; i < sum.cells * planes<typename F::Addend>(); ++i) cell[k][i] = 0;
  }
  double stretches[max_spread][stretch];
  for (i64 j = 0; j < boxes.spreads; ++j) {
    const i64* at = boxes.spread + 5 * j;
    const Spread s = {at[0], at[1], at[2], at[3], at[4]};
    const i64 first = chunk[rank - 1] * boxes.box[rank - 1], length = extent[rank - 1];
    if (s.bytes == 1) spread_over<u8>(stretches[j], base[s.operand], s, first, length);
    if (s.bytes == 2) spread_over<u16>(stretches[j], base[s.operand], s, first, length);
    if (s.bytes == 4) spread_over<u32>(stretches[j], base[s.operand], s, first, length);
    if (s.bytes == 8) spread_over<u64>(stretches[j], base[s.operand], s, first, length);
    base[s.operand] = stretches[j];
    offset[s.operand] = 0;
  }
  F f;
  f.steps(step);
  f.move(base, offset);
  f.call();
  for (;;) {
    f.move(base, offset);
    f.row();
    row<F>(f, extent[rank - 1], cell, rests);
    if (--rows == 0) break;
    for (i64 d = rank - 2; d >= 0; --d) {  // the next row, like an odometer
      const bool inside = ++at[d] < extent[d];
      const i64 moved = inside ? 1 : 1 - extent[d];
      for (int k = 0; k < n; ++k) offset[k] += moved * space.strides[k * rank + d];
      for (int k = 0; k < m; ++k) cell[k] += moved * boxes.sum(k).strides[d];
      if (inside) break;
      at[d] = 0;
    }
  }
  for (int k = 0; k < m; ++k) {
    const Sum sum = boxes.sum(k);
    const double* cells = scratch + sum.scratch;
    if (sum.left < 0) {
      deliver<F>(boxes, k, chunk, cells);
      continue;
    }
    double* left = boxes.work + number * boxes.leaves + sum.left;
    for (i64 i = 0; i < sum.cells * planes<typename F::Addend>(); ++i) left[i] = cells[i];
  }
}

template <class F> void boxes_between(const Boxes& boxes, i64 begin, i64 end) {
  double scratch[max_cells * planes<typename F::Addend>()];
  for (i64 number = begin; number < end; ++number) one_box<F>(boxes, number, scratch);
}

// ---- the second stage ------------------------------------------------------------------------------------------------

// The totals of what several boxes contributed to, in the order of the boxes.
template <class F> void totals(const Boxes& boxes, int k) {
  const Sum sum = boxes.sum(k);
  if (sum.left < 0) return;
  const i64 rank = boxes.space.rank;
  const i64* strides = boxes.space.strides + sum.operand * rank;
  i64 chunk[max_rank];
  for (i64 d = 0; d < rank; ++d) chunk[d] = 0;
  double cells[max_cells * planes<typename F::Addend>()];
  for (;;) {
    for (i64 i = 0; i < sum.cells * planes<typename F::Addend>(); ++i) cells[i] = 0;
    for (i64 d = 0; d >= 0;) {
      i64 number = 0;
      for (i64 axis = 0; axis < rank; ++axis) number = number * boxes.counts[axis] + chunk[axis];
      add_cells(cells, boxes.work + number * boxes.leaves + sum.left, sum.cells, typename F::Addend(0));
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

// ---- no sums, but short rows -----------------------------------------------------------------------------------------

template <class F> struct Plain : F {
  static constexpr int sums = 0;
  using Addend = float;
  static constexpr bool adds_row(int) { return false; }
  OG_FN void element(i64 i, Addend*) const { F::element(i); }
  OG_FN void staged(float (*room)[strip], i64 i, i64 j, Addend*) const { F::staged(room, i, j); }
  OG_FN void lanes(i64 i, i64 n, Addend*) const { F::lanes(i, n); }
  OG_FN static void total(int, void*, i64, double) {}
};

// ---- threads ---------------------------------------------------------------------------------------------------------

struct BoxTeam {
  const Boxes* boxes;
  i64 next;
};

template <class F> void take_boxes(void* data) {
  BoxTeam* team = (BoxTeam*)data;
  for (;;) {
    const i64 number = __atomic_fetch_add(&team->next, 1, __ATOMIC_RELAXED);
    if (number >= team->boxes->count) return;
    boxes_between<F>(*team->boxes, number, number + 1);
  }
}

// layout: that of og::launch; then number of boxes, doubles that each leaves for the second stage, number of operands to
// spread, extents of a box, boxes along each axis, and spread operands and sums as og::Spread and og::Sum have them. base has one entry more than there are operands: memory for what the
// boxes leave, null where `small_work` doubles suffice. begin and end: the boxes to do; all of them mean the second stage
// too, and begin < 0 means that alone.
template <class F>
OG_FN void launch_boxes(void* const* base, const i64* layout, i64 begin, i64 end, i64 threads, Parallel parallel) {
  const i64 rank = layout[0];
  const Space space = {base, rank, layout[1], layout[1 + rank], layout + 2, layout + 2 + rank};
  const i64* more = layout + 2 + rank + F::operands * rank;
  double small[small_work];
  double* work = (double*)base[F::operands];
  const i64 *box = more + 3, *counts = box + rank, *spread = counts + rank, *sums = spread + 5 * more[2];
  const Boxes boxes = {space, more[0], more[1], more[2], box, counts, spread, sums, work ? work : small};
  if (begin >= 0 && threads > 1 && parallel != nullptr && boxes.count > 1) {
    BoxTeam team = {&boxes, 0};
    parallel(take_boxes<F>, &team, (unsigned)threads, 0);
  } else if (begin >= 0) {
    boxes_between<F>(boxes, begin, end);
  }
  if (begin < 0 || (begin == 0 && end == boxes.count)) {
    for (int k = 0; k < F::sums; ++k) totals<F>(boxes, k);
  }
}

}  // namespace og
