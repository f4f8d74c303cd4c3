#pragma once
#include "config.h"
#include "lanes.h"

// Storage types and the one rounding between the compute type and memory. Everything is rounded to nearest, ties to
// even; NaN stays NaN; too large for f16 is infinity; subnormal f16 and bf16 results are exact roundings.
//
// The host forms are branch-free integer code so that a compiler turns the loop around them into vector code without
// F16C; selects stand for branches. On the device one PTX instruction does the same (sm_80 and later).

namespace og {

struct bf16 { u16 bits; };
struct f16 { u16 bits; };
struct b8 { u8 bits; };  // a bool in memory: any non-zero byte is true; GCC vectorises loads of this, not of bool

// ---- load: storage to compute type, exact --------------------------------------------------------------------------

OG_FN float load(float x) { return x; }
OG_FN double load(double x) { return x; }
OG_FN i8 load(i8 x) { return x; }
OG_FN u8 load(u8 x) { return x; }
OG_FN i32 load(i32 x) { return x; }
OG_FN i64 load(i64 x) { return x; }
OG_FN bool load(bool x) { return x; }
OG_FN bool load(b8 x) { return x.bits != 0; }

OG_FN float load(bf16 x) {
#if OG_DEVICE
  // By name: from (u32)bits << 16 the assembler makes three instructions for the upper half of a word (NVRTC 13.5).
  float y;
  asm("mov.b32 %0, {%1, %2};" : "=f"(y) : "h"((u16)0), "h"(x.bits));
  return y;
#else
  return from_bits((u32)x.bits << 16);
#endif
}
OG_FN float load(f16 x) {
#if OG_DEVICE
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
  return y;
#else
  // The sign stays on top and the other bits go under the exponent of f32, whose bias is mended by an exact multiplication
  // with 2^112, which also normalises subnormals; exponent 31 (inf, NaN) has to be made 255.
  const u32 moved = ((u32)(i32)(i16)x.bits << 13) & 0x8fffe000u;
  const float scaled = from_bits(moved) * 0x1p112f;
  return from_bits(bits(scaled) | (abs(scaled) >= 65536.0f ? 0x7f800000u : 0u));
#endif
}

// ---- rounding to 16 bits -------------------------------------------------------------------------------------------

OG_FN bf16 to_bf16(float x) {
#if OG_DEVICE
  bf16 y;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
  return y;
#else
  const u32 b = bits(x);
  const u32 rounded = (b + 0x7fffu + ((b >> 16) & 1u)) >> 16;  // ties to even; a carry may reach infinity, rightly
  const u32 quiet_nan = (b >> 16) | 0x40u;
  return bf16{(u16)((b & 0x7fffffffu) > 0x7f800000u ? quiet_nan : rounded)};
#endif
}

OG_FN f16 to_f16(float x) {
#if OG_DEVICE
  f16 y;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
  return y;
#else
  // Adding 2^13 times the power of two below |x| (below 2^-14 that one) lets the adder round at the last bit of the f16, and
  // leaves the f16's mantissa and a carry in the low bits. 65536 and more is infinity.
  const u32 b = bits(x), magnitude = b & 0x7fffffffu;
  const u32 bounded = magnitude < 0x47800000u ? magnitude : 0x47800000u;
  const u32 own = bounded & 0x7f800000u, exponent = own > 0x38800000u ? own : 0x38800000u;
  const u32 sum = bits(from_bits(bounded) + from_bits(exponent + (13u << 23)));
  const u32 rounded = sum - exponent + (exponent >> 13) - ((13u << 23) + (113u << 10));
  const u32 all = magnitude > 0x7f800000u ? 0x7e00u : rounded;
  return f16{(u16)(all | ((b >> 16) & 0x8000u))};
#endif
}

// Double to a 16-bit type through f32 would round twice. Rounding the first step to odd keeps the lost bits visible in
// the last one of 24, and two spare bits are enough for the second step to be the only rounding (Boldo, Melquiond 2008).
OG_FN float round_to_odd(double x) {
#if OG_DEVICE
  const float down = __double2float_rz(x);
#else
  const float nearest = (float)x;
  // Step back to the truncated value where rounding went away from zero; infinity steps back to the largest float.
  const bool away = abs((double)nearest) > abs(x);
  const float down = from_bits(bits(nearest) - (away ? 1u : 0u));
#endif
  const bool inexact = (double)down != x && x == x;
  return from_bits(bits(down) | (inexact ? 1u : 0u));
}

OG_FN bf16 to_bf16(double x) { return to_bf16(round_to_odd(x)); }
OG_FN f16 to_f16(double x) { return to_f16(round_to_odd(x)); }

// ---- store<S>: compute type to storage -----------------------------------------------------------------------------

template <class S, class T> struct storer {
  static_assert(sizeof(S) == 0, "og::store: convert with og::cast before storing another type");
};
template <class T> struct storer<T, T> {
  static OG_FN T apply(T x) { return x; }
};
template <> struct storer<bf16, float> {
  static OG_FN bf16 apply(float x) { return to_bf16(x); }
};
template <> struct storer<f16, float> {
  static OG_FN f16 apply(float x) { return to_f16(x); }
};
template <> struct storer<bf16, double> {
  static OG_FN bf16 apply(double x) { return to_bf16(x); }
};
template <> struct storer<f16, double> {
  static OG_FN f16 apply(double x) { return to_f16(x); }
};

template <> struct storer<b8, bool> {
  static OG_FN b8 apply(bool x) { return b8{(u8)(x ? 1 : 0)}; }
};

template <class S, class T> OG_FN S store(T x) { return storer<S, T>::apply(x); }

// ---- an explicit TypeCast inside a fused run rounds where it stands ------------------------------------------------

OG_FN float round_bf16(float x) { return load(to_bf16(x)); }
OG_FN float round_f16(float x) { return load(to_f16(x)); }
OG_FN float round_bf16(double x) { return load(to_bf16(x)); }
OG_FN float round_f16(double x) { return load(to_f16(x)); }

// ---- 16 elements at a time -----------------------------------------------------------------------------------------

#if OG_LANES
typedef u16 shorts16 __attribute__((vector_size(32)));
typedef u8 bytes16 __attribute__((vector_size(16)));
typedef short halves16 __attribute__((vector_size(32)));  // as the machine's functions spell them
typedef char chars16 __attribute__((vector_size(16)));
typedef short halves32 __attribute__((vector_size(64)));
typedef i32 ints8 __attribute__((vector_size(32)));

/// The first n of 16 lanes.
OG_FN u16 first_of(i64 n) { return (u16)(all16 >> (lane_count - n)); }

/// The first n of 16 elements from p, zeros for the rest; and to p. Memory beyond them is not touched.
template <class V, class S> OG_FN V some(const S* p, i64 n) {
  V x;
  if (n == lane_count) {
    __builtin_memcpy(&x, p, sizeof(V));
  } else if constexpr (sizeof(S) == 4) {
    x = (V)__builtin_ia32_loadups512_mask((const float*)p, (floats16){}, first_of(n));
  } else if constexpr (sizeof(S) == 2) {
    x = (V)__builtin_ia32_loaddquhi256_mask((const short*)p, (halves16){}, first_of(n));
  } else {
    x = (V)__builtin_ia32_loaddquqi128_mask((const char*)p, (chars16){}, first_of(n));
  }
  return x;
}
template <class V, class S> OG_FN void put(S* p, V x, i64 n) {
  if (n == lane_count) {
    __builtin_memcpy(p, &x, sizeof(V));
  } else if constexpr (sizeof(S) == 4) {
    __builtin_ia32_storeups512_mask((float*)p, (floats16)x, first_of(n));
  } else if constexpr (sizeof(S) == 2) {
    __builtin_ia32_storedquhi256_mask((short*)p, (halves16)x, first_of(n));
  } else {
    __builtin_ia32_storedquqi128_mask((char*)p, (chars16)x, first_of(n));
  }
}

OG_FN floats load_lanes(const float* p, i64 n) { return some<floats16>(p, n); }
OG_FN floats load_lanes(const bf16* p, i64 n) {
  // Each to the upper half of a lane, zeros below: one permutation, where widening and a shift are two.
  constexpr halves32 upper = {0, 0, 0, 1, 0, 2, 0, 3, 0, 4, 0, 5, 0, 6, 0, 7, 0, 8, 0, 9, 0, 10, 0, 11, 0, 12, 0, 13, 0, 14, 0, 15};
  const halves32 x = (halves32)__builtin_ia32_si512_256si((ints8)some<shorts16>(p, n));
  return (floats16)__builtin_ia32_permvarhi512_mask(x, upper, (halves32){}, 0xaaaaaaaau);
}
OG_FN floats load_lanes(const f16* p, i64 n) {
  return __builtin_ia32_vcvtph2ps512_mask((halves16)some<shorts16>(p, n), (floats16){}, all16, rounding);
}
OG_FN bools load_lanes(const b8* p, i64 n) {
  const bytes16 x = some<bytes16>(p, n);
  return bools((u16)__builtin_ia32_ptestmb128((chars16)x, (chars16)x, all16), 0);
}

OG_FN void store_lanes(float* p, floats x, i64 n) { put(p, x.v, n); }
OG_FN void store_lanes(bf16* p, floats x, i64 n) {
#if defined(__AVX512BF16__)
  // The machine's own rounding takes subnormals for zero.
  if (__builtin_expect(__builtin_ia32_fpclassps512_mask(x.v, 0x20, all16) == 0, 1)) {
    return put(p, __builtin_bit_cast(shorts16, __builtin_ia32_cvtneps2bf16_v16sf(x.v)), n);
  }
#endif
  const words16 b = bits(x).v;
  const floats rounded = from_bits((b + 0x7fffu + ((b >> 16) & 1u)) >> 16), nan = from_bits((b >> 16) | 0x40u);
  put(p, __builtin_ia32_pmovdw512_mask((ints16)choose(x == x, rounded, nan).v, (halves16){}, all16), n);
}
OG_FN void store_lanes(f16* p, floats x, i64 n) {
  put(p, __builtin_ia32_vcvtps2ph512_mask(x.v, 0, (halves16){}, all16), n);
}
OG_FN void store_lanes(b8* p, bools x, i64 n) {
  put(p, (bytes16)__builtin_ia32_cvtmask2b128(x.m) & (u8)1, n);
}

/// The first n of 16, zeros for the rest.
OG_FN floats first_lanes(floats x, i64 n) {
  return choose(bools(first_of(n), 0), x, (floats)0.0f);
}

/// Elements that lie `step` apart.
template <class S> OG_FN auto gather_lanes(const S* p, i64 step, i64 n) {
  if (step == 1) return load_lanes(p, n);  // a turned operand's copy
  S x[lane_count] = {};
  for (i64 i = 0; i < n; ++i) x[i] = p[i * step];
  return load_lanes(x, lane_count);
}
OG_FN floats gather_lanes(const float* p, i64 step, i64 n) {
  if (n < lane_count || step == 1) return gather_lanes<float>(p, step, n);
  // In registers: what was just stored in 16 pieces is not soon loaded as one.
  const float *q = p + 4 * step, *r = q + 4 * step, *s = r + 4 * step;
  const i64 two = 2 * step, three = 3 * step;
  return (floats16){p[0], p[step], p[two], p[three], q[0], q[step], q[two], q[three],
                    r[0], r[step], r[two], r[three], s[0], s[step], s[two], s[three]};
}
template <class S, class V> OG_FN void scatter_lanes(S* p, i64 step, V x, i64 n) {
  S y[lane_count];
  store_lanes(y, x, lane_count);
  for (i64 i = 0; i < n; ++i) p[i * step] = y[i];
}

OG_FN floats round_bf16(floats x) {
  bf16 y[lane_count];
  store_lanes(y, x, lane_count);
  return load_lanes(y, lane_count);
}
OG_FN floats round_f16(floats x) {
  f16 y[lane_count];
  store_lanes(y, x, lane_count);
  return load_lanes(y, lane_count);
}
#endif

}  // namespace og
