#pragma once
#include "config.h"
#include "exp.h"
#include "log.h"

// pow(x, y) = e^(y log|x|). An error d in the logarithm becomes y d in the result, up to 745 times as much, so the
// logarithm is needed to about 64 bits: double does for float, double-double arithmetic for double (Dekker 1971).

namespace og {

struct pair64 {
  double high, low;
};

/// log x for x > 0 as high + low, relative error about 2^-66.
OG_FN pair64 log_pair(double x) {
  const bool subnormal = x < smallest_normal<double>();
  const double normal = subnormal ? x * 0x1p54 : x;
  const double k = binary_exponent(normal);
  const double f = unscale(normal, k) - 1;
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
  // k ln2: the high part of ln2 has 40 bits, so the product is exact.
  const double e = k - (subnormal ? 54.0 : 0.0);
  const double e_ln2 = e * 0x1.62e42fefa2p-1;
  const double sum = e_ln2 + near;
  const double sum_low = ((e_ln2 - sum) + near) + fma(e, 0x1.9ef35793c7673p-41, near_low);
  const double high = sum + sum_low;
  return {high, (sum - high) + sum_low};
}

/// Whether y is an integer (infinity counts), and whether an odd one.
template <class T> OG_FN bool is_integer(T y) { return trunc(y) == y; }
template <class T> OG_FN bool is_odd(T y) {
  const T half = y * (T)0.5;
  return is_integer(y) & (trunc(half) != half);
}

/// The sign and the cases C99 lists, given |x|^y (Annex F.10.4.4): x^0 = 1 and 1^y = 1 even for NaN.
template <class T> OG_FN T pow_signed(T x, T y, T magnitude) {
  const bool negative = (bits(x) >> (8 * sizeof(T) - 1)) != 0;
  const T with_sign = negative & is_odd(y) ? -magnitude : magnitude;
  const T real = (x < 0) & (x > -infinity<T>()) & !is_integer(y) ? quiet_nan<T>() : with_sign;
  const bool one = (y == 0) | (x == 1) | ((x == -1) & (abs(y) == infinity<T>()));
  return one ? (T)1 : real;
}

/// |x|^(y + y_low) = 2^n (1 + t), the exponent kept within +-limit, and y log|x|, which says whether it was.
struct power64 {
  double n, t, exponent;
};
OG_FN power64 power_parts(double x, double y, double y_low, double limit) {
  const double a = abs(x);
  const pair64 l = log_pair(a);
  const bool regular = a > 0 && a < infinity<double>();
  const double irregular = a == 0 ? -infinity<double>() : a;  // log|x| for 0, infinity and NaN
  const double high = regular ? l.high : irregular;
  const double p = y * high;
  const double p_low = fma(y, high, -p) + (y * l.low + y_low * high);
  const double bounded = at_most(at_least(p, -limit), limit);
  double n;
  const double t = exp_reduce(bounded, bounded == p ? p_low : 0.0, n);
  return {n, t, p};
}

OG_FN double pow(double x, double y) {
  const power64 p = power_parts(x, y, 0.0, 746.0);
  return pow_signed(x, y, keep_nan(p.exponent, scale_exp(p.t, p.n)));
}

OG_FN float pow(float x, float y) {
  const double magnitude = exp((double)y * log((double)abs(x)));
  return pow_signed(x, y, (float)magnitude);
}

}  // namespace og
