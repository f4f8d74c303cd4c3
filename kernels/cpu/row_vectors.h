#pragma once
#include "cpu/boxes.h"

// Vectors of the machine's width, as single variables, for the reductions of a row. Arrays would be stored to memory
// between blocks.

namespace og {

// The machine's width: GCC 12 splits wider vectors into single elements.
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

template <class T, int n = per_vector<T>> OG_FN Vector<T, n> vector_at(const T* x) {
  Vector<T, n> v;
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
  // __builtin_convertvector converts two halves and joins them (GCC 12).
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
// The same for `count` vectors.
template <class T, int count, class Join> OG_FN T folded_all(Vector<T>* v, const Join& join) {
  if constexpr (count == 1) {
    return folded<T, per_vector<T>>(v[0], join);
  } else {
    each<count / 2>([&](auto k) { v[k.value] = join(v[k.value], v[k.value + count / 2]); });
    return folded_all<T, count / 2>(v, join);
  }
}

// ---- one reduction of one row ----------------------------------------------------------------------------------------

enum { block = 64, keep_bytes = 256 * 1024 };  // elements reduced at a time; bytes kept for a later pass

// peak: the largest, and a flag that all others are near.
enum class How { add, multiply, largest, smallest, peak };

// The partial result of a piece of a row; for a sum of doubles, with the rounding errors of the additions.
struct Partial {
  double value, rest;
};

template <How how, class T> struct Reduction;

}  // namespace og
