#pragma once
#include "math/arith.h"
#include "config.h"
#include "math/exp.h"
#include "math/lanes.h"
#include "math/log.h"
#include "math/tables.h"

// pow(x, y) = e^(y log|x|). An error d in the logarithm becomes y d in the result, up to 88 times as much in float and 745
// times in double, so the logarithm is needed to about 32 and 64 bits: in two numbers of the type (Dekker 1971).

namespace og {

template <class T> struct pair {
  T high, low;
};

#if OG_TABLES
// The first 5 bits of a mantissa m in [1, 2) select a number c of 7 bits near 1 / m, so that r = m c - 1 is exact, and
// then log m = log1p r - log c; from 1.4375 on log(m / 2), so that nothing cancels near 1. Rows: c; the high part of
// -log c, a multiple of 2^-16 that e ln2 can be added to without rounding; the low part.
alignas(64) static const float logarithms[3][intervals] = {
    {0x1p+0f, 0x1.e8p-1f, 0x1.d8p-1f, 0x1.dp-1f, 0x1.cp-1f, 0x1.b8p-1f, 0x1.a8p-1f, 0x1.ap-1f, 0x1.98p-1f, 0x1.88p-1f,
     0x1.8p-1f, 0x1.78p-1f, 0x1.7p-1f, 0x1.68p-1f, 0x1.6p-1f, 0x1.58p-1f, 0x1.5p-1f, 0x1.48p-1f, 0x1.48p-1f,
     0x1.4p-1f, 0x1.38p-1f, 0x1.3p-1f, 0x1.3p-1f, 0x1.28p-1f, 0x1.2p-1f, 0x1.2p-1f, 0x1.18p-1f, 0x1.1p-1f, 0x1.1p-1f,
     0x1.08p-1f, 0x1.08p-1f, 0x1p-1f},
    {0, 0x1.894p-5f, 0x1.4d3p-4f, 0x1.933p-4f, 0x1.1178p-3f, 0x1.366p-3f, 0x1.824p-3f, 0x1.a94p-3f, 0x1.d1p-3f,
     0x1.1178p-2f, 0x1.2698p-2f, 0x1.3c24p-2f, 0x1.522cp-2f, 0x1.68acp-2f, -0x1.4618p-2f, -0x1.2e9p-2f, -0x1.1674p-2f,
     -0x1.fb9p-3f, -0x1.fb9p-3f, -0x1.c9p-3f, -0x1.9528p-3f, -0x1.5ffp-3f, -0x1.5ffp-3f, -0x1.2958p-3f, -0x1.e27p-4f,
     -0x1.e27p-4f, -0x1.6f1p-4f, -0x1.f0ap-5f, -0x1.f0ap-5f, -0x1.f84p-6f, -0x1.f84p-6f, 0},
    {0, 0x1.54294p-18f, 0x1.15d208p-20f, 0x1.797566p-18f, 0x1.d044fcp-20f, -0x1.a7f538p-22f, -0x1.f4d572p-18f,
     -0x1.2c3752p-19f, 0x1.bf932ap-18f, 0x1.d044fcp-19f, -0x1.deecb2p-18f, 0x1.277334p-18f, -0x1.1f8c76p-18f,
     0x1.07d38ep-19f, -0x1.78438cp-19f, 0x1.d451eep-18f, -0x1.cababap-18f, -0x1.86d5e4p-19f, -0x1.86d5e4p-19f,
     0x1.070cacp-20f, 0x1.2b185ep-18f, -0x1.83853cp-18f, -0x1.83853cp-18f, 0x1.683fp-18f, -0x1.db8abcp-22f,
     -0x1.db8abcp-22f, 0x1.6ba8d4p-19f, -0x1.86008cp-20f, -0x1.86008cp-20f, 0x1.64f188p-18f, 0x1.64f188p-18f, 0}};

/// The mantissa of x > 0 in [1, 2), subnormals too; e: its exponent.
OG_FN float mantissa_from_one(float x, float& e) {
  const bool subnormal = x < smallest_normal<float>();
  const u32 b = bits(subnormal ? x * 0x1p54f : x);
  e = from_bits(b >> 23 | 0x4b000000u) - (0x1p23f + 127.0f) - (subnormal ? 54.0f : 0.0f);
  return from_bits((b & 0x007fffffu) | 0x3f800000u);
}
#if OG_LANES
OG_FN floats mantissa_from_one(floats x, floats& e) {
  e = exponent_of(x);
  return mantissa_of(x);
}
#endif

/// log x for x > 0 as high + low, relative error about 2^-30.
template <class F, if_float<F> = 0> OG_FN pair<F> log_pair(F x) {
  F e;
  const F m = mantissa_from_one(x, e);
  const auto i = shifted(bits(m), 18);
  e = choose(m >= 1.4375f, e + 1, e);
  const F r = fma(m, lookup(logarithms[0], i), (F)-1);
  // log1p r = r + r^2 P(r); own fit, error 2^-26.7 of P.
  F p = 0x1.9298b4p-3f;
  p = fma(p, r, -0x1.0015c8p-2f);
  p = fma(p, r, 0x1.55559ep-2f);
  p = fma(p, r, -0.5f);
  const F exact = fma(e, 0x1.62e4p-1f, lookup(logarithms[1], i));
  const F tail = fma(r * r, p, fma(e, 0x1.7f7d1cp-20f, lookup(logarithms[2], i)));
  const F sum = exact + r;
  const F sum_low = (r - (sum - exact)) + tail;
  const F high = sum + sum_low;
  return {high, (sum - high) + sum_low};
}
#else
/// log x for x > 0 as high + low, relative error about 2^-30.
template <class F, if_float<F> = 0> OG_FN pair<F> log_pair(F x) {
  F e;
  const F f = split(x, e) - 1;
  const F d = 2 + f, d_low = f - (d - 2);
  const F w = divide((F)1, d), s = f * w;
  const F twice_low = 2 * (fma(-s, d_low, fma(-s, d, f)) * w);
  const F z = s * s;
  // log(1 + f) = 2s + s z Q(z); own minimax fit of Q, error 2^-31.
  F q = 0x1.e29bd4p-3f;
  q = fma(q, z, 0x1.243b98p-2f);
  q = fma(q, z, 0x1.999a6ep-2f);
  q = fma(q, z, 0x1.555556p-1f);
  // The error of s matters in its cube too: without that the logarithm has 2^-27.5, and a power 6.6 ulp.
  const F tail = fma(s, z * q, fma(twice_low, z, twice_low));
  // e ln2: the high part of ln2 has 16 bits, so the product is exact.
  const F e_ln2 = e * 0x1.62e4p-1f;
  const F sum = fma((F)2, s, e_ln2);
  const F sum_low = fma((F)2, s, e_ln2 - sum) + fma(e, 0x1.7f7d1cp-20f, tail);
  const F high = sum + sum_low;
  return {high, (sum - high) + sum_low};
}
#endif

/// log x for x > 0 as high + low, relative error about 2^-66.
OG_FN pair<double> log_pair(double x) {
  double e;
  const double f = split(x, e) - 1;
  // s = f / (2 + f) in double-double
  const double d = 2 + f, d_low = f - (d - 2);
  const double s = divide(f, d);
  const double s_low = divide(fma(-s, d, f) - s * d_low, d);
  const double z = s * s, z_low = fma(s, s, -z) + 2 * s * s_low;
  // log(1 + f) = 2s (1 + u), u = z/3 + z^2 Q(z); own minimax fit of Q, error z^2 2^-73.
  double q = 0x1.ea0b5231569efp-5;
  q = fma(q, z, 0x1.de5607bf88148p-5);
  q = fma(q, z, 0x1.111fc332f76a5p-4);
  q = fma(q, z, 0x1.3b1369cd8fd71p-4);
  q = fma(q, z, 0x1.745d1813e5c2ap-4);
  q = fma(q, z, 0x1.c71c71c5ca7dfp-4);
  q = fma(q, z, 0x1.2492492492d48p-3);
  q = fma(q, z, 0x1.9999999999997p-3);
  const double third = z * 0x1.5555555555555p-2;
  const double third_low = fma(z, 0x1.5555555555555p-2, -third) + fma(z_low, 0x1.5555555555555p-2, z * 0x1.5555555555555p-56);
  const double tail = z * z * q;
  const double u = third + tail, u_low = ((third - u) + tail) + third_low;
  const double v = 2 * s * u, v_low = fma(2 * s, u, -v) + 2 * fma(s, u_low, s_low * u);
  const double near = 2 * s + v, near_low = ((2 * s - near) + v) + (v_low + 2 * s_low);
  // e ln2: the high part of ln2 has 40 bits, so the product is exact.
  const double e_ln2 = e * 0x1.62e42fefa2p-1;
  const double sum = e_ln2 + near;
  const double sum_low = ((e_ln2 - sum) + near) + fma(e, 0x1.9ef35793c7673p-41, near_low);
  const double high = sum + sum_low;
  return {high, (sum - high) + sum_low};
}

/// True if y is an integer (infinity counts); below, if it is an odd one.
template <class T> OG_FN mask<T> is_integer(T y) { return trunc(y) == y; }
template <class T> OG_FN mask<T> is_odd(T y) {
  const T half = y * (T)0.5;
  return is_integer(y) & (trunc(half) != half);
}

template <class T> OG_FN bool is_negative(T x) { return (bits(x) >> (8 * sizeof(T) - 1)) != 0; }

/// Adds the sign and the cases that C99 lists to |x|^y (Annex F.10.4.4): x^0 = 1 and 1^y = 1 even for NaN.
template <class T> OG_FN T pow_signed(T x, T y, T magnitude) {
  const T with_sign = choose(is_negative(x) & is_odd(y), -magnitude, magnitude);
  const T real = choose((x < 0) & (x > -infinity<T>()) & !is_integer(y), quiet_nan<T>(), with_sign);
  const mask<T> one = (y == 0) | (x == 1) | ((x == -1) & (abs(y) == infinity<T>()));
  return choose(one, (T)1, real);
}

/// y, a logarithm of |x| = a, corrected where a is 0, infinity or NaN.
template <class T> OG_FN T log_of_size(T a, T y) {
  const mask<T> regular = a > 0 && a < infinity<T>();
  return choose(regular, y, choose(a == 0, -infinity<T>(), a));
}
#if OG_LANES
OG_FN floats log_of_size(floats a, floats y) { return log_ends(a, y); }
#endif

/// |x|^(y + y_low) = 2^n (1 + t), where y log|x| is kept within +-limit; y log|x|; and a power of two, 2^100 at most,
/// for the part beyond the limit. (With a bool for that, GCC 12 makes jumps, and no vector code.)
template <class T> struct power {
  T n, t, exponent, excess;
};
template <class T> OG_FN power<T> power_parts(T x, T y, T y_low, T limit) {
  const T a = abs(x);
  const pair<T> l = log_pair(a);
  const T high = log_of_size(a, l.high);
  const T p = y * high;
  const T p_low = fma(y, high, -p) + fma(y_low, high, y * l.low);
  const T bounded = at_most(at_least(p, -limit), limit);
  T n;
  const T t = exp_reduce(bounded, choose(bounded == p, p_low, (T)0), n);
  const T beyond = at_most(at_least(p - bounded, (T)-100), (T)100);
  return {n, t, p, pow2((beyond + exp_constants<T>::magic) - exp_constants<T>::magic)};
}

template <class T> struct power_limit;
template <> struct power_limit<float> { static constexpr float pow = 105, backward = 261; };
template <> struct power_limit<double> { static constexpr double pow = 746, backward = 2100; };

#if OG_LANES
template <> struct power_limit<floats> : power_limit<float> {};
#endif

template <class T> OG_FN T pow(T x, T y) {
  const power<T> p = power_parts(x, y, (T)0, (T)power_limit<T>::pow);
  return pow_signed(x, y, keep_nan(p.exponent, scale_exp(p.t, p.n)));
}

/// For an x that is known to be positive, or NaN: no sign, and the logarithm is shared with powers of the same x.
namespace positive {
template <class T> OG_FN T log(T x) {
  const T a = abs(x);  // equal to x, but written as in power_parts, so that the compiler computes it once
  return log_of_size(a, log_pair(a).high);
}
template <class T> OG_FN T pow(T x, T y) {
  const power<T> p = power_parts(x, y, (T)0, (T)power_limit<T>::pow);
  return choose((y == 0) | (x == 1), (T)1, keep_nan(p.exponent, scale_exp(p.t, p.n)));
}
template <class T, class Ends> OG_FN T log(T x, Ends&) { return positive::log(x); }
template <class T> OG_FN T pow(T x, T y, any_ends) { return positive::pow(x, y); }
#if OG_LANES
OG_FN floats pow(floats x, floats y, no_ends& ends) {
  const pair<floats> l = log_pair(abs(x));
  const floats p = y * l.high;
  ends.reaches(bits(abs(p)));
  floats n;
  const floats t = exp_reduce(p, fma(y, l.high, -p) + y * l.low, n);
  return scale_exp(t, n);
}
#endif
}  // namespace positive

}  // namespace og
