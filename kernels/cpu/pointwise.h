#pragma once
#include "cpu/span.h"
#include "cpu/transpose.h"

// The CPU skeleton: cuts the iteration space into chunks, hands them to threads, walks rows, and lets the compiler
// vectorise the innermost loop over Fused::element.

namespace og {

enum { max_rank = 64 };

// The next element of a transposed operand is in the next row. Loops with such operands walk tiles instead of rows:
// lines that one row fetched are still in the L1 cache (128 lines of 64 bytes) when the next row reads them.
enum { tile_rows = 16, tile_columns = 128 };
OG_FN bool is_turned(const Space& space, int k) {
  const i64* step = space.strides + (k + 1) * space.rank - 2;
  const i64 down = step[0] < 0 ? -step[0] : step[0], along = step[1] < 0 ? -step[1] : step[1];
  return down != 0 && down < along;
}

// If columns are a power of two apart, however, no cache has room for the lines of a tile, and each is fetched once per
// row. Operands that are only read are therefore copied, block by block, with rows and columns exchanged. See
// opgraph/codegen/emit.py.
enum { block_rows = 64, block_bytes = 128 * 1024 };
template <class F, class = void> struct Blocks {
  static constexpr i64 width = 0;
  OG_FN bool copies(const Space&, int) const { return false; }
};
template <class F> struct Blocks<F, ignored<decltype(F::strided_bytes(0))>> {
  static constexpr int n = F::operands;
  static constexpr i64 element_bytes(int k) { return k < n ? F::strided_bytes(k) + element_bytes(k + 1) : 0; }
  static constexpr i64 width = block_bytes / block_rows / element_bytes(0) / 16 * 16;
  alignas(64) char room[block_bytes];
  void* base[n];
  i64 down[n], along[n];

  OG_FN bool copies(const Space& space, int k) const {
    return F::strided_bytes(k) != 0 && is_turned(space, k) && space.strides[(k + 1) * space.rank - 2] == 1;
  }
  OG_FN void start(const Space& space) {
    char* block = room;
    for (int k = 0; k < n; ++k) {
      const bool copied = copies(space, k);
      base[k] = copied ? block : space.base[k];
      down[k] = copied ? width : space.strides[(k + 1) * space.rank - 2];
      along[k] = copied ? 1 : space.strides[(k + 1) * space.rank - 1];
      block += F::strided_bytes(k) * width * block_rows;
    }
  }
  /// Copies `count` columns from `first` on. own: the offsets of the operands after that.
  OG_FN void copy(const Space& space, const i64* offset, i64 first, i64 count, i64 rows, i64* own) {
    each<n>([&](auto number) {
      constexpr int k = number.value, bytes = F::strided_bytes(k);
      const i64 step = space.strides[(k + 1) * space.rank - 1];
      own[k] = offset[k] + first * step;
      if constexpr (bytes != 0) {
        if (!copies(space, k)) return;
        using T = typename bits_of<bytes>::type;
        transpose((T*)base[k], width, 1, (const T*)space.base[k] + own[k], step, 1, count, rows);
        own[k] = 0;
      }
    });
  }
};

enum class Walk { rows, tiles, blocks };
template <class F> OG_FN Walk walk_of(const Space& space, const Blocks<F>& blocks) {
  if (space.rank < 2 || space.inner <= tile_columns) return Walk::rows;
  Walk walk = Walk::rows;
  for (int k = 0; k < F::operands; ++k) {
    if (is_turned(space, k)) walk = blocks.copies(space, k) && walk != Walk::tiles ? Walk::blocks : Walk::tiles;
  }
  return walk;
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
  Way<F>::choose(f, space);
  Blocks<F> blocks;
  constexpr bool may_copy = Blocks<F>::width != 0;
  const Walk walk = walk_of<F>(space, blocks);
  const bool copies = may_copy && walk == Walk::blocks;
  if constexpr (may_copy) {
    if (copies) blocks.start(space);
  }
  while (begin < end) {
    const i64 length = end - begin < inner - column ? end - begin : inner - column;
    i64 rows = 1, first = column, last = column + length;
    if (walk != Walk::rows && column == 0 && end - begin >= 2 * inner) {
      const i64 whole = (end - begin) / inner, left = space.dims[rank - 2] - at[rank - 2], most = copies ? (i64)block_rows : (i64)tile_rows;
      rows = whole < left ? whole : left;
      rows = rows < most ? rows : most;
    }
    const bool by_blocks = copies && rows > 1;
    const i64 columns = by_blocks ? Blocks<F>::width : (i64)tile_columns;
    if (rows > 1) last = inner < columns ? inner : columns;
    const i64* here = offset;
    i64 moved[n], tile_row = 0;
    for (;;) {  // one call for all walks: most of the compile time goes into the functions called here
      void* const* base = space.base;
      i64 left = first, right = last;
      if constexpr (may_copy) {
        if (by_blocks) {
          if (tile_row == 0) {
            blocks.copy(space, offset, first, last - first, rows, moved);
            f.steps(blocks.along);
            here = moved;
          }
          base = blocks.base;
          left = 0;
          right = last - first;
        }
      }
      f.move(base, here);
      f.row();
      span(f, left, right);
      if (rows == 1) break;
      if (++tile_row < rows) {
        if constexpr (may_copy) {
          for (int k = 0; k < n; ++k) moved[k] = here[k] + (by_blocks ? blocks.down[k] : space.strides[(k + 1) * rank - 2]);
        } else {
          for (int k = 0; k < n; ++k) moved[k] = here[k] + space.strides[(k + 1) * rank - 2];
        }
        here = moved;
      } else {
        if (last == inner) break;
        first = last;
        last = inner - first < columns ? inner : first + columns;
        tile_row = 0;
        here = offset;
      }
    }
    if (by_blocks) f.steps(step);
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
  Way<F>::settle(f);
}

// Threads take chunks from a shared counter. An element has the same bits, whichever thread computes it.
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
  const i64 pieces = threads * 4;  // a few per thread, so that a thread that starts late delays no others
  const i64 grain = 512;            // chunks of whole vectors
  Team team = {&space, 0, ((space.size + pieces - 1) / pieces + grain - 1) / grain * grain};
  parallel(work<F>, &team, (unsigned)threads, 0);
}

// layout: [rank, size, extents..., strides of operand 0..., ...]. `parallel` is GOMP_parallel, or null.
// begin and end: the elements to compute; 0 and size, unless the caller has its own threads.
template <class F>
OG_FN void launch(void* const* base, const i64* layout, i64 begin, i64 end, i64 threads, Parallel parallel) {
  const i64 rank = layout[0];
  const Space space = {base, rank, layout[1], layout[1 + rank], layout + 2, layout + 2 + rank};
  if (begin == 0 && end == space.size) return run<F>(space, threads, parallel);
  range<F>(space, begin, end);
}

}  // namespace og
