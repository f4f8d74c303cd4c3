#pragma once
#include "row_lanes.h"

// The CPU skeleton of a loop over rows. A row is the last `row_rank` axes: several runs, the last axis each. It is walked
// once for each reduction that waits for another; what the last pass needs is then known, and results are written. Boxes
// (kernels/host_sums.h) hold whole rows; any thread may do any box, so the bits never depend on the number of threads.

namespace og {

// ---- dividing a row --------------------------------------------------------------------------------------------------

// x / d for many x: two products instead of a quotient, 1.5 ulp off at most (2 below normal numbers). The first takes the exponent of 1 / d, so that
// neither overflows, or loses bits, unless the quotient does; 0, infinities and NaN come out as of a division.
struct Inverse {
  float scale, part;  // a power of 2; what is left, 1 to 2 where d is no extreme
};
OG_FN Inverse inverse_of(float d) {
  const double exact = 1.0 / (double)d;  // 2^-128 to 2^149, 0, infinity or NaN
  const i32 own = (i32)(bits(exact) >> 52 & 0x7ff) - 1023, exponent = own > 127 ? 127 : own < -126 ? -126 : own;
  const double scale = from_bits((u64)(exponent + 1023) << 52);
  return {(float)scale, (float)(exact / scale)};
}
template <class T> OG_FN T times(T x, Inverse inverse) { return x * inverse.scale * inverse.part; }

// ---- one row ---------------------------------------------------------------------------------------------------------

struct Totals {
  const double* value;
  OG_FN double operator()(int k) const { return value[k]; }
};

// One run of a pass. `cell` and `rests` are those of the sums, in the last pass.
template <class F, int pass, bool keep>
OG_FN void one_run(const F f, i64 width, Reductions<F, pass>& reductions, double* const* cell, const i64* rests) {
  using Addend = typename F::Addend;
  constexpr bool writes = pass + 1 == F::passes && F::stores;
  constexpr int n_reductions = F::reductions(pass), n_sums = writes ? F::sums : 0;
  if constexpr (n_reductions + n_sums == 0) {
    write_run<F, pass, keep>(f, width);
  } else if constexpr (n_sums == 0) {
    reduce_run<F, pass, keep>(f, width, reductions);
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

struct RowWalk {
  void* const* base;
  const Boxes* boxes;
  i64 row_rank, length;  // axes of a row, its elements
};

// Moves to the next run of a row. Offsets and cells come back to the start of the row after the last one.
template <class F> OG_FN bool next_run(const RowWalk& walk, i64* at, i64* offset, double** cell) {
  const Space& space = walk.boxes->space;
  const i64 rank = space.rank;
  for (i64 d = rank - 2; d >= rank - walk.row_rank; --d) {
    const bool inside = ++at[d] < space.dims[d];
    const i64 moved = inside ? 1 : 1 - space.dims[d];
    for (int k = 0; k < F::operands; ++k) offset[k] += moved * space.strides[k * rank + d];
    for (int k = 0; k < F::sums; ++k) cell[k] += moved * walk.boxes->sum(k).strides[d];
    if (inside) return true;
    at[d] = 0;
  }
  return false;
}

template <class F, bool keep, int pass = 0>
OG_FN void passes(F& f, const RowWalk& walk, i64* at, i64* offset, double** cell, const i64* rests, char* memory) {
  if constexpr (pass < F::passes) {
    const i64 width = walk.boxes->space.inner;
    constexpr i64 room = F::kept_bytes ? keep_bytes / (F::kept_bytes ? F::kept_bytes : 1) / 8 * 8 : 0;
    Reductions<F, pass> reductions;
    reductions.start();
    i64 first = 0;
    do {
      f.move(walk.base, offset);
      f.run();
      if constexpr (keep) f.keep(memory, room, first);
      one_run<F, pass, keep>(f, width, reductions, cell, rests);
      first += width;
    } while (next_run<F>(walk, at, offset, cell));
    Partial partials[F::most + 1];
    double totals[F::most + 1];
    reductions.partials(partials);
    reductions.results(partials, totals);
    f.template reduced<pass>(Totals{totals}, (double)walk.length);
    passes<F, keep, pass + 1>(f, walk, at, offset, cell, rests, memory);
  }
}

// ---- boxes of whole rows ---------------------------------------------------------------------------------------------

template <class F, bool keep> void box_of_rows(const Boxes& boxes, i64 row_rank, i64 number) {
  constexpr int n = F::operands, m = F::sums;
  const Space& space = boxes.space;
  const i64 rank = space.rank, outer = rank - row_rank;
  i64 chunk[max_rank], extent[max_rank], at[max_rank], step[n], offset[n], rests[m + 1];
  double* cell[m + 1];
  i64 rows = 1, length = 1;
  for (int k = 0; k < n; ++k) {
    offset[k] = 0;
    step[k] = space.strides[k * rank + rank - 1];
  }
  for (i64 d = rank - 1, rest = number; d >= 0; --d) {
    chunk[d] = rest % boxes.counts[d];
    rest /= boxes.counts[d];
    extent[d] = boxes.extent(d, chunk[d]);
    at[d] = 0;
    (d < outer ? rows : length) *= extent[d];
    for (int k = 0; k < n; ++k) offset[k] += chunk[d] * boxes.box[d] * space.strides[k * rank + d];
  }
  double* const left = boxes.work + number * boxes.leaves;
  for (int k = 0; k < m; ++k) {
    const Sum sum = boxes.sum(k);
    cell[k] = left + sum.left;
    rests[k] = sum.cells;
    for (i64 i = 0; i < sum.cells * planes<typename F::Addend>(); ++i) cell[k][i] = 0;
  }
  alignas(64) char memory[keep ? keep_bytes : 1];
  const RowWalk walk = {space.base, &boxes, row_rank, length};
  F f;
  f.steps(step);
  f.move(space.base, offset);
  f.call();
  for (;;) {
    f.move(space.base, offset);
    f.row();
    passes<F, keep>(f, walk, at, offset, cell, rests, memory);
    f.finish();
    if (--rows == 0) return;
    for (i64 d = outer - 1; d >= 0; --d) {  // the next row, like an odometer
      const bool inside = ++at[d] < extent[d];
      const i64 moved = inside ? 1 : 1 - extent[d];
      for (int k = 0; k < n; ++k) offset[k] += moved * space.strides[k * rank + d];
      for (int k = 0; k < m; ++k) cell[k] += moved * boxes.sum(k).strides[d];
      if (inside) break;
      at[d] = 0;
    }
  }
}

// One box, its values kept for later passes where there is room.
template <class F> OG_FN void take_box_of_rows(const Boxes& boxes, i64 row_rank, i64 number) {
  i64 length = 1;
  for (i64 d = boxes.space.rank - row_rank; d < boxes.space.rank; ++d) length *= boxes.space.dims[d];
  if constexpr (F::kept_bytes > 0) {
    if (length <= keep_bytes / F::kept_bytes / 8 * 8) return box_of_rows<F, true>(boxes, row_rank, number);
  }
  box_of_rows<F, false>(boxes, row_rank, number);
}

// As og::boxes_at and og::each_box say.
template <class F>
OG_FN void launch_rows(void* const* base, const i64* layout, i64 begin, i64 end, i64 threads, Parallel parallel) {
  double small[small_work];
  const Boxes boxes = boxes_at<F>(base, layout, 0, small);
  const i64 row_rank = boxes.box[-1];
  each_box<F>(boxes, begin, end, threads, parallel, [&](i64 number) { take_box_of_rows<F>(boxes, row_rank, number); });
}

}  // namespace og
