#pragma once
#include "host.h"

// Several kernels of the CPU, called one after the other. A sequence has the entry point of a kernel.

namespace og {

// The program is [most slots of a kernel, kernels...]; a kernel is
// [entry, layout, pieces, 1 if threads may share them, slots, (place, offset) of each slot...].
// A slot holds what kernels call an operand: the address at its place among those of the call, and an offset in bytes;
// with place -1 the offset alone.
typedef void (*Entry)(void* const*, const i64*, i64, i64, i64, Parallel);

OG_FN void launch_sequence(void* const* addresses, const i64* program, i64 count, i64 threads, Parallel parallel) {
  void** const base = (void**)__builtin_alloca(program[0] * sizeof(void*));
  const i64* at = program + 1;
  for (i64 k = 0; k < count; ++k) {
    const i64 slots = at[4];
    const i64* slot = at + 5;
    for (i64 i = 0; i < slots; ++i, slot += 2) base[i] = (void*)((slot[0] < 0 ? 0 : (i64)addresses[slot[0]]) + slot[1]);
    const bool shared = at[3] != 0;
    ((Entry)at[0])(base, (const i64*)at[1], 0, at[2], shared ? threads : 1, shared ? parallel : nullptr);
    at = slot;
  }
}

}  // namespace og

extern "C" void og_sequence(void* const* addresses, const og::i64* program, og::i64, og::i64 count, og::i64 threads,
                            og::Parallel parallel) {
  og::launch_sequence(addresses, program, count, threads, parallel);
}
