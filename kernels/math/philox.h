#pragma once
#include "config.h"

// Random bits as a function of the position: Philox 4x32-10 (Salmon, Moraes, Dror, Shaw, Parallel random numbers: as
// easy as 1, 2, 3, SC 2011), with the draws of oneDNN's dropout. No state is kept between elements, so a backward pass
// draws the same bits again, and no thread waits for another.

namespace og {

struct Philox { u32 a, b, c, d; };

OG_FN Philox philox_round(Philox x, u32 k0, u32 k1) {
  const u64 p = (u64)0xD2511F53u * x.a, q = (u64)0xCD9E8D57u * x.c;
  return {(u32)(q >> 32) ^ x.b ^ k0, (u32)q, (u32)(p >> 32) ^ x.d ^ k1, (u32)p};
}

/// Ten rounds; the key advances by Weyl sequences. Unrolled: a loop would prevent vectorisation of the one around it.
OG_FN Philox philox(Philox x, u32 k0, u32 k1) {
  const u32 w0 = 0x9E3779B9u, w1 = 0xBB67AE85u;
  x = philox_round(x, k0, k1);
  x = philox_round(x, k0 + w0, k1 + w1);
  x = philox_round(x, k0 + 2 * w0, k1 + 2 * w1);
  x = philox_round(x, k0 + 3 * w0, k1 + 3 * w1);
  x = philox_round(x, k0 + 4 * w0, k1 + 4 * w1);
  x = philox_round(x, k0 + 5 * w0, k1 + 5 * w1);
  x = philox_round(x, k0 + 6 * w0, k1 + 6 * w1);
  x = philox_round(x, k0 + 7 * w0, k1 + 7 * w1);
  x = philox_round(x, k0 + 8 * w0, k1 + 8 * w1);
  return philox_round(x, k0 + 9 * w0, k1 + 9 * w1);
}

/// 32 bits for a position. Four neighbours share a block: its counter is (offset, position with its last two bits cleared),
/// the key is the seed, and those two bits choose the word.
OG_FN u32 random_word(i64 position, i64 seed, i64 offset) {
  const u64 block = (u64)position & ~3ull;
  const Philox counter = {(u32)offset, (u32)((u64)offset >> 32), (u32)block, (u32)(block >> 32)};
  const Philox x = philox(counter, (u32)seed, (u32)((u64)seed >> 32));
  return position & 2 ? (position & 1 ? x.d : x.c) : (position & 1 ? x.b : x.a);
}

// ---- dropout -------------------------------------------------------------------------------------------------------

/// True if an element is kept: word > (2^32 - 1) * P, compared in double as oneDNN does. If P is NaN, nothing is kept.
OG_FN bool dropout_keeps(i64 position, i64 seed, i64 offset, float probability) {
  const double bound = 4294967295.0 * (double)probability;
  const u32 whole = bound < 4294967295.0 ? (bound > 0.0 ? (u32)bound : 0u) : 0xffffffffu;
  return random_word(position, seed, offset) > whole;
}

template <class T> OG_FN T dropout(T x, i64 position, i64 seed, i64 offset, float probability) {
  const T p = (T)probability;
  const T scale = p == (T)1 ? (T)0 : divide((T)1, (T)1 - p);
  return dropout_keeps(position, seed, offset, probability) ? x * scale : (T)0;
}

}  // namespace og
