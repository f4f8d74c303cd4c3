"""The CUDA engine's interface to CuPy: the device, arrays, memory for constants, and NVRTC.

The only module that imports CuPy.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from opgraph.codegen.kernel import KernelSource
from opgraph.errors import DeviceError
from opgraph.runtime.device_array import Adopted, DeviceArray, RawStream
from opgraph.runtime.nvrtc_errors import is_fault, no_memory, refused, refused_by_cuda, refused_in_capture, too_old
from opgraph.runtime.parallel import at_once

try:
    import cupy
except ImportError as _missing:
    raise DeviceError(
        f"CuPy cannot be imported: {_missing}",
        where='engine "cuda"',
        fix="pip install 'opgraph[cuda13]' (or [cuda12], as `nvidia-smi` says), or use device='cpu'",
    ) from None

#: CuPy adds -arch, -ftz=true, include folders and --device-as-default-execution-space.
OPTIONS = ("-std=c++17", "-fmad=false")
#: All kernels are written for compute capability 8.0 (Ampere). Kernels without bf16 may compile for older GPUs.
OLDEST = 80
_DLPACK_GPU = (2, 13)  # kDLCUDA, kDLCUDAManaged
_MEMORY_ALLOCATION = 2  # cudaErrorMemoryAllocation
_CUDA_ERRORS = (cupy.cuda.runtime.CUDARuntimeError, cupy.cuda.driver.CUDADriverError)

#: True if this process was forked from one that had used a GPU: it cannot use CUDA (CUDA C++ Programming Guide).
forked = False
_used = False


def _after_fork() -> None:
    global forked
    forked = _used


os.register_at_fork(after_in_child=_after_fork)


def refuse_fork() -> None:
    """Raises the error for a process forked from one that had used a GPU, before the driver fails or hangs.

    Raises:
        DeviceError: always.
    """
    raise DeviceError(
        "this process was forked off one that had used the GPU, and CUDA cannot be used in it",
        where='engine "cuda"',
        fix="start processes by multiprocessing.set_start_method('spawn'), or fork before the GPU is first used",
    )


def device_count() -> int:
    """The number of GPUs, at least one.

    Raises:
        DeviceError: there is no GPU or no driver for it, or a fault occurred before this call.
    """
    global _used
    if forked:
        refuse_fork()
    try:
        count = int(cupy.cuda.runtime.getDeviceCount())
        reason = "the driver reports no GPU"
    except cupy.cuda.runtime.CUDARuntimeError as error:
        if is_fault(error):
            raise refused_by_cuda("the GPU", error) from None
        count, reason = 0, str(error)
    if count == 0:
        # CUDA reports the same error for a missing driver and for one that is too old for its runtime.
        raise DeviceError(
            f"there is no usable GPU: {reason}",
            where='engine "cuda"',
            fix="check `nvidia-smi` (is there a driver, and new enough for this CuPy?), or use device='cpu'",
        )
    _used = True
    return count


class OnDevice:
    """Context manager: makes a GPU the current one of this thread. Autograd and user threads each have their own."""

    __slots__ = ("_before", "_device")

    def __init__(self, device: int) -> None:
        self._device = device

    def __enter__(self) -> None:
        if forked:
            refuse_fork()
        self._before = cupy.cuda.runtime.getDevice()
        if self._before != self._device:
            cupy.cuda.runtime.setDevice(self._device)

    def __exit__(self, *_: object) -> None:
        if self._before != self._device:
            cupy.cuda.runtime.setDevice(self._before)


def current_device() -> Any:
    """CuPy's functions that get and set the current GPU of this thread, for launches."""
    return cupy.cuda.runtime.getDevice, cupy.cuda.runtime.setDevice


def make_context(device: int) -> None:
    """Creates the GPU's context in this thread: the runtime does so at the first call that needs one.

    The call used here is allowed during a graph capture, unlike freeing memory.
    """
    cupy.cuda.runtime.setDevice(device)
    cupy.cuda.runtime.memGetInfo()


def wait(device: int, stream: Any) -> None:
    """Waits for all work on the stream (an object with `ptr`; None: on the device)."""
    with OnDevice(device):
        if stream is None:
            cupy.cuda.runtime.deviceSynchronize()
        else:
            cupy.cuda.runtime.streamSynchronize(stream.ptr)


class CupyLibrary:
    """CuPy as the owner of arrays on a GPU."""

    name = "cupy"
    keeps_for_graphs = False

    def view(self, owner: Any) -> DeviceArray:
        """Describes an array by address, shape and strides.

        Raises:
            ValueError: the strides are not multiples of the element size.
        """
        size = owner.dtype.itemsize
        strides = owner.strides
        if any(s % size for s in strides):
            raise ValueError("its strides are no multiples of the element size")
        data = owner.data
        return DeviceArray(
            owner, data.ptr, owner.dtype, owner.shape, tuple([s // size for s in strides]), data.device_id, self
        )

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any], device: int) -> tuple[Any, int]:
        """Allocates an array from CuPy's pool, on the current device.

        Raises:
            DeviceError: the GPU does not have enough memory.
        """
        try:
            owner = cupy.empty(shape, dtype)
        except MemoryError:  # CuPy's OutOfMemoryError, raised after CuPy freed its unused memory
            size = int(np.prod(shape)) * dtype.itemsize
            raise no_memory(f"a result of {dtype} {shape}", size, *cupy.cuda.runtime.memGetInfo()) from None
        return owner, owner.data.ptr

    def dense(self, owner: Any) -> Any:
        """Returns the array in row-major order, copied on the device if necessary."""
        return cupy.ascontiguousarray(owner)

    def adopted(self, memory: Adopted, dtype: np.dtype[Any], device: int) -> Any:
        """Creates an array of that dtype on foreign memory."""
        with OnDevice(device):
            return cupy.asarray(memory).view(dtype)

    def stream(self, device: int) -> Any:
        """CuPy's current stream of this thread."""
        return cupy.cuda.get_current_stream(device)

    def using(self, stream: Any, device: int) -> Any:
        """Returns a context manager that makes a stream CuPy's current one of this thread."""
        return cupy.cuda.Stream.from_external(RawStream(ptr=stream.ptr))

    def to_host(self, owner: Any) -> np.ndarray:
        """A copy in host memory."""
        return np.asarray(cupy.asnumpy(owner))

    def from_host(self, array: np.ndarray, device: int) -> Any:
        """A copy on the device."""
        with OnDevice(device):
            return cupy.asarray(array)


