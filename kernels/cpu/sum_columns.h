#pragma once
#include "cpu/row_vectors.h"

// Sums of columns. The addends of several rows to a column are added up before they go to the column's cell, a double,
// so that it is accessed once for all of them. Which rows are taken together depends on their order and on sizes alone.

namespace og {

// Elements [first, first + n) of a row, n <= strip. Their addends to sum k go to addend[k].
template <class F, class Addend> OG_FN void elements(const F& f, i64 first, i64 n, Addend (*addend)[strip]) {
  if constexpr (has_strips<F>::value) {
    for (i64 i = 0; i < n; i += F::strip_length) f.strips(first + i, n - i < F::strip_length ? n - i : F::strip_length, &addend[0][i]);
  } else
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
}

// The number of rows that are added up together, and of columns of a row before the next row: enough that a store to
// one row is done when the next row loads. The two addresses often have the same low bits, and the machine at first
// treats them as the same.
enum { rows_at_once = 8, columns_at_once = 64 };

// True if all sums of a functor are sums of columns, in floats.
template <class F> constexpr bool adds_columns_alone() {
  for (int k = 0; k < F::sums; ++k)
    if (F::adds_row(k)) return false;
  return F::sums > 0 && sizeof(typename F::Addend) == sizeof(float);
}

// The sums of some rows, of columns_at_once columns, for m sums.
template <int m> struct ColumnSums {
  static constexpr int per = per_vector<double>, vectors = columns_at_once / per;
  Vector<double> sum[m][vectors];
  OG_FN void start() {
    each_sum<m>([&](auto k) { each<vectors>([&](auto j) { sum[k.value][j.value] = Vector<double>{}; }); });
  }
  template <int stride> OG_FN void add(const float (*addend)[stride]) {
    each_sum<m>([&](auto k) {
      each<vectors>([&](auto j) {
        Vector<float, per> x;
        __builtin_memcpy(&x, addend[k.value] + per * j.value, sizeof x);
        sum[k.value][j.value] += widened<per>(x);
      });
    });
  }
#if OG_LANES
  // Adds to the 16 columns from 16 * j on.
  template <int j> OG_FN void add_lanes(const floats* addend) {
    each_sum<m>([&](auto k) OG_LAMBDA {
      sum[k.value][2 * j] += widened<8>(Half<16>::lower(addend[k.value].v));
      sum[k.value][2 * j + 1] += widened<8>(Half<16>::upper(addend[k.value].v));
    });
  }
#endif
  OG_FN void into(double* const* cell, i64 first, i64 n) const {
    alignas(64) double total[columns_at_once];
    each_sum<m>([&](auto k) {
      __builtin_memcpy(total, sum[k.value], sizeof total);
      for (i64 i = 0; i < n; ++i) cell[k.value][first + i] += total[i];
    });
  }
};

// Columns [first, first + n) of some rows, n <= columns_at_once.
template <class F> OG_FN void add_columns(const F* rows, int count, i64 first, i64 n, double* const* cell) {
  alignas(64) float addend[F::sums][strip];
  for (int k = 0; k < F::sums; ++k)
    for (i64 i = n; i < columns_at_once; ++i) addend[k][i] = 0;
  ColumnSums<F::sums> sums;
  sums.start();
  for (int r = 0; r < count; ++r) {
    elements(rows[r], first, n, addend);
    sums.add(addend);
  }
  sums.into(cell, first, n);
}

// Takes up to `most` rows of a box that have the same cells, and stores these in `cell`. begin(g) moves a copy of f to
// the current row. A copy made later would load at once what was just stored in parts, and wait for all earlier stores.
template <class F, class Begin>
OG_FN int rows_of_same_cells(const F& f, const Boxes& boxes, Place<F>& place, F* rows, double** cell, int most,
                             bool& more, Begin&& begin) {
  for (int k = 0; k < F::sums; ++k) cell[k] = place.cell[k];
  int count = 0;
  for (bool same = true; more && same && count < most;) {
    rows[count] = f;
    begin(rows[count++]);
    more = place.next(boxes, 0, boxes.space.rank - 1);
    for (int k = 0; k < F::sums; ++k) same &= cell[k] == place.cell[k];
  }
  return count;
}

// The rows of a box. Rows with the same cells are done several at a time.
template <class F> OG_FN void rows_of_columns(F& f, const Boxes& boxes, void* const* base, Place<F>& place) {
  const i64 width = place.extent[boxes.space.rank - 1];
  for (bool more = true; more;) {
    F rows[rows_at_once];
    double* cell[F::sums];
    const int count = rows_of_same_cells(f, boxes, place, rows, cell, rows_at_once, more, [&](F& g) {
      g.move(base, place.offset);
      g.row();
    });
    for (i64 first = 0; first < width; first += columns_at_once) {
      const i64 left = width - first;
      if (left >= columns_at_once) {
        add_columns(rows, count, first, (i64)columns_at_once, cell);
      } else {
        add_columns(rows, count, first, left, cell);
      }
    }
  }
}

}  // namespace og
