#pragma once
#include "cpu/inner_reduction.h"

// A row in a few vectors of 16 floats: its elements, and reductions of all of them at once, without lanes that
// accumulate several blocks. The bits are those of blocks (kernels/cpu/row_reductions.h): the operations left out here
// add 0 there, or compare with a value that is never chosen.

namespace og {

#if OG_LANES

// ---- elements of the last vector, which the row need not fill --------------------------------------------------------

// A number of lanes, as a mask that is computed once. A count would be compared with 16 for every operand.
struct Some {
  u16 mask;
};
template <int bytes> struct Masked;
template <> struct Masked<4> {
  using Lanes = floats16;
  static OG_FN Lanes read(const void* p, u16 m) { return __builtin_ia32_loadups512_mask((const float*)p, Lanes{}, m); }
  static OG_FN void write(void* p, Lanes x, u16 m) { __builtin_ia32_storeups512_mask((float*)p, x, m); }
};
template <> struct Masked<2> {
  using Lanes = halves16;
  static OG_FN Lanes read(const void* p, u16 m) { return __builtin_ia32_loaddquhi256_mask((const short*)p, Lanes{}, m); }
  static OG_FN void write(void* p, Lanes x, u16 m) { __builtin_ia32_storedquhi256_mask((short*)p, x, m); }
};
template <> struct Masked<1> {
  using Lanes = chars16;
  static OG_FN Lanes read(const void* p, u16 m) { return __builtin_ia32_loaddquqi128_mask((const char*)p, Lanes{}, m); }
  static OG_FN void write(void* p, Lanes x, u16 m) { __builtin_ia32_storedquqi128_mask((char*)p, x, m); }
};
template <class F, class S> OG_FN auto elements(const S* p, Some n) {
  const auto x = Masked<sizeof(S)>::read(p, n.mask);
  S y[lane_count];  // in a register
  __builtin_memcpy(y, &x, sizeof y);
  return load_lanes(y, lane_count);
}
template <class F, class S> OG_FN auto elements(const S* p, i64 step, Some n) {
  return gather_lanes(p, step, (i64)__builtin_popcount(n.mask));
}
template <class S, class V> OG_FN void store_elements(S* p, V x, Some n) {
  S y[lane_count];
  store_lanes(y, x, lane_count);
  typename Masked<sizeof(S)>::Lanes whole;
  __builtin_memcpy(&whole, y, sizeof y);
  Masked<sizeof(S)>::write(p, whole, n.mask);
}
template <class S, class V> OG_FN void store_elements(S* p, i64 step, V x, Some n) {
  scatter_lanes(p, step, x, (i64)__builtin_popcount(n.mask));
}

// ---- reductions of x[0], ... x[vectors - 1] --------------------------------------------------------------------------

// Of each four vectors, the first and the third, then the second and the fourth, then both sums are added up as floats.
template <int vectors> OG_FN double sum_at_once(const floats* x) {
  Vector<double> lane[2];
  each<(vectors + 3) / 4>([&](auto block) OG_LAMBDA {
    constexpr int first = 4 * block.value, count = vectors - first;
    floats16 four = x[first].v, odd;
    if constexpr (count > 2) four += x[first + 2].v;
    if constexpr (count > 1) odd = x[first + 1].v;
    if constexpr (count > 3) odd += x[first + 3].v;
    if constexpr (count > 1) four += odd;
    const Vector<double> low = widened<8>(Half<16>::lower(four)), high = widened<8>(Half<16>::upper(four));
    lane[0] = block.value ? lane[0] + low : low;
    lane[1] = block.value ? lane[1] + high : high;
  });
  return folded_all<double, 2>(lane, [](auto a, auto b) { return a + b; }) + 0.0;  // never -0
}

// Of each four vectors, the first and the third, and the second and the fourth are multiplied first.
template <int vectors> OG_FN double product_at_once(const floats* x) {
  Vector<double> lane[4];
  each<(vectors + 3) / 4>([&](auto block) OG_LAMBDA {
    constexpr int first = 4 * block.value, count = vectors - first;
    each<(count < 2 ? count : 2)>([&](auto k) OG_LAMBDA {
      const floats16 a = x[first + k.value].v;
      Vector<double> low = widened<8>(Half<16>::lower(a)), high = widened<8>(Half<16>::upper(a));
      if constexpr (count > k.value + 2) {
        const floats16 b = x[first + k.value + 2].v;
        low *= widened<8>(Half<16>::lower(b));
        high *= widened<8>(Half<16>::upper(b));
      }
      lane[2 * k.value] = block.value ? lane[2 * k.value] * low : low;
      lane[2 * k.value + 1] = block.value ? lane[2 * k.value + 1] * high : high;
    });
  });
  return folded_all<double, vectors == 1 ? 2 : 4>(lane, [](auto a, auto b) { return a * b; });
}

template <int vectors, int sign> OG_FN float extreme_at_once(const floats* x) {
  using Own = Extreme<float, sign>;
  floats lane[4];
  each<vectors>([&](auto j) OG_LAMBDA {
    floats& own = lane[j.value % 4];
    own = j.value < 4 ? x[j.value] : Own::beyond(own, x[j.value]);
  });
  if constexpr (vectors > 3) lane[1] = Own::beyond(lane[1], lane[3]);
  if constexpr (vectors > 2) lane[0] = Own::beyond(lane[0], lane[2]);
  return Own::first_of(vectors > 1 ? Own::beyond(lane[0], lane[1]) : lane[0]);
}
template <int vectors> OG_FN bool any_nan(const floats* x) {
  bools none = false;
  each<(vectors + 1) / 2>([&](auto j) OG_LAMBDA {
    constexpr int a = 2 * j.value, b = a + 1 < vectors ? a + 1 : a;
    none = none | compare<3>(x[a], x[b]);
  });
  return none.m;
}

template <How how, int vectors> OG_FN double reduced_at_once(floats* x, Some n) {
  using Own = Reduction<how, float>;
  floats filler = Own::nothing();
  if constexpr (how == How::peak) filler = x[0].v[0];
  x[vectors - 1] = choose(bools(n.mask, 0), x[vectors - 1], filler);
  if constexpr (how == How::add) {
    return sum_at_once<vectors>(x);
  } else if constexpr (how == How::multiply) {
    return product_at_once<vectors>(x);
  } else {
    const float found = extreme_at_once<vectors, how == How::smallest ? -1 : 1>(x);
    const double result = any_nan<vectors>(x) ? quiet_nan<float>() : found;
    if constexpr (how == How::peak) return Own::result({result, extreme_at_once<vectors, -1>(x)});
    return result;
  }
}
#endif

}  // namespace og
