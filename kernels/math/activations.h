#pragma once
#include "config.h"
#include "math/arith.h"
#include "math/erf.h"
#include "math/exp.h"
#include "math/lanes.h"
#include "math/log.h"
#include "math/logistic.h"

// Activation functions of ONNX and torch for float and double, one template each. NaN in gives NaN out; -0.0 keeps its
// sign where the function is odd near zero; no tail is lost to cancellation or early overflow.

namespace og {

/// max(x, 0), but NaN stays NaN: fmax would drop it.
template <class T> OG_FN T relu(T x) { return choose(x < (T)0, (T)0, x); }

template <class T> OG_FN T leaky_relu(T x, T a) { return choose(x < 0, a * x, x); }
template <class T> OG_FN T prelu(T x, T slope) { return choose(x < 0, slope * x, x); }
template <class T> OG_FN T thresholded_relu(T x, T a) { return choose(x > a || x != x, x, (T)0); }

/// ONNX Shrink: x + bias below -lambd, x - bias above lambd, else 0.
template <class T> OG_FN T shrink(T x, T bias, T lambd) {
  const T outside = choose(x < -lambd, x + bias, x - bias);
  return choose(x < -lambd || x > lambd || x != x, outside, (T)0);
}

template <class T> OG_FN T hard_sigmoid(T x, T a, T b) { return clamp(fma(a, x, b), (T)0, (T)1); }

/// x / 6, rounded once: the exact remainder corrects x times 1/6 (Brisebarre, Muller 2004), in a third of a division.
template <class T> OG_FN T sixth(T x) {
  const T q = x * (T)(1.0 / 6);
  return fma(fma((T)6, q, -x), (T)(-1.0 / 6), q);  // with these signs -0.0 stays
}

/// x * clamp(x / 6 + 1/2, 0, 1), written with one rounding of the sum: x (x + 3) / 6.
template <class T> OG_FN T hard_swish(T x) {
  const T bounded = choose(x < -3, (T)-3, x);
  return choose(x < 3, sixth(bounded * (bounded + 3)), x);
}

template <class T> OG_FN T softsign(T x) {
  const T a = abs(x);
  const T y = divide(x, 1 + a);
  return choose(a == infinity<T>(), copysign((T)1, x), y);
}

// ---- with exp ------------------------------------------------------------------------------------------------------

template <class T> OG_FN T elu(T x, T a) { return choose(x > 0, x, a * expm1(x)); }
template <class T> OG_FN T selu(T x, T alpha, T gamma) { return gamma * choose(x > 0, x, alpha * expm1(x)); }

/// max(x, 0) + min(alpha (e^(x/alpha) - 1), 0). The remainder of the division is passed along: for alpha < 0 the
/// exponent may be large, and its rounding error grows with it.
template <class T> OG_FN T celu(T x, T alpha) {
  const T z = divide(x, alpha);
  const T z_low = divide(fma(-z, alpha, x), alpha);
  const T bounded = at_most(at_least(z, (T)-60), exp_constants<T>::highest);
  T n;
  const T t = exp_reduce(bounded, choose(bounded == z, z_low, (T)0), n);
  return choose(x > 0, x, keep_nan(z, alpha * scale_expm1(t, n, z)));
}

/// x sigmoid(x). Dividing x by 1 + e^-x has an error of 1.9 ulp at most; swish(-inf) is -0, the limit.
template <class T> OG_FN T swish(T x) {
  const T bounded = at_least(x, exp_constants<T>::lowest - 15);  // x e^x is 0 below
  return keep_nan(x, logistic(bounded, bounded));
}

#if !OG_GPU_FORMS
OG_FN float swish(float x) {
  const float bounded = at_least(x, -120.0f);
  return finite_up_to(logistic_end, x, logistic_near(bounded, bounded, 0.0f));
}
#endif

/// sigmoid(a x). The rounding error of a x enters the exponent, and is up to 100 times as large in the result, so it is
/// computed (fma) and passed along.
template <class T> OG_FN T sigmoid(T x, T a) {
  using c = exp_constants<T>;
  const T product = a * x;
  const T z = at_least(product, c::lowest);
  const mask<T> regular = z > c::lowest && z < -c::tiny_exponent;
  return keep_nan(product, logistic((T)1, z, choose(regular, fma(a, x, -z), (T)0)));
}

/// x / (1 + e^-(product + low)). The range is that of the result: x e^z is right where e^z alone would underflow.
template <class T> OG_FN T swish_of_any_product(T x, T product, T low) {
  using c = exp_constants<T>;
  const T z = at_least(product, c::swish_end);
  const mask<T> regular = z > c::swish_end && z < -c::tiny_exponent;
  const T numerator = choose(z == c::swish_end, copysign((T)0, x), x);
  WholeNumber<T> n;
  const T t = exp_reduce(-at_most(z, (T)-c::tiny_exponent), -choose(regular, low, (T)0), n);
  return keep_nan(product, logistic_far(numerator, t, n));
}
template <class T> OG_FN T swish_of_product(T x, T product, T low) { return swish_of_any_product(x, product, low); }
#if OG_LANES
/// The same bits, in half the instructions if all products are near 0, where there are no special cases.
OG_FN floats swish_of_product(floats x, floats product, floats low) {
  if (__builtin_expect(any(!(abs(product) <= 40.0f)), 0)) return swish_of_any_product(x, product, low);
  using c = exp_constants<float>;
  constexpr float magic = c::magic + 127.0f;
  const floats k = fma(product, -c::log2e, magic), n = k - magic;
  const floats t = exp_tail(fma(n, -c::ln2_low, fma(n, -c::ln2_high, -product)) - low), power = power_of_bits(k);
  return divide(x, fma(power, t, 1 + power));
}
#endif
/// x sigmoid(a x) for any a. The rounding error of a x is passed along.
template <class T> OG_FN T swish(T x, T a) {
  const T factor = choose(a == 0, (T)0, x);  // 0 * inf would be NaN, but the result is x / 2
  const T product = a * factor;
  return swish_of_product(x, product, fma(a, factor, -product));
}
#if !OG_GPU_FORMS
/// For a factor that is a literal of medium size: a limit of x is also one of the product.
OG_FN float swish(float x, float a) {
  if (__builtin_constant_p(a) && a >= 0x1p-4f && a <= 0x1p4f) {
    const float bounded = at_least(x, divide(-120.0f, a)), product = a * bounded;
    return finite_up_to(divide(logistic_end, a), x, logistic_near(bounded, product, fma(a, bounded, -product)));
  }
  return swish<float>(x, a);
}
#endif
/// x sigmoid(a b x): neither product may lose its rounding error.
template <class T> OG_FN T swish(T x, T a, T b) {
  const T factor = choose(a == 0 || b == 0, (T)0, x);
  const T inner = a * factor;
  const T product = b * inner;
  const T low = fma(b, inner, -product) + b * fma(a, factor, -inner);
  return swish_of_product(x, product, low);
}

/// x Phi(x) = max(x, 0) - |x| Phi(-|x|): exact tail on the left, no cancellation on the right.
template <class F, if_float<F> = 0> OG_FN F gelu_erf(F x) {
#if OG_TABLES
  // Above 5.3, the end of the table, the tail is less than the last bit of x; below -5.3 there are hardly ever lanes.
  constexpr float end = 5.3f;
  const F t = size_within(x, (F)end);
  const F y = fma(-t, by_table(lower_tail, interval_by_square(t), t), larger((F)-0.0f, x));  // keeps NaN
  const mask<F> far = x < -end;
  if (__builtin_expect(!any(far), 1)) return y;
  return choose(far, -far_tail(x), y);
#else
  return fma(scaled_tail_times(size_up_to(x, 14.875f)), (F)-0x1p-64f, at_least(x, (F)-0.0f));  // the tail of NaN is NaN
#endif
}
/// Near 0 the long polynomial of the tail costs 4.2 ulp; x/2 + x/2 erf(x / sqrt2) does not.
OG_FN double gelu_erf(double x) {
  const double half = 0.5 * x;
  const double near = fma(half, erf_small(x * 0x1.6a09e667f3bcdp-1), half);
  return abs(x) < 0.75 ? copysign(near, x) : copysign((x <= 0 ? 0.0 : x) - tail_times(abs(x)), x);
}

// 2 sqrt(2/pi) and the same times 0.044715, high and low parts (mpmath).
template <class T> struct gelu_constants;
template <> struct gelu_constants<float> {
  static constexpr float a = 0x1.988454p+0f, b = 0x1.2444f2p-4f, b_low = 0x1.49b16ap-29f;
  static constexpr float a_short = 0x1.98846p+0f, a_rest = -0x1.985794p-21f;  // a in two parts, the first of 20 bits
  static constexpr float left = -11.2f, right = 6.0f;  // the result is 0 or x beyond
};
template <> struct gelu_constants<double> {
  static constexpr double a = 0x1.9884533d43651p+0, a_low = -0x1.cbc0d30ebfd15p-54;
  static constexpr double b = 0x1.2444f2a4d8b4bp-4, b_low = -0x1.6c843a29d1c7p-61;
  static constexpr double left = -22.5, right = 12.0;
};

#if OG_LANES
template <> struct gelu_constants<floats> : gelu_constants<float> {};
#endif

/// 2u = v slope for a double v, u = sqrt(2/pi) (v + 0.044715 v^3), in two parts; `part` is its slope's v^2 term.
struct double_cubic {
  double part, part_low, slope, slope_low, z, z_low;
};
OG_FN double_cubic double_cubic_of(double v) {
  using c = gelu_constants<double>;
  const double square = v * v, square_low = fma(v, v, -square);
  const double part = c::b * square;
  const double part_low = fma(c::b, square, -part) + fma(c::b, square_low, c::b_low * square);
  const double slope = c::a + part;
  const double back = slope - c::a;
  const double slope_low = ((c::a - (slope - back)) + (part - back)) + (part_low + c::a_low);
  const double z = v * slope;
  return {part, part_low, slope, slope_low, z, fma(v, slope, -z) + v * slope_low};
}
/// x (1 + tanh u) / 2 = x sigmoid(2u): 1 + tanh u would cancel on the left. 2u reaches -100 there, hence its two parts.
OG_FN double gelu_tanh(double x) {
  using c = gelu_constants<double>;
  const double left = at_least(x, c::left);
  const double_cubic u = double_cubic_of(at_most(left, c::right));
  return keep_nan(x, logistic(left, u.z, u.z_low));
}
/// 2u of a float v in two parts, |v| < 14. The larger part of a is so short that a + b v^2 minus this part is exact.
template <class F> struct cubic {
  F square, z, z_low;
};
template <class F> OG_FN cubic<F> cubic_of(F v) {
  using c = gelu_constants<float>;
  const F square = v * v, slope = fma((F)c::b, square, (F)c::a_short);
  const F rounded = fma((F)c::b, fma(v, v, -square), fma((F)c::b, square, c::a_short - slope));
  const F slope_low = fma((F)c::b_low, square, (F)c::a_rest) + rounded;
  const F z = v * slope;
  return {square, z, fma(v, slope_low, fma(v, slope, -z))};
}
template <class F, if_float<F> = 0> OG_FN F gelu_tanh(F x) {
  using c = gelu_constants<float>;
  const F left = at_least(x, (F)c::left), v = at_most(left, (F)c::right);
  const cubic<F> u = cubic_of(v);
  return finite_up_to(c::right, x, logistic_near(left, u.z, u.z_low));
}

/// y with the sign of x; y is 0 or already has that sign.
template <class F, if_float<F> = 0> OG_FN F keep_sign(F y, F x) { return from_bits(bits(y) | (bits(x) & 0x80000000u)); }
OG_FN double keep_sign(double y, double x) { return from_bits(bits(y) | (bits(x) & 0x8000000000000000ull)); }

/// x tanh(log(1 + e^x)) = x (e + 2) e / (e^2 + 2e + 2) with e = e^x. Written as x - x (2 / (e^2 + 2e + 2)) on the right
/// and as x e - x e ((e + e^2) / (e^2 + 2e + 2)) on the left, which damps the error of the quotient: in one step it
/// exceeds 3 ulp. e + e^2 is 2 at 0.
OG_FN double mish(double x) {
  using c = exp_constants<double>;
  const double bounded = at_least(x, c::lowest - 15);
  double k;
  const double t = exp_reduce(at_most(bounded, 40.0), k);
  const double e = scale_one_beside_one(t, k);
  const double quotient = divide(at_most(fma(e, e, e), 2.0), fma(e, e + 2, 2.0));
  const double entire = select(x > 0, x, scale_down(fma(bounded, t, bounded), k));
  const double y = fma(-at_most(entire, 50.0), quotient, entire);  // avoids inf * 0
  return keep_nan(x, keep_sign(y, x));
}
/// On the left, 2^64 times as large until the end, where it may become subnormal.
template <class F, if_float<F> = 0> OG_FN F mish(F x) {
  const F bounded = at_least(x, (F)-120.0f);
  const moved_power<F> v = moved_power_of<64>(at_most(bounded, (F)40.0f), (F)-0.0f);
  const F near = v.power * (F)0x1p-64f, e = fma(near, v.t, near);
  const F part = quotient(at_most(fma(e, e, e), (F)2), fma(e, e + 2, (F)2));
  const mask<F> right = x > 0;
  const F entire = choose(right, x, fma(bounded, v.t, bounded) * v.power), power = choose(right, (F)1, (F)0x1p-64f);
  const F y = fma(-at_most(entire, (F)50), part, entire) * power;  // avoids inf * 0
  return keep_nan(x, keep_sign(y, x));
}

#if OG_DEVICE
/// a / beta for a literal beta; no operation if that is 1.
OG_FN float divide_by(float a, float beta) { return beta == 1 ? a : divide(a, beta); }
OG_FN double divide_by(double a, double beta) { return beta == 1 ? a : divide(a, beta); }
#else
template <class T> OG_FN T divide_by(T a, T beta) { return divide(a, beta); }
#endif
/// log(1 + e^(beta x)) / beta = max(beta x, 0) / beta + log(1 + e^-|beta x|) / beta.
template <class T> OG_FN T softplus(T x, T beta) {
  using c = exp_constants<T>;
  const T z = beta * x;
  const T magnitude = at_least(-abs(z), c::swish_end);
  const T low = choose(magnitude > c::swish_end, fma(beta, x, -z), (T)0);
  T k;
  const T t = exp_reduce(magnitude, choose(z > 0, -low, low), k);
  const T first = at_least(k, -c::part);  // log(1 + e) is e below: scaled at the end, as beta may make it normal
  const T rest = k - first;
  const T y = scale_down(divide_by(log1p_in_range(scale_one(t, first)), beta), rest);
  return keep_nan(z, select(z > 0, x, (T)0) + y);
}

}  // namespace og
