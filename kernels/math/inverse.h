#pragma once
#include "config.h"
#include "math/exp.h"
#include "math/log.h"

// Inverse trigonometric, hyperbolic and inverse hyperbolic functions: written for double; float computes in double and
// rounds once. Reductions are the classical ones (Cephes, fdlibm); polynomials are own minimax fits.

namespace og {

/// atan: to |r| <= tan(pi/8) by -1/x or (x-1)/(x+1), adding pi/2 or pi/4. Fit error 2^-63.8.
OG_FN double atan(double x) {
  const double a = abs(x);
  const bool large = a > 0x1.3504f333f9de6p+1, middle = a > 0x1.a827999fcef32p-2;
  const double up = large ? -1.0 : (middle ? a - 1 : a);
  const double down = large ? a : (middle ? a + 1 : 1.0);
  const double base = large ? 0x1.921fb54442d18p+0 : (middle ? 0x1.921fb54442d18p-1 : 0.0);
  const double base_low = large ? 0x1.1a62633145c07p-54 : (middle ? 0x1.1a62633145c07p-55 : 0.0);
  const double r = divide(up, down);
  const double z = r * r;
  double p = 0x1.f01b0a478bfb7p-7;
  p = fma(p, z, -0x1.11bcbf59bbea5p-5);
  p = fma(p, z, 0x1.70b3b6e6607a1p-5);
  p = fma(p, z, -0x1.ab6df3d1ad6eap-5);
  p = fma(p, z, 0x1.e16f525d66a6ep-5);
  p = fma(p, z, -0x1.110c4b87bcb34p-4);
  p = fma(p, z, 0x1.3b136b26bf977p-4);
  p = fma(p, z, -0x1.745d1491facadp-4);
  p = fma(p, z, 0x1.c71c71b5fb1dap-4);
  p = fma(p, z, -0x1.24924924721e1p-3);
  p = fma(p, z, 0x1.99999999995bfp-3);
  p = fma(p, z, -0x1.5555555555554p-2);
  return copysign(base + (fma(z * p, r, base_low) + r), x);
}

/// asin a = s + s z P(z) for z = s^2 <= 1/4; above 1/2, asin a = pi/2 - 2 asin(sqrt((1 - a) / 2)). Fit error 2^-59.8.
OG_FN double asin_half(double a, bool& reflected) {
  reflected = a > 0.5;
  const double z = reflected ? (1 - a) * 0.5 : a * a;
  const double s = reflected ? sqrt(z) : a;
  double p = 0x1.0bdcbdbbe65f6p-5;
  p = fma(p, z, -0x1.59de0ec76b78bp-6);
  p = fma(p, z, 0x1.64f0c9c15eec5p-6);
  p = fma(p, z, 0x1.e1937e44cd733p-9);
  p = fma(p, z, 0x1.61870be2f25fap-7);
  p = fma(p, z, 0x1.757832994daedp-7);
  p = fma(p, z, 0x1.ca21309064f1bp-7);
  p = fma(p, z, 0x1.1c49decc770b7p-6);
  p = fma(p, z, 0x1.6e8bdfdbf01c8p-6);
  p = fma(p, z, 0x1.f1c71a8bf4a04p-6);
  p = fma(p, z, 0x1.6db6db722a9fap-5);
  p = fma(p, z, 0x1.333333332df21p-4);
  p = fma(p, z, 0x1.5555555555578p-3);
  return fma(z * p, s, s);
}
OG_FN double asin(double x) {
  bool reflected;
  const double p = asin_half(abs(x), reflected);
  const double far = 0x1.921fb54442d18p+0 - (2 * p - 0x1.1a62633145c07p-54);
  return copysign(reflected ? far : p, x);
}
OG_FN double acos(double x) {
  bool reflected;
  const double p = asin_half(abs(x), reflected);
  const double near = 0x1.921fb54442d18p+0 - (copysign(p, x) - 0x1.1a62633145c07p-54);
  const double far = x > 0 ? 2 * p : 0x1.921fb54442d18p+1 - (2 * p - 0x1.1a62633145c07p-53);
  return reflected ? far : near;
}

// ---- hyperbolic ----------------------------------------------------------------------------------------------------

/// e^|x| / 2 without overflow before the result does.
OG_FN double half_exp(double a) {
  double n;
  const double t = exp_reduce(at_most(a, 712.0), n);
  return scale_exp(t, n - 1);
}
OG_FN double sinh(double x) {
  const double a = abs(x);
  const double m = expm1_in_range(at_most(a, 2.0));
  const double e = half_exp(a);
  const double near = 0.5 * (m + divide(m, m + 1));
  const double far = e - divide(0.25, e);
  return keep_nan(x, copysign(a < 1 ? near : far, x));
}
OG_FN double cosh(double x) {
  const double e = half_exp(abs(x));
  return keep_nan(x, e + divide(0.25, e));
}

// Above 2^28 the square root is |x| to the last bit: log(2|x|), as log1p(|x| - 1) + ln2 to share the code.
OG_FN double asinh(double x) {
  const double a = abs(x);
  const bool large = a > 0x1p28;
  const double y = log1p(large ? a - 1 : a + divide(a * a, 1 + sqrt(fma(a, a, 1.0))));
  return copysign(large ? y + 0x1.62e42fefa39efp-1 : y, x);
}
OG_FN double acosh(double x) {
  const bool large = x > 0x1p28;
  const double t = x - 1;
  const double y = log1p(large ? t : t + sqrt(fma(t, t, 2 * t)));
  const double inside = large ? y + 0x1.62e42fefa39efp-1 : y;
  return x < 1 ? quiet_nan<double>() : inside;
}
OG_FN double atanh(double x) {
  const double a = abs(x);
  return copysign(0.5 * log1p(divide(2 * a, 1 - a)), x);
}

OG_FN float atan(float x) { return (float)atan((double)x); }
OG_FN float asin(float x) { return (float)asin((double)x); }
OG_FN float acos(float x) { return (float)acos((double)x); }
OG_FN float sinh(float x) { return (float)sinh((double)x); }
OG_FN float cosh(float x) { return (float)cosh((double)x); }
OG_FN float asinh(float x) { return (float)asinh((double)x); }
OG_FN float acosh(float x) { return (float)acosh((double)x); }
OG_FN float atanh(float x) { return (float)atanh((double)x); }

}  // namespace og
