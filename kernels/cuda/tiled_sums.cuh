#pragma once
#include "cuda/thread_sums.cuh"
#include "cuda/packs.cuh"

// The CUDA skeleton of a loop with sums: no atomics, and the same order of additions on any GPU.
//
// Outer axes that some sum keeps come first: their `groups` places are summed separately. The axes that every sum adds
// up, the `rows`, and the innermost one, the `columns`, are cut into tiles by their sizes alone. A block of TX x TM x
// TG threads takes a tile of TG groups: TX threads side by side along the columns, TM rows at a time. Each thread adds
// up its elements, and the threads of a block join theirs by a tree in shared memory. If several tiles contribute to a
// result, their sums go to `work`, and a second kernel (`totals` in reduction_finalize.cuh) adds them up, in a fixed
// order again.

namespace og {

enum { strip = 1 };  // Fused::element writes the addend of sum k to s[k]

// Extents, the cut, and strides (in elements), passed by value; 64-bit words. Axes: kept outer ones, added-up outer
// ones, columns. part[k]: where in `work` sum k leaves the sums of its tiles; -1: each tile completes its results.
template <int rank, int operands, int sums> struct Tiles {
  i64 groups, rows, columns, row_chunk, column_chunk, row_chunks, column_chunks;
  i64 part[sums];
  i64 extent[rank];
  i64 strides[operands][rank];
};

// Offsets of every operand at a group and a row.
template <class I, int kept, int rank, int operands, int sums>
OG_FN void offsets(const Tiles<rank, operands, sums>& tiles, I group, I row, i64 (&offset)[operands]) {
  OG_UNROLL for (int k = 0; k < operands; ++k) offset[k] = 0;
  OG_UNROLL for (int d = rank - 2; d >= 0; --d) {
    I& rest = d < kept ? group : row;
    const I extent = (I)tiles.extent[d], outer = (d == 0 || d == kept) ? 0 : rest / extent, at = rest - outer * extent;
    OG_UNROLL for (int k = 0; k < operands; ++k) offset[k] += (i64)at * tiles.strides[k][d];
    rest = outer;
  }
}

// Adds up a thread's packs of a row, from `column` on.
template <class F, int V, int U, int TX> OG_FN void add_packs(F& f, i64 column, i64 end, Added<F, V>& added) {
  using P = typename F::template Packs<V>;
  typename F::Addend s[F::sums * V];
  bool ready = false;  // values that change once per row are computed after the first loads, not to delay them
  for (; column + (U - 1) * TX * V + V <= end; column += U * TX * V) {
    P pack[U];
    OG_UNROLL for (int u = 0; u < U; ++u) f.fetch(pack[u], column + u * TX * V);
    if constexpr (V == 4) loads_first();  // f32: 16-bit kernels have no instructions to spare for it
    if (!ready) {
      f.call();
      f.row();
      ready = true;
    }
    OG_UNROLL for (int u = 0; u < U; ++u) {
      f.finish(pack[u], column + u * TX * V, s);
      added.pack(s);
    }
  }
  if (column < end && !ready) {
    f.call();
    f.row();
  }
  OG_ROLLED for (; column < end; column += TX * V) {
    if (U > 1 && V > 1 && column + V <= end) {
      P pack;
      f.fetch(pack, column);
      f.finish(pack, column, s);
      added.pack(s);
    } else {
      OG_ROLLED for (i64 i = column; i < end && i < column + V; ++i) {
        f.element(i, s);
        added.one(s, (int)(i - column));
      }
    }
  }
}

// The same, with code for G elements of a pack (see pointwise_unrolled.cuh): the same additions in the same order.
template <class F, int V, int G, int TX> OG_FN void add_groups(F& f, i64 column, i64 end, Added<F, V>& added) {
  bool ready = false;
  for (; column + V <= end; column += TX * V) {
    typename F::template Held<V> in;
    typename F::template Made<V> out;
    typename F::Addend s[F::sums * G], total[F::sums] = {};
    f.fetch(in, column);
    if (!ready) {
      f.call();
      f.row();
      ready = true;
    }
    OG_ROLLED for (int k = 0; k < V; k += G) {
      f.template group<G>(in, out, column + k, s);
      added.template group<G>(s, total);
    }
    added.row(total);
    f.put(out, column);
  }
  if (column < end && !ready) {
    f.call();
    f.row();
  }
  OG_ROLLED for (i64 i = column; i < end && i < column + V; ++i) {
    typename F::Addend s[F::sums];
    f.element(i, s);
    added.one(s, (int)(i - column));
  }
}

template <class F, int V, int U, int G, int TX, class I, int kept, int rank, int operands, int sums>
OG_FN void add_row(void* const* base, const Tiles<rank, operands, sums>& tiles, I group, I row, i64 begin, i64 end,
                   Added<F, V>& added) {
  i64 offset[operands], step[operands];
  OG_UNROLL for (int k = 0; k < operands; ++k) step[k] = tiles.strides[k][rank - 1];
  offsets<I, kept>(tiles, group, row, offset);
  F f;
  f.steps(step);
  f.move(base, offset);
  if constexpr (G > 0) add_groups<F, V, G, TX>(f, begin, end, added);
  else add_packs<F, V, U, TX>(f, begin, end, added);
}

enum { side_by_side = 8 };  // sums over the columns that are joined at a time: 16 KiB of shared memory in f64

// True if one of the sums [from, end) adds up the columns.
template <class F> OG_FN constexpr bool any_row(int from, int end) {
  for (int k = from; k < end; ++k)
    if (F::adds_row(k)) return true;
  return false;
}

// The tile of a block.
template <class I> struct Tile {
  I column_chunk, row_chunk, group;
  template <class T> OG_FN Tile(const T& tiles, I block, int groups, int group_of_thread) {
    const I above = block / (I)tiles.column_chunks;
    column_chunk = block % (I)tiles.column_chunks;
    row_chunk = above % (I)tiles.row_chunks;
    group = above / (I)tiles.row_chunks * groups + group_of_thread;
  }
};
// blockIdx.x, read again, so that values derived from it are recomputed: kept across the loop, they caused spills.
OG_FN u32 block_again() {
#if OG_DEVICE
  u32 block;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(block));
  return block;
#else
  return blockIdx.x;
#endif
}

