#pragma once
#include "config.h"
#include "math/exact.h"
#include "math/lanes.h"

// exp, expm1 and tanh for float and double, one template for both: the types differ in constants and in the degree of one
// polynomial. All of it is branch-free.
//
// Reduction (Cody and Waite 1980): x = n ln2 + r with |r| <= ln2 / 2, e^x = 2^n (1 + t), t = e^r - 1 = r + r^2 q(r). With
// a fused multiply-add the first step x - n * high(ln2) is exact, because its result is a multiple of the last bit of
// high(ln2) and below 1/2. q is our own minimax fit (weighted least squares, Lawson reweighting, 60 digits).

namespace og {

template <class T> struct exp_constants;
template <> struct exp_constants<float> {
  static constexpr float log2e = 0x1.715476p0f, ln2_high = 0x1.62e43p-1f, ln2_low = -0x1.05c61p-29f;
  static constexpr float magic = 0x1.8p23f;   // adding it rounds to an integer and leaves that in the low bits
  static constexpr float lowest = -105.0f;    // e^x rounds to 0 below, counting subnormals
  static constexpr float highest = 89.0f;     // e^x overflows above, n <= 128
  static constexpr float tiny_exponent = -87.0f;  // 2^n still normal; e^x is far below half an ulp of 1
  static constexpr float tanh_saturates = 9.1f;
  static constexpr float part = 64.0f;        // exponents beyond +-part are applied in a second step
  static constexpr float swish_end = -195.0f;  // x e^z underflows for every x below
};
template <> struct exp_constants<double> {
  static constexpr double log2e = 0x1.71547652b82fep0, ln2_high = 0x1.62e42fefa39efp-1, ln2_low = 0x1.abc9e3b39803fp-56;
  static constexpr double magic = 0x1.8p52;
  static constexpr double lowest = -746.0;
  static constexpr double highest = 710.0;
  static constexpr double tiny_exponent = -708.0;
  static constexpr double tanh_saturates = 19.1;
  static constexpr double part = 512.0;
  static constexpr double swish_end = -1460.0;
};

// q(r) = (e^r - 1 - r) / r^2 on |r| <= ln2 / 2. Error of 1 + r + r^2 q against e^r: 2^-28.2 and 2^-57.9.
template <class F, if_float<F> = 0> OG_FN F exp_tail(F r) {
  F q = 0x1.6d5ceep-10f;
  q = fma(q, r, 0x1.123bdep-7f);
  q = fma(q, r, 0x1.5554dap-5f);
  q = fma(q, r, 0x1.55548ep-3f);
  q = fma(q, r, 0x1p-1f);
  return fma(r * r, q, r);
}
OG_FN double exp_tail(double r) {
  double q = 0x1.af7a0c3518004p-26;
  q = fma(q, r, 0x1.28b0f601f1428p-22);
  q = fma(q, r, 0x1.71dde7529e23ep-19);
  q = fma(q, r, 0x1.a01995bb3c296p-16);
  q = fma(q, r, 0x1.a01a01b75aba3p-13);
  q = fma(q, r, 0x1.6c16c18606faap-10);
  q = fma(q, r, 0x1.111111110e14ep-7);
  q = fma(q, r, 0x1.555555554fe06p-5);
  q = fma(q, r, 0x1.555555555555ep-3);
  q = fma(q, r, 0x1.000000000000cp-1);
  return fma(r * r, q, r);
}

/// 2^n for an integer n in the normal range.
OG_FN float pow2(float n) { return from_bits(bits(n + (0x1.8p23f + 127.0f)) << 23); }
OG_FN double pow2(double n) { return from_bits(bits(n + (0x1.8p52 + 1023.0)) << 52); }
/// 2^(n - 127), from the bits of 1.5 * 2^23 + n.
OG_FN float power_of_bits(float k) { return from_bits(bits(k) << 23); }
/// x 2^n for the same n.
template <class T> OG_FN T scale(T x, T n) { return x * pow2(n); }
/// x 2^n, rounded once, for n up to twice as far.
template <class T> OG_FN T scale_twice(T x, T n) {
  const T half = fma(n, (T)0.5, exp_constants<T>::magic) - exp_constants<T>::magic;
  return scale(scale(x, half), n - half);
}
/// 2^n (1 + t) for the same n as scale.
template <class T> OG_FN T scale_one(T t, T n) {
  const T power = pow2(n);
  return fma(power, t, power);
}

// Limits on one side, as integer min of the bit patterns: floats of one sign are ordered like their bits. A NaN may
// become the limit, so callers restore it (keep_nan). The obvious x < low ? low : x is not used, because GCC 12 threads
// jumps through several of them and then vectorises complex masks (measured: exp took 2 times as long).
#if OG_GPU_FORMS
OG_FN float at_least(float x, float low) { return upper(x, low); }  // these keep a NaN
OG_FN float at_most(float x, float high) { return lower(x, high); }
#else
OG_FN float at_least(float x, float negative_low) {
  const u32 a = bits(x), b = bits(negative_low);
  return from_bits(a < b ? a : b);
}
OG_FN float at_most(float x, float positive_high) {
  const i32 a = (i32)bits(x), b = (i32)bits(positive_high), least = a < b ? a : b;  // cast at once GCC sees no minimum
  return from_bits((u32)least);
}
#endif
OG_FN double at_least(double x, double negative_low) {
  const u64 a = bits(x), b = bits(negative_low);
  return from_bits(a < b ? a : b);
}
OG_FN double at_most(double x, double positive_high) {
  const i64 a = (i64)bits(x), b = (i64)bits(positive_high);
  return from_bits((u64)(a < b ? a : b));
}
/// |x|, or the bound if that is less; NaN for NaN.
template <class T> OG_FN T size_up_to(T x, float bound) {
#if OG_DEVICE
  return lower(abs(x), bound);
#else
  return smaller((T)bound, abs(x));
#endif
}
/// x 2^n for |n| up to 1000, rounded once, through double.
OG_FN float scale_far(float x, float n) {
  return (float)((double)x * from_bits(bits((double)n + (0x1.8p52 + 1023.0)) << 52));
}
/// x 2^n for n from twice the smallest normal exponent on; a subnormal result is rounded once if x is 1 or more.
template <class T, class N> OG_FN T scale_down(T x, N n) {
  const N most = at_least(n, -2 * exp_constants<T>::part + 2);
  return scale(scale(x, most), n - most);
}
#if OG_LANES
template <> struct exp_constants<floats> : exp_constants<float> {};
OG_FN floats pow2(floats n) { return scale(floats(1.0f), n); }
OG_FN floats power_of_bits(floats k) { return from_bits(words(bits(k).v << 23u)); }
OG_FN floats scale_down(floats x, floats n) { return scale(x, n); }
OG_FN floats scale_far(floats x, floats n) { return scale(x, n); }
// These keep a NaN, and later operations propagate it: no correction is needed.
OG_FN floats at_least(floats x, floats low) { return larger(low, x); }
OG_FN floats at_most(floats x, floats high) { return smaller(high, x); }
OG_FN floats keep_nan(floats, floats y) { return y; }
#endif
/// y, or x where that is NaN.
template <class T> OG_FN T keep_nan(T x, T y) { return choose(x == x, y, x); }
#if OG_GPU_FORMS
OG_FN float keep_nan(float, float y) { return y; }  // as with floats
#endif

/// e^(x + low) = 2^n (1 + t): returns t, sets n. `low` is the part of an argument that did not fit into x.
template <class T> OG_FN T exp_reduce(T x, T low, T& n) {
  using c = exp_constants<T>;
  n = fma(x, c::log2e, c::magic) - c::magic;
  const T r = fma(n, -c::ln2_high, x);
  return exp_tail(fma(n, -c::ln2_low, r) + low);
}
template <class T> OG_FN T exp_reduce(T x, T& n) {
  using c = exp_constants<T>;
  n = fma(x, c::log2e, c::magic) - c::magic;
  return exp_tail(fma(n, -c::ln2_low, fma(n, -c::ln2_high, x)));
}
#if OG_GPU_FORMS
OG_FN float exp_reduce(float x, float low, Exponent& n) {
  using c = exp_constants<float>;
  n.k = fma(x, c::log2e, Exponent::magic);
  return exp_tail(fma(number_of(n), -c::ln2_low, fma(number_of(n), -c::ln2_high, x)) + low);
}
OG_FN float exp_reduce(float x, Exponent& n) {
  using c = exp_constants<float>;
  n.k = fma(x, c::log2e, Exponent::magic);
  return exp_tail(fma(number_of(n), -c::ln2_low, fma(number_of(n), -c::ln2_high, x)));
}
#endif

/// e^(x + low) = 2^n (1 + t), power = 2^(n + by). If the exponent of a result is far from that of e^x, `by` avoids
/// underflow and overflow in one multiplication by a power of two, and a constant one at the end. |n + by| <= 126.
template <class F> struct moved_power {
  F t, power;
};
template <int by, class F, if_float<F> = 0> OG_FN moved_power<F> moved_power_of(F x, F low) {
  using c = exp_constants<float>;
  constexpr float magic = c::magic + (127.0f + by);
  const F k = fma(x, (F)c::log2e, (F)magic), n = k - magic;
  return {exp_tail(fma(n, (F)-c::ln2_low, fma(n, (F)-c::ln2_high, x)) + low), power_of_bits(k)};
}

/// 2^n (1 + t), rounded once more only if the result is subnormal: in two steps of about n / 2, as 2^n may overflow.
template <class T> OG_FN T scale_exp(T t, T n) {
  const T half = fma(n, (T)0.5, exp_constants<T>::magic) - exp_constants<T>::magic;
  const T first = pow2(half);
  return fma(first, t, first) * pow2(n - half);
}

/// 2^n (1 + t) for the n of scale_down, to be added to 1 or more: below the smallest normal power nothing changes.
template <class T, class N> OG_FN T scale_one_beside_one(T t, N n) {
  return scale_one(t, at_least(n, -2 * exp_constants<T>::part + 2));
}

#if OG_LANES
OG_FN floats scale_exp(floats t, floats n) { return scale(1 + t, n); }
OG_FN floats scale_one_beside_one(floats t, floats n) { return scale_exp(t, n); }
#endif

template <class T> OG_FN T exp(T x) {
  using c = exp_constants<T>;
  T n;
  const T t = exp_reduce(at_most(at_least(x, c::lowest), c::highest), n);
  return keep_nan(x, scale_exp(t, n));
}

/// 2^n (1 + t) - 1 with the sign of x, which keeps -0.0. Half the scale is used: n = 128 (1024) must not overflow early.
template <class T> OG_FN T scale_expm1(T t, T n, T x) {
  const T half = pow2(n - 1);
  const T y = 2 * fma(half, t, half - (T)0.5);
  return copysign(choose(n == 0, t, y), x);
}
/// expm1 for x up to `highest`; NaN is not kept.
template <class T> OG_FN T expm1_in_range(T x) {
  T n;
  const T t = exp_reduce(at_least(x, (T)-60), n);
  return scale_expm1(t, n, x);
}
template <class T> OG_FN T expm1(T x) {
  return keep_nan(x, expm1_in_range(at_most(x, exp_constants<T>::highest)));
}

/// tanh |x| = m / (m + 2) with m = e^(2|x|) - 1: the quotient damps the error of m, and nothing cancels. m is one fma
/// of e^(2|x|) = 2^n (1 + t): 2^n - 1 is exact, or 1 hardly matters. For |x| > 0.8 it is 1 - 2 / (m + 2), which is
/// insensitive to rounding m + 2: at most 1.2 ulp there and 0.56 from 2 on. A derivative by the result, 1 - y^2,
/// magnifies its error.
template <class T> OG_FN T tanh(T x) {
  WholeNumber<T> n;
  const T size = abs(x), t = exp_reduce(2 * at_most(size, exp_constants<T>::tanh_saturates), n);
  const T power = pow2(n), m = fma(power, t, power - 1);
  const mask<T> far = size > (T)0.8f;
  const T quotient = divide(select(far, (T)-2, m), m + 2);
  return keep_nan(x, copysign(select(far, 1 + quotient, quotient), x));
}

}  // namespace og
