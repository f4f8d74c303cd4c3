#pragma once
#include "cuda/driver.h"
#include "ort/op.h"

// The same ops on onnxruntime's CUDA provider. A call finds the layout as on a CPU, then a kernel that serves it and
// its arguments, as opgraph/codegen/kernel.py does in Python, and launches it on the provider's stream. Nothing waits.
// The kernels come as machine code for several GPUs and as PTX for later ones; the image for the GPU of a context is
// loaded into it when the first kernel is created there.

namespace og {
namespace ort {

// A kernel of kernels/cuda/pointwise.cuh, or of the files next to it, for operands of these kinds.
struct GpuVariant {
  const char* kinds;
  i64 kernel;  // its index in the library
  i64 rank;    // of the space in its arguments; 0: it has none, and the space is one row
  i64 vector;  // elements of a pack
  i64 tile;    // elements of a flat space, or packs of rows, that one block does
  i64 most;    // most elements that it serves
  bool narrow; // finds rows by 32-bit arithmetic
};

// The kernels of a library for one type of GPU. `major`, `minor`: its compute capability; for PTX, the oldest one.
struct Image {
  int major, minor;
  bool is_ptx;
  const u8* data;
};

// The kernels in the emitted text.
struct Kernels {
  i64 images;
  const Image* image;
  i64 count;
  const char* const* names;
  cuda::Function** functions;  // of each context in turn
};

enum { gpu_rank = 8, gpu_operands = 48, contexts = 32, block_size = 256 };

static cuda::Driver driver;
static const Kernels* kernels = nullptr;
static cuda::Context* context_of[contexts];  // the contexts that the kernels are loaded into; only grows

// ---- errors ---------------------------------------------------------------------------------------------------------

// A message, composed without a library.
struct Message {
  char text[320];
  i64 length = 0;
  Message& operator<<(const char* part) {
    while (*part != 0 && length < (i64)sizeof text - 1) text[length++] = *part++;
    text[length] = 0;
    return *this;
  }
  Message& operator<<(int number) {
    char digits[12];
    i64 at = sizeof digits - 1;
    digits[at] = 0;
    for (unsigned left = (unsigned)number; at == (i64)sizeof digits - 1 || left != 0; left /= 10) {
      digits[--at] = (char)('0' + left % 10);
    }
    return *this << digits + at;
  }
  Status* status(int code) const { return api->CreateStatus(code, text); }
};

inline Status* failed(const char* what, int error) {
  const char* name = nullptr;
  if (driver.cuGetErrorName(error, &name) != cuda::success || name == nullptr) name = "an unknown error";
  return (Message() << "opgraph: " << what << ": " << name).status(fail);
}

// ---- loading -------------------------------------------------------------------------------------------------------

// The image for a GPU: machine code of its own generation, else PTX.
inline const Image* image_for(int major, int minor) {
  const Image* best = nullptr;
  for (i64 i = 0; i < kernels->images; ++i) {
    const Image& image = kernels->image[i];
    const bool older = major > image.major || (major == image.major && minor >= image.minor);
    const bool fits = image.is_ptx ? older : older && major == image.major;
    if (fits && (best == nullptr || best->is_ptx || image.minor > best->minor)) best = &image;
  }
  return best;
}

// Loads all kernels into the current context, for index `place`.
inline Status* load_kernels(i64 place) {
  int device = 0, major = 0, minor = 0, version = 0;
  int error = driver.cuCtxGetDevice(&device);
  if (error == cuda::success) error = driver.cuDeviceGetAttribute(&major, cuda::capability_major, device);
  if (error == cuda::success) error = driver.cuDeviceGetAttribute(&minor, cuda::capability_minor, device);
  if (error == cuda::success) error = driver.cuDriverGetVersion(&version);
  if (error != cuda::success) return failed("the GPU cannot be asked what it is", error);
  const Image* image = image_for(major, minor);
  if (image == nullptr) {
    return (Message() << "opgraph: this GPU is too old: its compute capability is " << major << "." << minor
                      << ", and the library has kernels for " << kernels->image[0].major << "."
                      << kernels->image[0].minor << " and newer; run the session on the CPU")
        .status(not_implemented);
  }
  cuda::Module* module = nullptr;
  error = driver.cuModuleLoadData(&module, image->data);
  if (error == cuda::unsupported_ptx || error == cuda::no_binary) {
    return (Message() << "opgraph: the NVIDIA driver is too old for this library (it knows CUDA " << version / 1000 << "."
                      << version % 1000 / 10 << "): update it, or build the library with an older nvidia-cuda-nvrtc")
        .status(not_implemented);
  }
  if (error != cuda::success) return failed("the kernels cannot be loaded", error);
  for (i64 i = 0; i < kernels->count; ++i) {
    cuda::Function** function = &kernels->functions[place * kernels->count + i];
    error = driver.cuModuleGetFunction(function, module, kernels->names[i]);
    int threads = 0;  // this query loads the code now: a first launch within a capture is too late
    if (error == cuda::success) error = driver.cuFuncGetAttribute(&threads, 0, *function);
    if (error != cuda::success) return failed("a kernel cannot be loaded", error);
  }
  return nullptr;
}

inline i64 place_of(cuda::Context* context) {
  for (i64 i = 0; i < contexts; ++i) {
    if (__atomic_load_n(&context_of[i], __ATOMIC_ACQUIRE) == context) return i;
  }
  return -1;
}

// Loads the kernels into a context, unless they are there already.
inline Status* load_into(cuda::Context* context, i64* place) {
  *place = place_of(context);
  if (*place >= 0) return nullptr;
  static char lock = 0;
  while (__atomic_test_and_set(&lock, __ATOMIC_ACQUIRE)) {}
  Status* status = nullptr;
  *place = place_of(context);
  if (*place < 0) {
    *place = place_of(nullptr);
    if (*place < 0) status = api->CreateStatus(fail, "opgraph: a library serves 32 CUDA contexts of a process, no more");
    int error = status == nullptr ? driver.cuCtxPushCurrent(context) : cuda::success;
    if (error != cuda::success) status = failed("the provider's context cannot be used", error);
    if (status == nullptr) {
      status = load_kernels(*place);
      cuda::Context* popped = nullptr;
      driver.cuCtxPopCurrent(&popped);
      if (status == nullptr) __atomic_store_n(&context_of[*place], context, __ATOMIC_RELEASE);
    }
  }
  __atomic_clear(&lock, __ATOMIC_RELEASE);
  return status;
}

// Finds the driver, once.
inline Status* ready() {
  static int state = 0;  // 1: found, 2: not found
  static char lock = 0;
  while (__atomic_test_and_set(&lock, __ATOMIC_ACQUIRE)) {}
  if (state == 0) state = cuda::find_driver(&driver) && driver.cuInit(0) == cuda::success ? 1 : 2;
  const bool found = state == 1;
  __atomic_clear(&lock, __ATOMIC_RELEASE);
  if (found) return nullptr;
  return api->CreateStatus(fail, "opgraph: no NVIDIA driver: libcuda.so.1 cannot be loaded, or finds no GPU (nvidia-smi)");
}

// Called when a kernel is created, so that an old GPU or driver is reported before anything runs.
inline Status* prepare_on_gpu() {
  OG_TRY(ready());
  cuda::Context* context = nullptr;
  i64 place = 0;
  if (driver.cuCtxGetCurrent(&context) != cuda::success || context == nullptr) return nullptr;  // first call reports it
  return load_into(context, &place);
}

// ---- one call ------------------------------------------------------------------------------------------------------

// True if packs of a variant lie within rows, and at multiples of their size in every operand with stride 1. (Operands
// are dense: if a row is whole packs, every stride beyond one is too.)
inline bool packs_fit(const GpuVariant& v, const Form& form, const DenseLayout& layout, void* const* base) {
  if (v.vector == 1) return true;
  if (v.rank > 0 && layout.dims[layout.rank - 1] % v.vector != 0) return false;
  for (i64 k = 0; v.kinds[k] != 0; ++k) {
    if (v.kinds[k] != 'c') continue;
    const i64 bytes = v.vector * form.bytes[k] < 16 ? v.vector * form.bytes[k] : 16;
    if ((usize)base[k] % (usize)bytes != 0) return false;
  }
  return true;
}

inline const GpuVariant* find_gpu_variant(const Form& form, const DenseLayout& layout, void* const* base) {
  for (i64 i = 0; i < form.gpu_variants; ++i) {
    const GpuVariant& v = form.gpu_variant[i];
    bool fits = layout.size <= v.most && (v.rank == 0 ? layout.rank == 1 : layout.rank <= v.rank);
    for (i64 k = 0; fits && v.kinds[k] != 0; ++k) {
      const char kind = layout.kinds[k];
      // One element: operands of every kind begin at it.
      fits = layout.size == 1 || (v.rank == 0 ? v.kinds[k] == kind : serves(v.kinds[k], kind));
    }
    if (fits && packs_fit(v, form, layout, base)) return &v;
  }
  return nullptr;
}

// og::Divider<u32> as a word: the multiplier, and the shift in the upper half; the formula is there.
inline i64 magic(i64 divisor) {
  i64 shift = 0;
  while (((i64)1 << shift) < divisor) ++shift;
  const u64 multiplier = ((u64)(((i64)1 << shift) - divisor) << 32) / (u64)divisor + 1;
  return (i64)(multiplier | (u64)shift << 32);
}

// og::Layout as words. Axes of extent 1 come first, if the kernel has more axes than the layout.
inline void write_layout(const GpuVariant& v, const DenseLayout& layout, i64 operands, i64* to) {
  const i64 more = v.rank - layout.rank;
  for (i64 d = 0; d < v.rank; ++d) {
    i64 extent = d < more ? 1 : layout.dims[d - more];
    if (d == v.rank - 1) extent /= v.vector;
    *to++ = extent;
    *to++ = v.narrow ? magic(extent) : 0;
  }
  for (i64 k = 0; k < operands; ++k) {
    for (i64 d = 0; d < v.rank; ++d) *to++ = d < more ? 0 : layout.strides[k * layout.rank + d - more];
  }
}

inline Status* compute_on_gpu(void* state, Context* context) {
  Kernel& kernel = *(Kernel*)state;
  Call call;
  OG_TRY(read_call(kernel, context, &call));
  if (call.layout.size == 0) return nullptr;
  const GpuVariant* v = find_gpu_variant(*call.form, call.layout, call.base);
  if (v == nullptr) {
    return api->CreateStatus(not_implemented, "opgraph: no kernel for a GPU serves operands that broadcast along so many "
                                              "axes; run the session on the CPU");
  }
  OG_TRY(ready());
  void* stream = nullptr;
  OG_TRY(api->KernelContext_GetGPUComputeStream(context, &stream));
  cuda::Context *wanted = nullptr, *current = nullptr;
  int error = driver.cuStreamGetCtx((cuda::Stream*)stream, &wanted);
  if (error == cuda::success) error = driver.cuCtxGetCurrent(&current);
  if (error != cuda::success) return failed("the provider's stream has no context", error);
  i64 place = 0;
  OG_TRY(load_into(wanted, &place));

  const i64 operands = call.form->loads + kernel.op->results;
  i64 layout[2 * gpu_rank + gpu_operands * gpu_rank];
  i64 count = v->rank == 0 ? call.layout.size : call.layout.size / v->vector;
  void* arguments[gpu_operands + 2];
  for (i64 k = 0; k < operands; ++k) {
    const bool by_value = k < call.form->loads && call.form->load[k].input == attribute;
    arguments[k] = by_value ? call.base[k] : &call.base[k];
  }
  i64 given = operands;
  if (v->rank > 0) {
    write_layout(*v, call.layout, operands, layout);
    arguments[given++] = layout;
  }
  arguments[given] = &count;  // a narrow kernel reads its lower half
  const i64 blocks = (count + v->tile - 1) / v->tile;
  if (blocks > 2147483647) return api->CreateStatus(not_implemented, "opgraph: more elements than a launch has blocks for");
  if (current != wanted) error = driver.cuCtxPushCurrent(wanted);
  if (error == cuda::success) {
    cuda::Function* function = kernels->functions[place * kernels->count + v->kernel];
    error = driver.cuLaunchKernel(function, (unsigned)blocks, 1, 1, block_size, 1, 1, 0, (cuda::Stream*)stream, arguments,
                                  nullptr);
    if (current != wanted) driver.cuCtxPopCurrent(&wanted);
  }
  return error == cuda::success ? nullptr : failed("a kernel cannot be launched", error);
}

static const Provider on_gpu = {"CUDAExecutionProvider", prepare_on_gpu, compute_on_gpu};

}  // namespace ort
}  // namespace og
