#pragma once
#include "cpu/row_reductions.h"
#include "cpu/transpose.h"

// The CPU skeleton of a loop over rows that lie side by side (schedule/interleaved_rows.py): lane i of a vector is row
// i of `side` neighbours. The axes are the outer axes, then those of a row, and last the axis of the lanes. If the
// lanes of an operand are far apart in memory while the elements of a row are adjacent, the operand is transposed: it
// is copied into a tile where lanes are neighbours, or back from one. Each row is reduced in the order of its elements,
// so the bits do not depend on its neighbours.

namespace og {

enum { side = 64 };

// ---- one reduction of all lanes --------------------------------------------------------------------------------------

template <How how, class T> struct Across;
template <class T> struct Across<How::add, T> {
  static constexpr bool exact = sizeof(T) == sizeof(double);
  alignas(64) double sum[side];
  alignas(64) double rest[exact ? side : 1];
  OG_FN void start() {
    for (int i = 0; i < side; ++i) sum[i] = 0;
    for (int i = 0; i < (exact ? side : 1); ++i) rest[i] = 0;
  }
  OG_FN void add(i64 i, T x) {
    if constexpr (exact) {
      add_exactly(sum[i], rest[i], x);
    } else {
      sum[i] += (double)x;
    }
  }
  OG_FN double result(i64 i) const { return exact ? whole(sum[i], rest[exact ? i : 0]) : sum[i]; }
};
template <class T> struct Across<How::multiply, T> {
  alignas(64) double product[side];
  OG_FN void start() {
    for (int i = 0; i < side; ++i) product[i] = 1;
  }
  OG_FN void add(i64 i, T x) { product[i] *= (double)x; }
  OG_FN double result(i64 i) const { return product[i]; }
};
template <class T, int sign> struct ExtremeAcross {
  alignas(64) T best[side];
  OG_FN void start() {
    for (int i = 0; i < side; ++i) best[i] = Extreme<T, sign>::nothing();
  }
  OG_FN void add(i64 i, T x) { best[i] = Extreme<T, sign>::chosen(best[i], x); }
  OG_FN double result(i64 i) const { return (double)best[i]; }
};
template <class T> struct Across<How::largest, T> : ExtremeAcross<T, 1> {};
template <class T> struct Across<How::smallest, T> : ExtremeAcross<T, -1> {};

// The reductions of a pass.
template <class F, int pass, int k = 0, bool none = k == F::reductions(pass)> struct LaneReductions {
  Across<F::how(pass, k), typename F::Addend> own;
  LaneReductions<F, pass, k + 1> others;
  OG_FN void start() {
    own.start();
    others.start();
  }
  OG_FN void add(i64 i, const typename F::Addend* x) {
    own.add(i, *x);
    others.add(i, x + 1);
  }
  OG_FN void results(double (*to)[side]) const {
    for (i64 i = 0; i < side; ++i) (*to)[i] = own.result(i);
    others.results(to + 1);
  }
};
template <class F, int pass, int k> struct LaneReductions<F, pass, k, true> {
  OG_FN void start() {}
  OG_FN void add(i64, const typename F::Addend*) {}
  OG_FN void results(double (*)[side]) const {}
};

// ---- tiles -----------------------------------------------------------------------------------------------------------

// Copies an operand with elements of `bytes` bytes from the caller's memory, lanes by elements, into a tile, or back.
OG_FN void load_transposed(void* tile, const void* memory, int bytes, i64 lane, i64 along, i64 lanes_, i64 length) {
  if (bytes == 1) transpose((u8*)tile, side, 1, (const u8*)memory, lane, along, lanes_, length);
  if (bytes == 2) transpose((u16*)tile, side, 1, (const u16*)memory, lane, along, lanes_, length);
  if (bytes == 4) transpose((u32*)tile, side, 1, (const u32*)memory, lane, along, lanes_, length);
  if (bytes == 8) transpose((u64*)tile, side, 1, (const u64*)memory, lane, along, lanes_, length);
}
OG_FN void store_transposed(const void* tile, void* memory, int bytes, i64 lane, i64 along, i64 lanes_, i64 length) {
  if (bytes == 1) transpose((u8*)memory, lane, along, (const u8*)tile, side, 1, length, lanes_);
  if (bytes == 2) transpose((u16*)memory, lane, along, (const u16*)tile, side, 1, length, lanes_);
  if (bytes == 4) transpose((u32*)memory, lane, along, (const u32*)tile, side, 1, length, lanes_);
  if (bytes == 8) transpose((u64*)memory, lane, along, (const u64*)tile, side, 1, length, lanes_);
}

// ---- up to `side` rows -----------------------------------------------------------------------------------------------

// The walk over rows, one element of each at a time: addresses of operands (of transposed ones, tiles), and strides.
template <class F> struct LaneRows {
  const Boxes* boxes;
  i64 row_rank, length, lanes_;
  void* base[F::operands];
  i64 along[F::operands * max_rank];  // strides of each operand along the axes of a row
};

// One element of each row. `cell` and `rests` are those of the sums, in the last pass.
template <class F, int pass, bool keep>
OG_FN void one_element_each(const F& f, i64 n, LaneReductions<F, pass>& all, double* const* cell, const i64* rests) {
  using Addend = typename F::Addend;
  constexpr bool writes = pass + 1 == F::passes && F::stores;
  constexpr int n_reductions = F::reductions(pass), n_sums = writes ? F::sums : 0;
  alignas(64) Addend addend[n_sums + 1][side];
  OG_VECTORIZE
  for (i64 i = 0; i < n; ++i) {
    Addend s[n_reductions + n_sums + 1];
    f.template element<pass, keep, 1>(i, s);
    all.add(i, s);
    for (int k = 0; k < n_sums; ++k) addend[k][i] = s[n_reductions + k];
  }
  each<n_sums>([&](auto k) {
    Addend* x = addend[k.value];
    if constexpr (F::adds_row(k.value)) {
      const i64 filled = (n + lanes - 1) / lanes * lanes;
      for (i64 i = n; i < filled; ++i) x[i] = 0;
      Row<Addend> total;
      total.add(x, filled);
      total.into(cell[k.value], rests[k.value]);
    } else {
      add_each(cell[k.value], rests[k.value], x, n);
    }
  });
}

template <class F, bool keep, int pass = 0>
OG_FN void passes_outer(F& f, const LaneRows<F>& walk, const i64* offset, double* const* cell, const i64* rests, char* memory) {
  if constexpr (pass < F::passes) {
    constexpr int n = F::operands, m = F::sums;
    constexpr i64 room = F::kept_bytes ? keep_bytes / (F::kept_bytes ? F::kept_bytes : 1) / 8 * 8 : 0;
    const i64 rank = walk.boxes->space.rank, first = rank - 1 - walk.row_rank;
    i64 own[n], at[max_rank];
    double* cells[m + 1];
    for (int k = 0; k < n; ++k) own[k] = offset[k];
    for (int k = 0; k < m; ++k) cells[k] = cell[k];
    for (i64 d = 0; d < walk.row_rank; ++d) at[d] = 0;
    LaneReductions<F, pass> all;
    all.start();
    for (i64 number = 0;;) {
      f.move(walk.base, own);
      f.run();
      if constexpr (keep) f.keep(memory, room, number * side);
      if (walk.lanes_ == side) {
        one_element_each<F, pass, keep>(f, side, all, cells, rests);
      } else {
        one_element_each<F, pass, keep>(f, walk.lanes_, all, cells, rests);
      }
      if (++number == walk.length) break;
      for (i64 d = walk.row_rank - 1; d >= 0; --d) {  // the next element, like an odometer
        const i64 extent = walk.boxes->space.dims[first + d];
        const bool inside = ++at[d] < extent;
        const i64 moved = inside ? 1 : 1 - extent;
        for (int k = 0; k < n; ++k) own[k] += moved * walk.along[k * walk.row_rank + d];
        for (int k = 0; k < m; ++k) cells[k] += moved * walk.boxes->sum(k).strides[first + d];
        if (inside) break;
        at[d] = 0;
      }
    }
    alignas(64) double total[F::most + 1][side];
    all.results(total);
    f.template reduced<pass>(total, (double)walk.length, walk.lanes_);
    passes_outer<F, keep, pass + 1>(f, walk, offset, cell, rests, memory);
  }
}

template <class F> constexpr i64 tile_bytes() {
  i64 sum = 0;
  for (int k = 0; k < F::operands; ++k) sum += F::transposed(k);
  return sum;
}

template <class F, bool keep> void box_outer(const Boxes& boxes, i64 row_rank, i64 number) {
  constexpr int n = F::operands, m = F::sums;
  constexpr bool has_tiles = tile_bytes<F>() > 0;
  enum { longest = 256 * 1024 };
  const Space& space = boxes.space;
  const i64 last = space.rank - 1, first = last - row_rank;
  Place<F> place;
  place.start(boxes, number);
  for (int k = 0; k < m; ++k) place.start_cells(boxes.sum(k), k, boxes.work + number * boxes.leaves + boxes.sum(k).left);
  LaneRows<F> walk = {&boxes, row_rank, place.count(first, last), 0, {}, {}};
  alignas(64) char memory[keep ? keep_bytes : 1];
  alignas(64) char tiles[has_tiles ? longest : 1];
  char* tile = tiles;
  i64 step[n];
  for (int k = 0; k < n; ++k) {
    walk.base[k] = F::transposed(k) ? tile : space.base[k];
    tile += F::transposed(k) * side * walk.length;
    step[k] = F::transposed(k) ? 1 : place.step[k];
    for (i64 d = 0; d < row_rank; ++d)
      walk.along[k * row_rank + d] = F::transposed(k) ? side : space.strides[k * space.rank + first + d];
  }
  F f;
  f.steps(step);
  f.move(space.base, place.offset);
  f.call();
  do {
    for (i64 lane = 0; lane < place.extent[last]; lane += side) {
      const i64 left = place.extent[last] - lane;
      walk.lanes_ = left < side ? left : side;
      const auto transpose_each_of = [&](int begin, int end, const auto& copy) {
        for (int k = begin; k < end; ++k) {
          if (!F::transposed(k)) continue;
          char* at = (char*)space.base[k] + (place.offset[k] + lane * place.step[k]) * F::transposed(k);
          copy(walk.base[k], at, F::transposed(k), place.step[k], space.strides[k * space.rank + first], walk.lanes_, walk.length);
        }
      };
      transpose_each_of(0, F::loads, [](auto... at) OG_LAMBDA { load_transposed(at...); });
      i64 own[n];
      double* cells[m + 1];
      for (int k = 0; k < n; ++k) own[k] = F::transposed(k) ? 0 : place.offset[k] + lane * place.step[k];
      for (int k = 0; k < m; ++k) cells[k] = place.cell[k] + lane * boxes.sum(k).strides[last];
      f.move(walk.base, own);
      f.row(walk.lanes_);
      passes_outer<F, keep>(f, walk, own, cells, place.rests, memory);
      f.move(walk.base, own);
      f.finish(walk.lanes_);
      transpose_each_of(F::loads, n, [](auto... at) OG_LAMBDA { store_transposed(at...); });
    }
  } while (place.next(boxes, 0, first));
}

// One box. Its values are kept for later passes if there is room.
template <class F> OG_FN void take_box_outer(const Boxes& boxes, i64 row_rank, i64 number) {
  i64 length = 1;
  for (i64 d = boxes.space.rank - 1 - row_rank; d < boxes.space.rank - 1; ++d) length *= boxes.space.dims[d];
  if constexpr (F::fits) {
    box_outer<F, true>(boxes, row_rank, number);
  } else {
    if constexpr (F::kept_bytes > 0) {
      if (length * side <= keep_bytes / F::kept_bytes / 8 * 8) return box_outer<F, true>(boxes, row_rank, number);
    }
    box_outer<F, false>(boxes, row_rank, number);
  }
}

// The arguments are those of og::boxes_at and og::each_box.
template <class F>
OG_FN void launch_outer(void* const* base, const i64* layout, i64 begin, i64 end, i64 threads, Parallel parallel) {
  double small[small_work];
  const Boxes boxes = boxes_at<F>(base, layout, 0, small);
  const i64 row_rank = boxes.box[-1];
  each_box<F>(boxes, begin, end, threads, parallel, [&](i64 number) { take_box_outer<F>(boxes, row_rank, number); });
}

}  // namespace og
