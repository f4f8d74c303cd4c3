#pragma once
#include "cpu/box_totals.h"
#include "cpu/sum_columns.h"

// The CPU skeleton of a loop with sums, and of a loop whose short rows are made long.

namespace og {

// ---- a row that is added up ------------------------------------------------------------------------------------------

// Addends come in strips of whole lanes; the last strip is padded with zeros. GCC vectorises plain loops over lanes for
// any machine; vector types instead took three times as long on some (GCC 12, AVX2).
template <class T> struct Row;

template <> struct Row<float> {
  enum { width = 16 };
  double sum = 0, lane[width];
  bool wide = false;  // true if `lane` is in use
  OG_FN void add(const float* x, i64 n) {
    double own[width];
    for (int l = 0; l < width; ++l) own[l] = wide ? lane[l] : 0;
    wide = true;
    for (i64 i = 0; i < n; i += width)
      for (int l = 0; l < width; ++l) own[l] += (double)x[i + l];
    for (int l = 0; l < width; ++l) lane[l] = own[l];
  }
  // Compiled once for all sums: a kernel with six takes a fifth less time to compile, and its strips take 3% longer.
  OG_ONCE void add_some(const float* x, i64 n, i64 filled) {
    if (n <= few) {
      add_few(x, n);
    } else {
      add(x, filled);
    }
  }
  // A strip that is too short for a tree to pay.
  OG_FN void add_few(const float* x, i64 n) {
    for (i64 i = 0; i < n; ++i) sum += (double)x[i];
  }
  OG_FN void add_lanes(const double* x) {
    for (int l = 0; l < width; ++l) lane[l] = x[l];
    wide = true;
  }
  OG_ONCE void into(double* cell, i64) const {
    double tree[width];
    if (!wide) {
      *cell += sum;
      return;
    }
    for (int l = 0; l < width; ++l) tree[l] = lane[l];
    for (int half = width / 2; half > 0; half /= 2)
      for (int l = 0; l < half; ++l) tree[l] += tree[l + half];
    *cell += tree[0] + sum;
  }
};

template <> struct Row<double> {
  double sum = 0, rest = 0;
  OG_FN void add(const double* x, i64 n) {
    double lane[lanes], rests[lanes];
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
  }
  OG_FN void add_some(const double* x, i64 n, i64 filled) {
    if (n <= few) {
      add_few(x, n);
    } else {
      add(x, filled);
    }
  }
  OG_FN void add_few(const double* x, i64 n) {
    for (i64 i = 0; i < n; ++i) add_exactly(sum, rest, x[i]);
  }
  OG_FN void into(double* cell, i64 rests) const {
    add_exactly(cell[0], cell[rests], sum);
    cell[rests] += rest;
  }
};

// ---- boxes -----------------------------------------------------------------------------------------------------------

template <class F> OG_FN void row(const F f, i64 width, double* const* cell, const i64* rests) {
  using Addend = typename F::Addend;
  alignas(64) Addend addend[F::sums + 1][strip];
  Row<Addend> total[F::sums + 1];
  const auto strips = [&](auto&& one) {
    for (i64 first = 0; first < width; first += strip) one(first, width - first < strip ? width - first : (i64)strip);
  };
  if constexpr (has_branches<F>::value) {
    Branches<F> both;
    strips([&](i64 first, i64 n) {
      both.walk(f, first, n, &addend[0][0]);
      each<F::sums>([&](auto k) {
        if constexpr (!F::adds_row(k.value)) add_each(cell[k.value] + first, rests[k.value], addend[k.value], n);
      });
    });
    each<F::sums>([&](auto k) {
      if constexpr (F::adds_row(k.value)) total[k.value].add_lanes(both.sums.lane[F::sum_result(k.value)]);
    });
  } else {
    strips([&](i64 first, i64 n) {
      const i64 filled = (n + lanes - 1) / lanes * lanes;
      for (int k = 0; k < F::sums; ++k)
        for (i64 i = n; i < filled; ++i) addend[k][i] = 0;
      elements(f, first, n, addend);
      each<F::sums>([&](auto k) {
        if constexpr (F::adds_row(k.value)) {
          total[k.value].add_some(addend[k.value], n, filled);
        } else {
          add_each(cell[k.value] + first, rests[k.value], addend[k.value], n);
        }
      });
    });
  }
  each<F::sums>([&](auto k) {
    if constexpr (F::adds_row(k.value)) total[k.value].into(cell[k.value], rests[k.value]);
  });
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
  const Space& space = boxes.space;
  const i64 last = space.rank - 1;
  Place<F> place;
  place.start(boxes, number);
  for (int k = 0; k < F::sums; ++k) place.start_cells(boxes.sum(k), k, scratch + boxes.sum(k).scratch);
  void* base[F::operands];
  for (int k = 0; k < F::operands; ++k) base[k] = space.base[k];
  double stretches[max_spread][stretch];
  for (i64 j = 0; j < boxes.spreads; ++j) {
    const i64* at = boxes.spread + 5 * j;
    const Spread s = {at[0], at[1], at[2], at[3], at[4]};
    const i64 first = place.chunk[last] * boxes.box[last], length = place.extent[last];
    if (s.bytes == 1) spread_over<u8>(stretches[j], base[s.operand], s, first, length);
    if (s.bytes == 2) spread_over<u16>(stretches[j], base[s.operand], s, first, length);
    if (s.bytes == 4) spread_over<u32>(stretches[j], base[s.operand], s, first, length);
    if (s.bytes == 8) spread_over<u64>(stretches[j], base[s.operand], s, first, length);
    base[s.operand] = stretches[j];
    place.offset[s.operand] = 0;
  }
  F f;
  f.steps(place.step);
  f.move(base, place.offset);
  f.call();
  Way<F>::choose(f, space);
  if constexpr (adds_columns_alone<F>() && !has_branches<F>::value) {
    rows_of_columns(f, boxes, base, place);
  } else {
    do {
      f.move(base, place.offset);
      f.row();
      row<F>(f, place.extent[last], place.cell, place.rests);
    } while (place.next(boxes, 0, last));
  }
  Way<F>::settle(f);
  for (int k = 0; k < F::sums; ++k) {
    const Sum sum = boxes.sum(k);
    const double* cells = scratch + sum.scratch;
    if (sum.left < 0) {
      deliver<F>(boxes, k, place.chunk, cells);
      continue;
    }
    double* left = boxes.work + number * boxes.leaves + sum.left;
    for (i64 i = 0; i < sum.cells * planes<typename F::Addend>(); ++i) left[i] = cells[i];
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
  OG_FN void strips(i64 i, i64 n, Addend*) const { F::strips(i, n); }
  template <class Results> OG_FN void finish(const Results* r, i64 i, i64 n, Addend*) const { F::finish(r, i, n); }
};

// ---- launching -------------------------------------------------------------------------------------------------------

// The arguments are those of og::boxes_at and og::each_box.
template <class F>
OG_FN void launch_tiled(void* const* base, const i64* layout, i64 begin, i64 end, i64 threads, Parallel parallel) {
  double small[small_work];
  const i64 spreads = layout[2 + layout[0] * (1 + F::operands) + 2];
  const Boxes boxes = boxes_at<F>(base, layout, spreads, small);
  each_box<F>(boxes, begin, end, threads, parallel, [&](i64 number) {
    double scratch[max_cells * planes<typename F::Addend>()];
    one_box<F>(boxes, number, scratch);
  });
}

}  // namespace og
