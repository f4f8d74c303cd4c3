#pragma once
#include "math/activations.h"
#include "math/arith.h"
#include "config.h"
#include "math/exp.h"
#include "math/lanes.h"

// Derivatives of activations times the incoming gradient d: f'(x) d, in one function each, because f' composed of the
// parts of f cancels, overflows, or is inf * 0 at infinity. Accuracy is measured against max(|f'|, |x f''|) |d|: next
// to a zero of f', the last bit of x changes f' by more than the result. For this reason, the rounding errors of
// products inside an exponent are not carried along here, unlike in the functions themselves.
//
// All smooth derivatives are built on e = e^-|z| = 2^n (1 + t) and one division. 2^n is applied at the very end, to d
// and to the rest in parts, so that a large d is multiplied by a derivative that would underflow (except for swish in
// float, where that costs too much). GELU and Mish: gelu_derivatives.h. Powers: power_derivatives.h.

namespace og {

// ---- in pieces -----------------------------------------------------------------------------------------------------

/// 0 at 0, as in torch and oneDNN; d for NaN, as in torch.
template <class T> OG_FN T relu_backward(T x, T d) { return choose(x <= 0, (T)0, d); }

template <class T> OG_FN T abs_backward(T x, T d) {
  const T moved = choose(x < 0, -d, d);
  return choose(x == 0, (T)0, choose(x == x, moved, x));
}

/// As in oneDNN: 0 at both bounds.
template <class T> OG_FN T clamp_backward(T x, T d, T lo, T hi) { return choose((x > lo) & (x < hi), d, (T)0); }

/// 0 where a x + b <= 0 or >= 1, decided without the rounding of the sum: 1 - 2^-25 is not 1.
template <class T> OG_FN T hard_sigmoid_backward(T x, T d, T a, T b) {
  const T below_one = b - 1;
  const T back = below_one + 1;
  const T rest = (b - back) + ((back - below_one) - 1);
  const mask<T> flat = (fma(a, x, b) <= 0) | (fma(a, x, below_one) + rest >= 0);
  return choose(flat, (T)0, a * d);
}

/// (2x + 3) / 6 between -3 and 3; 0 at -3 and 1 at 3, as in oneDNN. x + 3/2 is exact at the zero.
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
  static constexpr float density = 0x1.988454p-2f;  // 1 / sqrt(2 pi)
};
template <> struct derivative_constants<double> {
  static constexpr double end = -1472.0;
  static constexpr double normal_end = 55.0;
  static constexpr double cubic_end = 30.0;
  static constexpr double smallest_power = -1000.0;
  static constexpr double density = 0x1.9884533d43651p-2, density_low = -0x1.cbc0d30ebfd15p-56;  // in two parts
};

#if OG_LANES
template <> struct derivative_constants<floats> : derivative_constants<float> {};
#endif

/// d g 2^n for n from three times the smallest exponent to three times the largest.
template <class T> OG_FN T times_power(T d, T g, T n) {
  const T third = fma(n, (T)(1.0 / 3), exp_constants<T>::magic) - exp_constants<T>::magic;
  return scale(scale(d, third), third) * scale(g, n - 2 * third);
}

/// e^-|z| = 2^n (1 + t) = power (1 + t) = e, where power has a lower limit that does not change a sum with 1.
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

/// For a float z, e^-|z| = e 2^under 2^rest, e = power (1 + t): the part that float holds as a normal number, even
/// after a product or two (a GPU flushes others), and the rest of its exponent.
template <class F> struct half_decay {
  using Steps = decltype(WholeNumber<F>() - WholeNumber<F>());
  F size, t, power, e;
  Steps under, rest;
};
template <class F> OG_FN half_decay<F> half_decay_of(F z) {
  WholeNumber<F> n;
  const F size = at_most(abs(z), (F)-derivative_constants<F>::end), t = exp_reduce(-size, n);
  const WholeNumber<F> normal = at_least(n, -120.0f), twice = at_least(n, -246.0f);
  return {size, t, pow2(normal), scale_one(t, normal), twice - normal, n - twice};
}
/// r = 1 / (1 + e), and its relative error.
template <class F> struct near_one { F r, low; };
template <class F> OG_FN near_one<F> below_one(F e) {
  const F one = 1 + e, r = inverse(one);
  return {r, fma(-r, e - (one - 1), fma(-r, one, (F)1))};
}

