#pragma once

// One source for two targets: a host compiler (GCC, Clang) and NVRTC. No header is included, from the system or from
// CUDA: NVRTC then needs no include path, and a compiled kernel depends on nothing but the text it was built from.
//
// Compile the host with -ffp-contract=off (and -fno-math-errno -fno-trapping-math, never -ffast-math) and the device with
// -fmad=false. Every fused multiply-add is written out as og::fma, so both do the same IEEE operations in the same order
// and a CPU test stands for the GPU. Two differences remain: CuPy compiles with -ftz=true, which flushes f32 subnormals,
// and a CPU without FMA gets f32 fma through double, which may round twice.

#if defined(__CUDACC_RTC__) || defined(__CUDACC__)
#define OG_DEVICE 1
#define OG_FN __device__ __forceinline__
#define OG_SLOW __device__ __noinline__
#else
#define OG_DEVICE 0
#define OG_FN inline __attribute__((always_inline))
#define OG_SLOW inline __attribute__((noinline, cold))
#define OG_ONCE inline __attribute__((noinline))
#endif

// A kernel that takes long to compile is compiled as two halves in parallel: one half calls functions that the other
// half defines (opgraph/runtime/build_library.py).
#if defined(OG_CALLS)
#define OG_SHARED(function, ...) function;
#elif defined(OG_FUNCTIONS)
#define OG_SHARED(function, ...) __attribute__((noinline, used)) function { __VA_ARGS__; }
#else
#define OG_SHARED(function, ...) OG_ONCE function { __VA_ARGS__; }
#endif

// GCC: ivdep asserts that iterations are independent (an output may be an input, but then element by element).
#if defined(__clang__)
#define OG_VECTORIZE _Pragma("clang loop vectorize(assume_safety)")
#else
#define OG_VECTORIZE _Pragma("GCC ivdep")
#endif