// The first stage. grid: column_chunks x row_chunks x groups / TG, the column chunk running fastest.
// G: elements of a pack that have code of their own; 0: all of U packs.
template <class F, int V, int U, int TX, int TM, class I, int kept, int G = 0, int rank, int operands, int sums>
OG_FN void sum_tiles(void* const* base, const Tiles<rank, operands, sums>& tiles, typename F::Addend* work) {
  constexpr int TG = block_size / (TX * TM);
  constexpr int side = sums < side_by_side ? sums : side_by_side;
  __shared__ typename F::Addend meet[side][block_size];
  const int thread = (int)threadIdx.x, tx = thread % TX, tm = thread / TX % TM, tg = thread / (TX * TM);
  Added<F, V> added;
  {
    const Tile<I> at(tiles, (I)blockIdx.x, TG, tg);
    const i64 begin = (i64)at.column_chunk * tiles.column_chunk;
    const i64 end = begin + tiles.column_chunk < tiles.columns ? begin + tiles.column_chunk : tiles.columns;
    const i64 first = (i64)at.row_chunk * tiles.row_chunk;
    const i64 last = first + tiles.row_chunk < tiles.rows ? first + tiles.row_chunk : tiles.rows;
    if (at.group < (I)tiles.groups) {
      OG_ROLLED for (i64 row = first + tm; row < last; row += TM)
        add_row<F, V, U, G, TX, I, kept>(base, tiles, at.group, (I)row, begin + tx * V, end, added);
    }
  }
  const Tile<I> at(tiles, (I)block_again(), TG, tg);
  const I group = at.group, row_chunk = at.row_chunk, column_chunk = at.column_chunk;
  const bool inside = group < (I)tiles.groups;
  const i64 begin = (i64)column_chunk * tiles.column_chunk;
  const i64 end = begin + tiles.column_chunk < tiles.columns ? begin + tiles.column_chunk : tiles.columns;
  i64 offset[operands];
  offsets<I, kept>(tiles, group, (I)0, offset);
  // Sums over the columns are joined side by side.
  each<(sums + side - 1) / side>([&](auto c) {
    constexpr int from = c.value * side, count = sums - from < side ? sums - from : side;
    if constexpr (any_row<F>(from, from + count)) {
      each<count>([&](auto k) {
        if constexpr (F::adds_row(from + k.value)) meet[k.value][thread] = added.of[from + k.value][0];
      });
      __syncthreads();
      OG_ROLLED for (int half = TX * TM / 2; half > 0; half /= 2) {
        if (thread % (TX * TM) < half) {
          each<count>([&](auto k) {
            if constexpr (F::adds_row(from + k.value)) meet[k.value][thread] += meet[k.value][thread + half];
          });
        }
        __syncthreads();
      }
      if (tx == 0 && tm == 0 && inside) {
        const i64 tile = ((i64)group * tiles.row_chunks + row_chunk) * tiles.column_chunks + column_chunk;
        each<count>([&](auto k) {
          constexpr int sum = from + k.value, operand = F::sum_operand(sum);
          if constexpr (F::adds_row(sum)) {
            const i64 part = tiles.part[sum];
            if (part < 0) F::total(Number<sum>{}, base[operand], offset[operand], meet[k.value][thread]);
            else work[part + tile] = meet[k.value][thread];
          }
        });
      }
      __syncthreads();
    }
  });
  each<sums>([&](auto k) {
    constexpr int operand = F::sum_operand(k.value);
    if constexpr (!F::adds_row(k.value)) {
      OG_UNROLL for (int v = 0; v < V; ++v) {
        const i64 column = begin + tx * V + v, part = tiles.part[k.value];
        auto& all = meet[0];
        all[thread] = added.of[k.value][v];
        __syncthreads();
        OG_ROLLED for (int half = TM / 2; half > 0; half /= 2) {
          if (tm < half) all[thread] += all[thread + half * TX];
          __syncthreads();
        }
        if (tm == 0 && inside && column < end) {
          const i64 at = offset[operand] + column * tiles.strides[operand][rank - 1];
          if (part < 0) F::total(k, base[operand], at, all[thread]);
          else work[part + ((i64)group * tiles.row_chunks + row_chunk) * tiles.columns + column] = all[thread];
        }
        __syncthreads();
      }
    }
  });
}

}  // namespace og