/// f = sigmoid(z): f' = p (1 - p) with p = sigmoid(-|z|), whose error 1 - p damps. `factor` is dz/dx.
OG_FN double sigmoid_slope(double z, double d, double factor) {
  const decay<double> v = decay_of(z);
  const double q = divide(1 + v.t, 1 + v.e);
  const double g = fma(-q, q * v.power, q);
  return keep_nan(z, times_power(d, factor * g, v.n));
}
/// In float e r r. It begins like swish_slope, which is often in the same kernel.
template <class F, if_float<F> = 0> OG_FN F sigmoid_slope(F z, F d, F factor) {
  const half_decay<F> v = half_decay_of(z);
  const near_one<F> w = below_one(v.e);
  const F q = v.e * w.r, low = q * (w.r * w.low);
  return keep_nan(z, scale(scale(d * (factor * fma(q, w.r, low + low)), v.under), v.rest));
}
/// sigmoid(z) in a kernel that also has its slope: it begins like that, and shares an exponential and a division.
template <class F, if_float<F> = 0> OG_FN F sigmoid_beside_slope(F z) {
  const half_decay<F> v = half_decay_of(z);
  const near_one<F> w = below_one(v.e);
  const F right = fma(w.r, w.low, w.r);
  return keep_nan(z, choose(z < 0, scale(scale(v.e * right, v.under), v.rest), right));
}
OG_FN double sigmoid_beside_slope(double z) { return sigmoid(z); }
/// The same for tanh(x): 1 - e^-2|x| without cancellation, over 1 + e^-2|x|.
template <class F, if_float<F> = 0> OG_FN F tanh_beside_slope(F x) {
  const half_decay<F> v = half_decay_of(2 * x);
  const near_one<F> w = below_one(v.e);
  const F y = fma(-v.power, v.t, 1 - v.power) * w.r;
  return keep_nan(x, copysign(fma(y, w.low, y), x));
}
OG_FN double tanh_beside_slope(double x) { return tanh(x); }
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

/// f = x sigmoid(z + low): f' = s (1 + m (1 - s)) with s = sigmoid(z), m = x dz/dx, which is finite. 1 - s never
/// cancels. The rounding error of s is added at the end: without it, the error exceeds 3 ulp.
template <class T> OG_FN T gated_slope(T z, T low, T m, T m_low, T d) {
  const decay<T> v = decay_of(z, low);
  const mask<T> left = z < 0;
  const T above = select(left, 1 + v.t, (T)1), above_low = select(left, v.t - (above - 1), (T)0);
  const T below = 1 + v.e, below_low = v.e - (below - 1);
  const T q = divide(above, below);  // s, without 2^n on the left
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
/// In float, e = e^-|z| and r = 1 / (1 + e): f' = e r (1 - |z| r) on the left and 1 minus that on the right, with the
/// rounding errors of r and |z| r. 1.8 ulp, which leaves room for rounding z = a x; half the time of gated_slope.
template <class F, if_float<F> = 0> OG_FN F swish_slope(F z, F d) {
  const half_decay<F> v = half_decay_of(z);
  const near_one<F> w = below_one(v.e);
  const F size = v.size, e = v.e, r = w.r, r_low = w.low;
  const F product = size * r, y = fma(-product, r, r);
  const F y_low = fma(r_low, fma((F)-2, product, (F)1), -fma(size, r, -product));  // the same
  const F left = scale(fma(e, y, e * r * y_low), v.under), right = 1 - left;
  return keep_nan(z, d * choose(z < 0, left, right));
}
OG_FN double swish_backward(double x, double d) { return swish_slope(x, d); }
/// For a float x, e^-|x| = 2^n (1 + t): e, with a lower limit that does not change a sum with 1.
template <class F> struct gate_decay { F down, t, e; WholeNumber<F> n; };
template <class F> OG_FN gate_decay<F> gate_decay_of(F x) {
  WholeNumber<F> n;
  const F down = at_least(-abs(x), (F)-120.0f), t = exp_reduce(down, n);
  return {down, t, scale_one_beside_one(t, n), n};
}
/// f' = e (1 - |x| + e) / (1 + e)^2 on the left and 1 minus that on the right, e = e^-|x| = 2^n (1 + t): 2.8 ulp, in
/// less time than torch's, which also has one division.
template <class F, if_float<F> = 0> OG_FN F swish_backward(F x, F d) {
  const gate_decay<F> v = gate_decay_of(x);
  const F rest = 1 + v.down;
  const F quotient = divide(fma(v.e, 1 + v.t, fma(rest, v.t, rest)), fma(v.e, v.e + 2, (F)1));
  const F left = scale_down(quotient, v.n), right = 1 - left;
  return keep_nan(x, d * choose(x < 0, left, right));
}
/// swish(x) in a kernel that also has its slope: x e / (1 + e) on the left, x / (1 + e) on the right.
template <class F, if_float<F> = 0> OG_FN F swish_beside_slope(F x) {
  const gate_decay<F> v = gate_decay_of(x);
  const F quotient = divide(choose(x < 0, fma(v.down, v.t, v.down), x), 1 + v.e);
  return keep_nan(x, choose(x < 0, scale_down(quotient, v.n), quotient));
}
OG_FN double swish_beside_slope(double x) { return swish(x); }
/// For a factor 0 it is d / 2, even for infinite x. z stays a x, so that the factor's own gradient shares e^-|z|.
template <class T> OG_FN T swish_backward(T x, T d, T a) {
  return choose(a == 0, (T)0.5 * d, swish_slope(x * a, d));
}
template <class T> OG_FN T swish_backward(T x, T d, T a, T b) {
  return choose(a == 0 || b == 0, (T)0.5 * d, swish_slope(b * (x * a), d));
}

/// 1 for x > 0, a e^x otherwise.
template <class T> OG_FN T elu_backward(T x, T d, T a) {
  T n;
  const T t = exp_reduce(at_least(x, (T)derivative_constants<T>::end), n);
  const T left = times_power(d, fma(a, t, a), n);
  return choose(x > 0, d, keep_nan(x, left));
}

}  // namespace og
