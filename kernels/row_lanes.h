#pragma once
#include "row_reductions.h"

// Elements of rows, one at a time or 16 (kernels/lanes.h): what a functor's `element` reads and writes, and the blocks that
// its passes go in. Both forms add up the same lanes in the same order, so the bits are the same.

namespace og {

// ---- n elements from p on --------------------------------------------------------------------------------------------

template <class F> struct Elements {
  template <class S> static OG_FN auto read(const S* p, i64) { return load(*p); }
  template <class S> static OG_FN auto read(const S* p, i64, i64) { return load(*p); }
};
template <class F, class S> OG_FN auto elements(const S* p, i64 n) { return Elements<F>::read(p, n); }
template <class F, class S> OG_FN auto elements(const S* p, i64 step, i64 n) { return Elements<F>::read(p, step, n); }
template <class S> OG_FN void put_elements(S* p, float x, i64) { *p = store<S>(x); }
template <class S> OG_FN void put_elements(S* p, i64, float x, i64) { *p = store<S>(x); }
OG_FN void put_elements(b8* p, bool x, i64) { *p = store<b8>(x); }
OG_FN void put_elements(b8* p, i64, bool x, i64) { *p = store<b8>(x); }

#if OG_LANES
template <> struct Elements<floats> {
  template <class S> static OG_FN auto read(const S* p, i64 n) { return load_lanes(p, n); }
  template <class S> static OG_FN auto read(const S* p, i64 step, i64 n) { return gather_lanes(p, step, n); }
};
template <class S> OG_FN void put_elements(S* p, floats x, i64 n) { store_lanes(p, x, n); }
template <class S> OG_FN void put_elements(S* p, i64 step, floats x, i64 n) { scatter_lanes(p, step, x, n); }
OG_FN void put_elements(b8* p, bools x, i64 n) { store_lanes(p, x, n); }
OG_FN void put_elements(b8* p, i64 step, bools x, i64 n) { scatter_lanes(p, step, x, n); }
#endif

// Elements up to the next address that 16 of them begin at, where they are stored as a whole.
template <class S> OG_FN i64 apart_from_line(const S* p) {
  return -(i64)((u64)p / sizeof(S)) & 15;
}

// ---- blocks of a pass ------------------------------------------------------------------------------------------------

// What the elements of a pass add, in strips: those of reductions, then those of sums; from element `first` on.
template <class F, int pass, bool keep, int apart>
OG_FN void addends(const F& f, i64 first, i64 n, typename F::Addend* x) {
#if OG_LANES
  if constexpr (has_lanes<F>::value) {
    constexpr int count = F::reductions(pass) + (pass + 1 == F::passes && F::stores ? F::sums : 0);
    for (i64 i = 0; i < n; i += lane_count) {
      floats own[count + 1];
      f.template element<pass, keep, 1, floats>(first + i, own, n - i < lane_count ? n - i : lane_count);
      each<count>([&](auto k) { store_lanes(x + k.value * apart + i, own[k.value], lane_count); });
    }
    return;
  }
#endif
  OG_VECTORIZE
  for (i64 i = 0; i < n; ++i) f.template element<pass, keep, apart>(first + i, x + i);
}

// Elements [0, width) of a pass that only writes: from where whole vectors of a result are whole lines of the cache.
template <class F, int pass, bool keep> OG_FN void write_run(const F& f, i64 width) {
#if OG_LANES
  if constexpr (has_lanes<F>::value) {
    i64 i = f.apart_from_line();
    i = width < block ? 0 : i;
    if (i > 0) f.template element<pass, keep, 0, floats>(0, (floats*)nullptr, i);
    for (; i + lane_count <= width; i += lane_count) f.template element<pass, keep, 0, floats>(i, (floats*)nullptr, lane_count);
    if (i < width) f.template element<pass, keep, 0, floats>(i, (floats*)nullptr, width - i);
    return;
  }
#endif
  OG_VECTORIZE
  for (i64 i = 0; i < width; ++i) f.template element<pass, keep, 0>(i, (typename F::Addend*)nullptr);
}

// Elements [0, width) of a pass that reduces.
template <class F, int pass, bool keep> OG_FN void reduce_run(const F& f, i64 width, Reductions<F, pass>& reductions) {
  constexpr int count = F::reductions(pass);
  i64 first = 0;
#if OG_LANES
  if constexpr (has_lanes<F>::value) {
    for (; first + block <= width; first += block) {
      floats x[block / lane_count][count];
      each<block / lane_count>([&](auto j) {
        f.template element<pass, keep, 1, floats>(first + j.value * lane_count, x[j.value], lane_count);
      });
      reductions.add_lanes(x[0], x[1], x[2], x[3]);
    }
    if (first == width) return;
    floats x[block / lane_count][count];
    each<block / lane_count>([&](auto j) {
      const i64 left = width - first - j.value * lane_count, n = left < 0 ? 0 : left < lane_count ? left : lane_count;
      if (n > 0) f.template element<pass, keep, 1, floats>(first + j.value * lane_count, x[j.value], n);
      reductions.fill_lanes(x[j.value], n);
    });
    reductions.add_lanes(x[0], x[1], x[2], x[3]);
    return;
  }
#endif
  alignas(64) typename F::Addend x[count * block];
  for (; first + block <= width; first += block) {
    addends<F, pass, keep, block>(f, first, block, x);
    reductions.add(x, block);
  }
  if (first < width) {
    addends<F, pass, keep, block>(f, first, width - first, x);
    reductions.fill(x, width - first, block);
    reductions.add(x, block);
  }
}

}  // namespace og
