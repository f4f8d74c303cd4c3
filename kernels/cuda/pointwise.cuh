#pragma once
#include "cuda/fast_math.h"
#include "cuda/fast_derivatives.h"
#include "math/scalar.h"

// The CUDA skeletons of pointwise kernels. One tile per block, 64-bit positions, no shared memory.
//
// A thread moves U packs of V neighbouring elements, by 16-byte accesses, with all of its loads before the first use,
// so that a kernel of one input has two in flight (an H200 needs 48 KiB in flight per multiprocessor). Arithmetic with
// operands that change once per call or once per row comes after the loads too, because it would delay them.

#define OG_UNROLL _Pragma("unroll")
#define OG_ROLLED _Pragma("unroll 1")

namespace og {

enum { block_size = 256 };

// ---- packs ---------------------------------------------------------------------------------------------------------

template <class T, int V> struct alignas(sizeof(T) * V < 16 ? sizeof(T) * V : 16) Pack { T item[V]; };

// 16 bytes in one access, as an explicit instruction: the compiler usually joins neighbouring accesses, but not always
// (NVRTC 13.5: not the stores of two rows). A store is also a barrier, which keeps every load of a pack before it.
#if OG_DEVICE
OG_FN void load_16(const void* p, u32* to) {
  asm volatile("ld.global.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "l"(p));
}
OG_FN void store_16(void* p, const u32* from) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(from[0]), "r"(from[1]), "r"(from[2]), "r"(from[3])
               : "memory");
}
#else
OG_FN void load_16(const void* p, u32* to) { __builtin_memcpy(to, p, 16); }
OG_FN void store_16(void* p, const u32* from) { __builtin_memcpy(p, from, 16); }
#endif

// Keeps loads before this point, and their uses after it. Otherwise the assembler begins with the first pack and loads
// the second in the middle of it, with half as many bytes in flight. An opaque jump that is never taken prevents that;
// source order, a barrier and spare registers did not (NVRTC 13.5).
#if OG_DEVICE
OG_FN void loads_first() {
  asm volatile("{ .reg .pred p; setp.gt.u32 p, %0, 1024; @p trap; }" ::"r"(threadIdx.x));
}
#else
OG_FN void loads_first() {}
#endif

template <class T, int V> union Bits {
  Pack<T, V> pack;
  u32 word[sizeof(Pack<T, V>) / 4 + 1];
};

template <int V, class T> OG_FN Pack<T, V> load_pack(const T* p) {
  if constexpr (sizeof(Pack<T, V>) % 16 == 0) {
    Bits<T, V> bits;
    OG_UNROLL for (int w = 0; w < (int)sizeof(Pack<T, V>) / 4; w += 4) load_16((const u32*)p + w, bits.word + w);
    return bits.pack;
  } else {
    return *(const Pack<T, V>*)p;
  }
}

template <int V, class T> OG_FN void store_whole(T* p, const Pack<T, V>& pack) {
  if constexpr (sizeof(Pack<T, V>) % 16 == 0) {
    Bits<T, V> bits;
    bits.pack = pack;
    OG_UNROLL for (int w = 0; w < (int)sizeof(Pack<T, V>) / 4; w += 4) store_16((u32*)p + w, bits.word + w);
  } else {
    *(Pack<T, V>*)p = pack;
  }
}

template <int V, class T> OG_FN Pack<T, V> gather_pack(const T* p, i64 i, i64 step) {
  Pack<T, V> pack;
  OG_UNROLL for (int k = 0; k < V; ++k) pack.item[k] = p[(i + k) * step];
  return pack;
}

// Two results of a 16-bit type, rounded by one instruction.
template <class S> struct rounded_pair { static constexpr bool exists = false; };
#if OG_DEVICE
template <> struct rounded_pair<bf16> {
  static constexpr bool exists = true;
  static OG_FN u32 of(float low, float high) {
    u32 both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
  }
};
template <> struct rounded_pair<f16> {
  static constexpr bool exists = true;
  static OG_FN u32 of(float low, float high) {
    u32 both;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
  }
};
#endif

template <int V, class S, class T> OG_FN void store_pack(S* p, const T (&value)[V]) {
  if constexpr (rounded_pair<S>::exists && V % 2 == 0) {
    Pack<u32, V / 2> pack;
    OG_UNROLL for (int k = 0; k < V / 2; ++k) pack.item[k] = rounded_pair<S>::of(value[2 * k], value[2 * k + 1]);
    store_whole((u32*)p, pack);
  } else {
    Pack<S, V> pack;
    OG_UNROLL for (int k = 0; k < V; ++k) pack.item[k] = store<S>(value[k]);
    store_whole(p, pack);
  }
}

template <int V, class S, class T> OG_FN void scatter_pack(S* p, i64 i, i64 step, const T (&value)[V]) {
  OG_UNROLL for (int k = 0; k < V; ++k) p[(i + k) * step] = store<S>(value[k]);
}

// ---- the whole space is one row of n elements ------------------------------------------------------------------------

// Moves a functor to the first element of a space that is one row.
template <class F> OG_FN void to_start(F& f, void* const* base, const i64* step) {
  i64 offset[F::operands];
  OG_UNROLL for (int k = 0; k < F::operands; ++k) offset[k] = 0;
  f.steps(step);
  f.move(base, offset);
}

