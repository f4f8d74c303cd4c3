#pragma once
#include "config.h"
#include "math/derivatives.h"
#include "math/power_derivatives.h"
#include "cuda/fast_math.h"

// Derivatives of activations times the incoming gradient d, as in math/derivatives.h, with approximate instructions.
// With e = e^-|z| and r = 1 / (1 + e), sigmoid(z) and 1 - sigmoid(z) are r and e r, or e r and r: nothing cancels.

namespace og {
namespace fast {

/// e^-|z|, never exactly 0, so that an infinite gradient stays infinite.
OG_FN decay slope_decay(float z) { return decay_of(lower(abs(z), 200.0f)); }

OG_FN float hard_swish_backward(float x, float d) {
  const float inside = d * ((x + 1.5f) * 0x1.555556p-2f);
  return select(x <= -3, 0.0f, select(x >= 3, d, inside));
}

/// d / (2 sqrt x). The factor 1/2 is applied to the root, which neither overflows nor underflows.
OG_FN float sqrt_backward(float x, float d) { return d * (0.5f * approx::rsqrt(x)); }

/// d factor s (1 - s), s = sigmoid(z). sqrt(s (1 - s)) = h r is at most 1/2, so no product before the last overflows.
OG_FN float sigmoid_slope(float z, float d, float factor) {
  const decay v = slope_decay(z);
  const float root = v.h * rcp(1 + v.e);
  return d * root * (factor * root) * v.rest();
}
OG_FN float sigmoid_backward(float x, float d) { return sigmoid_slope(x, d, 1.0f); }
OG_FN float sigmoid_backward(float x, float d, float a) { return sigmoid_slope(a * x, d, a); }
/// d / cosh^2 x
OG_FN float tanh_backward(float x, float d) {
  const decay v = slope_decay(2 * x);
  const float root = 2 * v.h * rcp(1 + v.e);
  return d * root * root * v.rest();
}

/// sigmoid(beta x) d
OG_FN float softplus_backward(float x, float d, float beta) {
  const float z = beta * x;
  const decay v = slope_decay(z);
  return v.times(d, rcp(1 + v.e), z < 0);
}

/// f = x sigmoid(z): f' = s (1 + m (1 - s)), m = x dz/dx. Larger m than 300 changes nothing.
OG_FN float gated_slope(float z, float m_any, float d) {
  const float m = lower(upper(m_any, -300.0f), 300.0f);
  const decay v = slope_decay(z);
  const float r = rcp(1 + v.e);
  const bool left = z < 0;
  return v.times(d, r * fma(m * select(left, 1.0f, v.e), r, 1.0f), left);
}
OG_FN float swish_backward(float x, float d) { return gated_slope(x, x, d); }
/// For a factor 0 it is d / 2, even for infinite x. z stays a x, so that the factor's own gradient shares e^-|z|.
OG_FN float swish_backward(float x, float d, float a) {
  const float z = x * a, y = gated_slope(z, z, d);
  return select(a == 0, 0.5f * d, y);
}
OG_FN float swish_backward(float x, float d, float a, float b) {
  const float z = b * (x * a), y = gated_slope(z, z, d);
  return select((a == 0) | (b == 0), 0.5f * d, y);
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
  const bool left = x < 0;
  return v.times(d, select(left, g, fma(-v.e, g, 1.0f)), left);
}

/// Like og::mish_backward: e w ((2 + e) + 4x (1 + e) w) on the left, w ((1 + 2e) + 4x e^2 (1 + e) w) on the right.
OG_FN float mish_backward(float x, float d) {
  const float bounded = lower(upper(x, -300.0f), 300.0f);
  const decay v = slope_decay(bounded);
  const float e = v.e, one = 1 + e;
  const bool left = x < 0;
  const float w = rcp(select(left, fma(e, 2 + e, 2.0f), fma(2 * e, one, 1.0f)));
  const float steep = 4 * bounded * one * select(left, 1.0f, e * e);
  return v.times(d, w * fma(steep, w, select(left, 2 + e, fma(2.0f, e, 1.0f))), left);
}

OG_FN float elu_backward(float x, float d, float a) {
  const decay v = slope_decay(x);
  return select(x > 0, d, v.times(d, a));
}

/// c |x|^y sign d. The power of a finite x neither overflows nor vanishes: unless it is of medium size, its third roots
/// are multiplied in one by one.
OG_FN float power_slope(float x, float d, float y, float c, float sign) {
  const float l = approx::lg2(abs(x)), t = y * l * 0x1.555556p-2f;
  const bool regular = abs(l) < infinity<float>();
  const float third = ex2(regular ? lower(upper(t, -125.0f), 125.0f) : t);
  const float root = y == 0 ? 1.0f : third;
  const float signed_c = c * sign, whole = signed_c * root * (root * root);
  const bool at_once = !regular || (abs(whole) > 0x1p-100f && abs(whole) < 0x1p100f);
  const bool root_first = root < 1 || abs(d) < 1;  // in the other order, d times a part may be too large or too small
  const float near = root_first ? root : signed_c, far = root_first ? signed_c : root;
  return c == 0 ? 0.0f : at_once ? d * whole : d * near * far * root * root;
}
OG_FN bool is_moderate(float y, float c) { return is_moderate(y) && abs(c) >= 0x1p-60f; }

/// Like og::pow_backward: c x^(b - order) d.
OG_FN float pow_backward(float x, float d, float b, int order) {
  const float y = b - order, c = falling_factorial(b, order);
  if (!is_moderate(y, c)) return og::pow_backward(x, d, b, order);
  return power_slope(x, d, y, c, power_sign(x, b, order));
}
namespace positive {
OG_FN float pow_backward(float x, float d, float b, int order) {
  const float y = b - order, c = falling_factorial(b, order);
  if (!is_moderate(y, c)) return og::positive::pow_backward(x, d, b, order);
  return power_slope(x, d, y, c, 1.0f);
}
}  // namespace positive

}  // namespace fast
}  // namespace og
