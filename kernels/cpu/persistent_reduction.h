#pragma once
#include "cpu/row_registers.h"

// The CPU skeleton of a loop over rows that fit in a few vectors (opgraph/schedule/cpu.py): a row costs nothing but its
// passes. Without lanes, the rows are walked as in kernels/cpu/inner_reduction.h, which gives the same bits.

namespace og {

// True if a functor's rows are done at once: the last pass writes only elements, or adds up sums of columns.
template <class F> constexpr bool goes_at_once() {
  return has_lanes<F>::value && (F::sums == 0 || (adds_columns_alone<F>() && F::stores && F::reductions(F::passes - 1) == 0));
}

#if OG_LANES
// The sums of the columns of several rows, before they are added to their cells; as in kernels/cpu/row_column_sums.h.
template <class F, int vectors> struct Columns {
  Vector<double> sum[F::sums + 1][2 * vectors];
  OG_FN void start() {
    each_sum<F::sums>([&](auto k) OG_LAMBDA {
      each<2 * vectors>([&](auto j) OG_LAMBDA { sum[k.value][j.value] = Vector<double>{}; });
    });
  }
  template <int j> OG_FN void add(const floats* x) {
    each_sum<F::sums>([&](auto k) OG_LAMBDA {
      sum[k.value][2 * j] += widened<8>(Half<16>::lower(x[k.value].v));
      sum[k.value][2 * j + 1] += widened<8>(Half<16>::upper(x[k.value].v));
    });
  }
  OG_FN void into(double* const* cell, i64 width) {
    each_sum<F::sums>([&](auto k) OG_LAMBDA {
      alignas(64) double total[lane_count * vectors];
      __builtin_memcpy(total, sum[k.value], sizeof total);
      for (i64 i = 0; i < width; ++i) cell[k.value][i] += total[i];
    });
    start();
  }
};

template <class F, int vectors, int pass = 0> OG_FN void passes_at_once(F& f, Some n, i64 width, Columns<F, vectors>& columns) {
  if constexpr (pass < F::passes) {
    constexpr int count = F::reductions(pass), sums = pass + 1 == F::passes && F::stores ? F::sums : 0;
    floats x[count + 1][vectors];
    by_nearness<F, pass>(f, [&](auto near) OG_LAMBDA {
      each<vectors>([&](auto j) OG_LAMBDA {
        constexpr i64 i = j.value * lane_count;
        floats own[count + sums + 1];
        if constexpr (j.value + 1 < vectors) {
          f.template element<pass, true, 1, floats, near.value>(i, own, (i64)lane_count);
        } else {
          f.template element<pass, true, 1, floats, near.value>(i, own, n);
        }
        each<count>([&](auto k) OG_LAMBDA { x[k.value][j.value] = own[k.value]; });
        if constexpr (sums > 0) columns.template add<j.value>(own + count);
      });
    });
    double totals[count + 1];
    each<count>([&](auto k) OG_LAMBDA { totals[k.value] = reduced_at_once<F::how(pass, k.value), vectors>(x[k.value], n); });
    f.template reduced<pass>(Totals{totals}, (double)width);
    passes_at_once<F, vectors, pass + 1>(f, n, width, columns);
  }
}

template <class F, int vectors> void box_at_once(const Boxes& boxes, i64 number) {
  constexpr int n = F::operands, m = F::sums;
  const Space& space = boxes.space;
  const i64 rank = space.rank, width = space.inner;
  Place<F> place;
  place.start(boxes, number);
  double* const left = boxes.work + number * boxes.leaves;
  double* cell[m + 1];
  bool moves = false;  // true if each row has cells of its own
  for (int k = 0; k < m; ++k) {
    place.start_cells(boxes.sum(k), k, left + boxes.sum(k).left);
    moves |= boxes.sum(k).strides[rank - 2] != 0;
    cell[k] = place.cell[k];
  }
  alignas(64) char memory[F::kept_bytes * lane_count * vectors + 1];
  // Copies, which no store to an operand can alias.
  void* base[n];
  i64 offset[n], step[n];
  each<n>([&](auto k) OG_LAMBDA {
    base[k.value] = space.base[k.value];
    step[k.value] = space.strides[k.value * rank + rank - 2];
  });
  F f;
  f.steps(place.step);
  f.keep(memory, lane_count * vectors, 0);
  f.move(base, place.offset);
  f.call();
  const Some last = {(u16)(all16 >> (lane_count * vectors - width))};
  Columns<F, vectors> columns;
  columns.start();
  int count = 0;
  do {
    if constexpr (m > 0) {  // rows are added up together while they have the same cells
      bool same = true;
      for (int k = 0; k < m; ++k) same &= cell[k] == place.cell[k];
      if (!same && count > 0) columns.into(cell, width);
      count = same ? count : 0;
      for (int k = 0; k < m; ++k) cell[k] = place.cell[k];
    }
    each<n>([&](auto k) OG_LAMBDA { offset[k.value] = place.offset[k.value]; });
    for (i64 left = place.extent[rank - 2]; left > 0; --left) {
      f.move(base, offset);
      f.row();
      passes_at_once<F, vectors>(f, last, width, columns);
      f.finish();
      each<n>([&](auto k) OG_LAMBDA { offset[k.value] += step[k.value]; });
      if constexpr (m > 0) {
        if (++count < rows_at_once && !moves) continue;
        columns.into(cell, width);
        count = 0;
        for (int k = 0; k < m; ++k) cell[k] += boxes.sum(k).strides[rank - 2];
      }
    }
  } while (place.next(boxes, 0, rank - 2));
  if (m > 0 && count > 0) columns.into(cell, width);
}
#endif

// Rows of at most 16 * vectors elements, at least two. The arguments are those of og::boxes_at and og::each_box.
template <class F, int vectors>
OG_FN void launch_persistent(void* const* base, const i64* layout, i64 begin, i64 end, i64 threads, Parallel parallel) {
#if OG_LANES
  if constexpr (goes_at_once<F>()) {
    double small[small_work];
    const Boxes boxes = boxes_at<F>(base, layout, 0, small);
    each_box<F>(boxes, begin, end, threads, parallel, [&](i64 number) { box_at_once<F, vectors>(boxes, number); });
    return;
  }
#endif
  launch_inner<F, false>(base, layout, begin, end, threads, parallel);
}

}  // namespace og
