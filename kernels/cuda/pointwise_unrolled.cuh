#pragma once
#include "cuda/packs.cuh"

// The CUDA skeletons of pointwise kernels whose arithmetic takes longer than their memory accesses. Packs are those of
// pointwise.cuh, one after the other, and G elements of a pack at a time, so that NVRTC compiles the body of an element
// G times. pointwise.cuh has it for every element of each pack of a thread, of a last tile's pack, and of the rest of
// that: 13 or 25 times. The last tile takes the same path here; its packs are loaded and stored element by element.
// opgraph/schedule/cuda.py selects these kernels.

namespace og {

// A position that is opaque to the compiler, which otherwise keeps a pointer for each form of access to an operand.
OG_FN i64 anew(i64 position) {
#if OG_DEVICE
  asm volatile("" : "+l"(position));
#endif
  return position;
}

template <class F, int G, int V> OG_FN void by_groups(const F& f, typename F::template Held<V>& in,
                                                      typename F::template Made<V>& out, i64 i) {
  OG_ROLLED for (int k = 0; k < V; k += G) f.template group<G>(in, out, i + k);
}

template <class F, int V, int U, int G> OG_FN void flat_unrolled(void* const* base, const i64* step, i64 n) {
  F f;
  to_start(f, base, step);
  f.call();
  f.row();
  i64 i = (i64)blockIdx.x * (block_size * V * U) + (i64)threadIdx.x * V;
  int left = n - i < block_size * V * U ? (int)(n - i) : block_size * V * U;
  OG_ROLLED for (; left > 0; left -= block_size * V, i += block_size * V) {
    i = anew(i);
    typename F::template Held<V> in;
    typename F::template Made<V> out;
    if (left >= V) f.fetch(in, i);
    else f.fetch_some(in, i, left);
    by_groups<F, G>(f, in, out, i);
    if (left >= V) f.put(out, i);
    else f.put_some(out, i, left);
  }
}

template <class F, int V, int U, int G, class I, int rank, int operands>
OG_FN void rows_unrolled(void* const* base, const Layout<I, rank, operands>& layout, I n) {
  I i = (I)blockIdx.x * (block_size * U) + (I)threadIdx.x;
  OG_ROLLED for (int u = 0; u < U && i < n; ++u, i += block_size) {
    F f;
    typename F::template Held<V> in;
    typename F::template Made<V> out;
    const i64 column = place<F, V>(f, base, layout, i);
    f.fetch(in, column);
    f.call();
    f.row();
    by_groups<F, G>(f, in, out, column);
    f.put(out, column);
  }
}

}  // namespace og
