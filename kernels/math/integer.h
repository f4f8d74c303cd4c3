#pragma once
#include "config.h"

// Integer arithmetic with every input defined, so that no kernel can trap and both devices agree: results wrap modulo
// 2^width, x / 0 = x mod 0 = 0 as in NumPy, lowest / -1 wraps to lowest, a shift by the width or more clears.

namespace og {

template <class T> struct is_int { static constexpr bool value = false; };
template <> struct is_int<i8> { static constexpr bool value = true; };
template <> struct is_int<u8> { static constexpr bool value = true; };
template <> struct is_int<i32> { static constexpr bool value = true; };
template <> struct is_int<i64> { static constexpr bool value = true; };

// Work is done in an unsigned type at least as wide, where overflow is defined.
template <class T> struct unsigned_of { using type = u32; };
template <> struct unsigned_of<i64> { using type = u64; };
template <class T> using wrap = typename unsigned_of<T>::type;

template <class T> OG_FN T int_add(T a, T b) { return (T)((wrap<T>)a + (wrap<T>)b); }
template <class T> OG_FN T int_sub(T a, T b) { return (T)((wrap<T>)a - (wrap<T>)b); }
template <class T> OG_FN T int_mul(T a, T b) { return (T)((wrap<T>)a * (wrap<T>)b); }
template <class T> OG_FN T int_neg(T a) { return (T)((wrap<T>)0 - (wrap<T>)a); }

// Divisors 0 and -1 are handled separately; the hardware divides by 1 in their place, because both would trap.

/// Truncates toward zero.
template <class T> OG_FN T int_div(T a, T b) {
  if constexpr ((T)-1 < (T)0) {
    const bool safe = b != 0 && b != -1;
    const T quotient = (T)(a / (safe ? b : (T)1));
    return safe ? quotient : (b == 0 ? (T)0 : int_neg(a));
  } else {
    const T quotient = (T)(a / (b != 0 ? b : (T)1));
    return b != 0 ? quotient : (T)0;
  }
}

/// C remainder: the sign of the dividend.
template <class T> OG_FN T int_fmod(T a, T b) {
  if constexpr ((T)-1 < (T)0) {
    const bool safe = b != 0 && b != -1;
    return safe ? (T)(a % (safe ? b : (T)1)) : (T)0;
  } else {
    return b != 0 ? (T)(a % (b != 0 ? b : (T)1)) : (T)0;
  }
}

/// Python remainder: the sign of the divisor.
template <class T> OG_FN T int_mod(T a, T b) {
  const T r = int_fmod(a, b);
  if constexpr ((T)-1 < (T)0) {
    return r != 0 && ((r < 0) != (b < 0)) ? (T)(r + b) : r;
  } else {
    return r;
  }
}

/// By repeated squaring, wrapping. A negative exponent gives 0, except for base 1 and -1, whose powers are integers.
template <class T> OG_FN T ipow(T base, T exponent) {
  if constexpr ((T)-1 < (T)0) {
    if (exponent < 0) {
      const T unit = (exponent & 1) != 0 ? (T)-1 : (T)1;
      return base == 1 ? (T)1 : (base == -1 ? unit : (T)0);
    }
  }
  wrap<T> result = 1;
  wrap<T> square = (wrap<T>)base;
  for (wrap<T> e = (wrap<T>)exponent; e != 0; e >>= 1) {
    result = (e & 1) != 0 ? result * square : result;
    square = square * square;
  }
  return (T)result;
}

OG_FN i8 pow(i8 base, i8 exponent) { return ipow(base, exponent); }
OG_FN u8 pow(u8 base, u8 exponent) { return ipow(base, exponent); }
OG_FN i32 pow(i32 base, i32 exponent) { return ipow(base, exponent); }
OG_FN i64 pow(i64 base, i64 exponent) { return ipow(base, exponent); }

// ---- bits ----------------------------------------------------------------------------------------------------------

template <class T> OG_FN T bit_and(T a, T b) { return (T)(a & b); }
template <class T> OG_FN T bit_or(T a, T b) { return (T)(a | b); }
template <class T> OG_FN T bit_xor(T a, T b) { return (T)(a ^ b); }
template <class T> OG_FN T bit_not(T a) { return (T)~a; }
template <> OG_FN bool bit_not<bool>(bool a) { return !a; }

template <class T> OG_FN bool in_width(T count) { return (wrap<T>)count < (wrap<T>)(8 * sizeof(T)); }

template <class T> OG_FN T shift_left(T a, T count) {
  const wrap<T> shifted = (wrap<T>)a << ((wrap<T>)count & (8 * sizeof(wrap<T>) - 1));
  return in_width(count) ? (T)shifted : (T)0;
}

/// Arithmetic for signed types; past the width the sign remains, as in NumPy (0 for unsigned and positive).
template <class T> OG_FN T shift_right(T a, T count) {
  const int last = 8 * (int)sizeof(T) - 1;
  return (T)(a >> (in_width(count) ? (int)count : last)) & (T)(in_width(count) || a < (T)0 ? -1 : 0);
}

}  // namespace og
