#pragma once
#include "math/activations.h"
#include "config.h"
#include "math/derivatives.h"
#include "math/erf.h"
#include "math/lanes.h"
#include "math/tables.h"

// Derivatives of GELU in both forms and of Mish, times the incoming gradient d: see derivatives.h.

namespace og {

/// x sigmoid(2u), 2u = v (a + b v^2) and m = v (a + 3 b v^2) in two parts each: see gelu_tanh. f' is the difference of
/// two terms: an error of 2u or of m affects one of them alone, an error of x both.
OG_FN double gelu_tanh_backward(double x, double d) {
  const double end = derivative_constants<double>::cubic_end;
  const double v = at_most(at_least(x, -end), end);
  const double_cubic u = double_cubic_of(v);
  const double steep = u.slope + 2 * u.part;
  const double steep_low = (2 * u.part - (steep - u.slope)) + fma(2.0, u.part_low, u.slope_low);
  const double m = v * steep;
  const double m_low = fma(v, steep, -m) + v * steep_low;
  return keep_nan(x, gated_slope(u.z, u.z_low, m, m_low, d));
}
/// In float like swish_slope, with z = 2u, and M = z + 2 b |x|^3 in place of size: f' = e r (1 - M r) on the left.
template <class F, if_float<F> = 0> OG_FN F gelu_tanh_backward(F x, F d) {
  const F v = at_most(abs(x), (F)12.75f);  // f' is 0 or 1 above
  const cubic<F> u = cubic_of(v);
  WholeNumber<F> n;
  const F t = exp_reduce(-u.z, -u.z_low, n);
  const WholeNumber<F> normal = at_least(n, -120.0f);  // a GPU flushes other numbers, products too
  const F e = scale_one(t, normal);
  const near_one<F> w = below_one(e);
  const F r = w.r, r_low = w.low;
  const F third = v * u.square, twice = 2 * gelu_constants<float>::b, size = fma(twice, third, u.z);
  const F size_low = fma(twice, third, u.z - size) + u.z_low, product = size * r;
  const F y = fma(-product, r, r);
  const F y_low = fma(r_low, fma((F)-2, product, (F)1), -fma(size_low, r, fma(size, r, -product)));
  const F left = scale(fma(e, y, e * r * y_low), n - normal), right = 1 - left;
  return keep_nan(x, d * choose(x < 0, left, right));
}

/// Phi(x) + x phi(x) is e^(-t^2 / 2) (R(t) - t / sqrt(2 pi)) at x = -t, and 1 minus that at t. R as in erf.h, in two parts.
OG_FN double gelu_erf_slope(double x, double d) {
  using c = derivative_constants<double>;
  const double t = at_most(abs(x), c::normal_end);
  const double k = tail_center(t);
  const double p = t + k, p_low = t - (p - k);
  const double w = inverse(p);
  const double w_error = fma(-w, p_low, fma(-w, p, 1.0));
  const double g = tail_shape(fma(-2 * k, fma(w, w_error, w), 1.0));
  const double ratio = g * w, ratio_low = fma(ratio, w_error, fma(g, w, -ratio));
  const double h = fma(-t, c::density, ratio) + fma(-t, c::density_low, ratio_low);
  const bell<double> v = bell_of(t);
  const double y = fma(h, v.e, h);
  const double right = fma(-y, pow2(at_least(v.n, c::smallest_power)), 1.0);
  const bool left = x < 0;
  return keep_nan(x, times_power(d, left ? y : right, left ? v.n : 0.0));
}
/// In float, by one quotient. The derivative is a float, and 0 or 1 above the end.
template <class F, if_float<F> = 0> OG_FN F gelu_erf_slope(F x, F d) {
  const F t = size_up_to(x, 14.875f);
  const bell<F> v = bell_of(t);
  const F h = tail_slope_ratio(t), y = fma(h, v.e, h) * v.power;
  return d * choose(x < 0, y * (F)0x1p-64f, fma(y, (F)-0x1p-64f, (F)1));
}

/// T + x T', T = n / (n + 2), n = e^x (e^x + 2). With e = e^-|x| and w = 1 / D it is
///   e w ((2 + e) + 4x (1 + e) w),         D = 2 + e (2 + e),       for x < 0,
///   w ((1 + 2e) + 4x e^2 (1 + e) w),      D = 1 + 2e (1 + e),      for x >= 0.
/// On the left the terms nearly cancel; w and its factors are carried in two parts.
OG_FN double mish_slope_of(double x, double d) {
  const double end = derivative_constants<double>::end;
  const double bounded = at_most(at_least(x, end), -end);
  const decay<double> v = decay_of(bounded);
  const bool left = x < 0;
  const double e = v.e;
  const double one = 1 + e, one_low = e - (one - 1);
  const double two = 2 + e, two_low = e - (two - 2);
  const double factor = select(left, e, 2 * e), term = select(left, 2.0, 1.0);
  const double times = select(left, two, one), times_low = select(left, two_low, one_low);
  const double below = fma(factor, times, term);
  const double below_low = fma(factor, times, term - below) + factor * times_low;
  const double w = divide(1.0, below);
  const double w_low = w * fma(-w, below_low, fma(-w, below, 1.0));
  const double u = one * w, u_low = fma(one, w, -u) + fma(one, w_low, one_low * w);
  const double steep = 4 * bounded * select(left, 1.0, e * e);
  const double right = fma(2.0, e, 1.0);
  const double first = select(left, two, right), first_low = select(left, two_low, 2 * e - (right - 1));
  const double product = steep * u;
  const double g = first + product;
  const double g_low = ((first - g) + product) + (fma(steep, u, -product) + fma(steep, u_low, first_low));
  const double above = select(left, 1 + v.t, 1.0), above_low = select(left, v.t - (above - 1), 0.0);
  const double q = above * w, q_low = fma(above, w, -q) + fma(above, w_low, above_low * w);
  return keep_nan(x, times_power(d, fma(q, g, fma(q, g_low, q_low * g)), select(left, v.n, 0.0)));
}

/// In float, on the left, where e is small: e N / M with N = 1 + x + e (3/2 + x + e u), M = 1 + e (2 + e (2 + e u)),
/// u = 1 + e / 4. M is a square, but this form rounds once. 2^64 times as large until the end. From -0.6 on it is 1/2
/// and (e N - M / 2) / M, with no cancellation that matters; 1 from 20 on.
template <class F, if_float<F> = 0> OG_FN F mish_slope_in_float(F x, F d) {
  const F bounded = at_most(at_least(x, (F)-120.0f), (F)20.0f);
  const moved_power<F> v = moved_power_of<64>(bounded, (F)-0.0f);
  const F near = v.power * (F)0x1p-64f, e = fma(near, v.t, near), u = fma(e, (F)0.25f, (F)1);
  const F left = fma(e, fma(e, u, bounded + (F)1.5f), bounded + 1);
  const F right = fma(e, fma(e, fma(e, fma(e, (F)0.125f, (F)0.5f), bounded + (F)0.5f), bounded), (F)-0.5f);
  const mask<F> is_right = x > (F)-0.6f;
  const F y = quotient(select(is_right, right, fma(left, v.t, left)), fma(e, fma(e, fma(e, u, (F)2), (F)2), (F)1));
  return keep_nan(x, d * choose(is_right, y + (F)0.5f, y * v.power * (F)0x1p-64f));
}

#if OG_TABLES
/// d y 2^n for n <= 0, where y 2^max(n, -8) is at most about 1: rounded twice at most, and without overflow.
template <class F> OG_FN F times_far(F d, F y, F n) {
  const F near = at_least(n, (F)-8);
  return scale_far(d, n - near) * scale(y, near);
}
/// Like gelu_erf_slope, with the factor of e^(-t^2 / 2) from a table: nothing cancels in it.
template <class F, if_float<F> = 0> OG_FN F gelu_erf_backward(F x, F d) {
  const F t = at_most(abs(x), (F)derivative_constants<F>::normal_end);
  const bell<F> v = bell_of(t);
  const F bounded = size_within(t, (F)14.875f);  // above, the factor of e^(-t^2 / 2) does not matter
  const F h = by_table(tail_slope, interval_of(bounded), bounded), y = fma(h, v.e, h);
  const mask<F> left = x < 0;
  const F right = fma(-y, pow2(at_least(v.n, (F)-100)), (F)1);
  return keep_nan(x, times_far(d, choose(left, y, right), choose(left, v.n, (F)0)));
}
/// From a table, times e^min(x, 0).
template <class F, if_float<F> = 0> OG_FN F mish_backward(F x, F d) {
  const F end = derivative_constants<F>::end;
  const F size = at_most(abs(x), -end);
  F n;
  const F e = exp_reduce(smaller(at_least(x, end), (F)0), n);
  const F g = by_table(mish_slope, interval_of(size, x), size);
  return keep_nan(x, times_far(d, fma(g, e, g), n));
}
OG_FN double gelu_erf_backward(double x, double d) { return gelu_erf_slope(x, d); }
OG_FN double mish_backward(double x, double d) { return mish_slope_of(x, d); }
#else
template <class T> OG_FN T gelu_erf_backward(T x, T d) { return gelu_erf_slope(x, d); }
template <class F, if_float<F> = 0> OG_FN F mish_backward(F x, F d) { return mish_slope_in_float(x, d); }
OG_FN double mish_backward(double x, double d) { return mish_slope_of(x, d); }
#endif

}  // namespace og
