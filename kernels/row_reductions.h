#pragma once
#include "host_sums.h"

// What a pass makes of a row: sums and products of floats in doubles, of doubles with what each addition rounded off; the
// largest and the smallest element exactly, and NaN if one is. Addends come in blocks, the last one filled up with what
// changes nothing. Lanes are vectors by name: as arrays they would wait in memory, one block for the other.

namespace og {

enum { block = 64, keep_bytes = 256 * 1024 };  // elements that are reduced at a time; what is kept for a later pass
enum class How { add, multiply, largest, smallest, peak };

// ---- vectors ---------------------------------------------------------------------------------------------------------

// As wide as the machine has them: GCC 12 takes wider ones apart element by element.
#if defined(__AVX512F__)
enum { vector_bytes = 64 };
#elif defined(__AVX__)
enum { vector_bytes = 32 };
#else
enum { vector_bytes = 16 };
#endif
template <class T, int n> struct VectorOf {
  typedef T type __attribute__((vector_size(n * sizeof(T))));
};
template <class T, int n = vector_bytes / (int)sizeof(T)> using Vector = typename VectorOf<T, n>::type;
template <class T> constexpr int per_vector = vector_bytes / (int)sizeof(T);

template <class T> OG_FN Vector<T> vector_at(const T* x) {
  Vector<T> v;
  __builtin_memcpy(&v, x, sizeof v);
  return v;
}

template <int n> struct Half;
template <> struct Half<4> {
  template <class V> static OG_FN auto lower(V v) { return __builtin_shufflevector(v, v, 0, 1); }
  template <class V> static OG_FN auto upper(V v) { return __builtin_shufflevector(v, v, 2, 3); }
};
template <> struct Half<8> {
  template <class V> static OG_FN auto lower(V v) { return __builtin_shufflevector(v, v, 0, 1, 2, 3); }
  template <class V> static OG_FN auto upper(V v) { return __builtin_shufflevector(v, v, 4, 5, 6, 7); }
};
template <> struct Half<16> {
  template <class V> static OG_FN auto lower(V v) { return __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7); }
  template <class V> static OG_FN auto upper(V v) { return __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15); }
};

template <int n> OG_FN auto widened(Vector<float, n> x) {
#if defined(__AVX512F__)
  // __builtin_convertvector takes two halves and puts them together (GCC 12).
  if constexpr (n == 8) return (Vector<double, 8>)__builtin_ia32_cvtps2pd512_mask(x, Vector<double, 8>{}, (u8)-1, 4);
#endif
  if constexpr (n != 8 || vector_bytes < 64) return __builtin_convertvector(x, Vector<double, n>);
}

// join(x[l], x[l + half]) of all lanes, then of the lower half of these, down to one.
template <class T, int n, class Join> OG_FN T folded(Vector<T, n> v, const Join& join) {
  if constexpr (n == 2) {
    return join(v[0], v[1]);
  } else if constexpr (n == 4) {
    return join(join(v[0], v[2]), join(v[1], v[3]));
  } else {
    return folded<T, n / 2>(join(Half<n>::lower(v), Half<n>::upper(v)), join);
  }
}
// The same of `count` vectors.
template <class T, int count, class Join> OG_FN T folded_all(Vector<T>* v, const Join& join) {
  if constexpr (count == 1) {
    return folded<T, per_vector<T>>(v[0], join);
  } else {
    each<count / 2>([&](auto k) { v[k.value] = join(v[k.value], v[k.value + count / 2]); });
    return folded_all<T, count / 2>(v, join);
  }
}

// ---- one reduction of one row ----------------------------------------------------------------------------------------

// What a piece of a row makes; of a sum of doubles, with what additions rounded off.
struct Partial {
  double value, rest;
};

// Lanes of doubles, for pairs of floats.
struct Wide {
  static constexpr int per = per_vector<double>, count = lanes / per;
  Vector<double> lane[count];
  OG_FN void start(double x) {
    each<count>([&](auto k) { lane[k.value] = Vector<double>{} + x; });
  }
  template <class Join> OG_FN Partial partial(const Join& join) { return {folded_all<double, count>(lane, join), 0}; }
};

template <How how, class T> struct Reduction;
template <> struct Reduction<How::add, float> : Wide {
  static OG_FN float nothing() { return 0; }
  OG_FN void start() { Wide::start(0); }
  template <int k> OG_FN void add_pair(Vector<float> pair) {  // two elements are added up as floats
    lane[2 * k] += widened<per>(Half<2 * per>::lower(pair));
    lane[2 * k + 1] += widened<per>(Half<2 * per>::upper(pair));
  }
  OG_FN void add(const float* x) {
    each<count / 2>([&](auto k) {
      add_pair<k.value>(vector_at(x + 2 * per * k.value) + vector_at(x + lanes + 2 * per * k.value));
    });
  }
#if OG_LANES
  OG_FN void add_lanes(floats a, floats b, floats c, floats d) {
    add_pair<0>(a.v + c.v);
    add_pair<1>(b.v + d.v);
  }
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
  double lane[lanes];
  static OG_FN T nothing() { return 1; }
  OG_FN void start() {
    for (int l = 0; l < lanes; ++l) lane[l] = 1;
  }
  OG_FN void add(const T* x) {
    for (int l = 0; l < lanes; ++l) lane[l] *= (double)x[l] * (double)x[l + lanes];
  }
#if OG_LANES
  OG_FN void add_lanes(floats a, floats b, floats c, floats d) {
    const floats all[] = {a, b, c, d};
    alignas(64) float x[block];
    __builtin_memcpy(x, all, sizeof(x));
    add(x);
  }
#endif
  OG_FN Partial partial() {
    for (int half = lanes / 2; half > 0; half /= 2)
      for (int l = 0; l < half; ++l) lane[l] *= lane[l + half];
    return {lane[0], 0};
  }
  static OG_FN void join(Partial& into, Partial x) { into.value *= x.value; }
  static OG_FN double result(Partial x) { return x.value; }
};

// What is not smaller: NaN is taken, and nothing is taken instead of it.
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
// Of 16 floats the larger ones by one instruction, which does not take a NaN: whether there was one is kept apart.
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
  // As `folded`, but no lane is NaN, and nothing is compared by branches.
  static OG_FN float first_of_all(floats a, floats b, floats c, floats d) {
    floats16 v = beyond(beyond(a, c), beyond(b, d)).v;
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

// The largest element, and whether all others are so near that e^(x - largest) is a normal number. A double of a float has
// bits to spare: the last one says so.
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

// ---- all of a pass ---------------------------------------------------------------------------------------------------------

// The reductions of a pass.
template <class F, int pass, int k = 0, bool none = k == F::reductions(pass)> struct Reductions {
  Reduction<F::how(pass, k), typename F::Addend> own;
  Reductions<F, pass, k + 1> others;
  OG_FN void start() {
    own.start();
    others.start();
  }
  // Addends of a block, those of the next reduction `apart` further on.
  OG_FN void add(const typename F::Addend* x, int apart) {
    own.add(x);
    others.add(x + apart, apart);
  }
  OG_FN void fill(typename F::Addend* x, i64 n, int apart) {
    for (i64 i = n; i < block; ++i) x[i] = own.nothing();
    others.fill(x + apart, n, apart);
  }
#if OG_LANES
  // The same of four times 16 elements, each with those of the next reduction behind it.
  OG_FN void add_lanes(const floats* a, const floats* b, const floats* c, const floats* d) {
    own.add_lanes(*a, *b, *c, *d);
    others.add_lanes(a + 1, b + 1, c + 1, d + 1);
  }
  // `first`: those of the block.
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
