#pragma once
#include "config.h"
#include "math/lanes.h"

// Storage types and the one rounding between the compute type and memory. Everything is rounded to nearest, ties to
// even; NaN stays NaN; values too large for f16 become infinity; subnormal f16 and bf16 results are exact roundings.
//
// The host forms are branch-free integer code, so that a compiler can vectorise the loop around them without F16C;
// selects replace branches. On the device one PTX instruction does the same (sm_80 and later).

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
  // An explicit instruction: for (u32)bits << 16 the assembler emits three for the upper half of a word (NVRTC 13.5).
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
  // The sign stays on top, and the other bits go below the exponent of f32. Its bias is corrected by an exact
  // multiplication with 2^112, which also normalises subnormals; exponent 31 (inf, NaN) must become 255.
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
  const u32 rounded = (b + 0x7fffu + ((b >> 16) & 1u)) >> 16;  // ties to even; a carry into infinity is correct
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
  // Adding 2^13 times the power of two below |x| (2^-14 if |x| is less) makes the adder round at the last bit of the
  // f16, and leaves the f16's mantissa and a carry in the low bits. 65536 and more is infinity.
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

}  // namespace og
