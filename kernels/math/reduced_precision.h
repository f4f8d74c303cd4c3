#pragma once
#include "math/activations.h"
#include "config.h"
#include "math/tables.h"

// Functions for f16 and bf16 on a CPU with AVX-512: some functions of namespace og in f32, only as accurate as rounding
// to 16 bits requires, which is 2^-17.6 of the result for 0.51 ulp of f16, and 2^-14.6 for bf16. (cuda/fast_math.h is
// the same for a GPU, which has other instructions.) All other functions of og are in og::reduced too, unchanged.
// Without vscalefps, the far powers of two of these forms cost more than they save: up to twice the time of the f32
// forms with AVX2.

#if OG_TABLES

namespace og {
namespace reduced {

using namespace og;

/// Rounds each factor once, instead of a sixth that is rounded once.
template <class F> OG_FN F hard_swish(F x) {
  const F bounded = larger((F)-3.0f, x), gate = smaller((F)6.0f, bounded + 3);
  return bounded * (F)0x1.555556p-3f * gate;
}

/// Like og::bell_of, with one degree less and not in two parts: error 2^-18.4.
template <class F> OG_FN bell<F> bell_of(F t) {
  constexpr float magic = 0x1.8p23f + 191.0f;
  const F square = t * t, k = fma(square, (F)-0x1.715476p-1f, (F)magic), n = k - magic;
  const F r = fma(n, (F)0x1.62e43p+0f, square);  // t^2 / 2 + n ln2, twice
  F p = 0x1.541452p-9f;
  p = fma(p, r, (F)-0x1.57ce96p-6f);
  p = fma(p, r, (F)0x1.0003f4p-3f);
  p = fma(p, r, (F)-0x1.fffba8p-2f);
  return {n, p * r, power_of_bits(k)};
}
template <class F> OG_FN F gelu_erf_backward(F x, F d) {
  const F t = at_most(abs(x), (F)14.875f);  // 0 above, unless d is infinite
  const bell<F> v = reduced::bell_of(t);
  const F h = by_table(tail_slope, interval_of(t), t), y = scale_far(fma(h, v.e, h), v.n);
  return keep_nan(x, d * choose(x < 0, y, 1 - y));
}

/// x m / (m + 2), m = e (e + 2), e = e^x = 2^k (1 + r p), error of that 2^-23.4. Where e is below 2^-64, m is 2e, and the rest
/// of its exponent is applied at the end.
template <class F> OG_FN F mish(F x) {
  constexpr float magic = 0x1.8p23f + 127.0f;
  const F bounded = larger((F)-120.0f, x);
  const F k = fma(smaller((F)40.0f, bounded), (F)0x1.715476p0f, (F)magic), n = k - magic;
  const F r = fma(n, (F)-0x1.62e43p-1f, smaller((F)40.0f, bounded));
  F p = 0x1.0fa0c6p-7f;
  p = fma(p, r, (F)0x1.573a1ap-5f);
  p = fma(p, r, (F)0x1.555a7ep-3f);
  p = fma(p, r, (F)0x1.fffdc6p-2f);
  p = fma(p, r, (F)0x1.fffff6p-1f);
  const F least = larger((F)(magic - 64), k), power = power_of_bits(least);
  const F e = fma(power, p * r, power), m = e * (e + 2);
  return scale(bounded * divide(m, m + 2), k - least);
}

/// Like og::mish_backward, with the exponential of gelu_erf_backward.
template <class F> OG_FN F mish_backward(F x, F d) {
  constexpr float magic = 0x1.8p23f;
  const F size = at_most(abs(x), (F)201.0f), z = smaller(larger((F)-201.0f, x), (F)0);
  const F k = fma(z, (F)0x1.715476p0f, (F)magic), n = k - magic;
  const F r = fma(n, (F)-0x1.62e43p-1f, z);
  F p = 0x1.541452p-5f;
  p = fma(p, r, (F)0x1.57ce96p-3f);
  p = fma(p, r, (F)0x1.0003f4p-1f);
  p = fma(p, r, (F)0x1.fffba8p-1f);
  const F g = by_table(mish_slope, interval_of(size, x), size);
  return keep_nan(x, d * scale_far(fma(g, p * r, g), n));
}

/// 2^r for |r| <= 1/2, error 2^-23.4: 2^-18 would be enough for 16 bits, but not where a sum with it cancels.
template <class F, if_float<F> = 0> OG_FN F power_of_rest(F r) {
  F p = 0x1.5bba1p-10f;
  p = fma(p, r, (F)0x1.3cea88p-7f);
  p = fma(p, r, (F)0x1.c6b752p-5f);
  p = fma(p, r, (F)0x1.ebf9bcp-3f);
  p = fma(p, r, (F)0x1.62e42ap-1f);
  return fma(p, r, (F)1);
}

/// x e / (1 + e), e = e^z, for a z with the sign of x and |z| >= |x|: where e is subnormal, so is x e in bf16.
template <class F, if_float<F> = 0> OG_FN F gate(F x, F z) {
  const F y = smaller((F)20.0f, z) * (F)0x1.715476p0f, n = rint(y);
  const F e = scale_far(power_of_rest(y - n), n);
  return x * divide(e, e + 1);
}
template <class F> OG_FN F swish(F x) {
  const F bounded = larger((F)-110.0f, x);
  return gate(bounded, bounded);
}
template <class F> OG_FN F gelu_tanh(F x) {
  using c = gelu_constants<F>;
  const F left = larger((F)c::left, x), v = smaller((F)c::right, left);
  return gate(left, v * fma((F)c::b, v * v, (F)c::a));
}

/// x / (1 + e^-z) for any z, like og::swish_of_product: e^-z is limited to 2^100, the rest of it is applied at the end.
template <class F, if_float<F> = 0> OG_FN F gate_of_product(F x, F z) {
  constexpr float end = -190.0f;
  const F bounded = larger((F)end, smaller((F)20.0f, z)), y = bounded * (F)-0x1.715476p0f, n = rint(y);
  const F least = smaller(n, (F)100.0f), numerator = choose(bounded == end, copysign((F)0, x), x);
  return scale_far(divide(numerator, scale_far(power_of_rest(y - n), least) + 1), least - n);
}
template <class F> OG_FN F swish(F x, F a) { return gate_of_product(x, a * choose(a == 0, (F)0, x)); }
template <class F> OG_FN F swish(F x, F a, F b) {
  return gate_of_product(x, b * (a * choose(a == 0 || b == 0, (F)0, x)));
}

/// e^z = e = 2^n part, and r = 1 / (1 + e).
template <class F> struct reduced_power {
  F n, part, e, r;
};
template <class F> OG_FN reduced_power<F> reduced_power_of(F z) {
  const F y = z * (F)0x1.715476p0f, n = rint(y);
  const F part = power_of_rest(y - n), e = scale_far(part, n);
  return {n, part, e, divide((F)1, e + 1)};
}
template <class F> OG_FN reduced_power<F> reduced_decay_of(F z) { return reduced_power_of(-smaller((F)200.0f, abs(z))); }
template <class F> OG_FN F sigmoid(F x) {
  const reduced_power<F> v = reduced_decay_of(x);
  return keep_nan(x, choose(x < 0, v.e * v.r, v.r));
}
template <class F> OG_FN F sigmoid(F x, F a) { return reduced::sigmoid(a * x); }
/// It begins like sigmoid, which is often in the same kernel. Half of `part`, which may exceed 1, as d may be the
/// largest number.
template <class F, if_float<F> = 0> OG_FN F sigmoid_slope(F z, F d, F factor) {
  const reduced_power<F> v = reduced_decay_of(z);
  return keep_nan(z, scale_far(d * (factor * ((F)0.5f * v.part * v.r * v.r)), v.n + 1));
}
template <class F> OG_FN F sigmoid_backward(F x, F d) { return reduced::sigmoid_slope(x, d, (F)1); }
template <class F> OG_FN F sigmoid_backward(F x, F d, F a) { return reduced::sigmoid_slope(a * x, d, a); }

/// f = x sigmoid(z): f' = s (1 + m (1 - s)), m = x dz/dx, s = e r and 1 - s = r = 1 / (1 + e), e = e^z: nothing cancels
/// beyond what the condition permits (see derivatives.h). The power of two of a small e goes to d. z and m are limited.
template <class F, if_float<F> = 0> OG_FN F slope_of_gate(F z, F m, F d) {
  const reduced_power<F> v = reduced_power_of(z);
  const mask<F> left = z < 0;
  return scale_far(d, choose(left, v.n, (F)0)) * (fma(m, v.r, (F)1) * (v.r * choose(left, v.part, v.e)));
}
template <class F, if_float<F> = 0> OG_FN F within_gate(F z) { return larger((F)-200.0f, smaller((F)24.0f, z)); }
template <class F, if_float<F> = 0> OG_FN F swish_slope(F z, F d) {
  return slope_of_gate(within_gate(z), within_gate(z), d);
}
/// swish in a kernel that also has its slope.
template <class F> OG_FN F swish_beside_slope(F x) {
  const reduced_power<F> v = reduced_power_of(within_gate(x));
  return larger((F)-200.0f, x) * (v.e * v.r);
}
template <class F> OG_FN F swish_backward(F x, F d) { return reduced::swish_slope(x, d); }
template <class F> OG_FN F swish_backward(F x, F d, F a) { return reduced::swish_slope(a * choose(a == 0, (F)0, x), d); }
template <class F> OG_FN F swish_backward(F x, F d, F a, F b) {
  return reduced::swish_slope(b * (a * choose(a == 0 || b == 0, (F)0, x)), d);
}
template <class F> OG_FN F gelu_tanh_backward(F x, F d) {
  using c = gelu_constants<F>;
  const F v = larger((F)-16.0f, smaller((F)6.0f, x));  // 2u from -318 to 25
  const F cubic = c::b * (v * v), slope = c::a + cubic;
  return slope_of_gate(v * slope, v * fma((F)2, cubic, slope), d);
}

}  // namespace reduced
}  // namespace og

#else
namespace og {
namespace reduced {
using namespace og;
}  // namespace reduced
}  // namespace og
#endif
