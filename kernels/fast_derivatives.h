#pragma once
#include "config.h"
#include "derivatives.h"
#include "fast.h"

// Derivatives of activations times the gradient d that arrives, as derivatives.h has them, by approximate instructions.
// With e = e^-|z| and r = 1 / (1 + e), sigmoid(z) and 1 - sigmoid(z) are r and e r, or e r and r: nothing cancels.

namespace og {
namespace fast {

/// e^-|z|, not quite 0 anywhere: an infinite gradient stays infinite.
OG_FN decay slope_decay(float z) { return decay_of(lower(abs(z), 200.0f)); }

OG_FN float hard_swish_backward(float x, float d) {
  const float inside = d * ((x + 1.5f) * 0x1.555556p-2f);
  const float right = x >= 3 ? d : inside;
  return x <= -3 ? 0.0f : right;
}

/// d / (2 sqrt x). The half goes to the root, which neither overflows nor underflows.
OG_FN float sqrt_backward(float x, float d) { return d * (0.5f * approx::rsqrt(x)); }

/// d factor s (1 - s), s = sigmoid(z). sqrt(s (1 - s)) = h r is at most 1/2, so no product before the last overflows.
OG_FN float sigmoid_slope(float z, float d, float factor) {
  const decay v = slope_decay(z);
  const float root = v.h * rcp(1 + v.e);
  return d * root * (factor * root) * v.down;
}
OG_FN float sigmoid_backward(float x, float d) { return sigmoid_slope(x, d, 1.0f); }
OG_FN float sigmoid_backward(float x, float d, float a) { return sigmoid_slope(a * x, d, a); }
/// d / cosh^2 x
OG_FN float tanh_backward(float x, float d) {
  const decay v = slope_decay(2 * x);
  const float root = 2 * v.h * rcp(1 + v.e);
  return d * root * root * v.down;
}

/// sigmoid(beta x) d
OG_FN float softplus_backward(float x, float d, float beta) {
  const float z = beta * x;
  const decay v = slope_decay(z);
  const float r = rcp(1 + v.e);
  return z < 0 ? v.times(d, r) : d * r;
}

/// f = x sigmoid(z): f' = s (1 + m (1 - s)), m = x dz/dx, of which 300 is as good as more.
OG_FN float gated_slope(float z, float m_any, float d) {
  const float m = lower(upper(m_any, -300.0f), 300.0f);
  const decay v = slope_decay(z);
  const float r = rcp(1 + v.e);
  return z < 0 ? v.times(d, r * fma(m, r, 1.0f)) : d * (r * fma(m * v.e, r, 1.0f));
}
OG_FN float swish_backward(float x, float d) { return gated_slope(x, x, d); }
OG_FN float swish_backward(float x, float d, float a) {
  const float z = a * (a == 0 ? 0.0f : x);
  return gated_slope(z, z, d);
}
OG_FN float swish_backward(float x, float d, float a, float b) {
  const float z = b * (a * (a == 0 || b == 0 ? 0.0f : x));
  return gated_slope(z, z, d);
}

OG_FN float gelu_tanh_backward(float x, float d) {
  using c = gelu_constants<float>;
  const float v = lower(upper(x, -16.0f), 16.0f);
  const float cubic = c::b * (v * v), slope = c::a + cubic;
  return gated_slope(v * slope, v * fma(2.0f, cubic, slope), d);
}

/// e^(-t^2 / 2) (R(t) - t / sqrt(2 pi)) at x = -t, 1 minus that at x = t.
OG_FN float gelu_erf_backward(float x, float d) {
  const float t = lower(abs(x), 24.0f);
  const decay v = slope_decay(0.5f * t * t);
  const float g = fma(-t, derivative_constants<float>::density, tail_ratio(t));
  return x < 0 ? v.times(d, g) : d * fma(-v.e, g, 1.0f);
}

/// As og::mish_backward: e w ((2 + e) + 4x (1 + e) w) on the left, w ((1 + 2e) + 4x e^2 (1 + e) w) on the right.
OG_FN float mish_backward(float x, float d) {
  const float bounded = lower(upper(x, -300.0f), 300.0f);
  const decay v = slope_decay(bounded);
  const float e = v.e, one = 1 + e;
  const bool left = x < 0;
  const float w = rcp(left ? fma(e, 2 + e, 2.0f) : fma(2 * e, one, 1.0f));
  const float steep = 4 * bounded * one * (left ? 1.0f : e * e);
  const float g = w * fma(steep, w, left ? 2 + e : fma(2.0f, e, 1.0f));
  return left ? v.times(d, g) : d * g;
}

OG_FN float elu_backward(float x, float d, float a) {
  const decay v = slope_decay(x);
  return x > 0 ? d : v.times(d, a);
}

}  // namespace fast
}  // namespace og
