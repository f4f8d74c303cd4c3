#pragma once
#include "cuda/tiled_sums.cuh"

// Joins the values of the threads of a row: within a warp by a butterfly of shuffles, which gives all threads the same
// bits, then the warps in shared memory. The order is the same for any grid. All threads of a block take part.

namespace og {

enum { warp_size = 32 };
enum class How { add, multiply, largest, smallest };

// of(a, b) and of(b, a) have the same bits, except for NaN. Wide: the type in which threads reduce. Sums of a few
// floats each are added up in double, which costs two shuffles instead of one.
template <How how> struct Join;
template <> struct Join<How::add> {
  template <class T> using Wide = double;
  template <class T> static OG_FN T nothing() { return 0; }
  template <class T> static OG_FN T of(T a, T b) { return a + b; }
};
template <> struct Join<How::multiply> {
  template <class T> using Wide = T;
  template <class T> static OG_FN T nothing() { return 1; }
  template <class T> static OG_FN T of(T a, T b) { return a * b; }
};

// NaN if either is NaN; +0 is larger than -0.
template <int sign> struct Extreme {
  template <class T> using Wide = T;
  template <class T> static OG_FN T nothing() { return sign * -infinity<T>(); }
  template <class T> static OG_FN T of(T a, T b) {
    const T beyond = (sign > 0 ? b > a : b < a) ? b : a;
    const T chosen = a == b ? from_bits(sign > 0 ? bits(a) & bits(b) : bits(a) | bits(b)) : beyond;
    return a != a ? a : b != b ? b : chosen;
  }
#if OG_DEVICE
  static OG_FN float of(float a, float b) {
    float chosen;
    if constexpr (sign > 0) asm("max.NaN.f32 %0, %1, %2;" : "=f"(chosen) : "f"(a), "f"(b));
    else asm("min.NaN.f32 %0, %1, %2;" : "=f"(chosen) : "f"(a), "f"(b));
    return chosen;
  }
#endif
};
template <> struct Join<How::largest> : Extreme<1> {};
template <> struct Join<How::smallest> : Extreme<-1> {};

// Joins n values, in pairs of pairs.
template <class J, int n, class T> OG_FN T joined(const T* x) {
  if constexpr (n == 1) return x[0];
  else return J::of(joined<J, n / 2>(x), joined<J, n - n / 2>(x + n / 2));
}

// The joins of the reductions of a pass, and of sums.
template <class F, int pass> struct Reducing { template <int k> using Of = Join<F::how(pass, k)>; };
struct Adding { template <int k> using Of = Join<How::add>; };

// Joins the values of the n <= 32 threads of a group, or, among n neighbours in a warp, of those that are `apart` from
// each other. All threads of the warp take part.
template <class J, int n, int apart = 1, class T> OG_FN T warp_reduce(T x) {
  OG_UNROLL for (int d = n / 2; d >= apart; d /= 2) x = J::of(x, __shfl_xor_sync(0xffffffffu, x, d));
  return x;
}

// Replaces the first n of x by the values joined over all threads of a row, as `J` defines. Warps use two buffers
// alternately: before a warp writes to a buffer again, all have read it. adjacent > 1: rows are adjacent in memory, and
// so are their threads; those of one row are `adjacent` apart.
template <class T, int threads, int most, int adjacent> struct BlockReduce {
  static constexpr bool warps = adjacent == 1 && threads > warp_size;
  static constexpr int in_warp = adjacent >= warp_size ? 1 : warp_size / adjacent;  // threads of a row in one warp
  static constexpr int terms = adjacent > 1 ? threads / (in_warp < threads ? in_warp : threads) : 1;
  static constexpr bool shared = warps || terms > 1;
  static constexpr int slots = warps ? threads / warp_size : terms * adjacent;
  double (*place)[most][slots];
  int buffer;
  template <class J, int n> OG_FN void reduce(T (&x)[most]) {
    const int thread = (int)threadIdx.x;
    each<n>([&](auto k) {
      using Own = typename J::template Of<k.value>;
      typename Own::template Wide<T> wide = x[k.value];
      if constexpr (adjacent == 1) wide = warp_reduce<Own, (warps ? warp_size : threads)>(wide);
      else if constexpr (in_warp > 1) wide = warp_reduce<Own, warp_size, adjacent>(wide);
      if constexpr (warps) {
        if (thread % warp_size == 0) place[buffer][k.value][thread / warp_size] = (double)wide;
      } else if constexpr (shared) {
        if (thread / adjacent % in_warp == 0)
          place[buffer][k.value][thread / adjacent / in_warp * adjacent + thread % adjacent] = (double)wide;
      }
      x[k.value] = (T)wide;
    });
    if constexpr (shared) {
      __syncthreads();
      each<n>([&](auto k) {
        using Own = typename J::template Of<k.value>;
        using Wide = typename Own::template Wide<T>;
        const double* own = place[buffer][k.value];
        if constexpr (warps) {
          x[k.value] = (T)warp_reduce<Own, slots>((Wide)own[thread % slots]);
        } else {
          Wide total = (Wide)own[thread % adjacent];
          OG_UNROLL for (int t = 1; t < terms; ++t) total = Own::of(total, (Wide)own[t * adjacent + thread % adjacent]);
          x[k.value] = (T)total;
        }
      });
      buffer ^= 1;
    }
  }
};

}  // namespace og
