#pragma once
#include "config.h"
#include "math/lanes.h"

// Steps of f32 that are exact, or rounded once, in as few instructions as a GPU needs: the same bits as the plain
// forms, for arguments of which more is known than a compiler can derive. A test runs them on a CPU
// (tests/cuda/test_exact.py).
//
// OG_GPU_FORMS: f32 as a GPU computes it, also on a CPU that stands in for one (-DOG_NO_TABLES).

#if OG_DEVICE || defined(OG_NO_TABLES)
#define OG_GPU_FORMS 1
#else
#define OG_GPU_FORMS 0
#endif

namespace og {

// ---- division ------------------------------------------------------------------------------------------------------

// IEEE division checks its operands first and jumps if they are not of medium size: a third of its instructions. From
// r, within an ulp of 1 / b, two steps give the rounded 1 / b, and four more the rounded a / b (Markstein, Computation
// of elementary functions on the IBM RISC System/6000, 1990). These signs keep -0.0.
OG_FN float mended_inverse(float b, float r) { return fma(r, fma(-b, r, 1.0f), r); }
OG_FN float mended_quotient(float a, float b, float r) {
  const float w = mended_inverse(b, r), q = a * w;
  const float near = fma(fma(b, q, -a), -w, q);
  return fma(fma(b, near, -a), -w, near);
}

/// 1 / b for |b| from 2^-125 to 2^125.
template <class T> OG_FN T inverse(T b) { return divide((T)1, b); }
/// a / b for such b and a finite a that is 0 or above 2^-100 (its remainder must not be flushed), or any a if b is a
/// power of two; the quotient is not subnormal.
template <class T> OG_FN T quotient(T a, T b) { return divide(a, b); }
#if OG_DEVICE
OG_FN float near_inverse(float b) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(b));  // within an ulp, by the PTX ISA
  return r;
}
OG_FN float inverse(float b) { return mended_inverse(b, near_inverse(b)); }
OG_FN float quotient(float a, float b) { return mended_quotient(a, b, near_inverse(b)); }
#endif

// ---- limits --------------------------------------------------------------------------------------------------------

// The larger and the smaller of two values. The forms differ for NaN and zeros:
//
//   max, min            as ops (arith.h): NaN if either is, of two zeros the second
//   upper, lower        NaN if either is; -0.0 is less than 0.0: one instruction of a GPU
//   larger, smaller     the second if either is NaN or both are zeros: one instruction of a CPU (here, lanes.h)
//   at_least, at_most   a limit of one sign; keep_nan follows if a NaN may be lost: the cheapest form (exp.h)
//   Extreme             of a row (cpu/row_minmax.h)

#if OG_DEVICE
OG_FN float upper(float a, float b) {
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}
OG_FN float lower(float a, float b) {
  float y;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}
#else
OG_FN bool is_below(float a, float b) { return a < b || (a == b && bits(a) >> 31 > bits(b) >> 31); }
OG_FN float upper(float a, float b) { return a != a ? a : (b != b ? b : (is_below(a, b) ? b : a)); }
OG_FN float lower(float a, float b) { return a != a ? a : (b != b ? b : (is_below(b, a) ? b : a)); }
OG_FN float larger(float x, float y) { return x > y ? x : y; }
OG_FN float smaller(float x, float y) { return x < y ? x : y; }
#endif

// ---- whole exponents -----------------------------------------------------------------------------------------------

/// A whole number n, for 2^n, in the form that takes the fewest instructions: T itself, or this.
template <class T> struct whole_type { using type = T; };
template <class T> using WholeNumber = typename whole_type<T>::type;

#if OG_GPU_FORMS
/// 1.5 * 2^23 + n, as rounded to a whole number: n is in its low bits, and one shift and sum gives 2^n.
struct Exponent {
  float k;
  static constexpr float magic = 0x1.8p23f;
};
/// The difference of two exponents.
struct Steps { u32 n; };
template <> struct whole_type<float> { using type = Exponent; };

OG_FN float number_of(Exponent n) { return n.k - Exponent::magic; }
OG_FN Exponent at_least(Exponent n, float low) { return {upper(n.k, Exponent::magic + low)}; }
OG_FN Exponent at_most(Exponent n, float high) { return {lower(n.k, Exponent::magic + high)}; }
OG_FN Steps operator-(Exponent a, Exponent b) { return {bits(a.k) - bits(b.k)}; }
OG_FN float pow2(Exponent n) { return from_bits((bits(n.k) << 23) + 0x3f800000u); }
OG_FN float pow2(Steps n) { return from_bits((n.n << 23) + 0x3f800000u); }
OG_FN float scale(float x, Exponent n) { return x * pow2(n); }
OG_FN float scale(float x, Steps n) { return x * pow2(n); }
OG_FN float scale_one(float t, Exponent n) {
  const float power = pow2(n);
  return fma(power, t, power);
}
#endif

}  // namespace og
