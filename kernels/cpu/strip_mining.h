#pragma once
#include "cpu/f16_strips.h"
#include "math/lane_memory.h"

// A large kernel, statement by statement. Each statement does a whole strip before the next one starts, and leaves its
// values in the L1 and L2 caches. Statements with the same computation call one function, so that each function is
// compiled once. A strip is long enough to amortize calls and the values that a function keeps in registers. An element
// goes through the same operations as elsewhere, in the same order, so its bits are the same.
//
// schedule/cpu_body.py selects these kernels; codegen/strip_mining.py generates the members of their functors. W is the
// type of one computation: og::floats or one element. The memory of a strip has room for whole vectors; values behind
// the last element are never used.

// A function that only calls others: optimizing it gains nothing (without that, GCC takes a third less time).
#if defined(__GNUC__) && !defined(__clang__)
#define OG_PLAIN __attribute__((optimize("O0")))
#else
#define OG_PLAIN
#endif

namespace og {

template <class F, class = void> struct has_strips {
  static constexpr bool value = false;
};
template <class F> struct has_strips<F, ignored<decltype(F::strip_length)>> {
  static constexpr bool value = true;
};

template <class W> struct goes_by_vectors {
  static constexpr bool value = false;
};

// An argument of a statement: element j of a strip, or a number.
template <class S> OG_FN auto one_of(S* x, i64 j) { return load(x[j]); }
template <class T> OG_FN T one_of(T number, i64) { return number; }

#if OG_LANES
template <> struct goes_by_vectors<floats> {
  static constexpr bool value = true;
};
template <class S> OG_FN auto vector_of(S* x, i64 j) { return load_lanes((const S*)x + j, lane_count); }
template <class T> OG_FN T vector_of(T number, i64) { return number; }
OG_FN i64 lanes_left(i64 n, i64 j) { return n - j < lane_count ? n - j : lane_count; }
#endif

/// y = Op(x...), n elements.
template <class W, class Op, class Y, class... X> OG_FN void over(i64 n, Y* y, X... x) {
#if OG_LANES
  if constexpr (goes_by_vectors<W>::value) {
    for (i64 j = 0; j < n; j += lane_count) store_lanes(y + j, Op::template apply<W>(vector_of(x, j)...), lane_count);
  } else
#endif
  {
    OG_VECTORIZE
    for (i64 j = 0; j < n; ++j) y[j] = store<Y>(Op::template apply<W>(one_of(x, j)...));
  }
}

/// The arguments of the functions: the number of elements, and the address of each value. Indices take less time to
/// compile than pointers.
template <int places> struct Strip {
  i64 n;
  void* place[places];
  template <class T> OG_FN T* at(int k) const { return (T*)place[k]; }
};
template <class T> static OG_ONCE void settle(void** place, T* room, int count, i64 length) {
  for (int k = 0; k < count; ++k) place[k] = room + k * length;
}

/// Loads an operand, in the type of the computation.
template <class W, class T, class S, int places> static OG_ONCE void fetch(const Strip<places>& s, int to, const S* from) {
  T* y = (T*)s.place[to];
#if OG_LANES
  if constexpr (goes_by_vectors<W>::value) {
    for (i64 j = 0; j < s.n; j += lane_count) store_lanes(y + j, load_lanes(from + j, lanes_left(s.n, j)), lane_count);
  } else
#endif
  {
    OG_VECTORIZE
    for (i64 j = 0; j < s.n; ++j) y[j] = store<T>(load(from[j]));
  }
}
/// The same for an operand whose elements are `step` apart.
template <class W, class T, class S, int places> static OG_ONCE void fetch(const Strip<places>& s, int to, const S* from, i64 step) {
  T* y = (T*)s.place[to];
#if OG_LANES
  if constexpr (goes_by_vectors<W>::value) {
    for (i64 j = 0; j < s.n; j += lane_count)
      store_lanes(y + j, gather_lanes(from + j * step, step, lanes_left(s.n, j)), lane_count);
  } else
#endif
  {
    OG_VECTORIZE
    for (i64 j = 0; j < s.n; ++j) y[j] = store<T>(load(from[j * step]));
  }
}
/// An operand that is used where it is in memory. It is copied if vectors would reach behind its end.
template <class W, class T, int places> static OG_ONCE void in_place(Strip<places>& s, int to, int room, const T* from) {
  s.place[to] = (void*)from;
#if OG_LANES
  if (goes_by_vectors<W>::value && s.n % lane_count != 0) {
    fetch<W, T>(s, room, from);
    s.place[to] = s.place[room];
  }
#endif
}

/// Stores a result, rounded to its stored type.
template <class W, class T, class S, int places> static OG_ONCE void deliver(const Strip<places>& s, int from, S* to) {
  const T* x = (const T*)s.place[from];
#if OG_LANES
  if constexpr (goes_by_vectors<W>::value) {
    for (i64 j = 0; j < s.n; j += lane_count) store_lanes(to + j, load_lanes(x + j, lane_count), lanes_left(s.n, j));
  } else
#endif
  {
    OG_VECTORIZE
    for (i64 j = 0; j < s.n; ++j) to[j] = store<S>(load(x[j]));
  }
}
template <class W, class T, class S, int places> static OG_ONCE void deliver(const Strip<places>& s, int from, S* to, i64 step) {
  const T* x = (const T*)s.place[from];
#if OG_LANES
  if constexpr (goes_by_vectors<W>::value) {
    for (i64 j = 0; j < s.n; j += lane_count)
      scatter_lanes(to + j * step, step, load_lanes(x + j, lane_count), lanes_left(s.n, j));
  } else
#endif
  {
    OG_VECTORIZE
    for (i64 j = 0; j < s.n; ++j) to[j * step] = store<S>(load(x[j]));
  }
}
/// Stores addends of a sum, with zeros up to a whole vector.
template <class W, class T, class Addend, int places> static OG_ONCE void deliver_addends(const Strip<places>& s, int from, Addend* to) {
  const T* x = (const T*)s.place[from];
#if OG_LANES
  if constexpr (goes_by_vectors<W>::value) {
    for (i64 j = 0; j < s.n; j += lane_count)
      store_lanes(to + j, first_lanes(load_lanes(x + j, lane_count), lanes_left(s.n, j)), lane_count);
  } else
#endif
  {
    OG_VECTORIZE
    for (i64 j = 0; j < s.n; ++j) to[j] = (Addend)load(x[j]);
  }
}

}  // namespace og
