#pragma once
#include "branches.h"
#include "brief.h"
#include "halves.h"
#include "scalar.h"

// The CPU skeleton: cuts the iteration space into chunks, hands them to threads, walks rows, and lets the compiler
// vectorise the innermost loop over Fused::element.

namespace og {

enum { max_rank = 64 };

// What one call works on. `layout` holds rank, then the extents, then the strides (in elements) of each operand.
struct Space {
  void* const* base;
  i64 rank, size, inner;
  const i64* dims;
  const i64* strides;
};

/// Whether a functor does 16 elements at a time by itself; see opgraph/codegen/lanes.py.
template <class F, class = void> struct has_lanes {
  static constexpr bool value = false;
};
template <class F> struct has_lanes<F, ignored<decltype(F::by_lanes)>> {
  static constexpr bool value = F::by_lanes;
};

template <class F> OG_FN void span(const F f, i64 begin, i64 end) {
  if constexpr (has_branches<F>::value) {
    Branches<F> both;
    for (; begin < end; begin += strip) both.walk(f, begin, end - begin < strip ? end - begin : strip);
#if OG_LANES
  } else if constexpr (has_lanes<F>::value) {
    for (; begin + lane_count <= end; begin += lane_count) f.lanes(begin, lane_count);
    if (begin < end) f.lanes(begin, end - begin);
#endif
  } else if constexpr (halves_of<F>::count != 0) {
    alignas(64) float room[halves_of<F>::count][strip];
    for (i64 first = begin; first < end; first += strip) {
      const i64 n = end - first < strip ? end - first : strip;
      f.widen(room, first, n);
      OG_VECTORIZE
      for (i64 j = 0; j < n; ++j) f.staged(room, first + j, j);
      f.narrow(room, first, n);
    }
  } else {
    OG_VECTORIZE
    for (i64 i = begin; i < end; ++i) f.element(i);
  }
}

// A transposed operand has its neighbours in the next row. Of such operands, tiles are walked instead of rows: what a row
// reads with its neighbours is still in the first cache (128 lines of 64 bytes) when the next row comes to it.
enum { tile_rows = 16, tile_columns = 128 };
OG_FN bool is_turned(const Space& space, int operands) {
  if (space.rank < 2 || space.inner <= tile_columns) return false;
  for (int k = 0; k < operands; ++k) {
    const i64* step = space.strides + (k + 1) * space.rank - 2;
    const i64 down = step[0] < 0 ? -step[0] : step[0], along = step[1] < 0 ? -step[1] : step[1];
    if (down != 0 && down < along) return true;
  }
  return false;
}

// Elements [begin, end) of the space, in row-major order.
template <class F> void range(const Space& space, i64 begin, i64 end) {
  constexpr int n = F::operands;
  const i64 rank = space.rank, inner = space.inner;
  i64 step[n], offset[n], at[max_rank];
  for (int k = 0; k < n; ++k) {
    step[k] = space.strides[k * rank + rank - 1];
    offset[k] = 0;
  }
  i64 row = begin / inner, column = begin % inner;
  for (i64 d = rank - 2; d >= 0; --d) {
    at[d] = row % space.dims[d];
    row /= space.dims[d];
    for (int k = 0; k < n; ++k) offset[k] += at[d] * space.strides[k * rank + d];
  }
  F f;
  f.steps(step);
  f.move(space.base, offset);
  f.call();
  const bool turned = is_turned(space, n);
  while (begin < end) {
    const i64 length = end - begin < inner - column ? end - begin : inner - column;
    i64 rows = 1, first = column, last = column + length;
    if (turned && column == 0 && end - begin >= 2 * inner) {
      const i64 whole = (end - begin) / inner, left = space.dims[rank - 2] - at[rank - 2];
      rows = whole < left ? whole : left;
      rows = rows < tile_rows ? rows : (i64)tile_rows;
      if (rows > 1) last = tile_columns;
    }
    const i64* here = offset;
    i64 moved[n], tile_row = 0;
    for (;;) {  // one place for rows and tiles: what is called here is most of what has to be compiled
      f.move(space.base, here);
      f.row();
      span(f, first, last);
      if (rows == 1) break;
      if (++tile_row < rows) {
        for (int k = 0; k < n; ++k) moved[k] = here[k] + space.strides[(k + 1) * rank - 2];
        here = moved;
      } else {
        if (last == inner) break;
        first = last;
        last = inner - first < tile_columns ? inner : first + tile_columns;
        tile_row = 0;
        here = offset;
      }
    }
    if (rows > 1) {
      for (int k = 0; k < n; ++k) offset[k] += (rows - 1) * space.strides[k * rank + rank - 2];
      at[rank - 2] += rows - 1;
    }
    begin += rows > 1 ? rows * inner : length;
    column = 0;
    for (i64 d = rank - 2; d >= 0; --d) {  // the next row, like an odometer
      for (int k = 0; k < n; ++k) offset[k] += space.strides[k * rank + d];
      if (++at[d] < space.dims[d]) break;
      at[d] = 0;
      for (int k = 0; k < n; ++k) offset[k] -= space.dims[d] * space.strides[k * rank + d];
    }
  }
}

// Threads take chunks off a counter. Which thread computes an element never changes its bits.
struct Team {
  const Space* space;
  i64 next, chunk;
};

template <class F> void work(void* data) {
  Team* team = (Team*)data;
  for (;;) {
    const i64 begin = __atomic_fetch_add(&team->next, team->chunk, __ATOMIC_RELAXED);
    if (begin >= team->space->size) return;
    const i64 end = begin + team->chunk < team->space->size ? begin + team->chunk : team->space->size;
    range<F>(*team->space, begin, end);
  }
}

typedef void (*Parallel)(void (*)(void*), void*, unsigned, unsigned);

template <class F> void run(const Space& space, i64 threads, Parallel parallel) {
  if (threads < 2 || parallel == nullptr) return range<F>(space, 0, space.size);
  const i64 pieces = threads * 4;  // a few for each, so that a thread that starts late is not waited for
  const i64 grain = 512;            // chunks of whole vectors
  Team team = {&space, 0, ((space.size + pieces - 1) / pieces + grain - 1) / grain * grain};
  parallel(work<F>, &team, (unsigned)threads, 0);
}

// layout: [rank, size, extents..., strides of operand 0..., ...]. `parallel` is GOMP_parallel, or null.
// begin and end: the elements to do; 0 and size, unless the caller brings its own threads.
template <class F>
OG_FN void launch(void* const* base, const i64* layout, i64 begin, i64 end, i64 threads, Parallel parallel) {
  const i64 rank = layout[0];
  const Space space = {base, rank, layout[1], layout[1 + rank], layout + 2, layout + 2 + rank};
  if (begin == 0 && end == space.size) return run<F>(space, threads, parallel);
  range<F>(space, begin, end);
}

}  // namespace og
