#pragma once
#include "ort_api.h"
#include "ort_dense.h"
#include "ort_swish.h"

// Fused kernels as custom ops of onnxruntime: what a call needs is read off the context, the layout is found, and the
// space is cut into pieces for onnxruntime's own threads. Nothing here throws, aborts or keeps anything but the kernel's
// own state: every failure is an OrtStatus. The emitted text holds one Op for each name and signature.

namespace og {
namespace ort {

// A kernel for operands of these kinds: og::launch of elements, or og::launch_rows of boxes.
struct Variant {
  const char* kinds;
  void (*launch)(void* const*, const i64*, i64, i64, i64, Parallel);
};

// One way to call an op: with how many inputs, which load reads which input. Input 255: the attribute alpha. `row_rank`:
// how many axes make a row, 0 where rows are not reduced. `result`: what each result holds. `moderate`: a kernel for the
// usual alphas, whatever the layout; may be null.
struct Form {
  i64 inputs, loads;
  const DenseLoad* load;
  i64 row_rank;
  const u8* result;
  i64 variants;
  const Variant* variant;
  const Variant* moderate;
};

enum { attribute = 255 };

struct Op : CustomOp {
  const char* name;
  i64 least, most, results;  // inputs, outputs
  const int* input_types;    // ONNXTensorElementDataType
  const int* output_types;
  bool has_alpha;
  i64 forms;
  const Form* form;
};

struct Kernel {
  const Op* op;
  float alpha;
};

static const Api* api = nullptr;

OG_FN Status* refused(const char* message) { return api->CreateStatus(invalid_argument, message); }

#define OG_TRY(call)                              \
  do {                                            \
    if (Status* status = (call)) return status;   \
  } while (0)

// ---- one call ------------------------------------------------------------------------------------------------------

inline Status* read_shape(const Value* value, DenseShape* shape) {
  TypeAndShape* info = nullptr;
  OG_TRY(api->GetTensorTypeAndShape(value, &info));
  usize rank = 0;
  Status* status = api->GetDimensionsCount(info, &rank);
  if (status == nullptr && rank > dense_rank) status = refused("opgraph: a tensor has more than 32 dimensions");
  if (status == nullptr) {
    shape->rank = (i64)rank;
    status = api->GetDimensions(info, shape->dims, rank);
  }
  api->ReleaseTensorTypeAndShapeInfo(info);
  return status;
}

struct Job {
  void* const* base;
  const i64* layout;
  i64 piece, end;  // in elements, or in boxes of rows
  void (*launch)(void* const*, const i64*, i64, i64, i64, Parallel);
};

inline void work_piece(void* data, usize index) {
  const Job& job = *(const Job*)data;
  const i64 begin = (i64)index * job.piece;
  job.launch(job.base, job.layout, begin, begin + job.piece < job.end ? begin + job.piece : job.end, 1, nullptr);
}

// Elements for one piece: enough to be worth waking a thread, few enough to even out threads that start late.
enum { piece_size = 16384 };

inline const Variant* find_variant(const Form& form, const DenseLayout& layout) {
  const bool single = layout.dims[layout.rank - 1] == 1;
  for (i64 v = 0; v < form.variants; ++v) {
    bool fits = true;
    for (i64 k = 0; fits && form.variant[v].kinds[k] != 0; ++k) {
      const char slot = form.variant[v].kinds[k];
      // One element, of the space or of each row, is where every kind of operand begins.
      fits = layout.size == 1 || (single && slot != 'u') || serves(slot, layout.kinds[k]);
    }
    if (fits) return &form.variant[v];
  }
  return nullptr;
}

inline Status* compute(void* state, Context* context) {
  Kernel& kernel = *(Kernel*)state;
  const Op& op = *kernel.op;
  const Value* values[dense_operands];
  usize count = 0;
  OG_TRY(api->KernelContext_GetInputCount(context, &count));
  i64 given = 0;
  for (; given < op.most && (usize)given < count; ++given) {
    values[given] = nullptr;
    OG_TRY(api->KernelContext_GetInput(context, (usize)given, &values[given]));
    if (values[given] == nullptr) break;  // an optional input that was left out
  }
  const Form* form = nullptr;
  for (i64 f = 0; f < op.forms; ++f) {
    if (op.form[f].inputs == given) form = &op.form[f];
  }
  if (form == nullptr) return refused("opgraph: a node has too few inputs");

  DenseShape shapes[dense_operands];
  void* base[dense_operands + 1];
  for (i64 k = 0; k < form->loads; ++k) {
    const i64 input = form->load[k].input;
    if (input == attribute) {
      shapes[k].rank = 0;
      base[k] = &kernel.alpha;
      continue;
    }
    OG_TRY(read_shape(values[input], &shapes[k]));
    OG_TRY(api->GetTensorMutableData((Value*)values[input], &base[k]));
  }
  DenseLayout layout;
  if (!dense_layout(form->load, form->loads, shapes, form->result, op.results, form->row_rank, &layout)) {
    return refused("opgraph: the inputs of a fused node do not broadcast");
  }
  bool left_open = false;  // results for rows that have no element
  for (i64 r = 0; r < op.results; ++r) {
    Value* value = nullptr;
    DenseShape shape;
    result_shape(layout.shape, form->row_rank, form->result[r], &shape);
    i64 size = 1;
    for (i64 d = 0; d < shape.rank; ++d) size *= shape.dims[d];
    left_open = left_open || (layout.size == 0 && size > 0);
    OG_TRY(api->KernelContext_GetOutput(context, (usize)r, shape.dims, (usize)shape.rank, &value));
    OG_TRY(api->GetTensorMutableData(value, &base[form->loads + r]));
  }
  if (left_open) return refused("opgraph: a fused node reduces rows without elements");
  if (layout.size == 0) return nullptr;
  const bool moderate = form->moderate != nullptr && is_moderate(kernel.alpha);
  const Variant* variant = moderate ? form->moderate : find_variant(*form, layout);
  if (variant == nullptr) return api->CreateStatus(fail, "opgraph: no kernel was built for this layout");
  const i64 operands = form->loads + op.results;
  i64 whole[2 + dense_rank + dense_operands * dense_rank + 3 + 2 * dense_rank], *end = whole;
  *end++ = layout.rank;
  *end++ = layout.size;
  for (i64 d = 0; d < layout.rank; ++d) *end++ = layout.dims[d];
  for (i64 i = 0; i < operands * layout.rank; ++i) *end++ = layout.strides[i];
  base[operands] = nullptr;  // nothing is left for a second stage
  const bool rows = form->row_rank > 0;
  Job job = {base, whole, rows ? 1 : piece_size, rows ? cut_rows(layout, piece_size, end) : layout.size, variant->launch};
  if (layout.size < 2 * piece_size) {
    job.launch(base, whole, 0, job.end, 1, nullptr);
    return nullptr;
  }
  return api->KernelContext_ParallelFor(context, work_piece, (usize)((job.end + job.piece - 1) / job.piece), 0, &job);
}

// ---- what onnxruntime asks about an op -----------------------------------------------------------------------------

inline const Op& self(const CustomOp* op) { return *(const Op*)op; }

inline Status* create(const CustomOp* op, const Api*, const KernelInfo* info, void** out) {
  Allocator* allocator = nullptr;
  OG_TRY(api->GetAllocatorWithDefaultOptions(&allocator));
  float alpha = 1;
  if (self(op).has_alpha) {
    if (Status* status = api->KernelInfoGetAttribute_float(info, "alpha", &alpha)) {
      api->ReleaseStatus(status);  // left out
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
inline const char* provider_of(const CustomOp*) { return nullptr; }  // the CPU
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

inline CustomOp callbacks() {
  return CustomOp{api_version, create_v1, name_of, provider_of, input_type, input_count, output_type, output_count,
                  compute_v1, destroy, input_kind, output_kind, memory_type, at_least_one, at_least_one, at_least_one,
                  at_least_one, create, compute, nullptr, first_version, last_version};
}

// ---- registration --------------------------------------------------------------------------------------------------

// A message if this CPU lacks what the library was compiled for; running on would end the process.
// (OG_NO_RUNTIME: without the compiler's own runtime library nobody can be asked.)
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

// Adds ops to a session's options. One domain for the life of the process: sessions refer to it.
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
      (CustomOp&)ops[i] = callbacks();
      status = found->CustomOpDomain_Add(made, &ops[i]);
    }
    if (status == nullptr) domain = made;
  }
  __atomic_clear(&lock, __ATOMIC_RELEASE);
  return status != nullptr ? status : found->AddCustomOpDomain(options, domain);
}

#undef OG_TRY

}  // namespace ort
}  // namespace og
