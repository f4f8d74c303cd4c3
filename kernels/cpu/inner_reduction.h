#pragma once
#include "cpu/row_column_sums.h"

// The CPU skeleton of a loop over rows. A row is the last `row_rank` axes: one run, or several runs along the last
// axis. (A kernel is compiled for one of the two: both would take nearly twice as long to compile.) A row is walked
// once for each reduction that depends on another one. The last pass has all the values that it needs, and writes the
// results. Boxes (kernels/cpu/tiled_sums.h) hold whole rows. Any thread may do any box: the bits do not depend on it.

namespace og {

// ---- dividing a row --------------------------------------------------------------------------------------------------

// x / d for many x, as two products instead of a quotient: at most 1.5 ulp off (2 below normal numbers). The first
// factor is the power of 2 in 1 / d, so that no product overflows, or loses bits, unless the quotient does. For 0,
// infinities and NaN the result is the same as that of a division.
struct Inverse {
  float scale, part;  // a power of 2; the rest of 1 / d: 1 to 2 unless d is extreme
};
OG_FN Inverse inverse_of(float d) {
  const double exact = 1.0 / (double)d;  // 2^-128 to 2^149, 0, infinity or NaN
  const i32 own = (i32)(bits(exact) >> 52 & 0x7ff) - 1023, exponent = own > 127 ? 127 : own < -126 ? -126 : own;
  const double scale = from_bits((u64)(1023 + exponent) << 52), back = from_bits((u64)(1023 - exponent) << 52);
  return {(float)scale, (float)(exact * back)};
}
template <class T> OG_FN T times(T x, Inverse inverse) { return x * inverse.scale * inverse.part; }

// ---- one row ---------------------------------------------------------------------------------------------------------

struct Totals {
  const double* value;
  OG_FN double operator()(int k) const { return value[k]; }
};

// One run of a pass. `cell` and `rests` are those of the sums, in the last pass.
template <class F, int pass, bool keep, bool ahead = false>
OG_FN void one_run(const F f, i64 width, Reductions<F, pass>& reductions, double* const* cell, const i64* rests) {
  using Addend = typename F::Addend;
  constexpr bool writes = pass + 1 == F::passes && F::stores;
  constexpr int n_reductions = F::reductions(pass), n_sums = writes ? F::sums : 0;
  if constexpr (n_reductions + n_sums == 0) {
    write_some<F, pass, keep>(f, first_whole(f, width), 0, width, width > near_elements);
  } else if constexpr (n_sums == 0) {
    reduce_run<F, pass, keep, ahead>(f, width, reductions);
  } else {
    alignas(64) Addend addend[n_reductions + n_sums][strip];
    Row<Addend> total[n_sums + 1];
    for (i64 first = 0; first < width; first += strip) {
      const i64 n = width - first < strip ? width - first : strip;
      const i64 filled = (n + block - 1) / block * block;
      addends<F, pass, keep, strip>(f, first, n, addend[0]);
      if constexpr (n_reductions > 0) {
        if (filled > n) reductions.fill(addend[0] + filled - block, n - filled + block, strip);
        for (i64 i = 0; i < filled; i += block) reductions.add(addend[0] + i, strip);
      }
      each<n_sums>([&](auto k) {
        Addend* x = addend[n_reductions + k.value];
        if constexpr (F::adds_row(k.value)) {
          for (i64 i = n; i < filled; ++i) x[i] = 0;
          if (n <= few) {
            total[k.value].add_few(x, n);
          } else {
            total[k.value].add(x, filled);
          }
        } else {
          add_each(cell[k.value] + first, rests[k.value], x, n);
        }
      });
    }
    each<n_sums>([&](auto k) {
      if constexpr (F::adds_row(k.value)) total[k.value].into(cell[k.value], rests[k.value]);
    });
  }
}

// The passes [pass, end) over the row at a place. Afterwards the place is the same as before.
template <class F, bool keep, bool several, int pass, int end>
OG_FN void passes(F& f, const Boxes& boxes, i64 row_rank, Place<F>& place, char* memory) {
  if constexpr (pass < end) {
    const i64 rank = boxes.space.rank, width = boxes.space.inner;
    constexpr i64 room = F::kept_bytes ? keep_bytes / (F::kept_bytes ? F::kept_bytes : 1) / 8 * 8 : 0;
    Reductions<F, pass> reductions;
    reductions.start();
    i64 first = 0;
    do {
      f.move(boxes.space.base, place.offset);
      f.run();
      if constexpr (keep) f.keep(memory, room, first);
      one_run<F, pass, keep, true>(f, width, reductions, place.cell, place.rests);
      first += width;
    } while (several && place.next(boxes, rank - row_rank, rank - 1));
    Partial partials[F::most + 1];
    double totals[F::most + 1];
    reductions.partials(partials);
    reductions.results(partials, totals);
    f.template reduced<pass>(Totals{totals}, (double)first);
    passes<F, keep, several, pass + 1, end>(f, boxes, row_rank, place, memory);
  }
}

// ---- boxes of whole rows ---------------------------------------------------------------------------------------------

// Moves f to the last pass of a row, after all passes before it.
template <class F>
OG_FN void to_last_pass(F& f, const Boxes& boxes, Place<F>& place) {
  f.move(boxes.space.base, place.offset);
  f.row();
  passes<F, false, false, 0, F::passes - 1>(f, boxes, 1, place, nullptr);
  f.finish();
  f.move(boxes.space.base, place.offset);
}

// The rows of a box, one run each, whose columns are added up. Rows with the same cells are done several at a time.
template <class F> OG_FN void rows_together(F& f, const Boxes& boxes, Place<F>& place) {
  const i64 width = boxes.space.inner;
  const int most = width * rows_at_once <= together_elements ? rows_at_once : 1;
  for (bool more = true; more;) {
    F rows[rows_at_once];
    double* cell[F::sums];
    const auto begin = [&](F& g) { to_last_pass(g, boxes, place); };
    const int count = rows_of_same_cells(f, boxes, place, rows, cell, most, more, begin);
    columns_of_rows<F>(rows, count, width, cell);
  }
}

// True if a functor's last pass only writes.
template <class F> constexpr bool only_writes() {
  return has_lanes<F>::value && F::stores && F::sums == 0 && F::passes > 1 && F::reductions(F::passes - 1) == 0;
}

// The number of rows whose last passes are interleaved, and of columns of each at a time. Operands that all rows share,
// such as the weights of a norm, are then read from the L2 cache once for all of them. That pays if one row of all
// operands fills the L1 cache.
enum { interleaved_rows = 4, interleaved_columns = 1024, first_cache = 32 * 1024 };
template <class F> OG_FN int interleaved(const Space& space) {
  const i64 rank = space.rank;
  i64 common = 0, along = 0;
  for (int k = 0; k < F::operands; ++k) {
    const i64* step = space.strides + k * rank;
    along += step[rank - 1] != 0;
    common += step[rank - 1] != 0 && (rank == 1 || step[rank - 2] == 0);
  }
  const i64 bytes = along * space.inner * (i64)sizeof(float);
  if (bytes * interleaved_rows <= first_cache) return interleaved_rows;
  return common > 0 && bytes > first_cache && space.inner * interleaved_rows <= together_elements ? interleaved_rows : 1;
}

// The rows of a box, one run each.
template <class F> OG_FN void rows_by_turns(F& f, const Boxes& boxes, Place<F>& place) {
  const i64 width = boxes.space.inner;
  const int most = interleaved<F>(boxes.space);
  for (bool more = true; more;) {
    F rows[interleaved_rows];
    const auto begin = [&](F& g) { to_last_pass(g, boxes, place); };
    const int count = rows_of_same_cells(f, boxes, place, rows, (double**)nullptr, most, more, begin);
    const i64 part = most > 1 ? (i64)interleaved_columns : width;
    const bool back = width > near_elements;
    const i64 parts = (width + part - 1) / part;
    for (i64 p = 0; p < parts; ++p) {
      const i64 begin = (back ? parts - 1 - p : p) * part;
      for (int r = 0; r < count; ++r) {
        const F& f = rows[back ? count - 1 - r : r];
        const i64 head = first_whole(f, width), end = head + begin + part;
        write_some<F, F::passes - 1, false>(f, head, begin ? head + begin : 0, end < width ? end : width, back);
      }
    }
  }
}

template <class F, bool keep, bool several>
OG_FN void rows_of_box(F& f, const Boxes& boxes, i64 row_rank, Place<F>& place, char* memory) {
  if constexpr (adds_columns<F>() && !several) {
    rows_together<F>(f, boxes, place);
  } else if constexpr (only_writes<F>() && !keep && !several) {
    rows_by_turns<F>(f, boxes, place);
  } else {
    do {
      f.move(boxes.space.base, place.offset);
      f.row();
      passes<F, keep, several, 0, F::passes>(f, boxes, row_rank, place, memory);
      f.finish();
    } while (place.next(boxes, 0, boxes.space.rank - row_rank));
  }
}

template <class F, bool keep, bool several> void box_of_rows(const Boxes& boxes, i64 row_rank, i64 number) {
  const Space& space = boxes.space;
  Place<F> place;
  place.start(boxes, number);
  double* const left = boxes.work + number * boxes.leaves;
  for (int k = 0; k < F::sums; ++k) place.start_cells(boxes.sum(k), k, left + boxes.sum(k).left);
  alignas(64) char memory[keep ? keep_bytes : 1];
  F f;
  f.steps(place.step);
  f.nexts(space.rank > 1 ? space.strides + space.rank - 2 : nullptr, space.rank, space.size);
  f.move(space.base, place.offset);
  f.call();
  Way<F>::choose(f, space);
  rows_of_box<F, keep, several>(f, boxes, row_rank, place, memory);
  Way<F>::settle(f);
}

// One box. Its values are kept for later passes if there is room.
template <class F, bool several> OG_FN void take_box_of_rows(const Boxes& boxes, i64 row_rank, i64 number) {
  i64 length = 1;
  for (i64 d = boxes.space.rank - row_rank; d < boxes.space.rank; ++d) length *= boxes.space.dims[d];
  if constexpr (F::fits) {
    box_of_rows<F, true, several>(boxes, row_rank, number);
  } else {
    if constexpr (F::kept_bytes > 0) {
      if (length <= keep_bytes / F::kept_bytes / 8 * 8) return box_of_rows<F, true, several>(boxes, row_rank, number);
    }
    box_of_rows<F, false, several>(boxes, row_rank, number);
  }
}

// The arguments are those of og::boxes_at and og::each_box. several: true if a row is several runs.
template <class F, bool several>
OG_FN void launch_inner(void* const* base, const i64* layout, i64 begin, i64 end, i64 threads, Parallel parallel) {
  double small[small_work];
  const Boxes boxes = boxes_at<F>(base, layout, 0, small);
  const i64 row_rank = several ? boxes.box[-1] : 1;
  const auto box = [&](i64 number) { take_box_of_rows<F, several>(boxes, row_rank, number); };
  each_box<F>(boxes, begin, end, threads, parallel, box);
}

}  // namespace og
