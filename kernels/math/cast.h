#pragma once
#include "config.h"
#include "math/lanes.h"

// og::cast<To>(from) among the compute types float, double, i64, i32, i8, u8, bool. Hardware differs for floats that do
// not fit an integer (x86 gives the lowest value, CUDA saturates), and C++ leaves them undefined. Here they are
// truncated toward zero and saturated, and NaN becomes 0. Between integers the low bits are kept. To bool is x != 0:
// NaN is true.

namespace og {

template <class T> struct is_floating { static constexpr bool value = false; };
template <> struct is_floating<float> { static constexpr bool value = true; };
template <> struct is_floating<double> { static constexpr bool value = true; };

// 2^bits of the positive range, exact in every float type: the first value that no longer fits.
template <class T> struct cast_limit;
template <> struct cast_limit<i8> { static constexpr float above = 0x1p7f, below = -0x1p7f; };
template <> struct cast_limit<u8> { static constexpr float above = 0x1p8f, below = 0.0f; };
template <> struct cast_limit<i32> { static constexpr float above = 0x1p31f, below = -0x1p31f; };
template <> struct cast_limit<i64> { static constexpr float above = 0x1p63f, below = -0x1p63f; };

template <class To> struct wide_int { using type = i32; };  // the machine converts floats to these widths
template <> struct wide_int<i64> { using type = i64; };

template <class To, class From> OG_FN To float_to_int(From x) {
  constexpr From above = (From)cast_limit<To>::above;
  constexpr From below = (From)cast_limit<To>::below;
  // Only an in-range value reaches the conversion; written as a select, it vectorises.
  const bool fits = x < above && x > below;
  const From safe = fits ? x : (From)0;
  const To inside = (To)(typename wide_int<To>::type)safe;
  const To outside = x >= above ? limits<To>::highest : (x <= below ? limits<To>::lowest : (To)0);
  return fits ? inside : outside;
}

template <class To, class From> OG_FN To cast(From x) {
  if constexpr (is_floating<From>::value && !is_floating<To>::value) {
    return float_to_int<To>(x);
  } else if constexpr (sizeof(From) == 1 && (From)2 == (From)1) {  // bool; GCC vectorises the select, not the conversion
    return x ? (To)1 : (To)0;
  } else {
    return (To)x;  // int to float and double to float round to nearest even; int to int keeps the low bits
  }
}

template <> OG_FN bool cast<bool, float>(float x) { return x != 0.0f; }
template <> OG_FN bool cast<bool, double>(double x) { return x != 0.0; }

#if OG_LANES
template <class To> OG_FN To cast(bools x) { return choose(x, (To)1, (To)0); }
template <class To> OG_FN bools cast(floats x) { return x != 0; }
#endif

}  // namespace og
