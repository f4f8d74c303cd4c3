#pragma once
#include "activations.h"
#include "config.h"
#include "tables.h"

// What f16 and bf16 are computed with on the CPU: a few functions of namespace og in f32, but no nearer to the truth than
// rounding to 16 bits asks for, which is 2^-17.6 of the result for 0.51 ulp of f16, and 2^-14.6 for bf16. (fast.h is the same
// for a GPU, whose instructions are others.) Everything else of og is found in og::brief too, as it is.

#if OG_TABLES

namespace og {
namespace brief {

using namespace og;

/// One rounding of each factor instead of a sixth that is rounded once.
template <class F> OG_FN F hard_swish(F x) {
  const F bounded = larger((F)-3.0f, x), gate = smaller_number((F)6.0f, bounded + 3);
  return bounded * (F)0x1.555556p-3f * gate;
}

/// As tail_by_table: a degree less in both, error 2^-18.4, and nothing in two parts.
template <class F> OG_FN F gelu_erf(F x) {
  const F t = size_within(x, (F)14.875f), square = t * t;
  constexpr float magic = 0x1.8p23f + 191.0f;
  const F k = fma(square, (F)-0x1.715476p-1f, (F)magic), n = k - magic;
  const F r = fma(n, (F)0x1.62e43p+0f, square);  // t^2 / 2 + n ln2, twice
  F p = 0x1.541452p-9f;
  p = fma(p, r, (F)-0x1.57ce96p-6f);
  p = fma(p, r, (F)0x1.0003f4p-3f);
  p = fma(p, r, (F)-0x1.fffba8p-2f);
  const F scaled = t * power_of_bits(k);
  return larger((F)-0.0f, x) - divide(fma(scaled, p * r, scaled), by_table<1>(inverse_tail, interval_of(t), t));
}

/// x m / (m + 2), m = e (e + 2), e = e^x = 2^k (1 + r p), error of that 2^-23.4. Where e is below 2^-64, m is 2e, and the rest
/// of its exponent is applied at the end.
template <class F> OG_FN F mish(F x) {
  constexpr float magic = 0x1.8p23f + 127.0f;
  const F bounded = larger((F)-120.0f, x);
  const F k = fma(smaller_number((F)40.0f, bounded), (F)0x1.715476p0f, (F)magic), n = k - magic;
  const F r = fma(n, (F)-0x1.62e43p-1f, smaller_number((F)40.0f, bounded));
  F p = 0x1.0fa0c6p-7f;
  p = fma(p, r, (F)0x1.573a1ap-5f);
  p = fma(p, r, (F)0x1.555a7ep-3f);
  p = fma(p, r, (F)0x1.fffdc6p-2f);
  p = fma(p, r, (F)0x1.fffff6p-1f);
  const F least = larger((F)(magic - 64), k), power = power_of_bits(least);
  const F e = fma(power, p * r, power), m = e * (e + 2);
  return scale(bounded * divide(m, m + 2), k - least);
}

}  // namespace brief
}  // namespace og

#else
namespace og {
namespace brief {
using namespace og;
}
}  // namespace og
#endif
