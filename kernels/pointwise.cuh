#pragma once
#include "scalar.h"

// The CUDA skeletons of pointwise kernels. One tile per block, 64-bit positions, no shared memory.
//
// A thread moves U packs of V neighbouring elements, all loads before the first use: 16-byte accesses, and two of them
// in flight for kernels of one input (48 KiB in flight per multiprocessor is what an H200 needs).

#define OG_UNROLL _Pragma("unroll")

namespace og {

enum { block_size = 256 };

template <class T, int V> struct alignas(sizeof(T) * V < 16 ? sizeof(T) * V : 16) Pack { T item[V]; };

template <int V, class T> OG_FN Pack<T, V> load_pack(const T* p) { return *(const Pack<T, V>*)p; }
template <int V, class T> OG_FN void store_pack(T* p, const Pack<T, V>& pack) { *(Pack<T, V>*)p = pack; }

template <int V, class T> OG_FN Pack<T, V> gather_pack(const T* p, i64 i, i64 step) {
  Pack<T, V> pack;
  OG_UNROLL for (int k = 0; k < V; ++k) pack.item[k] = p[(i + k) * step];
  return pack;
}
template <int V, class T> OG_FN void scatter_pack(T* p, i64 i, i64 step, const Pack<T, V>& pack) {
  OG_UNROLL for (int k = 0; k < V; ++k) p[(i + k) * step] = pack.item[k];
}

// Extents and strides (in elements) of a call, passed by value.
template <int rank, int operands> struct Layout {
  i64 dims[rank];
  i64 strides[operands][rank];
};

// The whole space is one row of n elements.
template <class F, int V, int U, class L> OG_FN void flat(void* const* base, const L& layout, i64 n) {
  F f;
  i64 offset[F::operands], step[F::operands];
  OG_UNROLL for (int k = 0; k < F::operands; ++k) {
    offset[k] = 0;
    step[k] = layout.strides[k][0];
  }
  f.steps(step);
  f.move(base, offset);
  f.call();
  f.row();
  const i64 tile = (i64)blockIdx.x * (block_size * V * U);
  if (tile + block_size * V * U <= n) {
    f.template vectors<V, U>(tile + (i64)threadIdx.x * V, block_size * V);
  } else {  // the last tile
    for (i64 i = tile + threadIdx.x; i < n; i += block_size) f.element(i, i);
  }
}

// Rows: a thread takes one pack of one row. `packs` is the number of packs of a row; V divides the row unless it is 1.
template <class F, int V, int rank, class L> OG_FN void rows(void* const* base, const L& layout, i64 packs, i64 n) {
  const i64 i = (i64)blockIdx.x * block_size + threadIdx.x;
  if (i >= n) return;
  i64 row = i / packs;
  const i64 column = (i - row * packs) * V;
  i64 offset[F::operands], step[F::operands];
  OG_UNROLL for (int k = 0; k < F::operands; ++k) {
    offset[k] = 0;
    step[k] = layout.strides[k][rank - 1];
  }
  OG_UNROLL for (int d = rank - 2; d >= 0; --d) {
    const i64 at = row % layout.dims[d];
    row /= layout.dims[d];
    OG_UNROLL for (int k = 0; k < F::operands; ++k) offset[k] += at * layout.strides[k][d];
  }
  F f;
  f.steps(step);
  f.move(base, offset);
  f.call();
  f.row();
  f.template vectors<V, 1>(column, 0);
}

}  // namespace og
