#pragma once
#include "config.h"

// sin, cos and tan of a float, right for every float up to 3.4e38 and free of branches and tables. The quotient
// x / (pi/2) is needed modulo 4 only. In double, x times a 28-bit or 27-bit piece of 2/pi is exact, and bits of 2/pi that
// make multiples of 4 for all floats of a range of exponents can be left out (Payne and Hanek 1983). Four such ranges cover
// the floats; each has three pieces of 2/pi, computed with mpmath to 1600 bits.

namespace og {

/// |x| = (quadrant + h) pi/2 with h about in [-1/2, 1/2], absolute error below 2^-57; only quadrant mod 4 is meaningful.
OG_FN double quarter_turns(float magnitude, u32& quadrant) {
  const double a = magnitude;
  const bool r1 = magnitude >= 0x1p51f, r2 = magnitude >= 0x1p77f, r3 = magnitude >= 0x1p103f;
  double c1 = r1 ? 0x1.727220ap-27 : 0x1.45f306cp-1;
  double c2 = r1 ? 0x1.29fc27p-56 : 0x1.c9c8828p-29;
  double c3 = r1 ? 0x1.5f47d4d377037p-82 : 0x1.29fc2757d1f53p-56;
  c1 = r2 ? 0x1.4a7f09cp-54 : c1;
  c2 = r2 ? 0x1.5f47d48p-82 : c2;
  c3 = r2 ? 0x1.4ddc0db629599p-108 : c3;
  c1 = r3 ? 0x1.abe8fa8p-79 : c1;
  c2 = r3 ? 0x1.a6ee06cp-107 : c2;
  c3 = r3 ? 0x1.b14acc9e21c82p-135 : c3;
  const double magic = 0x1.8p52;
  const double t1 = a * c1 + magic;
  const double t2 = a * c2 + magic;
  const double fraction = (a * c1 - (t1 - magic)) + (a * c2 - (t2 - magic));  // every operation exact
  const double t3 = fraction + magic;
  quadrant = (u32)bits(t1) + (u32)bits(t2) + (u32)bits(t3);
  return fma(a, c3, fraction - (t3 - magic));
}

// sin r and cos r for |r| <= pi/4 and a little more. Own minimax fits, error 2^-28.0 and 2^-33.1.
OG_FN float sin_near_zero(float r) {
  const float z = r * r;
  const float s = fma(fma(-0x1.9956bp-13f, z, 0x1.11077ep-7f), z, -0x1.555546p-3f);
  return fma(z * s, r, r);
}
OG_FN float cos_near_zero(float r) {
  const float z = r * r;
  const float c = fma(fma(0x1.99eacep-16f, z, -0x1.6c0c2ep-10f), z, 0x1.55554ap-5f);
  return fma(z * z, c, fma(z, -0.5f, 1.0f));
}

/// sin((quadrant + h) pi/2)
OG_FN float sin_of_turns(double h, u32 quadrant) {
  const float r = (float)(h * 0x1.921fb54442d18p+0);
  const float y = (quadrant & 1u) != 0 ? cos_near_zero(r) : sin_near_zero(r);
  return from_bits(bits(y) ^ ((quadrant & 2u) << 30));
}

// inf - inf is NaN on the way, so infinite arguments need no test: the quotient is inf * c1 - inf.
OG_FN float sin(float x) {
  u32 quadrant;
  const double h = quarter_turns(abs(x), quadrant);
  return from_bits(bits(sin_of_turns(h, quadrant)) ^ (bits(x) & 0x80000000u));
}
OG_FN float cos(float x) {
  u32 quadrant;
  const double h = quarter_turns(abs(x), quadrant);
  return sin_of_turns(h, quadrant + 1u);
}

/// The quotient is formed in double, so it rounds once; polynomials one term longer than those above suffice.
OG_FN float tan(float x) {
  u32 quadrant;
  const double r = quarter_turns(abs(x), quadrant) * 0x1.921fb54442d18p+0;
  const double z = r * r;
  double s = 0x1.71de357afc54cp-19;
  s = fma(s, z, -0x1.a01a019c1608ep-13);
  s = fma(s, z, 0x1.111111110f8a6p-7);
  s = fma(s, z, -0x1.5555555555549p-3);
  s = fma(z * s, r, r);
  double c = -0x1.27e4f81349687p-22;
  c = fma(c, z, 0x1.a01a019cc0172p-16);
  c = fma(c, z, -0x1.6c16c16c15224p-10);
  c = fma(c, z, 0x1.555555555554cp-5);
  c = fma(z * z, c, fma(z, -0.5, 1.0));
  const bool odd = (quadrant & 1u) != 0;
  const float y = (float)divide(odd ? -c : s, odd ? s : c);
  return from_bits(bits(y) ^ (bits(x) & 0x80000000u));
}

}  // namespace og