CUPY = CupyLibrary()


def as_cupy(value: Any) -> Any:
    """Returns a CuPy array on the same memory, for CuPy arrays and objects with one of two protocols; else None.

    DLPack comes first: it has a code for bf16, which `__cuda_array_interface__` describes as two untyped bytes.
    """
    if isinstance(value, cupy.ndarray):
        return value
    if hasattr(value, "__dlpack_device__") and value.__dlpack_device__()[0] in _DLPACK_GPU:
        return cupy.from_dlpack(value)
    if hasattr(value, "__cuda_array_interface__"):
        return cupy.asarray(value)  # waits for the stream that the interface names
    return None


def copied_to_device(array: np.ndarray) -> Any:
    """Copies a row-major array to memory of the current device; returns an object with `ptr` that frees the memory.

    The memory comes from the driver, not from CuPy's pool: the caller's library may own all the rest of the memory.

    Raises:
        DeviceError: there is no memory, a capture is in progress, or the GPU had a fault.
    """
    what = f"a constant of {array.dtype} {array.shape}"
    try:
        memory = cupy.cuda.Memory(max(array.nbytes, 1))
        cupy.cuda.MemoryPointer(memory, 0).copy_from_host(array.ctypes.data, array.nbytes)
        cupy.cuda.runtime.deviceSynchronize()  # other streams do not wait for this copy
    except cupy.cuda.runtime.CUDARuntimeError as error:
        if error.status == _MEMORY_ALLOCATION:
            raise no_memory(what, array.nbytes, *cupy.cuda.runtime.memGetInfo()) from None
        raise refused_by_cuda(what, error) from None
    except RuntimeError as error:  # CuPy's own: its current stream is being captured
        raise refused_in_capture(what, error) from None
    return memory


def capture_query() -> Any:
    """CUDA's function that checks if a graph is being captured from a stream, given its address."""
    return cupy.cuda.runtime.streamIsCapturing


def passed(args: Sequence[Any]) -> tuple[Any, ...]:
    """Converts kernel arguments for a launch of CuPy, which passes an array of one element by value."""
    # Wrapped once here rather than by every launch (1.1 us each, measured with CuPy 14.2).
    wrap = getattr(cupy.cuda.function, "CNumpyArray", lambda array: array)
    return tuple([wrap(a) if isinstance(a, np.ndarray) else a for a in args])


_functions: dict[tuple[str, int], Any] = {}


def functions(sources: Sequence[KernelSource], device: int, labels: Sequence[str]) -> list[Any]:
    """Returns the compiled kernels, loaded on a device: callable as (grid, block, args, shared memory, stream).

    New sources are compiled in parallel: NVRTC and CuPy let other threads run.

    Args:
        labels: label of each op, for messages.

    Raises:
        DeviceError: NVRTC refused a source, or cannot be used.
    """
    new: dict[str, list[KernelSource]] = {}  # by source: CuPy compiles it once for all its entries, if not in parallel
    for source in sources:
        if (source.entry, device) not in _functions:
            new.setdefault(source.code, []).append(source)
    at_once([partial(_load, entries, device, labels) for entries in new.values()])
    return [_functions[source.entry, device] for source in sources]


def _load(sources: Sequence[KernelSource], device: int, labels: Sequence[str]) -> None:
    with OnDevice(device):
        for source in sources:
            try:
                function = cupy.RawKernel(source.code, source.entry, OPTIONS).kernel
                # CUDA loads the code of a function at its first use, which may fail during a capture.
                cupy.cuda.driver.funcGetAttribute(cupy.cuda.driver.CU_FUNC_ATTRIBUTE_NUM_REGS, function.ptr)
                _functions[source.entry, device] = function
            except cupy.cuda.compiler.CompileException as error:
                capability = cupy.cuda.Device(device).compute_capability
                if int(capability) < OLDEST:
                    raise too_old(device, capability, source.entry) from None
                raise refused(str(error), source, labels) from None
            except _CUDA_ERRORS as error:
                raise refused_by_cuda(f"kernel {source.entry}", error) from None
            except (RuntimeError, ImportError, OSError) as error:
                raise DeviceError(
                    f"kernel {source.entry} cannot be compiled or loaded: {error}",
                    where='engine "cuda"',
                    fix="pip install 'opgraph[cuda13]', which brings NVRTC and the CUDA headers that CuPy looks for",
                ) from None
