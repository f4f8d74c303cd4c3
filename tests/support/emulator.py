"""Runs CUDA text without a GPU: the same source, compiled by the host compiler, one thread after the other.

Each thread of a block is a coroutine that runs until it must wait for others: for those of its warp in a shuffle, for
those of its block in `__syncthreads()`. Warps run one after the other between two barriers, and so do blocks.
`backwards` reverses both orders, which reveals a result that depends on them. An access to a pack that is not at a
multiple of its size fails, as on a GPU; one beyond the end of an array ends the process (tests/support/guarded.py). It
differs from a GPU in what `OG_DEVICE` switches: instructions for accesses, rounding and division. `FakeCupy` replaces
the few functions of CuPy that the CUDA engine calls, and passes kernel arguments like CuPy 14.2.
"""

from __future__ import annotations

import ctypes
import hashlib
import subprocess
import tempfile
import types
from pathlib import Path
from typing import Any

import numpy as np
from guarded import guarded

from opgraph.runtime.cpu_compiler import find_compiler

_FOLDER = tempfile.TemporaryDirectory(prefix="opgraph-emulated-")
_FLAGS = (
    "-std=c++17", "-O1", "-march=native", "-ffp-contract=off", "-DOG_NO_TABLES", "-w", "-fPIC", "-shared",
    "-fno-gnu-unique",  # else `__shared__` variables of templates would be those of the process's first kernel
)  # fmt: skip
_BEFORE = """\
#include <ucontext.h>
static struct { unsigned x, y, z; } blockIdx, threadIdx;
#define __global__
#define __launch_bounds__(...)
#define __shared__ static
static ucontext_t scheduler, coroutine[1024];
enum Waiting { runs, in_shuffle, at_barrier, ended };
static Waiting waiting[1024];
static void meet(Waiting where) {
  const unsigned self = threadIdx.x;
  waiting[self] = where;
  swapcontext(&coroutine[self], &scheduler);
}
static void __syncthreads() { meet(at_barrier); }
// Two places by turns: before one is written again, all of the warp have met over the other.
static char shuffled[2][1024][8];
static unsigned char shuffles[1024];
template <class T> T __shfl_xor_sync(unsigned mask, T value, int lanes) {
  const unsigned self = threadIdx.x, turn = shuffles[self]++ & 1;
  __builtin_memcpy(shuffled[turn][self], &value, sizeof value);
  meet(mask == 0xffffffffu ? in_shuffle : ended);
  __builtin_memcpy(&value, shuffled[turn][self ^ lanes], sizeof value);
  return value;
}
static bool misplaced;
template <class P> P* placed(P* p, unsigned long size) {
  misplaced |= (unsigned long)p % size != 0;
  return p;
}
"""
#: Accesses of kernels/cuda/pointwise.cuh -> the same with a check that a GPU allows their addresses.
_PLACED = {
    "__builtin_memcpy(to, p, 16)": "__builtin_memcpy(to, placed(p, 16), 16)",
    "__builtin_memcpy(p, from, 16)": "__builtin_memcpy(placed(p, 16), from, 16)",
    "return *(const Pack<T, V>*)p;": "return *(const Pack<T, V>*)placed(p, alignof(Pack<T, V>));",
    "*(Pack<T, V>*)p = pack;": "*(Pack<T, V>*)placed(p, alignof(Pack<T, V>)) = pack;",
}
_AFTER = """
template <int... I> struct Places {};
template <int N, int... I> struct Count : Count<N - 1, N - 1, I...> {};
template <int... I> struct Count<0, I...> { using type = Places<I...>; };
template <class T> struct plain { using type = T; };
template <class T> struct plain<const T> { using type = T; };
template <class... A, int... I> void call(void (*f)(A...), void** args, Places<I...>) {
  f(*(typename plain<A>::type*)args[I]...);
}
template <class... A> void call(void (*f)(A...), void** args) { call(f, args, typename Count<sizeof...(A)>::type()); }
template <class... A> constexpr int arity(void (*)(A...)) { return sizeof...(A); }
extern "C" int arguments() { return arity(ENTRY); }
static void** arguments_now;
static void thread() {
  call(ENTRY, arguments_now);
  meet(ended);
}
static char stacks[SYNCHRONISES ? 1024 : 1][SYNCHRONISES ? 64 * 1024 : 1];
extern "C" int run(void** args, unsigned blocks, unsigned threads, int backwards) {
  arguments_now = args;
  for (unsigned b = 0; b < blocks; ++b) {
    blockIdx.x = backwards ? blocks - 1 - b : b;
    if (!SYNCHRONISES) {
      for (threadIdx.x = 0; threadIdx.x < threads; ++threadIdx.x) call(ENTRY, args);
      if (misplaced) return 2;
      continue;
    }
    for (unsigned t = 0; t < threads; ++t) {
      waiting[t] = runs;
      shuffles[t] = 0;
      getcontext(&coroutine[t]);
      coroutine[t].uc_stack.ss_sp = stacks[t];
      coroutine[t].uc_stack.ss_size = sizeof stacks[t];
      coroutine[t].uc_link = &scheduler;
      makecontext(&coroutine[t], thread, 0);
    }
    for (Waiting all = runs; all != ended;) {
      for (unsigned w = 0; w < threads; w += 32) {
        const unsigned first = backwards ? threads - 32 - w : w;
        do {
          for (unsigned l = 0; l < 32; ++l) {
            threadIdx.x = first + (backwards ? 31 - l : l);
            swapcontext(&scheduler, &coroutine[threadIdx.x]);
          }
          for (unsigned l = 0; l < 32; ++l)
            if (waiting[first + l] != waiting[first]) return 1;  // what not all threads of a warp reach
        } while (waiting[first] == in_shuffle);
        if (w == 0) all = waiting[first];
        if (waiting[first] != all) return 1;  // a barrier that not all threads of the block reach
      }
    }
  }
  return misplaced ? 2 : 0;
}
"""


