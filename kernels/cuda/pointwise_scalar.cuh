#pragma once
#include "cuda/pointwise.cuh"

// The CUDA skeletons of large pointwise kernels, whose arithmetic takes far longer than their memory accesses. A thread
// does one element after the other, so that NVRTC compiles the body once, and not for each element of a pack, of a last
// tile, and of its rest.
// opgraph/schedule/cuda.py selects these kernels.

namespace og {

enum { singles = 4 };  // elements of a thread: enough to make the code before them cheap

template <class F> OG_FN void flat_scalar(void* const* base, const i64* step, i64 n) {
  F f;
  to_start(f, base, step);
  f.call();
  f.row();
  const i64 first = (i64)blockIdx.x * (block_size * singles) + (i64)threadIdx.x, end = first + block_size * singles;
  OG_ROLLED for (i64 i = first; i < n && i < end; i += block_size) f.element(i);
}

template <class F, class I, int rank, int operands>
OG_FN void rows_scalar(void* const* base, const Layout<I, rank, operands>& layout, I n) {
  const I first = (I)blockIdx.x * (block_size * singles) + (I)threadIdx.x, end = first + block_size * singles;
  OG_ROLLED for (I i = first; i < n && i < end; i += block_size) {
    F f;
    const i64 column = place<F, 1>(f, base, layout, i);
    f.call();
    f.row();
    f.element(column);
  }
}

}  // namespace og
