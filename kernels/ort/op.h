#pragma once
#include "ort/call.h"

// The callbacks of an op for onnxruntime, and the registration of a library's ops.

namespace og {
namespace ort {

// ---- callbacks ------------------------------------------------------------------------------------------------------

inline const Op& self(const CustomOp* op) { return *(const Op*)op; }

inline Status* create(const CustomOp* op, const Api*, const KernelInfo* info, void** out) {
  Allocator* allocator = nullptr;
  if (self(op).provider->prepare != nullptr) OG_TRY(self(op).provider->prepare());
  OG_TRY(api->GetAllocatorWithDefaultOptions(&allocator));
  float alpha = 1;
  if (self(op).has_alpha) {
    if (Status* status = api->KernelInfoGetAttribute_float(info, "alpha", &alpha)) {
      api->ReleaseStatus(status);  // not given
      alpha = 1;
    }
  }
  void* memory = nullptr;
  OG_TRY(api->AllocatorAlloc(allocator, sizeof(Kernel), &memory));
  *(Kernel*)memory = Kernel{&self(op), alpha};
  *out = memory;
  return nullptr;
}

inline void destroy(void* kernel) {
  Allocator* allocator = nullptr;
  Status* status = api->GetAllocatorWithDefaultOptions(&allocator);
  if (status == nullptr) status = api->AllocatorFree(allocator, kernel);
  if (status != nullptr) api->ReleaseStatus(status);
}

inline void* create_v1(const CustomOp*, const Api*, const KernelInfo*) { return nullptr; }
inline void compute_v1(void*, Context*) {}
inline const char* name_of(const CustomOp* op) { return self(op).name; }
inline const char* provider_of(const CustomOp* op) { return self(op).provider->name; }
inline int input_type(const CustomOp* op, usize i) { return self(op).input_types[i]; }
inline usize input_count(const CustomOp* op) { return (usize)self(op).most; }
inline int output_type(const CustomOp* op, usize i) { return self(op).output_types[i]; }
inline usize output_count(const CustomOp* op) { return (usize)self(op).results; }
inline int input_kind(const CustomOp* op, usize i) { return (i64)i < self(op).least ? required : optional; }
inline int output_kind(const CustomOp*, usize) { return required; }
inline int memory_type(const CustomOp*, usize) { return 0; }
inline int at_least_one(const CustomOp*) { return 1; }
inline int first_version(const CustomOp*) { return 1; }
inline int last_version(const CustomOp*) { return 2147483647; }

inline CustomOp callbacks(const Op& op) {
  return CustomOp{api_version, create_v1, name_of, provider_of, input_type, input_count, output_type, output_count,
                  compute_v1, destroy, input_kind, output_kind, memory_type, at_least_one, at_least_one, at_least_one,
                  at_least_one, create, op.provider->compute, nullptr, first_version, last_version};
}

static const Provider on_cpu = {nullptr, nullptr, compute};

// ---- registration --------------------------------------------------------------------------------------------------

// A message if this CPU lacks a feature that the library was compiled for; running on would end the process.
// (OG_NO_RUNTIME: without the compiler's own runtime library, features cannot be queried.)
inline const char* missing_feature() {
#if !defined(OG_NO_RUNTIME) && defined(__x86_64__)
#if defined(__AVX512F__)
  if (!__builtin_cpu_supports("avx512f")) return "opgraph: this library was built for a CPU with AVX-512; build it here";
#endif
#if defined(__AVX2__)
  if (!__builtin_cpu_supports("avx2")) return "opgraph: this library was built for a CPU with AVX2; build it here";
#endif
#if defined(__FMA__)
  if (!__builtin_cpu_supports("fma")) return "opgraph: this library was built for a CPU with FMA; build it here";
#endif
#endif
  return nullptr;
}

// Adds ops to a session's options. There is one domain for the life of the process, because sessions refer to it.
inline Status* register_ops(SessionOptions* options, const ApiBase* base, Op* ops, i64 count) {
  const Api* found = base->GetApi(api_version);
  if (found == nullptr) {
    const Api* first = base->GetApi(1);
    return first->CreateStatus(not_implemented, "opgraph: the library needs onnxruntime 1.17 or newer");
  }
  static Domain* domain = nullptr;
  static char lock = 0;
  while (__atomic_test_and_set(&lock, __ATOMIC_ACQUIRE)) {}
  api = found;
  Status* status = nullptr;
  if (const char* message = missing_feature()) status = found->CreateStatus(fail, message);
  if (status == nullptr && domain == nullptr) {
    Domain* made = nullptr;
    status = found->CreateCustomOpDomain("opgraph", &made);
    for (i64 i = 0; status == nullptr && i < count; ++i) {
      (CustomOp&)ops[i] = callbacks(ops[i]);
      status = found->CustomOpDomain_Add(made, &ops[i]);
    }
    if (status == nullptr) domain = made;
  }
  __atomic_clear(&lock, __ATOMIC_RELEASE);
  return status != nullptr ? status : found->AddCustomOpDomain(options, domain);
}

}  // namespace ort
}  // namespace og
