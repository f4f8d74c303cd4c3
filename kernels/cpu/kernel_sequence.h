#pragma once
#include "config.h"

// Calls several kernels of the CPU, one after the other.

namespace og {

// The program is [most slots of a kernel, kernels...]; a kernel is
// [entry, layout, pieces, 1 if threads may share them, slots, (place, offset) of each slot...].
// A slot is an operand's address as a kernel receives it: the address at `place` among those of the call, plus an
// offset in bytes. With place -1 it is the offset alone.
typedef void (*Parallel)(void (*)(void*), void*, unsigned, unsigned);  // GOMP_parallel
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

// call: [program, kernels, threads, address of GOMP_parallel or null, addresses...]. One argument: the cheapest call.
extern "C" void og_sequence(void* const* call) {
  og::launch_sequence(call + 4, (const og::i64*)call[0], (og::i64)call[1], (og::i64)call[2], (og::Parallel)call[3]);
}
