#pragma once
#include "cpu/pointwise.h"

// The common part of loops with sums and loops over rows. The space is cut into boxes, by its sizes alone
// (schedule/cpu_tiles.py). Any thread may do any box. Within a box, rows run in the order of memory, and each sum
// collects its addends in cells, one for each of its results that the box reaches. If several boxes contribute to a
// result, their cells are added up afterwards, box by box, so the bits never depend on the number of threads.
//
// Cells are doubles: a sum of floats is nearly exact. A sum of doubles also carries its rounding errors.

namespace og {

enum { lanes = 32, few = 12, max_cells = 4096, small_work = 2048, stretch = 2048, max_spread = 4 };

// Adds x to sum, and the rounding error to rest. Only the addition to rest rounds (Knuth, The art of computer
// programming 2, 4.2.2).
OG_FN void add_exactly(double& sum, double& rest, double x) {
  const double total = sum + x, moved = total - sum;
  rest += (sum - (total - moved)) + (x - moved);
  sum = total;
}

// The sum with its rounding errors. After an overflow or an infinity, these are meaningless.
OG_FN double whole(double sum, double rest) { return sum - sum == 0 ? sum + rest : sum; }

// ---- cells -----------------------------------------------------------------------------------------------------------

// Adds n addends to n cells. If addends are doubles, the rounding errors are `rests` cells further on.
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

// One sum: its operand, the number of its cells in a box, their position among the cells of all sums (scratch), their
// position among the cells that a box leaves for the second stage (left; -1: the box completes them), and the strides
// of the cells. Each result is the sum of `group` neighbouring cells of the last axis, or, if `tile` is not 0, of cells
// that are `tile` apart.
struct Sum {
  i64 operand, cells, scratch, left, group, tile;
  const i64* strides;
};

// An operand that is spread over a stretch of the last axis before the walk. Element c of the axis is the operand's
// element c / period * outer + c % period * inner.
struct Spread {
  i64 operand, period, outer, inner, bytes;
};

struct Boxes {
  Space space;
  i64 count, leaves, spreads;  // boxes, doubles that each leaves for the second stage, operands to spread
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

// The position of a walk through a box: along each axis, in each operand, and in the cells of each sum.
template <class F> struct Place {
  i64 chunk[max_rank], extent[max_rank], at[max_rank], offset[F::operands], step[F::operands], rests[F::sums + 1];
  double* cell[F::sums + 1];

  // Starts at the first place of box `number`, without cells.
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
  // Starts sum k, with its cells in `cells`.
  OG_FN void start_cells(const Sum& sum, int k, double* cells) {
    cell[k] = cells;
    rests[k] = sum.cells;
    for (i64 i = 0; i < sum.cells * planes<typename F::Addend>(); ++i) cells[i] = 0;
  }
  // The number of places along axes [begin, end).
  OG_FN i64 count(i64 begin, i64 end) const {
    i64 product = 1;
    for (i64 d = begin; d < end; ++d) product *= extent[d];
    return product;
  }
  // Moves to the next place along axes [begin, end), like an odometer; after the last one, to the first, and returns
  // false.
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

}  // namespace og
