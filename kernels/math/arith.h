#pragma once
#include "config.h"
#include "math/integer.h"
#include "math/lanes.h"

// Arithmetic, comparison and rounding for float, double and the integers: one template per operation; the integer half
// is in integer.h. NumPy is the reference for signs, NaN and zero divisors.

namespace og {

template <class T> OG_FN T add(T a, T b) {
  if constexpr (is_int<T>::value) return int_add(a, b);
  else return a + b;
}
template <class T> OG_FN T sub(T a, T b) {
  if constexpr (is_int<T>::value) return int_sub(a, b);
  else return a - b;
}
template <class T> OG_FN T mul(T a, T b) {
  if constexpr (is_int<T>::value) return int_mul(a, b);
  else return a * b;
}
template <class T> OG_FN T div(T a, T b) {
  if constexpr (is_int<T>::value) return int_div(a, b);
  else return divide(a, b);
}
template <class T> OG_FN T neg(T a) {
  if constexpr (is_int<T>::value) return int_neg(a);
  else return -a;
}

/// The lowest integer has no opposite and stays as it is, as in NumPy.
OG_FN i8 abs(i8 x) { return x < 0 ? int_neg(x) : x; }
OG_FN u8 abs(u8 x) { return x; }
OG_FN i32 abs(i32 x) { return x < 0 ? int_neg(x) : x; }
OG_FN i64 abs(i64 x) { return x < 0 ? int_neg(x) : x; }

/// -1, 0 or 1; sign(-0.0) is 0.0 and sign(NaN) is NaN.
template <class T> OG_FN T sign(T x) {
  const T nonzero = choose(x > (T)0, (T)1, (T)-1);
  const T ordered = choose(x == (T)0, (T)0, nonzero);
  return choose(x != x, x, ordered);
}

template <class T> OG_FN T square(T x) { return mul(x, x); }
template <class T> OG_FN T squared_difference(T a, T b) { return square(sub(a, b)); }
template <class T> OG_FN T reciprocal(T x) { return div((T)1, x); }

/// Two correctly rounded steps: at most 1.5 ulp. rsqrt(0) = inf, rsqrt(-0.0) = -inf, negative gives NaN.
template <class T> OG_FN T rsqrt(T x) { return divide((T)1, sqrt(x)); }

// ---- order ---------------------------------------------------------------------------------------------------------

// fminf and fmaxf drop NaN; these return a NaN of either operand, as np.minimum does: a NaN in b fails the comparison
// and is the result. One choice is a conditional expression, one works on bits: from two conditional expressions GCC 12
// makes jumps, and from these complex masks (a clamp took 4 times as long).
template <class T> OG_FN T min(T a, T b) {
  const T less = choose(a < b, a, b);
  return select(a != a, a, less);
}
template <class T> OG_FN T max(T a, T b) {
  const T greater = choose(a > b, a, b);
  return select(a != a, a, greater);
}

/// min(max(x, lo), hi): hi wins where lo > hi, and a NaN among the three is the result.
template <class T> OG_FN T clamp(T x, T lo, T hi) {
  const T above = select(x <= lo, lo, x);
  const T inside = select(above >= hi, hi, above);
  return select(lo != lo, lo, select(hi != hi, hi, inside));
}

template <class T> OG_FN mask<T> eq(T a, T b) { return a == b; }
template <class T> OG_FN mask<T> ne(T a, T b) { return a != b; }
template <class T> OG_FN mask<T> lt(T a, T b) { return a < b; }
template <class T> OG_FN mask<T> le(T a, T b) { return a <= b; }
template <class T> OG_FN mask<T> gt(T a, T b) { return a > b; }
template <class T> OG_FN mask<T> ge(T a, T b) { return a >= b; }

// & and |, not && and ||: without short-circuit evaluation there is no branch to remove.
OG_FN bool logical_and(bool a, bool b) { return a & b; }
OG_FN bool logical_or(bool a, bool b) { return a | b; }
OG_FN bool logical_xor(bool a, bool b) { return a != b; }
OG_FN bool logical_not(bool a) { return !a; }
#if OG_LANES
OG_FN bools logical_and(bools a, bools b) { return a & b; }
OG_FN bools logical_or(bools a, bools b) { return a | b; }
OG_FN bools logical_xor(bools a, bools b) { return a != b; }
OG_FN bools logical_not(bools a) { return !a; }
#endif

template <class T> OG_FN mask<T> isnan(T x) { return x != x; }

template <class T> OG_FN mask<T> isinf(T x, bool detect_negative, bool detect_positive) {
  if (detect_negative && detect_positive) return abs(x) == infinity<T>();  // both are literals
  return ((x == infinity<T>()) & detect_positive) | ((x == -infinity<T>()) & detect_negative);
}

// ---- rounding and remainders ---------------------------------------------------------------------------------------

/// Half to even, as np.round and ONNX Round. floor, ceil and trunc are in config.h.
template <class T> OG_FN T round(T x) { return rint(x); }

// The C remainder is exact for every pair of floats, so two libraries cannot differ in it.
#if OG_DEVICE
OG_FN float fmod(float a, float b) { return ::fmodf(a, b); }
OG_FN double fmod(double a, double b) { return ::fmod(a, b); }
#else
OG_FN float fmod(float a, float b) { return __builtin_fmodf(a, b); }
OG_FN double fmod(double a, double b) { return __builtin_fmod(a, b); }
#endif
OG_FN i8 fmod(i8 a, i8 b) { return int_fmod(a, b); }
OG_FN u8 fmod(u8 a, u8 b) { return int_fmod(a, b); }
OG_FN i32 fmod(i32 a, i32 b) { return int_fmod(a, b); }
OG_FN i64 fmod(i64 a, i64 b) { return int_fmod(a, b); }

/// np.mod: the result has the sign of the divisor, even if it is zero.
template <class T> OG_FN T mod(T a, T b) {
  if constexpr (is_int<T>::value) {
    return int_mod(a, b);
  } else {
    const T r = fmod(a, b);
    const T zero = copysign((T)0, b);
    const T moved = (r < (T)0) != (b < (T)0) ? r + b : r;
    return r == (T)0 ? zero : moved;
  }
}

}  // namespace og
