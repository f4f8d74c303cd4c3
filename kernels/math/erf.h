#pragma once
#include "config.h"
#include "math/exp.h"
#include "math/lanes.h"
#include "math/tables.h"

// erf and the tail of the normal distribution, float and double.
//
// The tail is Q(t) = Phi(-t) = e^(-t^2/2) R(t), R(t) = erfcx(t / sqrt2) / 2. For double, in the spirit of Shepherd and
// Laframboise (1981), (t + k) R(t) is a polynomial g in q = (t - k) / (t + k) = 1 - 2k / (t + k), so one polynomial and one
// division serve from 0 to the underflow of Q. Own weighted fit, relative error 2^-57.8 (t <= 39). k was searched so that the
// constant term is nearly a double; its few bits make t + k - k exact.
//
// For float, both short polynomials of a quotient are computed independently of each other and of the exponential: the
// dependency chain decides the time (decision 0020). Own weighted fits (Loeb's iteration with Lawson's weights).

namespace og {

OG_FN double tail_center(double) { return 0x1.53p+2; }
OG_FN double tail_shape(double q) {
  double g = 0x1.2e92863bcd69bp-33;
  g = fma(g, q, -0x1.28e9bfc23c4a5p-31);
  g = fma(g, q, -0x1.c678802acedabp-29);
  g = fma(g, q, 0x1.e69a3bd66c2ebp-29);
  g = fma(g, q, 0x1.dc4f73f56134bp-26);
  g = fma(g, q, -0x1.8380b19a696d2p-26);
  g = fma(g, q, -0x1.8a8210d0feda7p-23);
  g = fma(g, q, 0x1.c6d3c4c6d0e94p-23);
  g = fma(g, q, 0x1.33d1116503e15p-20);
  g = fma(g, q, -0x1.4080a8860e299p-19);
  g = fma(g, q, -0x1.96e2cc21d736ap-18);
  g = fma(g, q, 0x1.bde38374479f2p-16);
  g = fma(g, q, 0x1.7bf59062e7803p-18);
  g = fma(g, q, -0x1.fd9dec33e0982p-13);
  g = fma(g, q, 0x1.2930b5b7a3f14p-11);
  g = fma(g, q, 0x1.557c2eab578a5p-11);
  g = fma(g, q, -0x1.1d967a39daf66p-7);
  g = fma(g, q, 0x1.19e34eca7f8e3p-5);
  g = fma(g, q, -0x1.7c05a6553a4a8p-4);
  g = fma(g, q, 0x1.92bcc72cdb948p-3);
  g = fma(g, q, -0x1.62717f6250dbep-2);
  g = fma(g, q, 0x1.0a50f6e49beacp-1);
  g = fma(g, q, -0x1.5af97ca5d792ep-1);
  return fma(g, q, 0x1.8b49ffebb622bp-1);
}

/// e^(-t^2 / 2) = 2^n (1 + e) for 0 <= t <= 21, and power = 2^(n + 64) for t < 16.
template <class F> struct bell {
  F n, e, power;
};
template <class F, if_float<F> = 0> OG_FN bell<F> bell_of(F t) {
  // n + 64 with the bias of an exponent, at the end of the mantissa. n times 2 ln2, truncated to 16 bits, is exact, and
  // so is the square within the fma.
  constexpr float magic = 0x1.8p23f + 191.0f, ln4 = 0x1.62e4p+0f, ln4_low = 0x1.7f7d1cp-19f;
  const F k = fma(t * t, (F)-0x1.715476p-1f, (F)magic), n = k - magic;
  const F r = fma(n, (F)ln4_low, fma(t, t, n * (F)ln4));  // t^2 / 2 + n ln2, twice
  // The polynomial of exp_tail at -r / 2, as r P(r).
  F p = 0x1.6d5ceep-16f;
  p = fma(p, r, (F)-0x1.123bdep-12f);
  p = fma(p, r, (F)0x1.5554dap-9f);
  p = fma(p, r, (F)-0x1.55548ep-6f);
  p = fma(p, r, (F)0x1p-3f);
  p = fma(p, r, (F)-0.5f);
  return {n, p * r, power_of_bits(k)};
}
/// The same without the power. The square keeps its low half: an error in it would be multiplied by the square itself.
OG_FN bell<double> bell_of(double t) {
  const double minus_half = -0.5 * t, exponent = minus_half * t;
  double n;
  const double e = exp_reduce(exponent, fma(minus_half, t, -exponent), n);
  return {n, e, 0};
}
/// R(t) = g / (t + k). The exact remainders correct t + k, the division and the numerator. t R(t) is a + a_low.
struct mended_tail {
  double a, a_low;
};
OG_FN mended_tail tail_ratio_times(double t) {
  const double k = tail_center(t);
  const double p = t + k, p_low = t - (p - k);
  const double w = inverse(p);
  const double w_error = fma(-w, p_low, fma(-w, p, 1.0));
  const double g = tail_shape(fma(-2 * k, fma(w, w_error, w), 1.0));
  const double product = t * g, product_low = fma(t, g, -product);
  const double a = product * w;
  return {a, (fma(-a, p, product) + fma(-a, p_low, product_low)) * w};
}
/// t Phi(-t) for t >= 0, down to the smallest subnormal.
OG_FN double tail_times(double t_any) {
  const double t = at_most(t_any, 39.0);
  const mended_tail v = tail_ratio_times(t);
  const bell<double> u = bell_of(t);
  return scale_twice(v.a + fma(v.a, u.e, v.a_low), u.n);
}

/// 2^64 t Phi(-t) for 0 <= t <= 14.875, by 1 / R(t) = 2 + t (a + P / Q), error 2^-27.3: next to 0 the errors of P and Q
/// do not matter, and far from it a t dominates, which is exact in the fma. 3.0 ulp at most, over all floats.
template <class F, if_float<F> = 0> OG_FN F scaled_tail_times(F t) {
  const bell<F> v = bell_of(t);
  F p = -0x1.0389f6p-6f;
  p = fma(p, t, (F)-0x1.1ca98cp-3f);
  p = fma(p, t, (F)-0x1.0942a2p-1f);
  p = fma(p, t, (F)-0x1.d25726p-1f);
  F q = 0x1.03d6b4p-7f;
  q = fma(q, t, (F)0x1.44b2e2p-4f);
  q = fma(q, t, (F)0x1.7146e8p-2f);
  q = fma(q, t, (F)0x1.bcd336p-1f);
  q = fma(q, t, (F)1);
  const F s = fma((F)0x1.40d7f6p+1f, t, fma(quotient(p, q), t, (F)2));
  const F a = quotient(t, s);
  return fma(a, v.e, a) * v.power;
}
/// R(t) - t / sqrt(2 pi) = (b - a t) + P / Q for 0 <= t <= 14.875, error 2^-29.5 of the larger of this and its
/// condition, see derivatives.h. b is near R where the derivative of GELU is lowest, so the other terms are small
/// there: 2.7 ulp at most.
template <class F, if_float<F> = 0> OG_FN F tail_slope_ratio(F t) {
  F p = -0x1.96a12p-8f;
  p = fma(p, t, (F)-0x1.7fdb7ap-5f);
  p = fma(p, t, (F)-0x1.087a32p-3f);
  p = fma(p, t, (F)-0x1.a133d2p-4f);
  p = fma(p, t, (F)0x1.cp-3f);
  F q = 0x1.69f09ap-6f;
  q = fma(q, t, (F)0x1.94950ep-3f);
  q = fma(q, t, (F)0x1.7cad2ap-1f);
  q = fma(q, t, (F)0x1.5baa9ap+0f);
  q = fma(q, t, (F)1);
  return fma(t, (F)-0x1.98866ap-2f, (F)0x1.2p-2f) + quotient(p, q);
}

#if OG_TABLES
/// t Phi(-t) for t from 5.3 on, by (t R(t)) 2^-64 as a polynomial in 1 / t^2; error 2^-29.5. 0 from 14.875 on.
template <class F> OG_FN F far_tail(F t_any) {
  const F t = size_within(t_any, (F)14.875f);
  const bell<F> v = bell_of(t);
  const F s = divide((F)1, t * t);
  F g = -0x1.098fep-57f;
  g = fma(g, s, (F)0x1.0a2d88p-59f);
  g = fma(g, s, (F)-0x1.7400dp-62f);
  g = fma(g, s, (F)0x1.31ea84p-64f);
  g = fma(g, s, (F)-0x1.9881cep-66f);
  g = fma(g, s, (F)0x1.988452p-66f);
  return fma(g, v.e, g) * v.power;
}
#endif

// erf on [0, 1]: x + x P(x^2), fit error 2^-29.2 and 2^-56.2.
template <class F, if_float<F> = 0> OG_FN F erf_small(F x) {
  const F z = x * x;
  F p = 0x1.4c5e5p-14f;
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
template <class F, if_float<F> = 0> OG_FN F erf(F x) {
  const F a = at_most(abs(x), (F)4);
  F p = 0x1.6bf0bap-16f;
  p = fma(p, a, -0x1.ced89ap-12f);
  p = fma(p, a, 0x1.13928ap-8f);
  p = fma(p, a, -0x1.9d06ecp-6f);
  p = fma(p, a, 0x1.bc169ep-4f);
  p = fma(p, a, 0x1.44353ap-1f);
  p = fma(p, a, 0x1.212c18p+0f);
  p = fma(p, a, -0x1.8a9fe6p-13f);
  F n;
  const F t = exp_reduce(-p, n);
  const F large = 1 - scale(1 + t, n);
  return keep_nan(x, copysign(choose(a > 1, large, erf_small(a)), x));
}
OG_FN double erf(double x) {
  const double a = at_most(abs(x), 6.0);
  const double t = a * 0x1.6a09e667f3bcdp+0;
  const double k = tail_center(t), w = divide(1.0, t + k);
  double n;
  const double e = exp_reduce(-a * a, n);
  const double upper = 2 * w * tail_shape(fma(-2 * k, w, 1.0)) * pow2(n) * (1 + e);
  return keep_nan(x, copysign(a > 1 ? 1 - upper : erf_small(a), x));
}

}  // namespace og
