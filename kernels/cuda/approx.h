#pragma once
#include "config.h"
#include "math/exp.h"
#include "math/log.h"

// The special-function unit of a GPU, one instruction each, with the error that the PTX ISA (9.0, "Floating Point
// Instructions") allows. Subnormal arguments and results are flushed to zeros of their sign.
//
// On a host, the exact value is used, plus OG_ERROR(number of the instruction, bits of the argument), a number from
// -1 to 1, times that error. A test defines OG_ERROR, and so covers the whole range of results that a GPU may give.

#ifndef OG_ERROR
#define OG_ERROR(which, bits) 0.0
#endif

namespace og {
namespace approx {

#if OG_DEVICE
/// 2^x
OG_FN float ex2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
/// 1 / x; 0 where |x| > 2^126.
OG_FN float rcp(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
/// a / b over the whole range.
OG_FN float div(float a, float b) {
  float y;
  asm("div.full.ftz.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}
/// log2 x
OG_FN float lg2(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
OG_FN float sqrt(float x) {
  float y;
  asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
OG_FN float rsqrt(float x) {
  float y;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
#else
enum { ex2_error, rcp_error, div_error, sqrt_error, rsqrt_error, lg2_error, instructions };

// Largest relative errors: 2 ulp, 1 ulp, 2 ulp, 2^-23, 2^-22.9, 2^-22; an ulp is at most 2^-23 of a number. The error
// of the logarithm is absolute between 1/2 and 2.
constexpr double largest_error[instructions] = {0x1p-22, 0x1p-23, 0x1p-22, 0x1p-23, 0x1.12p-23, 0x1p-22};

OG_FN float flushed(float x) { return abs(x) < smallest_normal<float>() ? copysign(0.0f, x) : x; }
OG_FN float near(double exact, int which, float argument) {
  return flushed((float)(exact * (1 + largest_error[which] * OG_ERROR(which, bits(argument)))));
}
OG_FN float ex2(float x) { return near(og::exp((double)flushed(x) * 0x1.62e42fefa39efp-1), ex2_error, x); }
OG_FN float rcp(float x) { return near(1.0 / (double)flushed(x), rcp_error, x); }
OG_FN float div(float a, float b) { return near((double)flushed(a) / (double)flushed(b), div_error, b); }
OG_FN float lg2(float x) {
  const double exact = og::log((double)flushed(x)) * 0x1.71547652b82fep0;
  const double unit = (x > 0.5f && x < 2) || abs(exact) == infinity<double>() ? 1.0 : exact;
  return flushed((float)(exact + unit * largest_error[lg2_error] * OG_ERROR(lg2_error, bits(x))));
}
OG_FN float sqrt(float x) { return near(og::sqrt((double)flushed(x)), sqrt_error, x); }
OG_FN float rsqrt(float x) { return near(1.0 / og::sqrt((double)flushed(x)), rsqrt_error, x); }
#endif

}  // namespace approx
}  // namespace og
