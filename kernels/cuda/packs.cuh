#pragma once
#include "cuda/pointwise.cuh"

// Packs that a loop goes through, a few elements per iteration. They stay in registers: the next elements are moved to
// the front, because an index that depends on the loop would put the pack into local memory.

namespace og {

// A word that is opaque to the compiler, which otherwise keeps its parts in separate registers.
OG_FN u32 as_word(u32 word) {
#if OG_DEVICE
  asm("" : "+r"(word));
#endif
  return word;
}

// A pack as words.
template <class T, int V> struct Words {
  static constexpr int count = ((int)sizeof(Pack<T, V>) + 3) / 4;
  u32 word[count];
  OG_FN void of(const Pack<T, V>& pack) {
    Bits<T, V> bits;
    if constexpr (sizeof(pack) % 4 != 0) bits.word[count - 1] = 0;
    bits.pack = pack;
    OG_UNROLL for (int w = 0; w < count; ++w) word[w] = sizeof(T) < 4 ? as_word(bits.word[w]) : bits.word[w];
  }
  OG_FN Pack<T, V> pack() const {
    Bits<T, V> bits;
    OG_UNROLL for (int w = 0; w < count; ++w) bits.word[w] = word[w];
    return bits.pack;
  }
  // Returns the first G elements, and moves those after them to the front.
  template <int G> OG_FN Pack<T, G> take() {
    Words<T, G> first;
    OG_UNROLL for (int w = 0; w < first.count; ++w) first.word[w] = word[w];
    OG_UNROLL for (int w = 0; w < count; ++w)
      if (w + shift<G>::words < count) word[w] = shifted<G>(word[w + shift<G>::words], w + shift<G>::words + 1 < count ? word[w + shift<G>::words + 1] : 0);
    return first.pack();
  }
  // Appends G elements: after V / G calls, all are new.
  template <int G> OG_FN void give(const Pack<T, G>& more) {
    Words<T, G> last;
    last.of(more);
    OG_UNROLL for (int w = 0; w < count; ++w) {
      const int at = w + shift<G>::words, next = at + 1;
      word[w] = shifted<G>(at < count ? word[at] : last.word[at - count], next < count ? word[next] : last.word[0]);
    }
  }

private:
  static constexpr int size = 8 * (int)sizeof(Pack<T, V>) < 32 ? 8 * (int)sizeof(Pack<T, V>) : 32;
  template <int G> struct shift {
    static constexpr int words = 8 * G * (int)sizeof(T) / 32, bits = 8 * G * (int)sizeof(T) % 32;
  };
  template <int G> static OG_FN u32 shifted(u32 low, u32 high) {
    if constexpr (G == V || shift<G>::bits == 0) return G == V && size < 32 ? high : low;
    else return low >> shift<G>::bits | high << (size - shift<G>::bits);
  }
};

template <class S, int G, class R> OG_FN Pack<S, G> stored(const R (&value)[G]) {
  Bits<S, G> bits;
  if constexpr (rounded_pair<S>::exists && G % 2 == 0) {
    OG_UNROLL for (int k = 0; k < G; k += 2) bits.word[k / 2] = rounded_pair<S>::of(value[k], value[k + 1]);
  } else {
    OG_UNROLL for (int k = 0; k < G; ++k) bits.pack.item[k] = store<S>(value[k]);
  }
  return bits.pack;
}

// Loads or stores a pack of which only `left` elements exist.
template <int V, class T> OG_FN Pack<T, V> load_some(const T* p, i64 step, int left) {
  Pack<T, V> pack;
  OG_UNROLL for (int k = 0; k < V; ++k) pack.item[k] = k < left ? p[k * step] : T();
  return pack;
}
template <int V, class T> OG_FN void store_some(T* p, i64 step, int left, const Pack<T, V>& pack) {
  OG_UNROLL for (int k = 0; k < V; ++k)
    if (k < left) p[k * step] = pack.item[k];
}

}  // namespace og
