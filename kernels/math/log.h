#pragma once
#include "config.h"
#include "math/lanes.h"

// log and log1p for float and double. x = 2^k (1 + f) with 1 + f in [sqrt(1/2), sqrt(2)), log x = k ln2 + log(1 + f).
// float: log(1 + f) = f - f^2 / 2 + f^3 P(f). double: with s = f / (2 + f), log(1 + f) = 2s + s^3 R(s^2), arranged as in
// fdlibm's e_log.c so that f and f^2 / 2 are subtracted exactly enough. Fits of our own; error 2^-27.3 f^3 and 2^-58.5.

namespace og {

/// log(1 + f) for 1 + f in [sqrt(1/2), sqrt(2)], a little more is harmless.
template <class F, if_float<F> = 0> OG_FN F log_near_one(F f) {
  F p = -0x1.41d9d4p-4f;
  p = fma(p, f, 0x1.07d444p-3f);
  p = fma(p, f, -0x1.0ce52ep-3f);
  p = fma(p, f, 0x1.226db4p-3f);
  p = fma(p, f, -0x1.547804p-3f);
  p = fma(p, f, 0x1.99a5a2p-3f);
  p = fma(p, f, -0x1.000222p-2f);
  p = fma(p, f, 0x1.55554ap-2f);
  return fma(f * f, fma(f, p, -0.5f), f);
}
OG_FN double log_near_one(double f) {
  const double s = divide(f, 2 + f);
  const double z = s * s;
  double r = 0x1.2f0a9bada8fbp-3;
  r = fma(r, z, 0x1.39a1334e0d77bp-3);
  r = fma(r, z, 0x1.74664452a0556p-3);
  r = fma(r, z, 0x1.c71c51edb70c8p-3);
  r = fma(r, z, 0x1.2492494215a11p-2);
  r = fma(r, z, 0x1.999999997fad8p-2);
  r = fma(r, z, 0x1.5555555555593p-1);
  const double half_square = 0.5 * f * f;
  return f - (half_square - s * fma(r, z, half_square));
}

/// k ln2 + y, small terms first.
template <class F, if_float<F> = 0> OG_FN F add_ln2(F k, F y) {
  return fma(k, 0x1.62e43p-1f, fma(k, -0x1.05c61p-29f, y));
}
OG_FN double add_ln2(double k, double y) {
  return fma(k, 0x1.62e42fefa39efp-1, fma(k, 0x1.abc9e3b39803fp-56, y));
}

/// The k for which 2^-k x is in [sqrt(1/2), sqrt(2)), x positive and normal; integers as floats, for the vector units.
OG_FN float binary_exponent(float x) {
  // Biased exponent of x / sqrt(1/2), put into the mantissa of 2^23 and read back as a number.
  const u32 biased = (bits(x) + (0x3f800000u - 0x3f3504f3u)) >> 23;
  return from_bits(biased | 0x4b000000u) - (0x1p23f + 127.0f);
}
OG_FN double binary_exponent(double x) {
  const u64 biased = (bits(x) + (0x3ff0000000000000ull - 0x3fe6a09e667f3bcdull)) >> 52;
  return from_bits(biased | 0x4330000000000000ull) - (0x1p52 + 1023.0);
}

/// x * 2^-k by integer arithmetic on the exponent.
OG_FN float unscale(float x, float k) { return from_bits(bits(x) - (bits(k + 0x1.8p23f) << 23)); }
OG_FN double unscale(double x, double k) { return from_bits(bits(x) - (bits(k + 0x1.8p52) << 52)); }

// The results of log and log1p outside their range: y where u is positive and finite, else inf, -inf at 0, NaN below 0.
#if OG_LANES
OG_FN floats log_limits(floats u, floats y) { return log_ends(u, y); }
#endif
template <class T> OG_FN T log_limits(T u, T y) {
  const T not_positive = choose(u == 0, -infinity<T>(), quiet_nan<T>());
  const T finite = choose(u < infinity<T>(), y, u);
  return choose(u > 0, finite, not_positive);
}

/// x = 2^k m, m in [sqrt(1/2), sqrt(2)), x positive, subnormals too: returns m, sets k.
template <class T> OG_FN T split(T x, T& k) {
  const bool subnormal = x < smallest_normal<T>();
  const T normal = subnormal ? x * (T)0x1p54 : x;
  const T exponent = binary_exponent(normal);
  k = subnormal ? exponent - 54 : exponent;
  return unscale(normal, exponent);
}
#if OG_LANES
OG_FN floats unscale(floats x, floats k) { return scale(x, -k); }
OG_FN floats split(floats x, floats& k) {
  const floats m = mantissa_of(x);
  const bools high = m >= 0x1.6a09e6p+0f;  // the float above sqrt(2)
  k = choose(high, exponent_of(x) + 1, exponent_of(x));
  return choose(high, 0.5f * m, m);
}
OG_FN floats binary_exponent(floats x) {
  floats k;
  split(x, k);
  return k;
}
#endif

template <class T> OG_FN T log(T x) {
  T k;
  const T m = split(x, k);
  return log_limits(x, add_ln2(k, log_near_one(m - 1)));
}

/// log(1 + x) for 1 + x positive and finite. 2^-k (1 + x) - 1 is formed from x with one rounding, so the bits of x that
/// 1 + x would drop are kept.
template <class T> OG_FN T log1p_in_range(T x) {
  const T k = binary_exponent(1 + x);
  const T shrink = unscale((T)1, k);
  return add_ln2(k, log_near_one(fma(shrink, x, shrink - 1)));
}
template <class T> OG_FN T log1p(T x) {
  const mask<T> large = x > (T)0x1p64f;  // 2^-k would be subnormal at the end: there log1p x = log(1 + x/4) + 2 ln2
  const T y = log1p_in_range(choose(large, x * (T)0.25, x));
  const T all = choose(large, y + (T)0x1.62e42fefa39efp+0, y);
  return copysign(log_limits(1 + x, all), x);  // the sign of x is that of the result: keeps -0.0
}

}  // namespace og
