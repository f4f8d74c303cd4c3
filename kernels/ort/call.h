#pragma once
#include "ort/api.h"
#include "ort/dense.h"
#include "ort/swish.h"

// One call of a fused kernel as a custom op of onnxruntime: reads the operands from the context, finds the layout, and
// cuts the space into pieces for onnxruntime's own threads. Nothing here throws, aborts or keeps anything but the
// kernel's own state: every failure is an OrtStatus. The emitted text has one Op for each name, signature and provider.

namespace og {
namespace ort {

// A kernel for operands of these kinds: og::launch of elements, or og::launch_inner of boxes.
struct Variant {
  const char* kinds;
  void (*launch)(void* const*, const i64*, i64, i64, i64, Parallel);
};

struct GpuVariant;  // kernels/ort/gpu.h

// One form of calls of an op: the number of inputs, and the input of each load. Input 255: the attribute alpha.
// `row_rank`: the number of axes of a row, 0 if rows are not reduced. `result`: the contents of each result.
// `moderate`: a kernel for the usual alphas, with any layout; may be null. `bytes`: of an element of each operand.
struct Form {
  i64 inputs, loads;
  const DenseLoad* load;
  i64 row_rank;
  const u8* result;
  i64 variants;
  const Variant* variant;
  const Variant* moderate;
  i64 gpu_variants;
  const GpuVariant* gpu_variant;
  const u8* bytes;
};

enum { attribute = 255 };

// The provider of an op: its name in onnxruntime (null: the CPU), the preparation of a new kernel, and a call.
struct Provider {
  const char* name;
  Status* (*prepare)();
  Status* (*compute)(void* kernel, Context* context);
};

struct Op : CustomOp {
  const Provider* provider;
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
      // One element, of the space or of each row: operands of every kind begin at it.
      fits = layout.size == 1 || (single && slot != 'u') || serves(slot, layout.kinds[k]);
    }
    if (fits) return &form.variant[v];
  }
  return nullptr;
}

// The operands of a call: the address of each load and result, and the layout.
struct Call {
  const Form* form;
  void* base[dense_operands + 1];
  DenseLayout layout;
};

// Reads a call from its context. onnxruntime allocates the results.
inline Status* read_call(Kernel& kernel, Context* context, Call* call) {
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
  for (i64 k = 0; k < form->loads; ++k) {
    const i64 input = form->load[k].input;
    if (input == attribute) {
      shapes[k].rank = 0;
      call->base[k] = &kernel.alpha;
      continue;
    }
    OG_TRY(read_shape(values[input], &shapes[k]));
    OG_TRY(api->GetTensorMutableData((Value*)values[input], &call->base[k]));
  }
  DenseLayout& layout = call->layout;
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
    OG_TRY(api->GetTensorMutableData(value, &call->base[form->loads + r]));
  }
  if (left_open) return refused("opgraph: a fused node reduces rows without elements");
  call->form = form;
  return nullptr;
}

inline Status* compute(void* state, Context* context) {
  Kernel& kernel = *(Kernel*)state;
  Call call;
  OG_TRY(read_call(kernel, context, &call));
  const Form* form = call.form;
  DenseLayout& layout = call.layout;
  void** base = call.base;
  if (layout.size == 0) return nullptr;
  const bool moderate = form->moderate != nullptr && is_moderate(kernel.alpha);
  const Variant* variant = moderate ? form->moderate : find_variant(*form, layout);
  if (variant == nullptr) return api->CreateStatus(fail, "opgraph: no kernel was built for this layout");
  const i64 operands = form->loads + kernel.op->results;
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

}  // namespace ort
}  // namespace og
