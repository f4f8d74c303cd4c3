#pragma once
#include "config.h"

// exp, expm1, tanh and the logistic family for float and double, one template for both: the types differ in constants and
// in the degree of one polynomial. All of it is branch-free.
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
OG_FN float exp_tail(float r) {
  float q = 0x1.6d5ceep-10f;
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

// One-sided limits that let NaN through.
template <class T> OG_FN T at_least(T x, T low) { return x < low ? low : x; }
template <class T> OG_FN T at_most(T x, T high) { return x > high ? high : x; }

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

/// m * 2^n with one rounding also where the result is subnormal or 2^n alone overflows; |n| <= 2 * part + 126.
template <class T> OG_FN T scale(T m, T n) {
  using c = exp_constants<T>;
  const T first = at_most(at_least(n, -c::part), c::part);
  return m * pow2(first) * pow2(n - first);
}

template <class T> OG_FN T exp_in_range(T x, T low) {
  T n;
  const T t = exp_reduce(x, low, n);
  return scale(1 + t, n);
}

template <class T> OG_FN T exp_any(T x) {
  using c = exp_constants<T>;
  T n;
  const T t = exp_reduce(at_most(at_least(x, c::lowest), c::highest), n);
  return scale(1 + t, n);
}
OG_FN float exp(float x) { return exp_any(x); }
OG_FN double exp(double x) { return exp_any(x); }

/// e^(x + low) - 1 for x <= highest. Half the scale is used, so that n = 128 (1024) does not overflow too early.
template <class T> OG_FN T expm1_in_range(T x, T low) {
  T n;
  const T t = exp_reduce(at_least(x, (T)-60), low, n);
  const T half = pow2(n - 1);
  const T y = 2 * fma(half, t, half - (T)0.5);
  return copysign(n == 0 ? t : y, x);  // the sign of x is that of the result: keeps -0.0
}
template <class T> OG_FN T expm1_any(T x) { return expm1_in_range(at_most(x, exp_constants<T>::highest), (T)0); }
OG_FN float expm1(float x) { return expm1_any(x); }
OG_FN double expm1(double x) { return expm1_any(x); }

/// tanh |x| = m / (m + 2) with m = e^(2|x|) - 1: the quotient damps the error of m, no cancellation anywhere.
template <class T> OG_FN T tanh_any(T x) {
  const T m = expm1_in_range(2 * at_most(abs(x), exp_constants<T>::tanh_saturates), (T)0);
  return copysign(divide(m, m + 2), x);
}
OG_FN float tanh(float x) { return tanh_any(x); }
OG_FN double tanh(double x) { return tanh_any(x); }

/// numerator / (1 + e^(z + low)) = quotient * 2^rest, rest <= 0. Where e^z is large its exponent beyond `part` is taken out,
/// so the quotient neither overflows nor loses bits: sigmoid(-100) is a right subnormal. Dividing by 1 + e^z rounds three
/// times; the folded x * (e * r) with e = e^-|x| and r = 1 / (1 + e) rounds four times and exceeds 3 ulp (measured).
template <class T> OG_FN T logistic_parts(T numerator, T z, T low, T& rest) {
  using c = exp_constants<T>;
  T n;
  const T t = exp_reduce(at_least(z, c::tiny_exponent), low, n);
  const T first = at_most(n, c::part);
  rest = first - n;
  return divide(numerator, 1 + pow2(first) * (1 + t));
}

/// For z up to lowest + 15 in magnitude, where 2^rest is a normal number.
template <class T> OG_FN T logistic(T numerator, T z, T low) {
  T rest;
  const T quotient = logistic_parts(numerator, z, low, rest);
  return quotient * pow2(rest);
}

template <class T> OG_FN T sigmoid_any(T x) {
  return logistic((T)1, -at_least(x, exp_constants<T>::lowest), (T)0);
}
OG_FN float sigmoid(float x) { return sigmoid_any(x); }
OG_FN double sigmoid(double x) { return sigmoid_any(x); }

}  // namespace og
