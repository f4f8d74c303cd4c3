#pragma once
#include "cuda/pointwise.cuh"

namespace og {

// The sums of one thread: one number for a sum over the columns, otherwise one for each of its V columns.
template <class F, int V> struct Added {
  typename F::Addend of[F::sums][V];
  OG_FN Added() {
    OG_UNROLL for (int k = 0; k < F::sums; ++k) OG_UNROLL for (int v = 0; v < V; ++v) of[k][v] = 0;
  }
  OG_FN void pack(const typename F::Addend* s) {
    each<F::sums>([&](auto k) {
      if constexpr (F::adds_row(k.value)) {
        typename F::Addend total = s[k.value * V];
        OG_UNROLL for (int v = 1; v < V; ++v) total += s[k.value * V + v];
        of[k.value][0] += total;
      } else {
        OG_UNROLL for (int v = 0; v < V; ++v) of[k.value][v] += s[k.value * V + v];
      }
    });
  }
  // Adds G elements of a pack; `total` has the sum of those before them. Sums of columns rotate.
  template <int G> OG_FN void group(const typename F::Addend* s, typename F::Addend (&total)[F::sums]) {
    each<F::sums>([&](auto k) {
      if constexpr (F::adds_row(k.value)) {
        OG_UNROLL for (int g = 0; g < G; ++g) total[k.value] += s[k.value * G + g];
      } else {
        typename F::Addend first[G];
        OG_UNROLL for (int g = 0; g < G; ++g) first[g] = of[k.value][g] + s[k.value * G + g];
        OG_UNROLL for (int v = G; v < V; ++v) of[k.value][v - G] = of[k.value][v];
        OG_UNROLL for (int g = 0; g < G; ++g) of[k.value][V - G + g] = first[g];
      }
    });
  }
  OG_FN void row(const typename F::Addend (&total)[F::sums]) {
    each<F::sums>([&](auto k) {
      if constexpr (F::adds_row(k.value)) of[k.value][0] += total[k.value];
    });
  }
  OG_FN void one(const typename F::Addend* s, int v) {
    each<F::sums>([&](auto k) {
      if constexpr (F::adds_row(k.value)) {
        of[k.value][0] += s[k.value];
      } else {
        OG_UNROLL for (int w = 0; w < V; ++w) of[k.value][w] += w == v ? s[k.value] : (typename F::Addend)0;
      }
    });
  }
};

}  // namespace og
