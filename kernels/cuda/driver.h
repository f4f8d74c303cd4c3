#pragma once
#include "config.h"

// The part of CUDA's driver API that launches kernels, loaded from libcuda.so.1 when it is first needed. A library can
// thus be built without CUDA, and run on a CPU without it. Source: CUDA Driver API, cuda.h.

extern "C" void* dlopen(const char* name, int flags);
extern "C" void* dlsym(void* library, const char* name);

namespace og {
namespace cuda {

struct Context;
struct Module;
struct Function;
struct Stream;

enum { success = 0, not_initialized = 3, no_device = 100, no_binary = 209, unsupported_ptx = 222 };  // CUresult
enum { capability_major = 75, capability_minor = 76 };                                               // CUdevice_attribute
enum { lazily = 1 };                                                                                 // RTLD_LAZY

struct Driver {
  int (*cuInit)(unsigned flags);
  int (*cuDriverGetVersion)(int* version);
  int (*cuGetErrorName)(int error, const char** name);
  int (*cuCtxGetCurrent)(Context** context);
  int (*cuCtxPushCurrent)(Context* context);
  int (*cuCtxPopCurrent)(Context** context);
  int (*cuCtxGetDevice)(int* device);
  int (*cuDeviceGetAttribute)(int* value, int attribute, int device);
  int (*cuStreamGetCtx)(Stream* stream, Context** context);
  int (*cuModuleLoadData)(Module** module, const void* image);
  int (*cuModuleGetFunction)(Function** function, Module* module, const char* name);
  int (*cuFuncGetAttribute)(int* value, int attribute, Function* function);
  int (*cuLaunchKernel)(Function* function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                        unsigned block_y, unsigned block_z, unsigned shared, Stream* stream, void** arguments,
                        void** extra);
};

// Fills the table. Returns false if there is no driver, or it lacks a function.
inline bool find_driver(Driver* driver) {
  void* library = dlopen("libcuda.so.1", lazily);
  if (library == nullptr) return false;
  static const char* const names[] = {
      "cuInit", "cuDriverGetVersion", "cuGetErrorName", "cuCtxGetCurrent", "cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2",
      "cuCtxGetDevice", "cuDeviceGetAttribute", "cuStreamGetCtx", "cuModuleLoadData", "cuModuleGetFunction",
      "cuFuncGetAttribute", "cuLaunchKernel"};
  static_assert(sizeof names == sizeof(Driver), "one name for each function");
  for (unsigned i = 0; i < sizeof names / sizeof *names; ++i) {
    void* found = dlsym(library, names[i]);
    if (found == nullptr) return false;
    __builtin_memcpy((char*)driver + i * sizeof found, &found, sizeof found);
  }
  return true;
}

}  // namespace cuda
}  // namespace og