def build(code: str, entry: str) -> ctypes.CDLL:
    """A CUDA source as a host library with `run(args, blocks, threads)`."""
    synchronises = "true" if "__syncthreads" in code or "__shfl" in code else "false"
    for plain, watched in _PLACED.items():
        assert code.count(plain) <= 1, plain
        code = code.replace(plain, watched)
    text = _BEFORE + code + _AFTER.replace("ENTRY", entry).replace("SYNCHRONISES", synchronises)
    path = Path(_FOLDER.name) / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.so"
    if not path.exists():
        compiler = find_compiler()
        assert compiler is not None
        with tempfile.TemporaryDirectory(dir=_FOLDER.name) as own:  # another thread may build the same text
            source, made = Path(own, "kernel.cpp"), Path(own, "kernel.so")
            source.write_text(text)
            subprocess.run([*compiler.command, *_FLAGS, "-o", str(made), str(source)], check=True)
            made.replace(path)
    return ctypes.CDLL(str(path))


class FakeArray:
    """The part of a CuPy array that the engine reads, on the memory of a NumPy array."""

    def __init__(self, array: np.ndarray, device: int = 0) -> None:
        self.host = array
        self.dtype, self.shape, self.strides = array.dtype, array.shape, array.strides
        self.data = types.SimpleNamespace(ptr=array.__array_interface__["data"][0], device_id=device)

    @property
    def T(self) -> FakeArray:
        return FakeArray(self.host.T)

    def __setitem__(self, at: Any, value: FakeArray | float) -> None:
        self.host[at] = value.host if isinstance(value, FakeArray) else value

    def __getitem__(self, at: Any) -> FakeArray:
        return FakeArray(self.host[at])

    def view(self, dtype: Any) -> FakeArray:
        return FakeArray(self.host.view(dtype), self.data.device_id)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {**self.host.__array_interface__, "stream": None}


class FakeStream:
    """A stream: an address that launches are recorded with."""

    def __init__(self, ptr: int) -> None:
        self.ptr = ptr


class _Within:
    """A block in which a stream is the current one."""

    def __init__(self, cupy: FakeCupy, ptr: int) -> None:
        self.cupy, self.stream = cupy, FakeStream(ptr)

    def __enter__(self) -> None:
        self.before, self.cupy.stream = self.cupy.stream, self.stream

    def __exit__(self, *_: object) -> None:
        self.cupy.stream = self.before


class CUDARuntimeError(RuntimeError):
    """CuPy's error of the CUDA runtime."""

    def __init__(self, status: int, text: str = "") -> None:
        super().__init__(text)
        self.status = status


class CUDADriverError(RuntimeError):
    """CuPy's error of the CUDA driver."""

    def __init__(self, status: int, text: str = "") -> None:
        super().__init__(text)
        self.status = status


