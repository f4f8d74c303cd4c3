#pragma once
#include "cpu/f16_strips.h"
#include "math/lane_memory.h"
#include "math/shifted_exp.h"

// A choice between two costly values. Each element goes only through the side that it needs; the alternative is to
// compute both and keep one. The elements of a strip are packed by the condition, each side computes its own elements,
// and the results return to their places. An element goes through the same operations as without packing, so its bits
// are the same. Addends along the row are added as soon as they are computed, in each strip first those of the side
// where the condition is false: four vectors at a time in float, then in double. (The rounding error of an addend with
// a branch of arithmetic exceeds that of three sums of floats.)
//
// opgraph/schedule/cpu_body.py selects the choices that are worth it; codegen/branch_compaction.py generates the
// members of a functor with two branches.

namespace og {

template <class F, class = void> struct has_branches {
  static constexpr bool value = false;
};
template <class F> struct has_branches<F, ignored<decltype(F::branch_inputs)>> {
  static constexpr bool value = true;
};

enum { packed_width = 16, packed_strip = strip + packed_width };  // whole vectors may end behind the last element
enum { together = 4 * packed_width };  // addends that become packed_width

template <class F> struct Branches {
  static constexpr int inputs = F::branch_inputs, results = F::branch_results;
  struct Side {
    alignas(64) float in[inputs][packed_strip], out[results][packed_strip];
    i64 count;
  };
  Side sides[2];
  /// The sums so far, for the sums whose results are not unpacked.
  struct Sums {
    alignas(64) double lane[results][packed_width];
  };
  Sums sums = {};

  /// Elements [first, first + n), n <= strip. The addends to the cells of their columns go to s[k * strip]. Compiled
  /// once for all callers, with a copy of the functor, so that no store aliases it.
  template <class... Addends>
  OG_SHARED(void walk(const F f, i64 first, i64 n, Addends*... s),
    pack(f, first, n);
    compute<false>(f);
    compute<true>(f);
    unpack(f, first, n, s...))

 private:
  OG_FN void add(int k, const float* addends) {
    for (int l = 0; l < packed_width; ++l) sums.lane[k][l] += (double)addends[l];
  }

  template <bool side> OG_FN void vectors_in_full(const F& f) {
    if constexpr (F::has_shifts(side)) {
      if (f.near(side)) {
        near_shifts ends;
        vectors<side>(f, ends);
      } else {
        vectors_far<side>(f);
      }
    } else {
      any_ends ends;
      vectors<side>(f, ends);
    }
  }
  /// For shifts that do not occur in practice: no compile time is spent on optimizing this.
  template <bool side> OG_SLOW void vectors_far(const F& f) {
    any_ends ends;
    vectors<side>(f, ends);
  }

#if OG_LANES
  u16 taken[strip / lane_count];

  OG_FN static floats get(const float* p) { return load_lanes(p, lane_count); }
  OG_FN static void put(float* p, floats x) { store_lanes(p, x, lane_count); }
  /// front: packs the lanes of a mask at the front, then zeros. back: the inverse; the rest is from `others`.
  OG_FN static floats front(floats x, bools m) { return __builtin_ia32_compresssf512_mask(x.v, (floats16){}, m.m); }
  OG_FN static floats plus(floats sum, floats x, bools m) {
    return __builtin_ia32_addps512_mask(sum.v, x.v, sum.v, m.m, rounding);
  }
  OG_FN static floats back(floats x, bools m, floats others) {
    return __builtin_ia32_expandsf512_mask(x.v, others.v, m.m);
  }
  /// Positions in both sides. Not the counts in `sides`: those are in memory, so stores might alias them.
  struct Places {
    i64 no = 0, yes = 0;
    OG_FN void move_on(bools no_lanes, bools yes_lanes) {
      no += __builtin_popcount(no_lanes.m);
      yes += __builtin_popcount(yes_lanes.m);
    }
  };

  OG_FN void pack_lanes(const F& f, i64 first, i64 i, i64 n, Places& at) {
    floats x[inputs];
    f.fetch(x, first + i, n);
    const bools here((u16)((1u << n) - 1), 0), yes = f.condition(x) & here, no = here != yes;
    taken[i / lane_count] = yes.m;
    each<inputs>([&](auto k) {
      put(sides[0].in[k.value] + at.no, front(x[k.value], no));
      put(sides[1].in[k.value] + at.yes, front(x[k.value], yes));
    });
    at.move_on(no, yes);
  }
  OG_FN void pack(const F& f, i64 first, i64 n) {
    Places at;
    i64 i = 0;
    for (; i + lane_count <= n; i += lane_count) pack_lanes(f, first, i, lane_count, at);
    if (i < n) pack_lanes(f, first, i, n - i, at);
    sides[0].count = at.no;
    sides[1].count = at.yes;
  }

  template <bool side> OG_FN void compute(const F& f) {
    Side& own = sides[side];
    for (int k = 0; k < inputs; ++k) put(own.in[k] + own.count, 1.0f);  // no function has a special case there
    if constexpr (F::has_ends(side)) {
      if (f.near(side)) {
        Sums before;
        copy<side>(before, sums);
        no_ends ends;
        vectors<side>(f, ends);
        if (ends.held()) return;
        copy<side>(sums, before);
      }
    }
    vectors_in_full<side>(f);
  }
  template <bool side> OG_FN static void copy(Sums& to, const Sums& from) {
    each<results>([&](auto k) {
      if constexpr (F::makes(side, k.value) && F::stays_packed(k.value))
        __builtin_memcpy(to.lane[k.value], from.lane[k.value], sizeof to.lane[k.value]);
    });
  }
  template <bool side, class Ends> OG_FN void vectors(const F& f, Ends& ends) {
    Side& own = sides[side];
    for (i64 begin = 0; begin < own.count; begin += together) {
      const i64 end = own.count - begin < together ? own.count : begin + together;
      floats added[results];
      for (int k = 0; k < results; ++k) added[k] = 0.0f;
      for (i64 i = begin; i < end; i += lane_count) {
        const bools here((u16)(end - i < lane_count ? (1u << (end - i)) - 1 : all16), 0);
        floats x[inputs], y[results];
        each<inputs>([&](auto k) { x[k.value] = get(own.in[k.value] + i); });
        f.template branch<side>(x, y, ends);
        each<results>([&](auto k) {
          if constexpr (F::makes(side, k.value)) {
            if constexpr (F::stays_packed(k.value)) added[k.value] = plus(added[k.value], y[k.value], here);
            else put(own.out[k.value] + i, y[k.value]);
          }
        });
      }
      each<results>([&](auto k) {
        if constexpr (F::makes(side, k.value) && F::stays_packed(k.value)) {
          alignas(64) float addends[lane_count];
          put(addends, added[k.value]);
          add(k.value, addends);
        }
      });
    }
  }

  template <class... Addends>
  OG_FN void unpack_lanes(const F& f, i64 first, i64 i, i64 n, Places& at, Addends*... s) {
    const bools yes(taken[i / lane_count], 0), no = !yes;
    floats y[results];
    each<results>([&](auto k) {
      if constexpr (!F::stays_packed(k.value)) {
        y[k.value] = 0.0f;
        if constexpr (F::makes(false, k.value)) y[k.value] = back(get(sides[0].out[k.value] + at.no), no, y[k.value]);
        if constexpr (F::makes(true, k.value)) y[k.value] = back(get(sides[1].out[k.value] + at.yes), yes, y[k.value]);
      }
    });
    f.finish(y, first + i, n, s + i...);
    at.move_on(no, yes);
  }
  template <class... Addends> OG_FN void unpack(const F& f, i64 first, i64 n, Addends*... s) {
    Places at;
    i64 i = 0;
    for (; i + lane_count <= n; i += lane_count) unpack_lanes(f, first, i, lane_count, at, s...);
    if (i < n) unpack_lanes(f, first, i, n - i, at, s...);
  }
#else
  bool taken[strip];
  float whole[inputs > results ? inputs : results][strip];

  OG_FN void pack(const F& f, i64 first, i64 n) {
    f.fetch(whole, first, n);
    OG_VECTORIZE
    for (i64 i = 0; i < n; ++i) {
      float x[inputs];
      each<inputs>([&](auto k) { x[k.value] = whole[k.value][i]; });
      taken[i] = f.condition(x);
    }
    i64 ones = 0;
    for (i64 i = 0; i < n; ++i) {  // stored to both sides: the choice of a side needs no jump
      each<inputs>([&](auto k) { sides[0].in[k.value][i - ones] = sides[1].in[k.value][ones] = whole[k.value][i]; });
      ones += taken[i];
    }
    sides[0].count = n - ones;
    sides[1].count = ones;
  }

  template <bool side> OG_FN void compute(const F& f) {
    vectors_in_full<side>(f);
    each<results>([&](auto k) {
      if constexpr (F::makes(side, k.value) && F::stays_packed(k.value))
        add_all(k.value, sides[side].out[k.value], sides[side].count);
    });
  }
  template <bool side, class Ends> OG_FN void vectors(const F& f, Ends& ends) {
    Side& own = sides[side];
    OG_VECTORIZE
    for (i64 i = 0; i < own.count; ++i) {
      float x[inputs], y[results];
      each<inputs>([&](auto k) { x[k.value] = own.in[k.value][i]; });
      f.template branch<side>(x, y, ends);
      each<results>([&](auto k) {
        if constexpr (F::makes(side, k.value)) own.out[k.value][i] = y[k.value];
      });
    }
  }
  /// Adds addends as `vectors` does with lanes.
  OG_FN void add_all(int k, const float* x, i64 n) {
    for (i64 begin = 0; begin < n; begin += together) {
      const i64 end = n - begin < together ? n : begin + together;
      float added[packed_width] = {};
      for (i64 i = begin; i < end; ++i) added[(i - begin) % packed_width] += x[i];
      add(k, added);
    }
  }

  template <class... Addends> OG_FN void unpack(const F& f, i64 first, i64 n, Addends*... s) {
    each<results>([&](auto k) {
      if constexpr (!F::stays_packed(k.value)) {
        i64 ones = 0;
        for (i64 i = 0; i < n; ++i) {
          const float no = F::makes(false, k.value) ? sides[0].out[k.value][i - ones] : 0.0f;
          const float yes = F::makes(true, k.value) ? sides[1].out[k.value][ones] : 0.0f;
          whole[k.value][i] = taken[i] ? yes : no;
          ones += taken[i];
        }
      }
    });
    f.finish(whole, first, n, s...);
  }
#endif
};

}  // namespace og
