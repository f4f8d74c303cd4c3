#pragma once
#include "math/activations.h"
#include "cuda/approx.h"
#include "math/arith.h"
#include "config.h"
#include "math/power.h"

// Functions for f16 and bf16 on a GPU: those of namespace og in approximate instructions, in f32, for loops that store
// nothing wider. All other functions of og are in og::fast too, unchanged.
//
// f16 has 11 bits: a result must be exact to 2^-17.6 to be rounded within 0.51 ulp. bf16 has 8 bits and needs 2^-14.6.
// In f32, a product with log2(e) does not lose that much, so nothing is carried in two parts here. bf16 reaches down to
// 2^-126, where e^z is flushed but x e^z is not, so h = e^(z/2) is multiplied in twice.
//
// select() replaces ?: if an operand is computed: without a branch, the compiler finds that two functions of one
// argument need the same exponential (NVRTC 13.5).
//
// Polynomials: own fits (weighted least squares, Lawson); each comment gives the relative error.

namespace og {
namespace fast {

using namespace og;
using approx::ex2;
using approx::rcp;

constexpr float log2e = 0x1.715476p0f, half_log2e = 0x1.715476p-1f;

// ---- arithmetic ------------------------------------------------------------------------------------------------------

template <class T> OG_FN T div(T a, T b) { return og::div(a, b); }
OG_FN float div(float a, float b) { return approx::div(a, b); }
template <class T> OG_FN T reciprocal(T x) { return og::reciprocal(x); }
OG_FN float reciprocal(float x) { return rcp(x); }
OG_FN float sqrt(float x) { return approx::sqrt(x); }
OG_FN float rsqrt(float x) { return approx::rsqrt(x); }

// ---- e^x -------------------------------------------------------------------------------------------------------------

OG_FN float exp(float x) { return ex2(x * log2e); }

/// x P(x) near 0, error 2^-23.8 for |x| <= 0.45. The result takes the sign of x, which keeps -0.0.
OG_FN float expm1(float x) {
  float p = 0x1.6b65bep-10f;
  p = fma(p, x, 0x1.12e8c6p-7f);
  p = fma(p, x, 0x1.55597ap-5f);
  p = fma(p, x, 0x1.55537ap-3f);
  p = fma(p, x, 0x1.fffff8p-2f);
  const float near = fma(x * x, p, x);
  return copysign(select(abs(x) < 0.45f, near, exp(x) - 1), x);
}

/// x P(x^2) near 0, error 2^-23.7 for |x| <= 0.6; else 1 - 2e / (1 + e), e = e^(-2|x|).
OG_FN float tanh(float x) {
  const float z = x * x;
  float p = 0x1.fbd622p-7f;
  p = fma(p, z, -0x1.aaf714p-5f);
  p = fma(p, z, 0x1.109a3ep-3f);
  p = fma(p, z, -0x1.5552c8p-2f);
  const float near = fma(x * z, p, x);
  const float e = ex2(-2 * log2e * abs(x));
  const float far = fma(-2 * e, rcp(1 + e), 1.0f);
  return copysign(select(abs(x) < 0.6f, near, far), x);
}

/// Subnormal results are flushed, so 1 / (1 + e^-x) is right wherever it is not 0.
OG_FN float sigmoid(float x) { return rcp(1 + ex2(x * -log2e)); }
OG_FN float sigmoid(float x, float a) { return sigmoid(a * x); }

/// e^-z for z >= 0, as h h 2^-64 if z is far, else as h h: h alone is a normal number as long as the product with any
/// f32 may be. e is e^-z unless z is far; then it is another number that also leaves a sum with 1 unchanged.
struct decay {
  float h, e;
  bool far;
  OG_FN float rest() const { return select(far, 0x1p-64f, 1.0f); }
  /// d e^-z g, or d g unless `applies`, for |g| from 2^-60 to 2^20
  OG_FN float times(float d, float g, bool applies = true) const {
    const float factor = select(applies, h, 1.0f);
    return d * factor * g * factor * select(applies, rest(), 1.0f);
  }
};
OG_FN decay decay_of(float z) {
  const bool far = z > 100;
  const float h = ex2(fma(z, -half_log2e, select(far, 32.0f, 0.0f)));
  return {h, h * h, far};
}

/// x sigmoid(z) for z with the sign of x; x at least -200. h (1 / (1 + h^2)) stays a normal number, x h may not.
OG_FN float gate(float x, float z) {
  const float h = ex2(half_log2e * lower(z, 80.0f));
  return h * rcp(fma(h, h, 1.0f)) * x * h;
}
OG_FN float swish(float x) { return gate(upper(x, -200.0f), x); }

/// x sigmoid(z) for any z; 0 for x = inf, z = -inf.
OG_FN float gate_any(float x, float z) {
  constexpr float largest = 0x1.fffffep127f;
  const decay v = decay_of(abs(z));
  const float q = x * rcp(1 + v.e);
  return select(z < 0, v.times(lower(upper(q, -largest), largest), 1.0f), q);
}
OG_FN float swish(float x, float a) { return gate_any(x, a * (a == 0 ? 0.0f : x)); }
OG_FN float swish(float x, float a, float b) {
  return gate_any(x, b * (a * (a == 0 || b == 0 ? 0.0f : x)));
}

/// x^y = 2^(y log2|x|) as long as y does not multiply the logarithm's error by much.
OG_FN bool is_moderate(float y) { return abs(y) <= 16; }
OG_FN float pow(float x, float y) {
  if (!is_moderate(y)) return og::pow(x, y);
  return pow_signed(x, y, ex2(y * approx::lg2(abs(x))));
}
/// Like og::positive: for an x that is known to be positive, or NaN.
namespace positive {
using og::log;
OG_FN float pow(float x, float y) {
  if (!is_moderate(y)) return og::positive::pow(x, y);
  return y == 0 ? 1.0f : ex2(y * approx::lg2(x));
}
}  // namespace positive

// ---- activations -----------------------------------------------------------------------------------------------------

OG_FN float hard_swish(float x) {
  const float gate = lower(upper(x + 3, 0.0f), 6.0f);
  return select(x < 3, upper(x, -3.0f) * gate * 0x1.555556p-3f, x);
}
OG_FN float softsign(float x) {
  const float a = lower(abs(x), 0x1p100f);
  return copysign(a * rcp(1 + a), x);
}
OG_FN float elu(float x, float a) { return select(x > 0, x, a * expm1(x)); }
OG_FN float selu(float x, float alpha, float gamma) {
  return select(x > 0, gamma * x, gamma * alpha * expm1(x));
}

/// x sigmoid(2u), as in og::gelu_tanh.
OG_FN float gelu_tanh(float x) {
  using c = gelu_constants<float>;
  const float left = upper(x, c::left), v = lower(left, c::right);
  return gate(left, v * fma(c::b, v * v, c::a));
}

/// e^(t^2 / 2) Phi(-t) for 0 <= t <= 25 (math/erf.h): (t + k) R(t) is a polynomial in 1 - 2k / (t + k), error 2^-21.4.
OG_FN float tail_ratio(float t) {
  const float w = rcp(t + 3.25f), q = fma(-6.5f, w, 1.0f);
  float g = -0x1.c89e2ap-11f;
  g = fma(g, q, -0x1.fde308p-11f);
  g = fma(g, q, 0x1.0d17c4p-7f);
  g = fma(g, q, 0x1.0af4dp-10f);
  g = fma(g, q, -0x1.4b627cp-4f);
  g = fma(g, q, 0x1.190d1ap-2f);
  g = fma(g, q, -0x1.1437c8p-1f);
  return fma(g, q, 0x1.79918p-1f) * w;
}
/// max(x, 0) - |x| Phi(-|x|)
OG_FN float gelu_erf(float x) {
  const float t = lower(abs(x), 15.0f);
  const float h = ex2(t * t * (-0.5f * half_log2e));
  return copysign(upper(x, 0.0f) - t * tail_ratio(t) * h * h, x);
}

/// x n / (n + 2), n = e (e + 2), e = e^x = h^2.
OG_FN float mish(float x) {
  const float bounded = upper(x, -200.0f);
  const float h = ex2(half_log2e * lower(bounded, 40.0f));
  const float e = h * h, two = e + 2;
  return h * (two * rcp(fma(e, two, 2.0f))) * bounded * h;
}

/// log(1 + e) / e for 0 <= e <= 1, error 2^-24.
OG_FN float log1p_ratio(float e) {
  float p = 0x1.4fbc8ap-8f;
  p = fma(p, e, -0x1.dbc22p-6f);
  p = fma(p, e, 0x1.3d0eccp-4f);
  p = fma(p, e, -0x1.164302p-3f);
  p = fma(p, e, 0x1.867684p-3f);
  p = fma(p, e, -0x1.fc88f6p-3f);
  p = fma(p, e, 0x1.552aeap-2f);
  p = fma(p, e, -0x1.fffe4ep-2f);
  return fma(p, e, 0x1.fffffep-1f);
}
/// max(beta x, 0) / beta + log(1 + e^-|beta x|) / beta; beta is a literal, so 1 / beta is one too.
OG_FN float softplus(float x, float beta) {
  const float z = beta * x;
  const decay v = decay_of(abs(z));
  const float y = v.times(divide(1.0f, beta), log1p_ratio(v.e));
  return select(z > 0, x + y, y);
}

}  // namespace fast
}  // namespace og
