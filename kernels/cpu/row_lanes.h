#pragma once
#include "cpu/row_reductions.h"

// Elements of rows, one or 16 at a time (kernels/math/lanes.h): the loads and stores of a functor's `element`, and the
// blocks of its passes. Both forms add up the same lanes in the same order, so the bits are the same.

namespace og {

// ---- n elements from p on --------------------------------------------------------------------------------------------

template <class F> struct Elements {
  template <class S> static OG_FN auto read(const S* p, i64) { return load(*p); }
  template <class S> static OG_FN auto read(const S* p, i64, i64) { return load(*p); }
};
template <class F, class S> OG_FN auto elements(const S* p, i64 n) { return Elements<F>::read(p, n); }
template <class F, class S> OG_FN auto elements(const S* p, i64 step, i64 n) { return Elements<F>::read(p, step, n); }
template <class S> OG_FN void store_elements(S* p, float x, i64) { *p = store<S>(x); }
template <class S> OG_FN void store_elements(S* p, i64, float x, i64) { *p = store<S>(x); }
OG_FN void store_elements(b8* p, bool x, i64) { *p = store<b8>(x); }
template <class Out, class S, class T> OG_FN void store_results(Out, S* p, T x, i64) { *p = store<S>(x); }
OG_FN void store_elements(b8* p, i64, bool x, i64) { *p = store<b8>(x); }

#if OG_LANES
template <> struct Elements<floats> {
  template <class S> static OG_FN auto read(const S* p, i64 n) { return load_lanes(p, n); }
  template <class S> static OG_FN auto read(const S* p, i64 step, i64 n) { return gather_lanes(p, step, n); }
};
template <class S> OG_FN void store_elements(S* p, floats x, i64 n) { store_lanes(p, x, n); }
template <class S> OG_FN void store_elements(S* p, i64 step, floats x, i64 n) { scatter_lanes(p, step, x, n); }
OG_FN void store_elements(b8* p, bools x, i64 n) { store_lanes(p, x, n); }
template <class S> OG_FN void store_results(Results out, S* p, floats x, i64 n) { out.write_asked(p, x, n); }
template <class S> OG_FN void store_results(Results out, S* p, bools x, i64 n) { out.write_asked(p, x, n); }
OG_FN void store_elements(b8* p, i64 step, bools x, i64 n) { scatter_lanes(p, step, x, n); }
#endif

// Prefetches the cache line at an address into the L2 cache, for a read or a write. The address need not be valid.
OG_FN void fetch(const void* p) { __builtin_prefetch(p, 0, 2); }
OG_FN void fetch_to_write(const void* p) { __builtin_prefetch(p, 1, 2); }

// Most bytes of rows that may stay in the last-level cache between calls. They arrive in time without a prefetch.
enum { near_bytes = 12 * 1024 * 1024 };

// ---- rows whose elements are near the largest one --------------------------------------------------------------------

// e^x for -nearest <= x <= 0: there are no special cases, and 2^n is applied by an addition to the exponent.
template <bool near, class T> OG_FN T exp_of_row(T x) { return exp(x); }
#if OG_LANES
template <> OG_FN floats exp_of_row<true, floats>(floats x) {
  using c = exp_constants<float>;
  const floats magic = fma(x, c::log2e, c::magic), n = magic - c::magic;
  const floats t = exp_tail(fma(n, -c::ln2_low, fma(n, -c::ln2_high, x)));
  return from_bits(words(bits(1 + t).v + (bits(magic).v << 23)));
}

template <class F, int pass, class Work> OG_FN void by_nearness(const F& f, const Work& work) {
  if constexpr (F::nears(pass)) {
    if (f.all_near()) return work(Number<1>{});
  }
  work(Number<0>{});
}
#endif

// ---- blocks of a pass ------------------------------------------------------------------------------------------------

// Stores the addends of a pass in strips: those of reductions, then those of sums, of n elements from `first` on.
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

// Rows of more elements than these are written backwards from the end, where the previous pass finished: only that part
// is in the L1 cache. Shorter rows are written forwards, in the direction of the prefetch.
enum { near_elements = 8 * 1024 };

// Elements [begin, end) of a pass that only writes. Whole vectors begin at `head`.
template <class F, int pass, bool keep> OG_FN void write_some(const F& f, i64 head, i64 begin, i64 end, bool back) {
#if OG_LANES
  if constexpr (has_lanes<F>::value) {
    return by_nearness<F, pass>(f, [&](auto near) OG_LAMBDA {
      const auto some = [&](i64 i, i64 n) OG_LAMBDA {
        f.template element<pass, keep, 0, floats, near.value>(i, (floats*)nullptr, n);
      };
      const i64 first = begin < head ? head : begin;
      const i64 last = first + (end - first) / lane_count * lane_count, step = back ? -lane_count : lane_count;
      if (begin < first) some(begin, first - begin);
      for (i64 left = last - first, i = back ? last - lane_count : first; left > 0; left -= lane_count, i += step)
        some(i, lane_count);
      if (last < end) some(last, end - last);
    });
  }
#endif
  OG_VECTORIZE
  for (i64 i = begin; i < end; ++i) f.template element<pass, keep, 0>(i, (typename F::Addend*)nullptr);
}

// The first element of a run at which the vectors of a result become whole cache lines.
template <class F> OG_FN i64 first_whole(const F& f, i64 width) {
#if OG_LANES
  if constexpr (has_lanes<F>::value) return width < block ? 0 : f.apart_from_line();
#endif
  return 0;
}

#if OG_LANES
// Elements [0, width) of a pass that reduces, 16 at a time. ahead: true if memory is prefetched.
template <class F, int pass, bool keep, bool ahead, bool near>
OG_FN void reduce_lanes(const F& f, i64 width, Reductions<F, pass>& reductions) {
  constexpr int count = F::reductions(pass);
  i64 first = 0;
  for (; first + block <= width; first += block) {
    if constexpr (ahead) {
      if (f.is_far) each<block / lane_count>([&](auto j) { f.template ahead<pass>(first + j.value * lane_count); });
    }
    floats x[block / lane_count][count];
    each<block / lane_count>([&](auto j) {
      f.template element<pass, keep, 1, floats, near>(first + j.value * lane_count, x[j.value], lane_count);
    });
    reductions.add_lanes(x[0], x[1], x[2], x[3]);
  }
  if (first == width) return;
  floats x[block / lane_count][count];
#pragma GCC unroll 1  // one copy of the element's code instead of four: up to a sixth of a kernel's compile time
  for (i64 j = 0; j < block / lane_count; ++j) {
    const i64 left = width - first - j * lane_count, n = left < 0 ? 0 : left < lane_count ? left : lane_count;
    if (n > 0) f.template element<pass, keep, 1, floats, near>(first + j * lane_count, x[j], n);
    reductions.fill_lanes(x[j], n, x[0]);
  }
  reductions.add_lanes(x[0], x[1], x[2], x[3]);
}
#endif

// Elements [0, width) of a pass that reduces.
template <class F, int pass, bool keep, bool ahead>
OG_FN void reduce_run(const F& f, i64 width, Reductions<F, pass>& reductions) {
#if OG_LANES
  if constexpr (has_lanes<F>::value) {
    return by_nearness<F, pass>(f, [&](auto near) OG_LAMBDA {
      reduce_lanes<F, pass, keep, ahead, near.value>(f, width, reductions);
    });
  }
#endif
  constexpr int count = F::reductions(pass);
  alignas(64) typename F::Addend x[count * block];
  i64 first = 0;
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
