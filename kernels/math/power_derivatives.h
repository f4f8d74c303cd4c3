#pragma once
#include "math/derivatives.h"
#include "math/power.h"

// Derivatives of powers times the incoming gradient d: see derivatives.h.

namespace og {

/// b (b - 1) ... (b - order + 1)
template <class T> OG_FN T falling_factorial(T b, int order) {
  T c = b;
  for (int k = 1; k < order; k++) c *= b - (T)k;
  return c;
}

/// The factor that turns |x|^(b - order) into x^(b - order). b decides parity and wholeness, as b - order is rounded.
template <class T> OG_FN T power_sign(T x, T b, int order) {
  const mask<T> finite = abs(b) < infinity<T>();
  const mask<T> odd = is_integer(b) & finite & (is_odd(b) != (mask<T>)((order & 1) != 0));
  const mask<T> fraction = !is_integer(b) & (x < 0) & (x > -infinity<T>());
  const T sign = choose(is_negative(x) & odd, (T)-1, (T)1);
  return choose(fraction, quiet_nan<T>(), sign);
}

/// The derivative of |x|^b of an order, times sign d: c |x|^(b - order) sign d, and c. The power of a finite x counts
/// as neither 0 nor infinite, as before rounding: 0 and infinity times it are 0 and infinity.
template <class T> OG_FN T power_slope(T x, T d, T b, int order, T sign, T& c) {
  const T y = b - order, back = y + order, a = abs(x);
  const T y_low = (b - back) + ((back - y) - order);
  c = falling_factorial(b, order);
  const power<T> p = power_parts(x, y, y_low, (T)power_limit<T>::backward);
  const mask<T> regular = (a > 0) & (a < infinity<T>()) & (abs(b) < infinity<T>());
  const T irregular = choose(p.exponent < 0, (T)0, infinity<T>());
  const T size = choose((y == 0) | (a == 1), (T)1, select(p.exponent == p.exponent, select(regular, 1 + p.t, irregular), p.exponent));
  const mask<T> small = abs(c) < 1;  // c * size may overflow, or c be subnormal
  const T g = c * (select(small, (T)0x1p64, (T)0.5) * sign * size);
  const T n = select(regular, p.n + select(small, (T)-64, (T)1), (T)1);
  // If d c is a normal number, it is computed first: d 2^n and c 2^n may not be normal.
  const T product = d * g;
  const mask<T> first = (abs(product) >= smallest_normal<T>()) & (abs(product) < infinity<T>());
  const T value = times_power(select(first, product, d), select(first, (T)1, g) * select(regular, p.excess, (T)1), n);
  return select(d == d + d, product, value);  // 0 and infinity times a power stay 0 and infinity
}
/// The derivative of x^b of an order, times d; 0 where its factor is 0, even at x = 0.
template <class T> OG_FN T pow_backward(T x, T d, T b, int order) {
  T c;
  const T value = power_slope(x, d, b, order, power_sign(x, b, order), c);
  return select(c == 0, (T)0, value);
}
namespace positive {
template <class T> OG_FN T pow_backward(T x, T d, T b, int order) {
  T c;
  const T value = power_slope(x, d, b, order, (T)1, c);
  return select(c == 0, (T)0, value);
}
template <class T> OG_FN T pow_backward(T x, T d, T b, int order, any_ends) {
  return positive::pow_backward(x, d, b, order);
}
#if OG_LANES
/// If no product of some factors comes near the limits of f32, their powers of two may be multiplied in any order: d is
/// 0 or from 2^-71 to 2^60, c from 2^-8 to 2^20, the power from e^-30 to e^30.
OG_FN floats pow_backward(floats x, floats d, floats b, int order, no_ends& ends) {
  const floats y = b - order, back = y + order, y_low = (b - back) + ((back - y) - order);
  const floats c = falling_factorial(b, order);
  const pair<floats> l = log_pair(abs(x));
  const floats p = y * l.high;
  ends.reaches(bits(abs(p)));
  ends.reaches(bits(abs(choose(d == 0, (floats)1, d))) - bits((floats)0x1p-71f));
  ends.reaches(bits(choose((abs(c) >= 0x1p-8f) & (abs(c) <= 0x1p20f), (floats)0, infinity<floats>())));
  floats n;
  const floats t = exp_reduce(p, fma(y, l.high, -p) + fma(y_low, l.high, y * l.low), n);
  return scale(d * (c * (1 + t)), n);
}
#endif
}  // namespace positive

}  // namespace og
