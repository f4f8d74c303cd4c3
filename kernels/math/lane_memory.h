#pragma once
#include "math/convert.h"

// Loads and stores of 16 elements at a time, for the arithmetic of kernels/math/lanes.h.

namespace og {

#if OG_LANES
typedef u16 shorts16 __attribute__((vector_size(32)));
typedef u8 bytes16 __attribute__((vector_size(16)));
typedef short halves16 __attribute__((vector_size(32)));  // the types of the machine's functions
typedef char chars16 __attribute__((vector_size(16)));
typedef short halves32 __attribute__((vector_size(64)));
typedef i32 ints8 __attribute__((vector_size(32)));

/// The first n of 16 lanes.
OG_FN u16 first_of(i64 n) { return (u16)(all16 >> (lane_count - n)); }

/// Loads the first n of 16 elements from p, with zeros for the rest, or stores them to p. Nothing beyond is accessed.
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
  // Each to the upper half of a lane, zeros below: one permutation instead of a widening and a shift.
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

/// 16 elements in their storage format.
template <class S> struct Stored;
template <> struct Stored<float> {
  static OG_FN floats16 of(floats x) { return x.v; }
};
template <> struct Stored<bf16> {
  static OG_FN shorts16 of(floats x) {
#if defined(__AVX512BF16__)
    // The machine's rounding instruction treats subnormals as zero.
    if (__builtin_expect(__builtin_ia32_fpclassps512_mask(x.v, 0x20, all16) == 0, 1)) {
      return __builtin_bit_cast(shorts16, __builtin_ia32_cvtneps2bf16_v16sf(x.v));
    }
#endif
    const words16 b = bits(x).v;
    const floats rounded = from_bits((b + 0x7fffu + ((b >> 16) & 1u)) >> 16), nan = from_bits((b >> 16) | 0x40u);
    return (shorts16)__builtin_ia32_pmovdw512_mask((ints16)choose(x == x, rounded, nan).v, (halves16){}, all16);
  }
};
template <> struct Stored<f16> {
  static OG_FN shorts16 of(floats x) { return (shorts16)__builtin_ia32_vcvtps2ph512_mask(x.v, 0, (halves16){}, all16); }
};
template <> struct Stored<b8> {
  static OG_FN bytes16 of(bools x) { return (bytes16)__builtin_ia32_cvtmask2b128(x.m) & (u8)1; }
};
template <class S, class V> OG_FN void store_lanes(S* p, V x, i64 n) { put(p, Stored<S>::of(x), n); }

/// The first n of 16, zeros for the rest.
OG_FN floats first_lanes(floats x, i64 n) {
  return choose(bools(first_of(n), 0), x, (floats)0.0f);
}

/// Elements that lie `step` apart.
template <class S> OG_FN auto gather_lanes(const S* p, i64 step, i64 n) {
  if (step == 1) return load_lanes(p, n);  // the copy of a transposed operand
  S x[lane_count] = {};
  for (i64 i = 0; i < n; ++i) x[i] = p[i * step];
  return load_lanes(x, lane_count);
}
OG_FN floats gather_lanes(const float* p, i64 step, i64 n) {
  if (n < lane_count || step == 1) return gather_lanes<float>(p, step, n);
  // In registers: 16 elements that have just been stored one by one cannot soon be loaded as one.
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

// The number of elements before the next address at which 16 of them are aligned, and stored as a whole.
template <class S> OG_FN i64 apart_from_line(const S* p) {
  return -(i64)((u64)p / sizeof(S)) & 15;
}

// ---- results of a call ------------------------------------------------------------------------------------------------

#if OG_LANES && OG_OWNS_LINES
// An Intel core stores to a line that it does not own only after fetching it, and has few such stores in flight. So
// lines are prefetched early, and results that no cache would keep until they are read are stored without a fetch.
// AMD's cores gain by neither. See specs/decisions/0028-prefetch-and-streaming-stores-on-intel.md.
enum { read_bytes = 4096, ahead_bytes = 2048, past_caches_bytes = 16 * 1024 * 1024 };
template <class S> OG_FN auto read_lanes(const S* p, i64 n) {
  __builtin_prefetch((const char*)p + read_bytes);
  return load_lanes(p, n);
}
OG_FN bool write_past_caches(float* p, floats16 x) {
  if ((u64)p % sizeof(x) != 0) return false;
  __builtin_ia32_movntps512(p, x);
  return true;
}
template <class S> OG_FN bool write_past_caches(S* p, shorts16 x) {
  typedef long long words4 __attribute__((vector_size(32)));
  if ((u64)p % sizeof(x) != 0) return false;
  __builtin_ia32_movntdq256((words4*)p, (words4)x);
  return true;
}
OG_FN bool write_past_caches(b8*, bytes16) { return false; }

/// The form of the stores of one call.
struct Results {
  bool are_large = false;

  template <class S, class V> OG_FN void write(S* p, V x, i64 n) const {
    if (!are_large) __builtin_prefetch((const char*)p + ahead_bytes, 1);
    write_asked(p, x, n);
  }
  /// Stores to a line that was prefetched.
  template <class S, class V> OG_FN void write_asked(S* p, V x, i64 n) const {
    const auto stored = Stored<S>::of(x);
    if (are_large && n == lane_count && write_past_caches(p, stored)) return;
    put(p, stored, n);
  }
};
#else
#if OG_LANES
template <class S> OG_FN auto read_lanes(const S* p, i64 n) { return load_lanes(p, n); }
#endif
struct Results {
  static constexpr bool are_large = false;
#if OG_LANES
  template <class S, class V> OG_FN void write(S* p, V x, i64 n) const { store_lanes(p, x, n); }
  template <class S, class V> OG_FN void write_asked(S* p, V x, i64 n) const { store_lanes(p, x, n); }
#endif
};
#endif

}  // namespace og
