#pragma once
#include "config.h"

// floats: 16 floats at a time, with the operations of the scalar library. Its templates take float, double and, if the
// machine has AVX-512, floats. The differences are here and in a few overloads: 2^n is applied by one instruction
// (vscalefps), an exponent is taken off by two (vgetexpps, vgetmantps), conditions are masks, so GCC cannot make jumps
// of them. Each gives the bits of the scalar form (tests/codegen/test_lanes.py). Elsewhere OG_LANES is 0 and GCC
// vectorises the scalar form.
//
// No system header is included: <immintrin.h> alone takes longer to compile than most kernels.

// A lambda in the body of a loop that is to be vectorised: GCC would turn a long one into a call.
#define OG_LAMBDA __attribute__((always_inline))

namespace og {

/// Passed to a function whose arguments may be anything.
struct any_ends {};

/// The type of a comparison of two T.
template <class T> struct mask_of { using type = bool; };
template <class T> using mask = typename mask_of<T>::type;

/// condition ? if_true : if_false, for every T. (`select` does the same by bits.)
template <class T> OG_FN T choose(bool condition, T if_true, T if_false) { return condition ? if_true : if_false; }
template <class T> OG_FN T select(bool condition, T if_true, T if_false) { return condition ? if_true : if_false; }
#if !OG_DEVICE
// By bits: from `x > 0 ? x : 1` GCC 12 derives later conditions for the constant, and then selects between conditions,
// which it cannot vectorise (where(x > 0, x, 1) before a power took 8 times as long).
OG_FN float select(bool condition, float if_true, float if_false) {
  const u32 mask = -(u32)condition;
  return from_bits((bits(if_true) & mask) | (bits(if_false) & ~mask));
}
OG_FN double select(bool condition, double if_true, double if_false) {
  const u64 mask = -(u64)condition;
  return from_bits((bits(if_true) & mask) | (bits(if_false) & ~mask));
}
#endif
/// True if a condition holds in any lane.
OG_FN bool any(bool condition) { return condition; }

/// `template <class F, if_float<F> = 0>`: a function of float and floats, which has another form for double.
template <class T> struct float_only {};
template <> struct float_only<float> { using type = int; };
template <class T> using if_float = typename float_only<T>::type;

#if !OG_DEVICE && !defined(OG_NO_LANES) && defined(__AVX512F__) && defined(__AVX512DQ__) && defined(__AVX512BW__) && defined(__AVX512VL__) && !defined(__clang__)
#define OG_LANES 1

enum { lane_count = 16 };

typedef float floats16 __attribute__((vector_size(64)));
typedef u32 words16 __attribute__((vector_size(64)));
typedef i32 ints16 __attribute__((vector_size(64)));

struct bools {
  u16 m;
  OG_FN bools() = default;
  OG_FN explicit constexpr bools(u16 bits, int) : m(bits) {}
  OG_FN bools(bool b) : m((u16)-(int)b) {}
};
OG_FN bools operator&(bools a, bools b) { return bools((u16)(a.m & b.m), 0); }
OG_FN bools operator|(bools a, bools b) { return bools((u16)(a.m | b.m), 0); }
OG_FN bools operator&&(bools a, bools b) { return a & b; }
OG_FN bools operator||(bools a, bools b) { return a | b; }
OG_FN bools operator!=(bools a, bools b) { return bools((u16)(a.m ^ b.m), 0); }
OG_FN bools operator==(bools a, bools b) { return bools((u16)~(a.m ^ b.m), 0); }
OG_FN bools operator!(bools a) { return bools((u16)~a.m, 0); }
OG_FN bool any(bools condition) { return condition.m != 0; }

template <> struct mask_of<bools> { using type = bools; };
OG_FN bools choose(bools condition, bools if_true, bools if_false) { return (condition & if_true) | (!condition & if_false); }
OG_FN bools select(bools condition, bools if_true, bools if_false) { return choose(condition, if_true, if_false); }

/// The bits of 16 floats.
struct words {
  words16 v;
  OG_FN words() = default;
  OG_FN words(words16 x) : v(x) {}
  OG_FN words(u32 x) : v(x - (words16){}) {}
};
OG_FN words operator&(words a, words b) { return a.v & b.v; }
OG_FN words operator|(words a, words b) { return a.v | b.v; }
OG_FN words operator-(words a, words b) { return a.v - b.v; }

struct floats {
  floats16 v;
  OG_FN floats() = default;
  OG_FN floats(floats16 x) : v(x) {}
  OG_FN floats(float x) : v((floats16){x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}) {}
};
template <> struct mask_of<floats> { using type = bools; };
template <> struct float_only<floats> { using type = int; };

OG_FN floats operator+(floats a, floats b) { return a.v + b.v; }
OG_FN floats operator-(floats a, floats b) { return a.v - b.v; }
OG_FN floats operator*(floats a, floats b) { return a.v * b.v; }
OG_FN floats operator-(floats a) { return -a.v; }
OG_FN floats& operator*=(floats& a, floats b) { return a = a * b; }

enum { all16 = 0xffff, rounding = 4 };  // every lane; the current rounding mode
template <int predicate> OG_FN bools compare(floats a, floats b) {
  return bools((u16)__builtin_ia32_cmpps512_mask(a.v, b.v, predicate, all16, rounding), 0);
}
OG_FN bools operator==(floats a, floats b) { return compare<0>(a, b); }
OG_FN bools operator!=(floats a, floats b) { return compare<4>(a, b); }
OG_FN bools operator<(floats a, floats b) { return compare<17>(a, b); }
OG_FN bools operator<=(floats a, floats b) { return compare<18>(a, b); }
OG_FN bools operator>(floats a, floats b) { return compare<30>(a, b); }
OG_FN bools operator>=(floats a, floats b) { return compare<29>(a, b); }

OG_FN floats choose(bools condition, floats if_true, floats if_false) {
  return (floats16)__builtin_ia32_blendmps_512_mask(if_false.v, if_true.v, condition.m);
}
OG_FN floats select(bools condition, floats if_true, floats if_false) { return choose(condition, if_true, if_false); }

OG_FN words bits(floats x) { return (words16)x.v; }
OG_FN floats from_bits(words b) { return (floats16)b.v; }
OG_FN bools is_negative(floats x) { return bools((u16)__builtin_ia32_cvtd2mask512((ints16)x.v), 0); }

OG_FN floats fma(floats a, floats b, floats c) {
  return __builtin_ia32_vfmaddps512_mask(a.v, b.v, c.v, all16, rounding);
}
OG_FN floats divide(floats a, floats b) { return a.v / b.v; }
OG_FN floats sqrt(floats x) { return __builtin_ia32_sqrtps512_mask(x.v, x.v, all16, rounding); }
template <int how> OG_FN floats rounded(floats x) {
  return __builtin_ia32_rndscaleps_mask(x.v, how, x.v, all16, rounding);
}
OG_FN floats rint(floats x) { return rounded<0>(x); }
OG_FN floats floor(floats x) { return rounded<1>(x); }
OG_FN floats ceil(floats x) { return rounded<2>(x); }
OG_FN floats trunc(floats x) { return rounded<3>(x); }
OG_FN floats abs(floats x) { return from_bits(bits(x) & 0x7fffffffu); }
OG_FN floats copysign(floats magnitude, floats sign) {
  return from_bits((bits(magnitude) & 0x7fffffffu) | (bits(sign) & 0x80000000u));
}

template <> OG_FN floats infinity<floats>() { return infinity<float>(); }
template <> OG_FN floats quiet_nan<floats>() { return quiet_nan<float>(); }
template <> OG_FN floats smallest_normal<floats>() { return smallest_normal<float>(); }

/// x 2^n for any integer n, rounded once.
OG_FN floats scale(floats x, floats n) {
  return __builtin_ia32_scalefps512_mask(x.v, n.v, x.v, all16, rounding);
}
/// The larger and the smaller; y if either is NaN.
OG_FN floats larger(floats x, floats y) { return __builtin_ia32_maxps512_mask(x.v, y.v, y.v, all16, rounding); }
OG_FN floats smaller(floats x, floats y) { return __builtin_ia32_minps512_mask(x.v, y.v, y.v, all16, rounding); }
/// floor(log2 x) for x > 0, and the mantissa of x in [1, 2) with its sign; subnormals too.
OG_FN floats exponent_of(floats x) { return __builtin_ia32_getexpps512_mask(x.v, x.v, all16, rounding); }
OG_FN floats mantissa_of(floats x) { return __builtin_ia32_getmantps512_mask(x.v, 0, x.v, all16, rounding); }

/// A logarithm y of x, corrected where x is not a positive finite number: -inf at 0, NaN below, x for inf and NaN. One
/// table of responses by class of x: quiet and signalling NaN, zero, one, -inf, inf, negative, positive.
OG_FN floats log_ends(floats x, floats y) {
  return __builtin_ia32_fixupimmps512_mask(y.v, x.v, (ints16)words(0x03530421u).v, 0, all16, rounding);
}

/// Passed to a function with a shorter form for lanes that stay away from 0, infinity, NaN, overflow and underflow: the
/// same bits there, and anything elsewhere. `furthest` records how far each lane went, in all calls together.
struct no_ends {
  words furthest = 0u;
  OG_FN void reaches(words how_far) {
    furthest = (words16)__builtin_ia32_pmaxud512_mask((ints16)furthest.v, (ints16)how_far.v, (ints16)how_far.v, all16);
  }
  /// True if nothing went further than 30, as a float. The bits of a NaN are large.
  OG_FN bool held() const {
    return __builtin_ia32_ucmpd512_mask((ints16)furthest.v, (ints16)bits(floats(30.0f)).v, 2, all16) == all16;
  }
};

// ---- functions that have no form of their own ------------------------------------------------------------------------

/// f of each lane: GCC vectorises the loop as it does elsewhere.
template <class F, class... X> OG_FN floats each_lane(F f, X... x) {
  alignas(64) float in[sizeof...(X)][lane_count], out[lane_count];
  int k = 0;
  (__builtin_memcpy(in[k++], &x.v, sizeof(x.v)), ...);
#pragma GCC ivdep
  for (int i = 0; i < lane_count; ++i) {
    if constexpr (sizeof...(X) == 1) out[i] = f(in[0][i]);
    else out[i] = f(in[0][i], in[1][i]);
  }
  floats y;
  __builtin_memcpy(&y.v, out, sizeof(out));
  return y;
}

#else
#define OG_LANES 0
#endif

}  // namespace og
