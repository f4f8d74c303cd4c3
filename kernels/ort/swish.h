#pragma once
#include "cpu/pointwise.h"

// x sigmoid(a x) for one factor 2^-6 <= |a| <= 2^6, the usual ones: with about half the instructions of og::swish,
// which must be right for every factor. onnxruntime has a fast kernel for a = 1 alone.
//
// y = x / (1 + e^-ax) = 2^-40 x / (2^-40 + 2^-40 e^-ax). With this scale the denominator can hold e^116, and
// beyond |a x| = 116 every result with such an a rounds to 0: no exponent has to be split off. Above a x = 40 the
// result is x itself.

namespace og {

OG_FN float swish_moderate(float x, float a, float edge) {
  const u32 magnitude = bits(x) & 0x7fffffffu, most = bits(edge);
  const float near = from_bits((magnitude < most ? magnitude : most) | (bits(x) & 0x80000000u));
  const float product = a * near;
  float n;
  const float t = exp_reduce(-product, -fma(a, near, -product), n);
  const float scaled = pow2(n - 40);  // garbage where the result is x
  const float quotient = divide(near, fma(scaled, t, 0x1p-40f + scaled)) * 0x1p-40f;
  return a * x <= 40 ? quotient : x;  // for NaN, x
}

// Like an emitted functor: one element at a time, over og::range. x1 is the factor.
template <class S> struct ModerateSwish {
  static constexpr int operands = 3;
  const S* x0;
  const float* x1;
  S* y0;
  float a, edge;
  OG_FN void move(void* const* base, const i64* offset) {
    x0 = (const S*)base[0] + offset[0];
    x1 = (const float*)base[1];
    y0 = (S*)base[2] + offset[2];
  }
  OG_FN void steps(const i64*) {}
  OG_FN void call() {
    a = *x1;
    edge = divide(116.0f, abs(a));
  }
  OG_FN void row() {}
  OG_FN void element(i64 i) const { y0[i] = store<S>(swish_moderate(load(x0[i]), a, edge)); }
};

OG_FN bool is_moderate(float a) { return abs(a) >= 0x1p-6f && abs(a) <= 0x1p6f; }

}  // namespace og
