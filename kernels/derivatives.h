#pragma once
#include "activations.h"
#include "arith.h"
#include "config.h"
#include "erf.h"
#include "exp.h"
#include "lanes.h"
#include "power.h"

// Derivatives of activations times the gradient d that arrives: f'(x) d, in one function each, because f' made of the parts
// of f cancels, overflows, or is inf * 0 at infinity. Accuracy is measured against max(|f'|, |x f''|) |d|: next to a zero of
// f' the last bit of x is worth more than the result. That is also why the rounding errors of products inside an exponent
// are not carried along here, as they are in the functions themselves.
//
// All smooth ones are built on e = e^-|z| = 2^n (1 + t) and one division; 2^n is applied at the very end, to d and to the rest
// in parts, so that a large d meets a derivative that would underflow (but for swish in float, where that costs too much).

namespace og {

// ---- in pieces -----------------------------------------------------------------------------------------------------

/// 0 at 0, as torch and oneDNN; d for NaN, as torch.
template <class T> OG_FN T relu_backward(T x, T d) { return choose(x <= 0, (T)0, d); }

template <class T> OG_FN T abs_backward(T x, T d) {
  const T moved = choose(x < 0, -d, d);
  return choose(x == 0, (T)0, choose(x == x, moved, x));
}

/// oneDNN's: 0 at both bounds.
template <class T> OG_FN T clamp_backward(T x, T d, T lo, T hi) { return choose((x > lo) & (x < hi), d, (T)0); }

/// 0 where a x + b <= 0 or >= 1, decided without the rounding of the sum: 1 - 2^-25 is not 1.
template <class T> OG_FN T hard_sigmoid_backward(T x, T d, T a, T b) {
  const T below_one = b - 1;
  const T back = below_one + 1;
  const T rest = (b - back) + ((back - below_one) - 1);
  const mask<T> flat = (fma(a, x, b) <= 0) | (fma(a, x, below_one) + rest >= 0);
  return choose(flat, (T)0, a * d);
}

/// (2x + 3) / 6 between -3 and 3; 0 at -3 and 1 at 3, as oneDNN. x + 3/2 is exact at the zero.
template <class T> OG_FN T hard_swish_backward(T x, T d) {
  const T inside = d * divide(x + (T)1.5, (T)3);
  const T right = choose(x >= 3, d, inside);
  return choose(x <= -3, (T)0, right);
}

/// d / (2y). Halves d instead where 2y would overflow.
template <class T> OG_FN T half_quotient(T d, T y) {
  const mask<T> large = abs(y) > divide((T)0.5, smallest_normal<T>());
  return divide(choose(large, (T)0.5 * d, d), choose(large, y, 2 * y));
}
template <class T> OG_FN T sqrt_backward(T x, T d) { return half_quotient(d, sqrt(x)); }
template <class T> OG_FN T sqrt_backward_dst(T y, T d) { return half_quotient(d, y); }

// ---- of the output -------------------------------------------------------------------------------------------------

/// alpha d y (1 - y), the smaller factor first: no overflow before the end.
template <class T> OG_FN T sigmoid_backward_dst(T y, T d, T alpha) {
  const T rest = 1 - y;
  const mask<T> high = y > (T)0.5;
  return (d * choose(high, rest, y)) * (alpha * choose(high, y, rest));
}
template <class T> OG_FN T sigmoid_backward_dst(T y, T d) { return sigmoid_backward_dst(y, d, (T)1); }

/// d (1 - y^2)
template <class T> OG_FN T tanh_backward_dst(T y, T d) {
  const T a = abs(y);
  return (d * (1 - a)) * (1 + a);
}

template <class T> OG_FN T elu_backward_dst(T y, T d, T a) { return choose(y > 0, d, d * (y + a)); }

// ---- smooth --------------------------------------------------------------------------------------------------------

template <class T> struct derivative_constants;
template <> struct derivative_constants<float> {
  static constexpr float end = -201.0f;     // d z e^z underflows for every d below
  static constexpr float normal_end = 21.0f;   // d t e^(-t^2 / 2) does above
  static constexpr float cubic_end = 16.0f;    // and the derivative of the gelu of tanh
  static constexpr float smallest_power = -100.0f;  // 1 + 2^n is 1 long before
  static constexpr float density = 0x1.988454p-2f, density_low = -0x1.857936p-27f;  // 1 / sqrt(2 pi), in two parts
};
template <> struct derivative_constants<double> {
  static constexpr double end = -1472.0;
  static constexpr double normal_end = 55.0;
  static constexpr double cubic_end = 30.0;
  static constexpr double smallest_power = -1000.0;
  static constexpr double density = 0x1.9884533d43651p-2, density_low = -0x1.cbc0d30ebfd15p-56;
};

#if OG_LANES
template <> struct derivative_constants<floats> : derivative_constants<float> {};
#endif

/// d g 2^n for n from three times the smallest exponent to three times the largest.
template <class T> OG_FN T times_power(T d, T g, T n) {
  const T third = fma(n, (T)(1.0 / 3), exp_constants<T>::magic) - exp_constants<T>::magic;
  return scale(scale(d, third), third) * scale(g, n - 2 * third);
}

/// e^-|z| = 2^n (1 + t) = power (1 + t) = e, where power stops at a number that 1 does not feel.
template <class T> struct decay {
  T n, t, power, e;
};
template <class T> OG_FN decay<T> decay_of(T z, T low = 0) {
  using c = derivative_constants<T>;
  T n;
  const T t = exp_reduce(at_least(-abs(z), (T)c::end), choose(z < 0, low, -low), n);
  const T normal = at_least(n, (T)c::smallest_power);
  return {n, t, pow2(normal), scale_one(t, normal)};
}

/// f = sigmoid(z): f' = p (1 - p) with p = sigmoid(-|z|), whose error 1 - p damps. `factor` is dz/dx.
template <class T> OG_FN T sigmoid_slope(T z, T d, T factor) {
  const decay<T> v = decay_of(z);
  const T q = divide(1 + v.t, 1 + v.e);
  const T g = fma(-q, q * v.power, q);
  return keep_nan(z, times_power(d, factor * g, v.n));
}
template <class T> OG_FN T sigmoid_backward(T x, T d) { return sigmoid_slope(x, d, (T)1); }
template <class T> OG_FN T sigmoid_backward(T x, T d, T a) { return sigmoid_slope(a * x, d, a); }
/// 1 - tanh^2 x = 4 sigmoid'(2x)
template <class T> OG_FN T tanh_backward(T x, T d) { return sigmoid_slope(2 * x, d, (T)4); }

/// sigmoid(beta x) d
template <class T> OG_FN T softplus_backward(T x, T d, T beta) {
  const T z = beta * x;
  const decay<T> v = decay_of(z);
  const mask<T> left = z < 0;
  const T q = divide(choose(left, 1 + v.t, (T)1), 1 + v.e);
  return keep_nan(z, times_power(d, q, choose(left, v.n, (T)0)));
}

/// f = x sigmoid(z + low): f' = s (1 + m (1 - s)) with s = sigmoid(z), m = x dz/dx, which is finite. 1 - s never cancels. What
/// the rounding of s left out is added at the end: without it, 3 ulp is exceeded.
template <class T> OG_FN T gated_slope(T z, T low, T m, T m_low, T d) {
  const decay<T> v = decay_of(z, low);
  const mask<T> left = z < 0;
  const T above = select(left, 1 + v.t, (T)1), above_low = select(left, v.t - (above - 1), (T)0);
  const T below = 1 + v.e, below_low = v.e - (below - 1);
  const T q = divide(above, below);  // s, but for 2^n on the left
  const T opposite = fma(-q, v.power, (T)1);
  const T rest = select(left, opposite, q * v.e);
  const T q_low = (fma(-q, below, above) + fma(-q, below_low, above_low)) * select(left, rest, q);
  const T rest_low = select(left, fma(-q, v.power, 1 - rest) - q_low * v.power, (T)0);
  const T g = fma(m, rest, (T)1) + fma(m, rest_low, m_low * rest);
  return times_power(d, fma(q, g, q_low * g), select(left, v.n, (T)0));
}
OG_FN double swish_slope(double z, double d) {
  const double bounded = at_most(at_least(z, derivative_constants<double>::end), -derivative_constants<double>::end);
  return keep_nan(z, gated_slope(bounded, 0.0, bounded, 0.0, d));
}
/// Of a float z, e^-|z| 2^-under = power (1 + t) = e: what float holds as a normal number, and the rest of its exponent.
template <class F> struct half_decay {
  F size, t, power, e, under;
};
template <class F> OG_FN half_decay<F> half_decay_of(F z) {
  F n;
  const F size = at_most(abs(z), (F)120), t = exp_reduce(-size, n);
  const F normal = at_least(n, (F)-126);
  return {size, t, pow2(normal), scale_one(t, normal), n - normal};
}
/// In float, e = e^-|z| and r = 1 / (1 + e): f' = e r (1 - |z| r) on the left and 1 minus that on the right, what r and |z| r
/// round off carried along. 1.8 ulp, which leaves room for the rounding of z = a x, and half the time of gated_slope.
template <class F, if_float<F> = 0> OG_FN F swish_slope(F z, F d) {
  const half_decay<F> v = half_decay_of(z);
  const F size = v.size, e = v.e;
  const F one = 1 + e, r = divide((F)1, one);
  const F r_low = fma(-r, e - (one - 1), fma(-r, one, (F)1));  // as a part of r
  const F product = size * r, y = fma(-product, r, r);
  const F y_low = fma(r_low, fma((F)-2, product, (F)1), -fma(size, r, -product));  // the same
  const F left = scale(fma(e, y, e * r * y_low), v.under), right = 1 - left;
  return keep_nan(z, d * choose(z < 0, left, right));
}
OG_FN double swish_backward(double x, double d) { return swish_slope(x, d); }
/// f' = e (1 + e - |x|) / (1 + e)^2 on the left: 2.7 ulp in the time of torch's, whose one division this has too.
template <class F, if_float<F> = 0> OG_FN F swish_backward(F x, F d) {
  const half_decay<F> v = half_decay_of(x);
  const F above = fma(v.power, v.t, (1 - v.size) + v.power);
  const F one = 1 + v.e, one_low = v.e - (one - 1);
  const F left = scale(divide(v.e * above, fma(one, one, (one + one) * one_low)), v.under), right = 1 - left;
  return keep_nan(x, d * choose(x < 0, left, right));
}
template <class T> OG_FN T swish_backward(T x, T d, T a) { return swish_slope(a * choose(a == 0, (T)0, x), d); }
template <class T> OG_FN T swish_backward(T x, T d, T a, T b) {
  return swish_slope(b * (a * choose(a == 0 || b == 0, (T)0, x)), d);
}

/// x sigmoid(2u), 2u = v (a + b v^2) and m = v (a + 3 b v^2) in two parts each: see gelu_tanh. f' is the difference of two
/// terms that feel the errors of 2u and of m alone, where an error of x moves both.
template <class T> OG_FN T gelu_tanh_backward(T x, T d) {
  using c = gelu_constants<T>;
  const T end = derivative_constants<T>::cubic_end;
  const T v = at_most(at_least(x, -end), end);
  const T square = v * v, square_low = fma(v, v, -square);
  const T cubic = c::b * square;
  const T cubic_low = fma(c::b, square, -cubic) + fma(c::b, square_low, c::b_low * square);
  const T slope = c::a + cubic;
  const T back = slope - c::a;
  const T slope_low = ((c::a - (slope - back)) + (cubic - back)) + (cubic_low + c::a_low);
  const T z = v * slope;
  const T z_low = fma(v, slope, -z) + v * slope_low;
  const T steep = slope + 2 * cubic;
  const T steep_low = (2 * cubic - (steep - slope)) + fma((T)2, cubic_low, slope_low);
  const T m = v * steep;
  const T m_low = fma(v, steep, -m) + v * steep_low;
  return keep_nan(x, gated_slope(z, z_low, m, m_low, d));
}

/// f' of gelu_erf as 1/2 + x P(x^2), and where; own fit on x^2 <= 0.26, error 2^-24.8. In float the difference of R and
/// t / sqrt(2 pi) exceeds 3 ulp there.
template <class F, if_float<F> = 0> OG_FN mask<F> is_near_half(F t) { return t < 0.5f; }
OG_FN bool is_near_half(double) { return false; }
template <class F, if_float<F> = 0> OG_FN F near_half(F x) {
  const F z = x * x;
  F p = 0x1.1bf5f4p-10f;
  p = fma(p, z, -0x1.36ba26p-7f);
  p = fma(p, z, 0x1.ea354cp-5f);
  p = fma(p, z, -0x1.105834p-2f);
  return fma(fma(p, z, 0x1.988454p-1f), x, 0.5f);
}
OG_FN double near_half(double x) { return x; }

/// Phi(x) + x phi(x) is e^(-t^2 / 2) (R(t) - t / sqrt(2 pi)) at x = -t, and 1 minus that at t. R as in erf.h, in two parts.
template <class T> OG_FN T gelu_erf_slope(T x, T d) {
  using c = derivative_constants<T>;
  const T t = at_most(abs(x), (T)c::normal_end);
  const T k = tail_center(t);
  const T p = t + k, p_low = t - (p - k);
  const T w = divide((T)1, p);
  const T w_error = fma(-w, p_low, fma(-w, p, (T)1));
  const T g = tail_shape(fma(-2 * k, fma(w, w_error, w), (T)1));
  const T ratio = g * w, ratio_low = fma(ratio, w_error, fma(g, w, -ratio));
  const T h = fma(-t, c::density, ratio) + fma(-t, c::density_low, ratio_low);
  const T minus_half = (T)-0.5 * t;
  const T exponent = minus_half * t;  // in two parts: at sqrt 2, f'' = 0 excuses nothing
  T n;
  const T e = exp_reduce(exponent, fma(minus_half, t, -exponent), n);
  const T y = fma(h, e, h);
  const T near = fma(-y, pow2(at_least(n, (T)c::smallest_power)), (T)1);
  const mask<T> half = is_near_half(t), left = x < 0 && !half;
  const T right = choose(half, near_half(x), near);
  return keep_nan(x, times_power(d, choose(left, y, right), choose(left, n, (T)0)));
}

/// T + x T', T = n / (n + 2), n = e^x (e^x + 2). Over e = e^-|x| and w = 1 / D it is
///   e w ((2 + e) + 4x (1 + e) w),         D = 2 + e (2 + e),       for x < 0,
///   w ((1 + 2e) + 4x e^2 (1 + e) w),      D = 1 + 2e (1 + e),      for x >= 0.
/// On the left the terms nearly cancel; w and what it multiplies are carried in two parts.
template <class T> OG_FN T mish_slope_of(T x, T d) {
  const T end = derivative_constants<T>::end;
  const T bounded = at_most(at_least(x, end), -end);
  const decay<T> v = decay_of(bounded);
  const mask<T> left = x < 0;
  const T e = v.e;
  const T one = 1 + e, one_low = e - (one - 1);
  const T two = 2 + e, two_low = e - (two - 2);
  const T factor = select(left, e, 2 * e), term = select(left, (T)2, (T)1);
  const T times = select(left, two, one), times_low = select(left, two_low, one_low);
  const T below = fma(factor, times, term);
  const T below_low = fma(factor, times, term - below) + factor * times_low;
  const T w = divide((T)1, below);
  const T w_low = w * fma(-w, below_low, fma(-w, below, (T)1));
  const T u = one * w, u_low = fma(one, w, -u) + fma(one, w_low, one_low * w);
  const T steep = 4 * bounded * select(left, (T)1, e * e);
  const T right = fma((T)2, e, (T)1);
  const T first = select(left, two, right), first_low = select(left, two_low, 2 * e - (right - 1));
  const T product = steep * u;
  const T g = first + product;
  const T g_low = ((first - g) + product) + (fma(steep, u, -product) + fma(steep, u_low, first_low));
  const T above = select(left, 1 + v.t, (T)1), above_low = select(left, v.t - (above - 1), (T)0);
  const T q = above * w, q_low = fma(above, w, -q) + fma(above, w_low, above_low * w);
  return keep_nan(x, times_power(d, fma(q, g, fma(q, g_low, q_low * g)), select(left, v.n, (T)0)));
}

#if OG_TABLES
/// d y 2^n for n <= 0, where y 2^max(n, -8) is at most about 1: rounded twice at most, and not at infinity.
template <class F> OG_FN F times_far(F d, F y, F n) {
  const F near = at_least(n, (F)-8);
  return scale_far(d, n - near) * scale(y, near);
}
template <class F, if_float<F> = 0> OG_FN F gelu_erf_backward(F x, F d) {
  const F t = at_most(abs(x), (F)derivative_constants<F>::normal_end);
  const bell<F> v = bell_of(t);
  const F bounded = size_within(t, (F)14.875f);  // what it is times e^(-t^2 / 2) does not matter above
  const F h = by_table(tail_slope, interval_of(bounded), bounded), y = fma(h, v.e, h);
  const mask<F> left = x < 0;
  const F right = fma(-y, pow2(at_least(v.n, (F)-100)), (F)1);
  return keep_nan(x, times_far(d, choose(left, y, right), choose(left, v.n, (F)0)));
}
/// By a table that is multiplied by e^min(x, 0).
template <class F, if_float<F> = 0> OG_FN F mish_backward(F x, F d) {
  const F end = derivative_constants<F>::end;
  const F size = at_most(abs(x), -end);
  F n;
  const F e = exp_reduce(smaller_number(at_least(x, end), (F)0), n);
  const F g = by_table(mish_slope, interval_of(size, x), size);
  return keep_nan(x, times_far(d, fma(g, e, g), n));
}
OG_FN double gelu_erf_backward(double x, double d) { return gelu_erf_slope(x, d); }
OG_FN double mish_backward(double x, double d) { return mish_slope_of(x, d); }
#else
template <class T> OG_FN T gelu_erf_backward(T x, T d) { return gelu_erf_slope(x, d); }
template <class T> OG_FN T mish_backward(T x, T d) { return mish_slope_of(x, d); }
#endif

/// 1 for x > 0, a e^x otherwise.
template <class T> OG_FN T elu_backward(T x, T d, T a) {
  T n;
  const T t = exp_reduce(at_least(x, (T)derivative_constants<T>::end), n);
  const T left = times_power(d, fma(a, t, a), n);
  return choose(x > 0, d, keep_nan(x, left));
}

// ---- powers --------------------------------------------------------------------------------------------------------

/// b (b - 1) ... (b - order + 1)
template <class T> OG_FN T falling_factorial(T b, int order) {
  T c = b;
  for (int k = 1; k < order; k++) c *= b - (T)k;
  return c;
}

/// What |x|^(b - order) is multiplied by to become x^(b - order): parity and wholeness are those of b, as b - order is rounded.
template <class T> OG_FN T power_sign(T x, T b, int order) {
  const mask<T> finite = abs(b) < infinity<T>();
  const mask<T> odd = is_integer(b) & finite & (is_odd(b) != (mask<T>)((order & 1) != 0));
  const mask<T> fraction = !is_integer(b) & (x < 0) & (x > -infinity<T>());
  const T sign = choose(is_negative(x) & odd, (T)-1, (T)1);
  return choose(fraction, quiet_nan<T>(), sign);
}

/// The derivative of |x|^b of an order, times sign d: c |x|^(b - order) sign d, and c. The power of a finite x is neither 0 nor
/// infinite, as it is not before it is rounded: 0 and infinity times it are 0 and infinity.
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
  // Where d c is a normal number it goes first: neither d 2^n nor c 2^n need be one.
  const T product = d * g;
  const mask<T> first = (abs(product) >= smallest_normal<T>()) & (abs(product) < infinity<T>());
  const T value = times_power(select(first, product, d), select(first, (T)1, g) * select(regular, p.excess, (T)1), n);
  return select(d == d + d, product, value);  // 0 and infinity times a power are what they are
}
/// The derivative of x^b of an order, times d; 0 where its factor is 0, at x = 0 too.
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
}  // namespace positive

}  // namespace og
