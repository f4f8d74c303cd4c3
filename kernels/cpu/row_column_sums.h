#pragma once
#include "cpu/row_lanes.h"

// The last pass of several rows at a time, if each column has sums. The cells of these sums are doubles that do not fit
// in the L1 cache; they are accessed once for all of these rows, as in sum_columns.h.

namespace og {

// Most elements of all these rows together, so that they are still in the L2 cache.
enum { together_elements = 128 * 1024 };

// True if a functor's last pass only writes and adds up columns, in floats.
template <class F> constexpr bool adds_columns() {
  return adds_columns_alone<F>() && F::stores && F::kept_bytes == 0 && F::reductions(F::passes - 1) == 0;
}

#if OG_LANES
// Adds the addends of some rows to n columns from `first` on.
template <class F, bool whole>
OG_FN void add_rows(const F* rows, int count, i64 first, i64 n, ColumnSums<F::sums>& sums) {
  for (int r = 0; r < count; ++r) {
    const F f = rows[r];
    each<columns_at_once / lane_count>([&](auto j) OG_LAMBDA {
      const i64 i = j.value * lane_count, left = whole ? lane_count : n - i < lane_count ? n - i : lane_count;
      if (!whole && left <= 0) return;
      floats own[F::sums];
      f.template element<F::passes - 1, false, 1, floats>(first + i, own, left);
      sums.template add_lanes<j.value>(own);
    });
  }
}
#endif

template <class F> OG_FN void columns_of_rows(const F* rows, int count, i64 width, double* const* cell) {
  for (i64 first = 0; first < width; first += columns_at_once) {
    const i64 n = width - first < columns_at_once ? width - first : columns_at_once;
    ColumnSums<F::sums> sums;
    sums.start();
#if OG_LANES
    if constexpr (has_lanes<F>::value) {
      if (n == columns_at_once) {
        add_rows<F, true>(rows, count, first, n, sums);
      } else {
        add_rows<F, false>(rows, count, first, n, sums);
      }
    } else
#endif
    {
      alignas(64) float addend[F::sums][columns_at_once] = {};
      for (int r = 0; r < count; ++r) {
        addends<F, F::passes - 1, false, columns_at_once>(rows[r], first, n, addend[0]);
        sums.add(addend);
      }
    }
    sums.into(cell, first, n);
  }
}

}  // namespace og
