#pragma once
#include "config.h"
#include "exp.h"

// erf and the tail of the normal distribution, float and double.
//
// The tail is Q(t) = Phi(-t) = e^(-t^2/2) R(t), R(t) = erfcx(t / sqrt2) / 2. As Shepherd and Laframboise (1981) do for
// erfcx, (1 + c t) R(t) is a polynomial in q = (t - k) / (t + k), smooth and between 0.4 and 0.63, so that one polynomial
// serves from 0 to the underflow of Q. Own weighted fits: error 2^-27.0 (float, k = 3, t <= 14.6; c was searched so that
// the constant term is nearly a float) and 2^-55.5 (double, k = 6, c = 1.25, t <= 39).

namespace og {

OG_FN float tail_shape(float t) {
  const float q = divide(t - 3, t + 3);
  float g = 0x1.80852ap-15f;
  g = fma(g, q, 0x1.5a944ap-17f);
  g = fma(g, q, -0x1.ee4fdep-12f);
  g = fma(g, q, -0x1.631ad6p-12f);
  g = fma(g, q, 0x1.89a742p-9f);
  g = fma(g, q, 0x1.2d4ea8p-10f);
  g = fma(g, q, -0x1.75be36p-6f);
  g = fma(g, q, 0x1.742eb4p-5f);
  g = fma(g, q, -0x1.13ee42p-6f);
  g = fma(g, q, -0x1.8a0e22p-4f);
  return fma(g, q, 0x1.f2d094p-2f);
}
OG_FN float tail_divisor(float t) { return fma(0x1.00cp0f, t, 1.0f); }
OG_FN double tail_divisor(double t) { return fma(1.25, t, 1.0); }

OG_FN double tail_shape(double t) {
  const double q = divide(t - 6, t + 6);
  double g = 0x1.01aaa02f8d142p-29;
  g = fma(g, q, 0x1.b8b2de108b108p-29);
  g = fma(g, q, -0x1.5d14f309b301ep-26);
  g = fma(g, q, -0x1.898dc3f228aafp-26);
  g = fma(g, q, 0x1.71a59829138a5p-23);
  g = fma(g, q, -0x1.260d19d185ebap-26);
  g = fma(g, q, -0x1.57460e1d92475p-20);
  g = fma(g, q, 0x1.4366e4b8b5635p-19);
  g = fma(g, q, 0x1.6a2ebd3d971ffp-18);
  g = fma(g, q, -0x1.1fd76cf1ad9b6p-15);
  g = fma(g, q, 0x1.b7513318c371cp-15);
  g = fma(g, q, 0x1.32bf565eb67d4p-13);
  g = fma(g, q, -0x1.2892b4e39af42p-10);
  g = fma(g, q, 0x1.0117e27fbd7a8p-8);
  g = fma(g, q, -0x1.3d2b7c9ccd7eep-7);
  g = fma(g, q, 0x1.3387e1297ab8ep-6);
  g = fma(g, q, -0x1.e2974d93fb322p-6);
  g = fma(g, q, 0x1.2f2378afd7a49p-5);
  g = fma(g, q, -0x1.19a9b75bc4e67p-5);
  g = fma(g, q, 0x1.ebd7218a75924p-7);
  g = fma(g, q, 0x1.7dda28541e872p-6);
  g = fma(g, q, -0x1.352d288bfd30cp-4);
  return fma(g, q, 0x1.19eb69542c75p-1);
}

OG_FN float tail_end(float) { return 15.0f; }
OG_FN double tail_end(double) { return 39.0; }

/// t * Phi(-t) for t >= 0, relative error a few ulp down to the smallest subnormal. The square keeps its low half: an error
/// in it would be multiplied by the square itself.
template <class T> OG_FN T tail_times(T t_any) {
  const T t = at_most(t_any, tail_end(t_any));
  const T square = t * t, square_low = fma(t, t, -square);
  T n;
  const T e = exp_reduce((T)-0.5 * square, (T)-0.5 * square_low, n);
  const T a = divide(t * tail_shape(t), tail_divisor(t));
  return scale(fma(a, e, a), n);
}

// erf on [0, 1]: x + x P(x^2), fit error 2^-29.2 and 2^-56.2.
OG_FN float erf_small(float x) {
  const float z = x * x;
  float p = 0x1.4c5e5p-14f;
  p = fma(p, z, -0x1.a519fp-11f);
  p = fma(p, z, 0x1.542ff6p-8f);
  p = fma(p, z, -0x1.b7fec4p-6f);
  p = fma(p, z, 0x1.ce2d52p-4f);
  p = fma(p, z, -0x1.81274p-2f);
  p = fma(p, z, 0x1.06eba8p-3f);
  return fma(p, x, x);
}
OG_FN double erf_small(double x) {
  const double z = x * x;
  double p = 0x1.2d511ebf71724p-34;
  p = fma(p, z, -0x1.47f48ddac9317p-30);
  p = fma(p, z, 0x1.fcf9004eca236p-27);
  p = fma(p, z, -0x1.5fa4a89ee2751p-23);
  p = fma(p, z, 0x1.b9f0232901e7ap-20);
  p = fma(p, z, -0x1.f4d3545ea86e5p-17);
  p = fma(p, z, 0x1.f9a3370b2bc03p-14);
  p = fma(p, z, -0x1.c02db4ac3feb8p-11);
  p = fma(p, z, 0x1.565bcd130164cp-8);
  p = fma(p, z, -0x1.b82ce312aee49p-6);
  p = fma(p, z, 0x1.ce2f21a0436ep-4);
  p = fma(p, z, -0x1.812746b0379fep-2);
  p = fma(p, z, 0x1.06eba8214db69p-3);
  return fma(p, x, x);
}

/// float above 1: log erfc is a polynomial (after N. Juffa's erff; own fit, error of erf 2^-31.9), erf is 1 up to 3.93.
OG_FN float erf(float x) {
  const float a = at_most(abs(x), 4.0f);
  float p = 0x1.6bf0bap-16f;
  p = fma(p, a, -0x1.ced89ap-12f);
  p = fma(p, a, 0x1.13928ap-8f);
  p = fma(p, a, -0x1.9d06ecp-6f);
  p = fma(p, a, 0x1.bc169ep-4f);
  p = fma(p, a, 0x1.44353ap-1f);
  p = fma(p, a, 0x1.212c18p+0f);
  p = fma(p, a, -0x1.8a9fe6p-13f);
  float n;
  const float t = exp_reduce(-p, n);
  const float large = 1 - pow2(n) * (1 + t);
  return copysign(a > 1 ? large : erf_small(a), x);
}
OG_FN double erf(double x) {
  const double a = at_most(abs(x), 6.0);
  const double t = a * 0x1.6a09e667f3bcdp+0;
  double n;
  const double e = exp_reduce(-a * a, n);
  const double upper = divide(2 * tail_shape(t), tail_divisor(t)) * pow2(n) * (1 + e);
  return copysign(a > 1 ? 1 - upper : erf_small(a), x);
}

}  // namespace og