namespace og {

using i8 = signed char;
using u8 = unsigned char;
using i16 = short;
using u16 = unsigned short;
using i32 = int;
using u32 = unsigned int;
using i64 = long long;
using u64 = unsigned long long;

static_assert(sizeof(i8) == 1 && sizeof(i16) == 2 && sizeof(i32) == 4 && sizeof(i64) == 8, "fixed widths");

// ---- loops of the compiler -----------------------------------------------------------------------------------------

template <int v> struct Number { static constexpr int value = v; };

/// f(0), f(1), ... f(n - 1), each with a constant. By halves, because compilers limit template nesting.
template <int n, int k = 0, class F> OG_FN void each(F&& f) {
  if constexpr (k + 1 == n) {
    f(Number<k>{});
  } else if constexpr (k < n) {
    each<k + (n - k) / 2, k>(f);
    each<n, k + (n - k) / 2>(f);
  }
}
struct Index { int value; };
/// f(0), f(1), ... f(n - 1), for the n sums of a loop. The indices are constants only if n is small: a compiler takes
/// 50 ms for each column that is added up in code of its own, and if there are many, most are in memory in any case.
template <int n, class F> OG_FN void each_sum(F&& f) {
  if constexpr (n <= 8) {
    each<n>(f);
  } else {
    for (int k = 0; k < n; ++k) f(Index{k});
  }
}
/// Calls `total` of sum k of a functor, for a k that is not a constant.
template <class F, class... A> OG_FN void total_of(int k, A... a) {
  if constexpr (F::sums > 0) {
    each<F::sums>([&](auto sum) {
      if (sum.value == k) F::total(sum, a...);
    });
  }
}

// ---- bit casts -----------------------------------------------------------------------------------------------------

#if OG_DEVICE
OG_FN u32 bits(float x) { return __float_as_uint(x); }
OG_FN u64 bits(double x) { return (u64)__double_as_longlong(x); }
OG_FN float from_bits(u32 b) { return __uint_as_float(b); }
OG_FN double from_bits(u64 b) { return __longlong_as_double((i64)b); }
#else
OG_FN u32 bits(float x) { return __builtin_bit_cast(u32, x); }
OG_FN u64 bits(double x) { return __builtin_bit_cast(u64, x); }
OG_FN float from_bits(u32 b) { return __builtin_bit_cast(float, b); }
OG_FN double from_bits(u64 b) { return __builtin_bit_cast(double, b); }
#endif

// ---- exact operations of the machine -------------------------------------------------------------------------------

#if OG_DEVICE
// The _rn forms are never contracted or approximated, under any compiler options.
OG_FN float fma(float a, float b, float c) { return __fmaf_rn(a, b, c); }
OG_FN double fma(double a, double b, double c) { return __fma_rn(a, b, c); }
OG_FN float divide(float a, float b) { return __fdiv_rn(a, b); }
OG_FN double divide(double a, double b) { return __ddiv_rn(a, b); }
OG_FN float sqrt(float x) { return __fsqrt_rn(x); }
OG_FN double sqrt(double x) { return __dsqrt_rn(x); }
OG_FN float rint(float x) { return ::rintf(x); }
OG_FN double rint(double x) { return ::rint(x); }
OG_FN float floor(float x) { return ::floorf(x); }
OG_FN double floor(double x) { return ::floor(x); }
OG_FN float ceil(float x) { return ::ceilf(x); }
OG_FN double ceil(double x) { return ::ceil(x); }
OG_FN float trunc(float x) { return ::truncf(x); }
OG_FN double trunc(double x) { return ::trunc(x); }
#else
#if defined(__FMA__) || defined(__aarch64__) || defined(__ARM_FEATURE_FMA)
OG_FN float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
#else
// The product of two floats is exact in double, so only the sum rounds twice. Unlike a call to fmaf, this vectorises.
OG_FN float fma(float a, float b, float c) { return (float)((double)a * (double)b + (double)c); }
#endif
OG_FN double fma(double a, double b, double c) { return __builtin_fma(a, b, c); }
OG_FN float divide(float a, float b) { return a / b; }
OG_FN double divide(double a, double b) { return a / b; }
OG_FN float sqrt(float x) { return __builtin_sqrtf(x); }
OG_FN double sqrt(double x) { return __builtin_sqrt(x); }
OG_FN float rint(float x) { return __builtin_rintf(x); }
OG_FN double rint(double x) { return __builtin_rint(x); }
OG_FN float floor(float x) { return __builtin_floorf(x); }
OG_FN double floor(double x) { return __builtin_floor(x); }
OG_FN float ceil(float x) { return __builtin_ceilf(x); }
OG_FN double ceil(double x) { return __builtin_ceil(x); }
OG_FN float trunc(float x) { return __builtin_truncf(x); }
OG_FN double trunc(double x) { return __builtin_trunc(x); }
#endif

// Sign-bit operations: exact, quiet on NaN, one instruction.
OG_FN float abs(float x) { return from_bits(bits(x) & 0x7fffffffu); }
OG_FN double abs(double x) { return from_bits(bits(x) & 0x7fffffffffffffffull); }
OG_FN float copysign(float magnitude, float sign) {
  return from_bits((bits(magnitude) & 0x7fffffffu) | (bits(sign) & 0x80000000u));
}
OG_FN double copysign(double magnitude, double sign) {
  return from_bits((bits(magnitude) & 0x7fffffffffffffffull) | (bits(sign) & 0x8000000000000000ull));
}

// ---- constants -----------------------------------------------------------------------------------------------------

template <class T> OG_FN T infinity();
template <> OG_FN float infinity<float>() { return from_bits(0x7f800000u); }
template <> OG_FN double infinity<double>() { return from_bits(0x7ff0000000000000ull); }

template <class T> OG_FN T quiet_nan();
template <> OG_FN float quiet_nan<float>() { return from_bits(0x7fc00000u); }
template <> OG_FN double quiet_nan<double>() { return from_bits(0x7ff8000000000000ull); }

template <class T> OG_FN T smallest_normal();
template <> OG_FN float smallest_normal<float>() { return 0x1p-126f; }
template <> OG_FN double smallest_normal<double>() { return 0x1p-1022; }

template <class T> struct limits;
template <> struct limits<i8> { static constexpr i8 lowest = -128, highest = 127; };
template <> struct limits<u8> { static constexpr u8 lowest = 0, highest = 255; };
template <> struct limits<i32> { static constexpr i32 lowest = -2147483647 - 1, highest = 2147483647; };
template <> struct limits<i64> {
  static constexpr i64 lowest = -9223372036854775807ll - 1, highest = 9223372036854775807ll;
};

}  // namespace og
