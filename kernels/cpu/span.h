#pragma once
#include "cpu/branch_compaction.h"
#include "math/reduced_precision.h"
#include "cpu/f16_strips.h"
#include "math/scalar.h"
#include "cpu/strip_mining.h"

// Elements of one row on the CPU, in the form that a functor has: by branches, by strips, 16 at a time, or one by one.

namespace og {

// The data of one call. `layout` holds rank, then the extents, then the strides (in elements) of each operand.
struct Space {
  void* const* base;
  i64 rank, size, inner;
  const i64* dims;
  const i64* strides;
};

/// True if a functor does 16 elements at a time; see opgraph/codegen/lanes.py.
template <class F, class = void> struct has_lanes {
  static constexpr bool value = false;
};
template <class F> struct has_lanes<F, ignored<decltype(F::by_lanes)>> {
  static constexpr bool value = F::by_lanes;
};

/// Chooses how a functor stores the results of a call. `settle` comes after the last store, before any read.
template <class F, class = void> struct Way {
  static OG_FN void choose(F&, const Space&) {}
  static OG_FN void settle(const F&) {}
};
#if OG_LANES && OG_OWNS_LINES
template <class F> struct Way<F, ignored<decltype(F::result_bytes)>> {
  static OG_FN void choose(F& f, const Space& space) {
    bool in_place = false;  // their lines have been fetched then
    for (int k = F::loads; k < F::operands; ++k)
      for (int j = 0; j < F::loads; ++j) in_place |= space.base[k] == space.base[j];
    f.out.are_large = !in_place && space.size * F::result_bytes >= past_caches_bytes;
  }
  static OG_FN void settle(const F& f) {
    if (f.out.are_large) __builtin_ia32_sfence();
  }
};
#endif

template <class F> OG_FN void span(const F f, i64 begin, i64 end) {
  if constexpr (has_branches<F>::value) {
    Branches<F> both;
    for (; begin < end; begin += strip) both.walk(f, begin, end - begin < strip ? end - begin : strip);
  } else if constexpr (has_strips<F>::value) {
    for (; begin < end; begin += F::strip_length) f.strips(begin, end - begin < F::strip_length ? end - begin : F::strip_length);
#if OG_LANES
  } else if constexpr (has_lanes<F>::value) {
    // The elements before the first whole cache line, and after the last one.
    i64 some = end - begin < 2 * lane_count ? 0 : f.apart_from_line(begin);
    for (;;) {
      if (some != 0) f.lanes(begin, some);
      begin += some;
      for (; begin + lane_count <= end; begin += lane_count) f.lanes(begin, lane_count);
      some = end - begin;
      if (some == 0) break;
    }
#endif
  } else if constexpr (halves_of<F>::count != 0) {
    alignas(64) float room[halves_of<F>::count][strip];
    for (i64 first = begin; first < end; first += strip) {
      const i64 n = end - first < strip ? end - first : strip;
      f.widen(room, first, n);
      OG_VECTORIZE
      for (i64 j = 0; j < n; ++j) f.staged(room, first + j, j);
      f.narrow(room, first, n);
    }
  } else {
    OG_VECTORIZE
    for (i64 i = begin; i < end; ++i) f.element(i);
  }
}

}  // namespace og
