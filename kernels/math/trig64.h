#pragma once
#include "config.h"

// sin, cos and tan of a double. Up to 2^31 the argument is reduced by three 53-bit pieces of pi/2 (Cody and Waite), the
// second one in double-double: about 2^-130 absolute error, more than the double closest to a multiple of pi/2 needs.
// Beyond, 192 bits of 2/pi starting where multiples of 4 end are multiplied by the significand (Payne and Hanek).

namespace og {

/// A reduced angle high + low, |high| <= pi/4 and a little more.
struct angle64 {
  double high, low;
  u32 quadrant;
};

#if OG_DEVICE
OG_FN u64 multiply_high(u64 a, u64 b) { return __umul64hi(a, b); }
#else
OG_FN u64 multiply_high(u64 a, u64 b) { return (u64)(((unsigned __int128)a * b) >> 64); }
#endif

/// x >= 2^31, finite.
OG_SLOW angle64 reduce_large(double x) {
  // One word of zeros, then the first 1280 bits of 2/pi (mpmath).
  constexpr u64 two_over_pi[21] = {
      0,
      0xa2f9836e4e441529ull, 0xfc2757d1f534ddc0ull, 0xdb6295993c439041ull, 0xfe5163abdebbc561ull,
      0xb7246e3a424dd2e0ull, 0x06492eea09d1921cull, 0xfe1deb1cb129a73eull, 0xe88235f52ebb4484ull,
      0xe99c7026b45f7e41ull, 0x3991d639835339f4ull, 0x9c845f8bbdf9283bull, 0x1ff897ffde05980full,
      0xef2f118b5a0a6d1full, 0x6d367ecf27cb09b7ull, 0x4f463f669e5fea2dull, 0x7527bac7ebe5f17bull,
      0x3d0739f78a5292eaull, 0x6bfb5fb11f8d5d08ull, 0x56033046fc7b6babull, 0xf0cfbc209af4361dull};
  const int exponent = (int)(bits(x) >> 52) - 1075;  // x = significand * 2^exponent
  const u64 significand = (bits(x) & 0xfffffffffffffull) | 0x10000000000000ull;
  const int start = exponent + 62;  // bit of the table that weighs 2 once multiplied
  const int word = start >> 6, shift = start & 63;
  u64 window[3];
  for (int i = 0; i < 3; i++) {
    const u64 next = shift == 0 ? 0 : two_over_pi[word + i + 1] >> (64 - shift);
    window[i] = (two_over_pi[word + i] << shift) | next;
  }
  // significand * window mod 2^192: two bits of quadrant, then the fraction.
  u64 p0 = significand * window[2];
  const u64 m = significand * window[1];
  u64 p1 = multiply_high(significand, window[2]) + m;
  u64 p2 = multiply_high(significand, window[1]) + significand * window[0] + (p1 < m ? 1 : 0);
  u32 quadrant = (u32)(p2 >> 62);
  p2 = (p2 << 2) | (p1 >> 62);
  p1 = (p1 << 2) | (p0 >> 62);
  const bool negative = (p2 >> 63) != 0;  // fractions from 1/2 count down from the next quadrant
  if (negative) {
    quadrant++;
    p1 = ~p1;
    p2 = ~p2;
  }
  // 128 bits as a sum of four exact doubles, from the top.
  const double a = (double)(p2 >> 32) * 0x1p-32, b = (double)(p2 & 0xffffffffu) * 0x1p-64;
  const double c = (double)(p1 >> 32) * 0x1p-96, d = (double)(p1 & 0xffffffffu) * 0x1p-128;
  const double ab = a + b;
  const double rest = ((a - ab) + b) + (c + d);
  const double f = ab + rest;
  const double f_low = (ab - f) + rest;
  const double high = f * 0x1.921fb54442d18p+0;
  const double low = fma(f, 0x1.921fb54442d18p+0, -high) + fma(f, 0x1.1a62633145c07p-54, f_low * 0x1.921fb54442d18p+0);
  return {negative ? -high : high, negative ? -low : low, quadrant};
}

/// |x| for x finite; infinity and NaN give NaN.
OG_FN angle64 reduce_angle(double magnitude) {
  if (magnitude >= 0x1p31) {
    if (magnitude < infinity<double>()) return reduce_large(magnitude);
    return {quiet_nan<double>(), 0, 0};
  }
  const double magic = 0x1.8p52;
  const double shifted = fma(magnitude, 0x1.45f306dc9c883p-1, magic);
  const double n = shifted - magic;
  const double r = fma(n, -0x1.921fb54442d18p+0, magnitude);  // exact
  const double w = n * 0x1.1a62633145c07p-54;
  const double w_low = fma(n, 0x1.1a62633145c07p-54, -w);
  const double high = r - w;
  const double back = high - r;  // two-sum: n = 1 may leave r smaller than w
  const double low = (((r - (high - back)) - (w + back)) - w_low) + n * 0x1.f1976b7ed8fbcp-110;
  return {high, low, (u32)bits(shifted)};
}

// Own minimax fits on |r| <= pi/4, error 2^-58.0 (relative to r) and 2^-64.2; `low` enters by the first derivative.
OG_FN double sin_near_zero(double r, double low) {
  const double z = r * r;
  double s = 0x1.5d939636d766fp-33;
  s = fma(s, z, -0x1.ae5e687993efbp-26);
  s = fma(s, z, 0x1.71de357afc54cp-19);
  s = fma(s, z, -0x1.a01a019c1608ep-13);
  s = fma(s, z, 0x1.111111110f8a6p-7);
  s = fma(s, z, -0x1.5555555555549p-3);
  return r + fma(z * r, s, fma(z * -0.5, low, low));
}
OG_FN double cos_near_zero(double r, double low) {
  const double z = r * r;
  double c = -0x1.8fb16595c137ep-37;
  c = fma(c, z, 0x1.1ee9f1b984e35p-29);
  c = fma(c, z, -0x1.27e4f81349687p-22);
  c = fma(c, z, 0x1.a01a019cc0172p-16);
  c = fma(c, z, -0x1.6c16c16c15224p-10);
  c = fma(c, z, 0x1.555555555554cp-5);
  const double half = 0.5 * z;
  const double w = 1 - half;
  return w + (((1 - w) - half) + fma(z * z, c, -r * low));
}

OG_FN double sin_of_angle(angle64 a) {
  const double s = sin_near_zero(a.high, a.low), c = cos_near_zero(a.high, a.low);
  const double y = (a.quadrant & 1u) != 0 ? c : s;
  return (a.quadrant & 2u) != 0 ? -y : y;
}

OG_FN double sin(double x) {
  const double y = sin_of_angle(reduce_angle(abs(x)));
  return from_bits(bits(y) ^ (bits(x) & 0x8000000000000000ull));
}
OG_FN double cos(double x) {
  angle64 a = reduce_angle(abs(x));
  a.quadrant++;
  return sin_of_angle(a);
}
OG_FN double tan(double x) {
  const angle64 a = reduce_angle(abs(x));
  const double s = sin_near_zero(a.high, a.low), c = cos_near_zero(a.high, a.low);
  const bool odd = (a.quadrant & 1u) != 0;
  const double y = divide(odd ? -c : s, odd ? s : c);
  return from_bits(bits(y) ^ (bits(x) & 0x8000000000000000ull));
}

}  // namespace og
