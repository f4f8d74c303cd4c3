#pragma once
#include "config.h"

// The part of onnxruntime's C ABI that a library of custom ops needs, declared here so that no header of onnxruntime
// has to be found. Source: include/onnxruntime/core/session/onnxruntime_c_api.h. Both tables only grow at their end:
// onnxruntime itself asserts the position of the last function of each version (KernelContext_GetResource is 265 and
// ends version 16). So the declarations below hold for every onnxruntime from 1.17 on, which added
// KernelContext_ParallelFor.

namespace og {
namespace ort {

using usize = __SIZE_TYPE__;

enum { api_version = 17 };
enum { invalid_argument = 2, not_implemented = 9, fail = 1 };  // OrtErrorCode
enum { required = 0, optional = 1 };                            // OrtCustomOpInputOutputCharacteristic

struct Status;
struct SessionOptions;
struct Domain;
struct Value;
struct TypeAndShape;
struct Allocator;
struct KernelInfo;
struct Context;
struct CustomOp;

// OrtApi. Skipped functions are named by the position of the first.
struct Api {
  Status* (*CreateStatus)(int code, const char* message);
  void* skipped_1[25];
  Status* (*CreateCustomOpDomain)(const char* domain, Domain** out);
  Status* (*CustomOpDomain_Add)(Domain* domain, const CustomOp* op);
  Status* (*AddCustomOpDomain)(SessionOptions* options, Domain* domain);
  void* skipped_29[22];
  Status* (*GetTensorMutableData)(Value* value, void** out);
  void* skipped_52[8];
  Status* (*GetTensorElementType)(const TypeAndShape* info, int* out);
  Status* (*GetDimensionsCount)(const TypeAndShape* info, usize* out);
  Status* (*GetDimensions)(const TypeAndShape* info, i64* out, usize count);
  void* skipped_63[2];
  Status* (*GetTensorTypeAndShape)(const Value* value, TypeAndShape** out);
  void* skipped_66[9];
  Status* (*AllocatorAlloc)(Allocator* allocator, usize size, void** out);
  Status* (*AllocatorFree)(Allocator* allocator, void* memory);
  void* skipped_77[1];
  Status* (*GetAllocatorWithDefaultOptions)(Allocator** out);
  void* skipped_79[6];
  Status* (*KernelInfoGetAttribute_float)(const KernelInfo* info, const char* name, float* out);
  void* skipped_86[2];
  Status* (*KernelContext_GetInputCount)(const Context* context, usize* out);
  Status* (*KernelContext_GetOutputCount)(const Context* context, usize* out);
  Status* (*KernelContext_GetInput)(const Context* context, usize index, const Value** out);
  Status* (*KernelContext_GetOutput)(Context* context, usize index, const i64* dims, usize count, Value** out);
  void* skipped_92[1];
  void (*ReleaseStatus)(Status* status);
  void* skipped_94[5];
  void (*ReleaseTensorTypeAndShapeInfo)(TypeAndShape* info);
  void* skipped_100[93];
  Status* (*KernelContext_GetGPUComputeStream)(const Context* context, void** out);
  void* skipped_194[80];
  Status* (*KernelContext_ParallelFor)(const Context* context, void (*work)(void*, usize), usize total, usize batches,
                                       void* data);
};

#define OG_AT(member, position) \
  static_assert(__builtin_offsetof(Api, member) == position * sizeof(void*), "position in OrtApi")
OG_AT(AddCustomOpDomain, 28);
OG_AT(GetTensorMutableData, 51);
OG_AT(GetTensorElementType, 60);
OG_AT(GetTensorTypeAndShape, 65);
OG_AT(AllocatorAlloc, 75);
OG_AT(GetAllocatorWithDefaultOptions, 78);
OG_AT(KernelInfoGetAttribute_float, 85);
OG_AT(KernelContext_GetOutput, 91);
OG_AT(ReleaseStatus, 93);
OG_AT(ReleaseTensorTypeAndShapeInfo, 99);
OG_AT(KernelContext_GetGPUComputeStream, 193);
OG_AT(KernelContext_ParallelFor, 274);
#undef OG_AT

struct ApiBase {
  const Api* (*GetApi)(u32 version);
  const char* (*GetVersionString)();
};

// OrtCustomOp as of version 17. A member that an onnxruntime of this version may call without a check must not be null:
// null ones among the first crashed it (tried with versions 1 and 13).
struct CustomOp {
  u32 version;
  void* (*CreateKernel)(const CustomOp* op, const Api* api, const KernelInfo* info);
  const char* (*GetName)(const CustomOp* op);
  const char* (*GetExecutionProviderType)(const CustomOp* op);
  int (*GetInputType)(const CustomOp* op, usize index);
  usize (*GetInputTypeCount)(const CustomOp* op);
  int (*GetOutputType)(const CustomOp* op, usize index);
  usize (*GetOutputTypeCount)(const CustomOp* op);
  void (*KernelCompute)(void* kernel, Context* context);
  void (*KernelDestroy)(void* kernel);
  int (*GetInputCharacteristic)(const CustomOp* op, usize index);
  int (*GetOutputCharacteristic)(const CustomOp* op, usize index);
  int (*GetInputMemoryType)(const CustomOp* op, usize index);
  int (*GetVariadicInputMinArity)(const CustomOp* op);
  int (*GetVariadicInputHomogeneity)(const CustomOp* op);
  int (*GetVariadicOutputMinArity)(const CustomOp* op);
  int (*GetVariadicOutputHomogeneity)(const CustomOp* op);
  Status* (*CreateKernelV2)(const CustomOp* op, const Api* api, const KernelInfo* info, void** kernel);
  Status* (*KernelComputeV2)(void* kernel, Context* context);
  Status* (*InferOutputShapeFn)(const CustomOp* op, void* context);
  int (*GetStartVersion)(const CustomOp* op);
  int (*GetEndVersion)(const CustomOp* op);
};

}  // namespace ort
}  // namespace og
