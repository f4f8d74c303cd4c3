#pragma once
#include "cpu/row_minmax.h"

// The reductions of a pass over a row: sums and products, in doubles; for sums of doubles also the rounding errors of
// the additions; the largest and the smallest element. Addends come in blocks, the last one padded with neutral
// elements.

namespace og {

// ---- sums and products -----------------------------------------------------------------------------------------------

// Lanes of doubles, for pairs of floats.
struct Wide {
  static constexpr int per = per_vector<double>, count = lanes / per;
  Vector<double> lane[count];
  OG_FN void start(double x) {
    each<count>([&](auto k) { lane[k.value] = Vector<double>{} + x; });
  }
  template <class Join> OG_FN Partial partial(const Join& join) { return {folded_all<double, count>(lane, join), 0}; }
};

template <> struct Reduction<How::add, float> : Wide {
  static OG_FN float nothing() { return 0; }
  OG_FN void start() { Wide::start(0); }
  // Four elements are added as floats: half as many conversions as with two, half the error of floats throughout.
  template <int k> OG_FN void add_pair(Vector<float> pair) {
    lane[2 * k] += widened<per>(Half<2 * per>::lower(pair));
    lane[2 * k + 1] += widened<per>(Half<2 * per>::upper(pair));
  }
  OG_FN void add(const float* x) {
    each<count / 4>([&](auto k) {
      const float* y = x + 2 * per * k.value;
      add_pair<k.value>((vector_at(y) + vector_at(y + lanes)) + (vector_at(y + lanes / 2) + vector_at(y + lanes + lanes / 2)));
    });
  }
#if OG_LANES
  OG_FN void add_lanes(floats a, floats b, floats c, floats d) { add_pair<0>((a.v + c.v) + (b.v + d.v)); }
#endif
  OG_FN Partial partial() {
    return Wide::partial([](auto a, auto b) { return a + b; });
  }
  static OG_FN void join(Partial& into, Partial x) { into.value += x.value; }
  static OG_FN double result(Partial x) { return x.value; }
};

template <> struct Reduction<How::add, double> {
  double lane[lanes], rests[lanes];
  static OG_FN double nothing() { return 0; }
  OG_FN void start() {
    for (int l = 0; l < lanes; ++l) lane[l] = rests[l] = 0;
  }
  OG_FN void add(const double* x) {
    for (int i = 0; i < block; i += lanes)
      for (int l = 0; l < lanes; ++l) add_exactly(lane[l], rests[l], x[i + l]);
  }
  OG_FN Partial partial() {
    for (int half = lanes / 2; half > 0; half /= 2) {
      for (int l = 0; l < half; ++l) {
        add_exactly(lane[l], rests[l], lane[l + half]);
        rests[l] += rests[l + half];
      }
    }
    return {lane[0], rests[0]};
  }
  static OG_FN void join(Partial& into, Partial x) {
    add_exactly(into.value, into.rest, x.value);
    into.rest += x.rest;
  }
  static OG_FN double result(Partial x) { return whole(x.value, x.rest); }
};

template <class T> struct Reduction<How::multiply, T> {
  static constexpr int per = per_vector<double>, count = lanes / per;
  Vector<double> lane[count];
  static OG_FN T nothing() { return 1; }
  OG_FN void start() {
    each<count>([&](auto k) { lane[k.value] = Vector<double>{} + 1; });
  }
  static OG_FN Vector<double> wide(const T* x) {
    if constexpr (sizeof(T) == sizeof(double)) return vector_at(x);
    if constexpr (sizeof(T) != sizeof(double)) return widened<per>(vector_at<float, per>(x));
  }
  OG_FN void add(const T* x) {
    each<count>([&](auto k) { lane[k.value] *= wide(x + per * k.value) * wide(x + lanes + per * k.value); });
  }
#if OG_LANES
  template <int k> OG_FN void add_pair(floats a, floats b) {
    lane[2 * k] *= widened<per>(Half<16>::lower(a.v)) * widened<per>(Half<16>::lower(b.v));
    lane[2 * k + 1] *= widened<per>(Half<16>::upper(a.v)) * widened<per>(Half<16>::upper(b.v));
  }
  OG_FN void add_lanes(floats a, floats b, floats c, floats d) {
    add_pair<0>(a, c);
    add_pair<1>(b, d);
  }
#endif
  OG_FN Partial partial() {
    return {folded_all<double, count>(lane, [](auto a, auto b) { return a * b; }), 0};
  }
  static OG_FN void join(Partial& into, Partial x) { into.value *= x.value; }
  static OG_FN double result(Partial x) { return x.value; }
};

// ---- all of a pass ---------------------------------------------------------------------------------------------------

// The reductions of a pass.
template <class F, int pass, int k = 0, bool none = k == F::reductions(pass)> struct Reductions {
  Reduction<F::how(pass, k), typename F::Addend> own;
  Reductions<F, pass, k + 1> others;
  OG_FN void start() {
    own.start();
    others.start();
  }
  // Adds the addends of a block. Those of the next reduction are `apart` further on.
  OG_FN void add(const typename F::Addend* x, int apart) {
    own.add(x);
    others.add(x + apart, apart);
  }
  OG_FN void fill(typename F::Addend* x, i64 n, int apart) {
    for (i64 i = n; i < block; ++i) x[i] = own.nothing();
    others.fill(x + apart, n, apart);
  }
#if OG_LANES
  // The same for four times 16 elements. The addends of the next reduction follow each.
  OG_FN void add_lanes(const floats* a, const floats* b, const floats* c, const floats* d) {
    own.add_lanes(*a, *b, *c, *d);
    others.add_lanes(a + 1, b + 1, c + 1, d + 1);
  }
  // first: the first 16 addends of the block.
  OG_FN void fill_lanes(floats* x, i64 n, const floats* first) {
    floats filler = own.nothing();
    if constexpr (F::how(pass, k) == How::peak) filler = first->v[0];
    *x = choose(bools(first_of(n), 0), *x, filler);
    others.fill_lanes(x + 1, n, first + 1);
  }
#endif
  OG_FN void partials(Partial* to) {
    *to = own.partial();
    others.partials(to + 1);
  }
  static OG_FN void join(Partial* into, const Partial* x) {
    decltype(own)::join(*into, *x);
    decltype(others)::join(into + 1, x + 1);
  }
  static OG_FN void results(const Partial* x, double* to) {
    *to = decltype(own)::result(*x);
    decltype(others)::results(x + 1, to + 1);
  }
};
template <class F, int pass, int k> struct Reductions<F, pass, k, true> {
  OG_FN void start() {}
  OG_FN void add(const typename F::Addend*, int) {}
  OG_FN void fill(typename F::Addend*, i64, int) {}
#if OG_LANES
  OG_FN void add_lanes(const floats*, const floats*, const floats*, const floats*) {}
  OG_FN void fill_lanes(floats*, i64, const floats*) {}
#endif
  OG_FN void partials(Partial*) {}
  static OG_FN void join(Partial*, const Partial*) {}
  static OG_FN void results(const Partial*, double*) {}
};

}  // namespace og
