#pragma once
#include "config.h"
#include "math/exp.h"
#include "math/lanes.h"

// The logistic family, numerator / (1 + e^-x), for float and double: sigmoid, and the base for activations.h.

namespace og {

/// 1 + 2^n (1 + t) for the n of scale_one, nearly rounded once: the sum of 1 and 2^n is exact, or one hardly matters.
template <class T, class N> OG_FN T one_and_scaled(T t, N n) {
  const T power = pow2(n);
  return fma(power, t, 1 + power);
}

/// numerator / (1 + 2^n (1 + t)) = quotient * 2^rest, rest <= 0. If e^z is large, its exponent beyond `part` is taken
/// out, so the quotient neither overflows nor loses bits: sigmoid(-100) is the right subnormal. Dividing by 1 + e^z
/// rounds twice; the folded x * (e * r) with e = e^-|x| and r = 1 / (1 + e) rounds 4 times and exceeds 3 ulp
/// (measured).
template <class T> OG_FN T logistic_quotient(T numerator, T t, T n, T& rest) {
  const T beyond = exp_constants<T>::part - n;
  rest = (T)0.5 * (beyond - abs(beyond));  // min(beyond, 0), by arithmetic: GCC turns a select into branches
  return divide(numerator, one_and_scaled(t, n + rest));
}
#if OG_LANES
OG_FN floats logistic_quotient(floats numerator, floats t, floats n, floats& rest) {
  const floats first = at_most(n, exp_constants<floats>::part);
  rest = first - n;
  return divide(numerator, one_and_scaled(t, first));
}
#endif

/// numerator / (1 + e^-(x + low)) for x from lowest - 15 on, where 2^rest is a normal number. NaN is not kept.
template <class T> OG_FN T logistic(T numerator, T x) {
  T n, rest;
  const T t = exp_reduce(-at_most(x, (T)-exp_constants<T>::tiny_exponent), n);
  const T quotient = logistic_quotient(numerator, t, n, rest);
  return scale(quotient, rest);
}
/// numerator / (1 + 2^n (1 + t)) for any n, however large.
template <class T> OG_FN T logistic_far(T numerator, T t, T n) {
  T rest;
  const T quotient = logistic_quotient(numerator, t, n, rest);
  return scale_down(quotient, rest);
}
/// y if x is less than end, else x, the correct value there.
template <class T> OG_FN T finite_up_to(float, T x, T y) { return keep_nan(x, y); }
/// numerator / (1 + e^-(x + low)) for x down to -131 and what is neither infinite nor next to the subnormals, unless finite_up_to
/// says what it is there.
template <class T> OG_FN T logistic_near(T numerator, T x, T low) {
  T n, rest;
  const T t = exp_reduce(-x, -low, n);
  const T quotient = logistic_quotient(numerator, t, n, rest);
  return scale(quotient, rest);
}
#if OG_GPU_FORMS
OG_FN float finite_up_to(float end, float x, float y) { return x < end ? y : x; }
OG_FN float logistic_near(float numerator, float x, float low) {
  Exponent n;
  const float t = exp_reduce(-x, -low, n);
  const Exponent first = at_most(n, exp_constants<float>::part);
  return scale(quotient(numerator, one_and_scaled(t, first)), first - n);
}
OG_FN float logistic_far(float numerator, float t, Exponent n) {
  const Exponent first = at_most(n, exp_constants<float>::part), second = at_most(n, 3 * exp_constants<float>::part - 2);
  return scale(scale(divide(numerator, one_and_scaled(t, first)), first - second), second - n);
}
#endif
template <class T> OG_FN T logistic(T numerator, T x, T low) {
  T n, rest;
  const T t = exp_reduce(-at_most(x, (T)-exp_constants<T>::tiny_exponent), -low, n);
  const T quotient = logistic_quotient(numerator, t, n, rest);
  return scale(quotient, rest);
}

#if !OG_GPU_FORMS
// A float on a CPU: the divisor is 2^64 times as small, and so needs no second exponent. The same bits as above.
constexpr float logistic_end = 40.0f;  // above, e^-x does not change a sum with 1
OG_FN float finite_up_to(float end, float x, float y) { return x < end ? y : x; }
OG_FN float logistic_near(float numerator, float x, float low) {
  const moved_power<float> v = moved_power_of<-64>(-x, -low);
  return divide(numerator, fma(v.power, v.t, v.power + 0x1p-64f)) * 0x1p-64f;
}
OG_FN float logistic(float numerator, float x, float low) { return logistic_near(numerator, at_most(x, logistic_end), low); }
OG_FN float logistic(float numerator, float x) { return logistic(numerator, x, 0.0f); }
#endif

template <class T> OG_FN T sigmoid(T x) {
  return keep_nan(x, logistic((T)1, at_least(x, exp_constants<T>::lowest)));
}

}  // namespace og
