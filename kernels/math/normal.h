#pragma once
#include "config.h"
#include "math/erf.h"
#include "math/exp.h"
#include "math/log.h"

// erfc, erfcx, log_ndtr and the inverses erfinv and ndtri, as in torch.special and scipy, by the tail Q(t) = e^(-t^2/2)
// R(t) of erf.h. Computed in double; float rounds the double result once.

namespace og {

/// t R(t) sqrt(2 pi) for t >= 35, over s = 1 / t^2 (Abramowitz and Stegun 7.1.23); the first term left out is under
/// 2^-54.
OG_FN double mills_series(double s) {
  double p = fma(-11.0, s, 1.0);
  p = fma(-9 * s, p, 1.0);
  p = fma(-7 * s, p, 1.0);
  p = fma(-5 * s, p, 1.0);
  p = fma(-3 * s, p, 1.0);
  return fma(-s, p, 1.0);
}
/// R(t) = g(q) / (t + k) for t >= 0. Remainders correct q = (t - k) / (t + k) and the divisor.
OG_FN double mills_ratio(double t) {
  const double near = at_most(t, 35.0), k = tail_center(near);
  const double p = near + k, p_low = near - (p - k), m = near - k, m_low = near - (m + k);
  const double w = divide(1.0, p);
  const double q = m * w, q_low = fma(-q, p, m) + fma(-q, p_low, m_low);
  const double ratio = tail_shape(fma(q_low, w, q)) * fma(w, fma(-w, p_low, fma(-w, p, 1.0)), w);
  const double far = divide(0x1.9884533d43651p-2, t) * mills_series(divide(1.0, t * t));  // 1 / sqrt(2 pi)
  return t < 35 ? ratio : far;
}

OG_FN double erfc(double x) {
  const double a = at_most(abs(x), 28.0);  // 0 and 2 beyond
  const double square = a * a;
  double n;
  const double e = exp_reduce(-square, fma(-a, a, square), n);
  const double ratio = 2 * mills_ratio(a * 0x1.6a09e667f3bcdp+0);
  const double tail = scale_twice(fma(ratio, e, ratio), n);
  const double far = x < 0 ? 2 - tail : tail;
  return keep_nan(x, x < 0.75 && x > -1 ? 1 - erf_small(x) : far);
}

/// e^(x^2) erfc(x).
OG_FN double erfcx(double x) {
  const double a = abs(x);
  const double far = divide(0x1.20dd750429b6dp-1, a) * mills_series(divide(0.5, a * a));  // 1 / sqrt(pi)
  const double right = a < 24 ? 2 * mills_ratio(a * 0x1.6a09e667f3bcdp+0) : far;
  const double b = at_most(a, 27.0), square = b * b;  // infinite to the left of -26.7
  double n;
  const double e = exp_reduce(square, fma(b, b, -square), n);
  return keep_nan(x, x < 0 ? scale_twice(2 + 2 * e, n) - right : right);
}

/// log Phi(x): log R(t) - t^2 / 2 at -t, log(1 - Q(t)) at t.
OG_FN double log_ndtr(double x) {
  const double a = abs(x), t = at_most(a, 39.0);
  const double left = fma(-0.5 * a, a, log(mills_ratio(a)));
  const bell<double> u = bell_of(t);
  const double ratio = mills_ratio(t);
  const double right = log1p(-scale_twice(fma(ratio, u.e, ratio), u.n));
  return keep_nan(x, x < 0 ? left : right);
}

/// erfinv(y) for 0 <= y <= 1/2: eight terms of the series, then two steps of Halley's on erf(x) - y.
OG_FN double erfinv_center(double y) {
  const double z = y * y;
  double x = 0x1.2aba98b98c6bcp-5;
  x = fma(x, z, 0x1.5eeb1d488e312p-5);
  x = fma(x, z, 0x1.a7c85c89bb08bp-5);
  x = fma(x, z, 0x1.0a13189c6ef7ap-4);
  x = fma(x, z, 0x1.62847c47dda48p-4);
  x = fma(x, z, 0x1.053c2c0ab91c5p-3);
  x = fma(x, z, 0x1.db29fb2fee5e4p-3);
  x = fma(x, z, 0x1.c5bf891b4ef6bp-1) * y;
  for (int i = 0; i < 2; i++) {
    const double u = (erf_small(x) - y) * 0x1.c5bf891b4ef6bp-1 * exp(x * x);
    x -= divide(u, fma(x, u, 1.0));
  }
  return x;
}
/// The t >= 0 with Q(t) = p, for 0 < p <= 1/4: Abramowitz and Stegun 26.2.23, then three steps of Halley's on
/// (Q(t) - p) / phi(t) = sqrt(2 pi) (R(t) - p e^(t^2/2)).
OG_FN double tail_quantile(double p) {
  const double l = log(p);
  const double r = sqrt(-2 * l);
  const double above = fma(fma(0.010328, r, 0.802853), r, 2.515517);
  double t = r - divide(above, fma(fma(fma(0.001308, r, 0.189269), r, 1.432788), r, 1.0));
  for (int i = 0; i < 3; i++) {
    const double u = 0x1.40d931ff62706p+1 * (mills_ratio(t) - exp(fma(0.5 * t, t, l)));
    t += divide(u, fma(-0.5 * u, t, 1.0));
  }
  return t;
}

/// The x with erf(x) = y: infinite at 1 and -1, NaN beyond.
OG_FN double erfinv(double y) {
  const double a = abs(y);
  const double outside = a == 1 ? infinity<double>() : quiet_nan<double>();
  const bool inside = a < 1;
  const double t = tail_quantile(inside && a > 0.5 ? 0.5 * (1 - a) : 0.25);
  const double far = inside ? t * 0x1.6a09e667f3bcdp-1 : outside;
  return keep_nan(y, copysign(a > 0.5 ? far : erfinv_center(a), y));
}

/// The x with Phi(x) = p: -inf at 0, inf at 1, NaN beyond.
OG_FN double ndtri(double p) {
  const double h = p - 0.5, a = abs(h);
  const double rest = h < 0 ? p : 1 - p;
  const double outside = rest == 0 ? infinity<double>() : quiet_nan<double>();
  const bool inside = rest > 0;
  const double t = tail_quantile(inside && a > 0.25 ? rest : 0.25);
  const double far = inside ? t : outside;
  return keep_nan(p, copysign(a > 0.25 ? far : 0x1.6a09e667f3bcdp+0 * erfinv_center(2 * a), h));
}

OG_FN float erfc(float x) { return (float)erfc((double)x); }
OG_FN float erfcx(float x) { return (float)erfcx((double)x); }
OG_FN float log_ndtr(float x) { return (float)log_ndtr((double)x); }
OG_FN float erfinv(float x) { return (float)erfinv((double)x); }
OG_FN float ndtri(float x) { return (float)ndtri((double)x); }

}  // namespace og
