#pragma once
#include "row_lanes.h"

// The last pass of several rows at a time, where each column has sums: what the rows add to a column is added up before it
// goes to the column's cell, so that cells, doubles that the first cache has no room for, are touched once for all of them.
// Rows are taken together in their order and by sizes alone.

namespace og {

// Rows that are taken together, and elements in all of them at most: the second cache has them still.
enum { together = 8, together_elements = 128 * 1024 };

// Whether a functor's last pass does nothing but to write and to add up columns in floats.
template <class F> constexpr bool adds_columns() {
  for (int k = 0; k < F::sums; ++k)
    if (F::adds_row(k)) return false;
  return F::stores && F::sums > 0 && F::kept_bytes == 0 && sizeof(typename F::Addend) == sizeof(float) &&
         F::reductions(F::passes - 1) == 0;
}

// Elements of each row before the next row's turn, so many that a store to one row is done when the next one loads: the
// addresses of both often have the same low bits, which the machine takes for the same address at first.
enum { columns = 64 };

#if OG_LANES
// What rows add to n columns from `first` on.
template <class F, bool whole> OG_FN void add_rows(const F* rows, int count, i64 first, i64 n, double (*to)[columns]) {
  typedef Vector<double> Doubles;
  constexpr int m = F::sums;
  Doubles sum[m][columns / 8];
  each<m>([&](auto k) OG_LAMBDA {
    each<columns / 8>([&](auto j) OG_LAMBDA { sum[k.value][j.value] = Doubles{}; });
  });
  for (int r = 0; r < count; ++r) {
    const F f = rows[r];
    each<columns / lane_count>([&](auto j) OG_LAMBDA {
      const i64 i = j.value * lane_count, left = whole ? lane_count : n - i < lane_count ? n - i : lane_count;
      if (!whole && left <= 0) return;
      floats own[m];
      f.template element<F::passes - 1, false, 1, floats>(first + i, own, left);
      each<m>([&](auto k) OG_LAMBDA {
        sum[k.value][2 * j.value] += widened<8>(Half<16>::lower(own[k.value].v));
        sum[k.value][2 * j.value + 1] += widened<8>(Half<16>::upper(own[k.value].v));
      });
    });
  }
  __builtin_memcpy(to, sum, sizeof sum);
}
#endif

template <class F> OG_FN void columns_of_rows(const F* rows, int count, i64 width, double* const* cell) {
  constexpr int last = F::passes - 1, m = F::sums;
  for (i64 first = 0; first < width; first += columns) {
    const i64 n = width - first < columns ? width - first : columns;
    alignas(64) double sum[m][columns];
#if OG_LANES
    if constexpr (has_lanes<F>::value) {
      if (n == columns) {
        add_rows<F, true>(rows, count, first, n, sum);
      } else {
        add_rows<F, false>(rows, count, first, n, sum);
      }
    } else
#endif
    {
      alignas(64) float addend[m][columns];
      for (int k = 0; k < m; ++k)
        for (i64 i = 0; i < n; ++i) sum[k][i] = 0;
      for (int r = 0; r < count; ++r) {
        addends<F, last, false, columns>(rows[r], first, n, addend[0]);
        for (int k = 0; k < m; ++k)
          for (i64 i = 0; i < n; ++i) sum[k][i] += (double)addend[k][i];
      }
    }
    for (int k = 0; k < m; ++k)
      for (i64 i = 0; i < n; ++i) cell[k][first + i] += sum[k][i];
  }
}

}  // namespace og