template <class F, int V, int U> OG_FN void flat(void* const* base, const i64* step, i64 n) {
  using P = typename F::template Packs<V>;
  F f;
  to_start(f, base, step);
  const i64 tile = (i64)blockIdx.x * (block_size * V * U);
  const i64 first = tile + (i64)threadIdx.x * V;
  if (tile + block_size * V * U <= n) {
    P pack[U];
    OG_UNROLL for (int u = 0; u < U; ++u) f.fetch(pack[u], first + u * block_size * V);
    f.call();
    f.row();
    loads_first();
    OG_UNROLL for (int u = 0; u < U; ++u) f.finish(pack[u], first + u * block_size * V);
  } else {  // the last tile: whole packs, then single elements
    f.call();
    f.row();
    OG_ROLLED for (i64 i = first; i < n; i += block_size * V) {
      if (V > 1 && i + V <= n) {
        P pack;
        f.fetch(pack, i);
        f.finish(pack, i);
      } else {
        OG_ROLLED for (i64 k = i; k < n && k < i + V; ++k) f.element(k);
      }
    }
  }
}

// ---- rows: a pack lies within one row --------------------------------------------------------------------------------

// Division by a number that is constant during a call. In 32 bits by a multiplication (Granlund and Montgomery,
// Division by invariant integers, PLDI 1994), exact for 0 <= n < 2^31: multiplier = 2^32 (2^shift - d) / d + 1 rounded
// down, shift = log2 d rounded up. A division takes about 20 instructions in 32 bits and 70 in 64.
template <class I> struct Divider;
template <> struct Divider<u32> {
  u32 divisor, zero, multiplier, shift;
#if OG_DEVICE
  OG_FN u32 quotient(u32 n) const { return (__umulhi(n, multiplier) + n) >> shift; }
#else
  OG_FN u32 quotient(u32 n) const { return ((u32)((u64)n * multiplier >> 32) + n) >> shift; }
#endif
};
template <> struct Divider<i64> {
  i64 divisor, multiplier_and_shift;
  OG_FN i64 quotient(i64 n) const { return n / divisor; }
};

// Extents and strides (in elements) of a call, passed by value. The last extent is in packs. With I = u32 the number of
// packs and every stride fit 31 bits.
template <class I, int rank, int operands> struct Layout {
  Divider<I> dims[rank];
  i64 strides[operands][rank];
};

// offset + at * stride; in 32 bits one explicit instruction, because the compiler multiplied in 64 bits (NVRTC 13.5).
OG_FN i64 advance(i64 offset, u32 at, i64 stride) {
#if OG_DEVICE
  i64 moved;
  asm("mad.wide.s32 %0, %1, %2, %3;" : "=l"(moved) : "r"(at), "r"((i32)stride), "l"(offset));
  return moved;
#else
  return offset + (i64)(i32)at * (i32)stride;
#endif
}
OG_FN i64 advance(i64 offset, i64 at, i64 stride) { return offset + at * stride; }

// Moves `f` to the row of pack i; returns the pack's first column.
template <class F, int V, class I, int rank, int operands>
OG_FN i64 place(F& f, void* const* base, const Layout<I, rank, operands>& layout, I i) {
  i64 offset[operands], step[operands];
  OG_UNROLL for (int k = 0; k < operands; ++k) {
    offset[k] = 0;
    step[k] = layout.strides[k][rank - 1];
  }
  I row = layout.dims[rank - 1].quotient(i);
  const i64 column = (i64)(i - row * layout.dims[rank - 1].divisor) * V;
  OG_UNROLL for (int d = rank - 2; d >= 0; --d) {
    const I outer = d == 0 ? 0 : layout.dims[d].quotient(row);
    const I at = d == 0 ? row : row - outer * layout.dims[d].divisor;
    OG_UNROLL for (int k = 0; k < operands; ++k) offset[k] = advance(offset[k], at, layout.strides[k][d]);
    row = outer;
  }
  f.steps(step);
  f.move(base, offset);
  return column;
}

// n packs. V divides the row.
template <class F, int V, int U, class I, int rank, int operands>
OG_FN void rows(void* const* base, const Layout<I, rank, operands>& layout, I n) {
  using P = typename F::template Packs<V>;
  const I tile = (I)blockIdx.x * (block_size * U);
  const I first = tile + (I)threadIdx.x;
  if (tile + block_size * U <= n) {
    F f[U];
    P pack[U];
    i64 column[U];
    OG_UNROLL for (int u = 0; u < U; ++u) column[u] = place<F, V>(f[u], base, layout, (I)(first + u * block_size));
    OG_UNROLL for (int u = 0; u < U; ++u) f[u].fetch(pack[u], column[u]);
    OG_UNROLL for (int u = 0; u < U; ++u) {
      f[u].call();
      f[u].row();
    }
    loads_first();
    OG_UNROLL for (int u = 0; u < U; ++u) f[u].finish(pack[u], column[u]);
  } else {  // the last tile
    OG_ROLLED for (I i = first; i < n; i += block_size) {
      F f;
      P pack;
      const i64 column = place<F, V>(f, base, layout, i);
      f.fetch(pack, column);
      f.call();
      f.row();
      f.finish(pack, column);
    }
  }
}

}  // namespace og
