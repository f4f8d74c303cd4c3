#pragma once
#include "config.h"

// Bernoulli draws from a Mersenne Twister (Matsumoto, Nishimura, Mersenne twister, TOMACS 1998), the generator of torch
// in host memory. The numbers and the state afterwards are the same as torch's. torch computes the numbers one by one;
// here the 624 words of a state are computed and compared many at a time.

namespace og {

constexpr i64 TWISTER_WORDS = 624, TWISTER_DISTANCE = 397;

/// The format of torch.Generator.get_state(). torch stores words of 32 bits in 64.
struct TwisterState {
  u64 seed;
  int left, seeded;  // number of words left, plus one
  u64 next;          // index of the first of them
  u64 words[TWISTER_WORDS];
};

OG_FN u32 twisted(u32 word, u32 next, u32 far) {
  const u32 y = (word & 0x80000000u) | (next & 0x7fffffffu);
  return far ^ (y >> 1) ^ (next & 1u ? 0x9908b0dfu : 0u);
}

OG_FN u32 tempered(u32 y) {
  y ^= y >> 11;
  y ^= (y << 7) & 0x9d2c5680u;
  y ^= (y << 15) & 0xefc60000u;
  return y ^ (y >> 18);
}

/// The next 624 words. A loop reads none of the words that its own last 226 iterations have written.
OG_FN void twist(u32* words) {
  constexpr i64 near = TWISTER_WORDS - TWISTER_DISTANCE;
  OG_VECTORIZE
  for (i64 i = 0; i < near; ++i) words[i] = twisted(words[i], words[i + 1], words[i + TWISTER_DISTANCE]);
  OG_VECTORIZE
  for (i64 i = near; i < TWISTER_WORDS - 1; ++i) words[i] = twisted(words[i], words[i + 1], words[i - near]);
  words[TWISTER_WORDS - 1] = twisted(words[TWISTER_WORDS - 1], words[0], words[TWISTER_DISTANCE - 1]);
}

/// Draws `count` values: 1 if 53 random bits are below `limit`. Two words make a number; the first has its high bits.
OG_FN void draw_bernoulli(TwisterState* state, unsigned char* out, i64 count, u64 limit) {
  u32 words[TWISTER_WORDS], drawn[TWISTER_WORDS + 1];
  for (i64 i = 0; i < TWISTER_WORDS; ++i) words[i] = (u32)state->words[i];
  i64 at = state->left > 1 ? (i64)state->next : TWISTER_WORDS;
  i64 carried = 0;  // words of the previous state that were drawn but not used: 0 or 1
  for (i64 done = 0; done < count;) {
    if (at == TWISTER_WORDS) {
      twist(words);
      at = 0;
    }
    const i64 fresh = TWISTER_WORDS - at;
    OG_VECTORIZE
    for (i64 i = 0; i < fresh; ++i) drawn[carried + i] = tempered(words[at + i]);
    const i64 pairs = (carried + fresh) / 2 < count - done ? (carried + fresh) / 2 : count - done;
    OG_VECTORIZE
    for (i64 i = 0; i < pairs; ++i) {
      const u64 bits = (((u64)drawn[2 * i] << 32) | drawn[2 * i + 1]) & 0x1fffffffffffffull;
      out[done + i] = bits < limit;
    }
    done += pairs;
    if (done == count) {
      at += 2 * pairs - carried;
    } else {
      drawn[0] = drawn[carried + fresh - 1];
      carried = carried + fresh - 2 * pairs;
      at = TWISTER_WORDS;
    }
  }
  for (i64 i = 0; i < TWISTER_WORDS; ++i) state->words[i] = words[i];
  state->next = (u64)at;
  state->left = (int)(TWISTER_WORDS - at + 1);
}

}  // namespace og

// call: [state, memory of the results, their number, limit]
extern "C" void og_bernoulli(void* const* call) {
  og::draw_bernoulli((og::TwisterState*)call[0], (unsigned char*)call[1], (og::i64)call[2], (og::u64)call[3]);
}