class FakeCupy(types.ModuleType):
    """A module called cupy; `launches` records (kernel, grid, stream address).

    `capturing`: addresses of streams from which a graph is captured. `uploads` counts allocations from the driver,
    `freed` has the addresses of those that were freed, `loaded` kernels whose code is on the device, `waits` the waits
    for the whole device. `copies` records ("to host" or "to device", bytes) of every copy between the two memories that
    CuPy makes.
    """

    ndarray = FakeArray

    def __init__(self) -> None:
        super().__init__("cupy")
        self.launches: list[tuple[str, tuple[int, ...], int]] = []
        self.loaded: set[int] = set()
        self.copies: list[tuple[str, int]] = []
        self.allocated = 0
        self.allocated_on: list[int] = []
        self.backwards = False
        self.device = 0
        self.stream = FakeStream(0)
        self.capturing: set[int] = set()
        self.uploads = 0
        self.freed: list[int] = []
        self.waits = 0
        refused = type("CompileException", (Exception,), {})
        runtime = types.SimpleNamespace(
            getDeviceCount=lambda: 2,
            getDevice=lambda: self.device,
            setDevice=lambda device: setattr(self, "device", device),
            deviceSynchronize=self._wait,
            streamSynchronize=lambda ptr: None,
            streamIsCapturing=lambda ptr: ptr in self.capturing,
            CUDARuntimeError=CUDARuntimeError,
        )
        self.cuda = types.SimpleNamespace(
            runtime=runtime,
            get_current_stream=lambda device: self.stream,
            Stream=types.SimpleNamespace(from_external=lambda stream: _Within(self, stream.__cuda_stream__()[1])),
            Device=lambda index: types.SimpleNamespace(compute_capability="90"),
            Memory=lambda size: _Memory(self, size),
            MemoryPointer=lambda memory, offset: _MemoryPointer(self, memory),
            driver=types.SimpleNamespace(
                CUDADriverError=CUDADriverError, CU_FUNC_ATTRIBUTE_NUM_REGS=4, funcGetAttribute=self._load
            ),
            compiler=types.SimpleNamespace(CompileException=refused),
            function=types.SimpleNamespace(),
        )

    def empty(self, shape: tuple[int, ...], dtype: Any) -> FakeArray:
        self.allocated += 1
        self.allocated_on.append(self.stream.ptr)
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return FakeArray(guarded(size).view(dtype).reshape(shape), self.device)

    def _wait(self) -> None:
        self.waits += 1

    def _load(self, attribute: int, function: int) -> int:
        self.loaded.add(function)
        return 32

    def asarray(self, value: Any) -> FakeArray:
        if hasattr(value, "__cuda_array_interface__"):
            told = value.__cuda_array_interface__
            if hasattr(value, "host"):
                return FakeArray(value.host.view(np.dtype(told["typestr"])), self.device)
            return FakeArray(np.asarray(_OnHost(value)), self.device)
        made = self.empty(np.shape(value), np.asarray(value).dtype)
        made.host[...] = value
        self.copies.append(("to device", made.host.nbytes))
        return made

    def from_dlpack(self, value: Any) -> FakeArray:
        host = value.host
        if not isinstance(host, np.ndarray):  # a tensor of a torch with a fake GPU
            from opgraph.runtime.providers.torch import to_numpy

            host = to_numpy(host)
        return FakeArray(host, self.device)

    def ascontiguousarray(self, value: FakeArray) -> FakeArray:
        return FakeArray(np.ascontiguousarray(value.host).reshape(value.shape), value.data.device_id)

    def asnumpy(self, value: FakeArray) -> np.ndarray:
        self.copies.append(("to host", value.host.nbytes))
        return value.host.copy()

    def RawKernel(self, code: str, name: str, options: tuple[str, ...]) -> Any:
        return types.SimpleNamespace(kernel=_Function(self, build(code, name), name))


class _OnHost:
    """Memory of the "GPU" as NumPy sees it."""

    def __init__(self, array: Any) -> None:
        self.kept = array
        self.__array_interface__ = {"strides": None, **array.__cuda_array_interface__}


class _Function:
    def __init__(self, cupy: FakeCupy, library: ctypes.CDLL, name: str) -> None:
        self.cupy, self.library, self.name = cupy, library, name
        self.ptr = ctypes.cast(library.run, ctypes.c_void_p).value  # launched by tests/support/libcuda.py

    def __call__(self, grid: tuple[int, ...], block: tuple[int, ...], args: Any, shared: int, stream: Any) -> None:
        assert len(block) == 1 and 0 < block[0] <= 512 and block[0] % 32 == 0 and shared == 0 and 0 < grid[0] < 2**31
        assert len(args) == self.library.arguments()
        held = [_argument(a) for a in args]
        self.cupy.launches.append((self.name, grid, stream.ptr))
        given = (ctypes.c_void_p * len(held))(*[ctypes.addressof(h) for h in held])
        wrong = ("", "a barrier that some threads miss", "a pack that does not lie at a multiple of its size")
        assert not wrong[self.library.run(given, grid[0], block[0], self.cupy.backwards)]


def _argument(value: Any) -> Any:
    """Like CuPy: None is a null pointer, a Python int has 64 bits, a NumPy scalar its size, one element its bytes."""
    if value is None or isinstance(value, int):
        return ctypes.c_int64(value or 0)
    if isinstance(value, np.ndarray):
        assert value.size == 1, "CuPy passes arrays of one element by value, and no others"
    return ctypes.create_string_buffer(value.tobytes())


class _Memory:
    def __init__(self, cupy: FakeCupy, size: int) -> None:
        self.cupy = cupy
        cupy.uploads += 1
        self.held = np.empty(size + 16, np.uint8)
        self.ptr = self.held.__array_interface__["data"][0]
        self.ptr += -self.ptr % 16

    def __del__(self) -> None:
        self.cupy.freed.append(self.ptr)


class _MemoryPointer:
    def __init__(self, cupy: FakeCupy, memory: _Memory) -> None:
        self.cupy, self.memory = cupy, memory

    def copy_from_host(self, source: int, size: int) -> None:
        """Raises the same as CuPy 14.2: no error of CUDA's."""
        if self.cupy.stream.ptr in self.cupy.capturing:
            raise RuntimeError("the current stream is capturing, so synchronous API calls are disallowed")
        ctypes.memmove(self.memory.ptr, source, size)
