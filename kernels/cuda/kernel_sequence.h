#pragma once
#include "config.h"

// Launches several kernels of a GPU, one after the other, from the host, by the address of the driver's cuLaunchKernel.

namespace og {

// CUresult cuLaunchKernel(function, grid x y z, block x y z, bytes of shared memory, stream, parameters, extra)
typedef int (*LaunchKernel)(void*, u32, u32, u32, u32, u32, u32, u32, void*, void**, void**);

// The program is [most parameters of a kernel, kernels...]; a kernel is [function, blocks, threads, parameters, (place,
// value) of each parameter...]. A parameter is the address at `place` among those of the call plus `value` bytes; with
// place -1 the value itself, in 64 bits; with place -2 the data at that address.
enum { itself = -1, lies_there = -2 };

/// 0, or the number of the kernel that the driver refused in the upper half and the CUresult in the lower one.
OG_FN i64 launch_cuda_sequence(void* const* addresses, const i64* program, i64 begin, i64 end, void* stream, LaunchKernel launch) {
  i64* const values = (i64*)__builtin_alloca(program[0] * sizeof(i64));
  void** const given = (void**)__builtin_alloca(program[0] * sizeof(void*));
  const i64* at = program + 1;
  for (i64 k = 0; k < end; ++k) {
    const i64* const kernel = at;
    const i64 parameters = kernel[3];
    at += 4 + 2 * parameters;
    if (k < begin) continue;
    for (i64 i = 0; i < parameters; ++i) {
      const i64 place = kernel[4 + 2 * i], value = kernel[5 + 2 * i];
      values[i] = place >= 0 ? (i64)addresses[place] + value : value;
      given[i] = place == lies_there ? (void*)value : (void*)&values[i];
    }
    const int refused = launch((void*)kernel[0], (u32)kernel[1], 1, 1, (u32)kernel[2], 1, 1, 0, stream, given, nullptr);
    if (refused != 0) return (k << 32) | refused;
  }
  return 0;
}

}  // namespace og

// call: [program, end of the kernels, cuLaunchKernel, first kernel, stream, addresses...]
extern "C" og::i64 og_cuda_sequence(void* const* call) {
  return og::launch_cuda_sequence(call + 5, (const og::i64*)call[0], (og::i64)call[3], (og::i64)call[1], call[4],
                                  (og::LaunchKernel)call[2]);
}
