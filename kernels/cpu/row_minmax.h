#pragma once
#include "cpu/tiled_sums.h"

// The largest and the smallest element of a row, exactly; NaN if any element is NaN.

namespace og {

// The more extreme of two elements. A NaN replaces any number, and no number replaces a NaN.
template <class T, int sign> struct Extreme {
  static constexpr int per = per_vector<T>, count = 4;
  Vector<T> lane[count];
  static OG_FN T nothing() { return sign * -infinity<T>(); }
  template <class U> static OG_FN U chosen(U a, U b) {
    const auto beyond = sign > 0 ? b > a : b < a;
    return beyond | (b != b) ? b : a;
  }
  OG_FN void start() {
    each<count>([&](auto k) { lane[k.value] = Vector<T>{} + nothing(); });
  }
  OG_FN void add(const T* x) {
    each<block / per>([&](auto k) {
      lane[k.value % count] = chosen(lane[k.value % count], vector_at(x + per * k.value));
    });
  }
  OG_FN Partial partial() {
    return {(double)folded_all<T, count>(lane, [](auto a, auto b) { return chosen(a, b); }), 0};
  }
  static OG_FN void join(Partial& into, Partial x) { into.value = chosen(into.value, x.value); }
  static OG_FN double result(Partial x) { return x.value; }
};
#if OG_LANES
// For 16 floats, one instruction chooses the more extreme ones. It drops NaN, so `none` records whether there was one.
template <int sign> struct Extreme<float, sign> {
  floats lane[4];
  bools none;
  static OG_FN float nothing() { return sign * -infinity<float>(); }
  template <class U> static OG_FN U chosen(U a, U b) {
    const auto beyond = sign > 0 ? b > a : b < a;
    return beyond | (b != b) ? b : a;
  }
  static OG_FN floats beyond(floats a, floats b) { return sign > 0 ? larger(b, a) : smaller(b, a); }
  OG_FN void start() {
    each<4>([&](auto k) { lane[k.value] = nothing(); });
    none = false;
  }
  OG_FN void add_lanes(floats a, floats b, floats c, floats d) {
    lane[0] = beyond(lane[0], a);
    lane[1] = beyond(lane[1], b);
    lane[2] = beyond(lane[2], c);
    lane[3] = beyond(lane[3], d);
    none = none | compare<3>(a, b) | compare<3>(c, d);
  }
  OG_FN void add(const float* x) {
    add_lanes(load_lanes(x, 16), load_lanes(x + 16, 16), load_lanes(x + 32, 16), load_lanes(x + 48, 16));
  }
  // Like `folded`, but no lane is NaN, and no comparison is a branch.
  static OG_FN float first_of_all(floats a, floats b, floats c, floats d) {
    return first_of(beyond(beyond(a, c), beyond(b, d)));
  }
  static OG_FN float first_of(floats all) {
    floats16 v = all.v;
    v = beyond(v, (floats16)__builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7)).v;
    v = beyond(v, (floats16)__builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3)).v;
    v = beyond(v, (floats16)__builtin_shufflevector(v, v, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1)).v;
    v = beyond(v, (floats16)__builtin_shufflevector(v, v, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0)).v;
    return v[0];
  }
  OG_FN Partial partial() {
    const float found = first_of_all(lane[0], lane[1], lane[2], lane[3]);
    return {none.m ? quiet_nan<float>() : found, 0};
  }
  static OG_FN void join(Partial& into, Partial x) { into.value = chosen(into.value, x.value); }
  static OG_FN double result(Partial x) { return x.value; }
};
#endif
template <class T> struct Reduction<How::largest, T> : Extreme<T, 1> {};

// The largest element, and a flag that all others are so near that e^(x - largest) is a normal number. A double that
// holds a float has bits to spare: the last bit is the flag.
enum { nearest = 87 };
OG_FN bool all_near(double total) { return bits(total) & 1; }
template <class T> struct Reduction<How::peak, T> : Extreme<T, 1> {};
#if OG_LANES
template <> struct Reduction<How::peak, float> : Extreme<float, 1> {
  typedef Extreme<float, 1> Largest;
  floats low[4];
  OG_FN void start() {
    Largest::start();
    each<4>([&](auto k) { low[k.value] = infinity<float>(); });
  }
  OG_FN void add_lanes(floats a, floats b, floats c, floats d) {
    Largest::add_lanes(a, b, c, d);
    add_low(a, b, c, d);
  }
  OG_FN void add_low(floats a, floats b, floats c, floats d) {
    low[0] = smaller(low[0], a);
    low[1] = smaller(low[1], b);
    low[2] = smaller(low[2], c);
    low[3] = smaller(low[3], d);
  }
  OG_FN void add(const float* x) {
    add_lanes(load_lanes(x, 16), load_lanes(x + 16, 16), load_lanes(x + 32, 16), load_lanes(x + 48, 16));
  }
  OG_FN Partial partial() {
    return {Largest::partial().value, Extreme<float, -1>::first_of_all(low[0], low[1], low[2], low[3])};
  }
  static OG_FN void join(Partial& into, Partial x) {
    Largest::join(into, x);
    into.rest = x.rest < into.rest ? x.rest : into.rest;
  }
  static OG_FN double result(Partial x) {
    return x.value - x.rest <= nearest ? from_bits(bits(x.value) | 1) : x.value;
  }
};
#endif
template <class T> struct Reduction<How::smallest, T> : Extreme<T, -1> {};

}  // namespace og
