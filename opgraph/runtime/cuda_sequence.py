"""Launches GPU kernels one after the other, with one call into native code.

The native loop (kernels/cuda/kernel_sequence.h) calls the driver's `cuLaunchKernel` with the handles of CuPy's
functions. Without a C++ compiler, or if calls are logged, the kernels are launched one by one through CuPy.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import numpy as np

from opgraph.errors import DeviceError
from opgraph.ir.stage_log import Logged
from opgraph.runtime import cpu_compiler, cuda, cuda_memory
from opgraph.runtime.cuda_plan import Plan
from opgraph.runtime.device_array import RawStream
from opgraph.runtime.kernel_sequence import KernelLaunch, check_launch, native_entry

#: The driver's file name in its own installation.
LIBCUDA = "libcuda.so.1"
_INVALID_CONTEXT = 201
#: Values that kernels/cuda/kernel_sequence.h reads instead of a place.
_ITSELF, _LIES_THERE = -1, -2


class CudaSequence:
    """Prepared kernels of one GPU, launched in order on one stream. Calls may overlap.

    Args:
        launches: at least one; later kernels may read what earlier ones write.
        count: the number of array addresses of a call.
        device: index of the GPU.

    Attributes:
        workspace: bytes of device memory that a call provides, as one more address; 0: none.

    Raises:
        InvalidArguments: a kernel has no elements, operands do not fit a kernel, or a place is not in a call.
        DeviceError: the native loop does not compile, or there is no driver.
    """

    def __init__(self, launches: Sequence[KernelLaunch[Plan]], count: int, device: int) -> None:
        self.launches = tuple(launches)
        self._device = device
        self._count = count
        for number, item in enumerate(self.launches):
            wanted = len(item.plan.moving) if item.plan.launches and not item.plan.cleared else 0
            check_launch(item, wanted, count, f"kernel {number} of a sequence")
        sizes = [item.plan.work[0] * item.plan.work[1].itemsize for item in self.launches]
        self.workspace = max(sizes, default=0)
        self._kernels = [launch for item in self.launches for launch in item.plan.launches]
        self._held = [memory for item in self.launches for memory in item.plan.keep]
        self._is_capturing = cuda.capture_query()
        self._native: Callable[[bytes], int] | None = None
        self.direct: tuple[Callable[[bytes], int], Callable[..., bytes]] | None = None
        is_logged = any(isinstance(launch.function, Logged) for launch in self._kernels)
        if cpu_compiler.is_available() and not is_logged:
            words = [max((len(launch.args) for launch in self._kernels), default=0)]
            for item in self.launches:
                words += _program(item, workspace=count)
            self._program = (ctypes.c_int64 * len(words))(*words)
            self._native = native_entry("cuda/kernel_sequence.h", "og_cuda_sequence", ctypes.c_int64)
            pack = struct.Struct(f"{5 + count + (self.workspace > 0)}P").pack
            self._packed = partial(pack, ctypes.addressof(self._program), len(self._kernels), _launch_kernel(LIBCUDA))
            #: A call without a Python function: `entry(pack(stream, *addresses))` returns 0 on success; any other
            #: value is for `recover`. None if there is no compiler, or if kernels read constants.
            self.direct = None if self._held else (self._native, partial(self._packed, 0))

    def __call__(self, stream: int, *addresses: int) -> None:
        """Launches the kernels; returns without waiting for them.

        Args:
            stream: the address of a stream of this GPU; the GPU must be the current one of the thread.
            addresses: of arrays laid out and aligned like those of the plans; then of the workspace, if there is one.

        Raises:
            DeviceError: the driver refuses a launch.
        """
        if self._held and stream and self._is_capturing(stream):
            cuda_memory.keep(self._held)  # the graph reads the constants as long as it lives
        if self._native is None:
            self._one_by_one(stream, addresses)
            return
        refused = self._native(self._packed(0, stream, *addresses))
        if refused:
            self.recover(refused, stream, *addresses)

    def recover(self, refused: int, stream: int, *addresses: int) -> None:
        """Creates the context of a thread that has none and continues at the refused launch.

        A thread has no context if it only ever got memory from a pool.

        Args:
            refused: the value that the native loop returned.

        Raises:
            DeviceError: the launch was refused for another reason.
        """
        assert self._native is not None
        if refused & 0xFFFFFFFF == _INVALID_CONTEXT:
            cuda.make_context(self._device)
            refused = self._native(self._packed(refused >> 32, stream, *addresses))
        if refused:
            raise DeviceError(
                f"the driver refuses a launch: {_error_name(LIBCUDA, refused & 0xFFFFFFFF)}",
                where=f"kernel {refused >> 32} of a sequence on cuda:{self._device}",
                fix="an earlier kernel of this process may have failed: run it again with CUDA_LAUNCH_BLOCKING=1",
            )

    def _one_by_one(self, stream: int, addresses: Sequence[int]) -> None:
        work = addresses[self._count] if self.workspace else 0
        where = RawStream(ptr=stream)
        for item in self.launches:
            operands = list(item.plan.fixed)
            for (place, offset), position in zip(item.operands, item.plan.moving, strict=True):
                operands[position] = addresses[place] + offset
            for launch in item.plan.launches:
                launch.function(launch.grid, launch.block, launch.filled(operands, work), 0, where)


def _program(item: KernelLaunch[Plan], workspace: int) -> list[int]:
    """The words of one prepared call that kernels/cuda/kernel_sequence.h reads."""
    plan = item.plan
    operands = [(_ITSELF, address) for address in plan.fixed]
    for (place, offset), position in zip(item.operands, plan.moving, strict=True):
        operands[position] = (place, offset)
    words: list[int] = []
    for launch in plan.launches:
        parameters = [_constant(a) for a in launch.args]
        for i, operand in launch.operands:
            parameters[i] = operands[operand]
        if launch.work is not None and plan.work[0]:
            parameters[launch.work] = (workspace, 0)
        for i, offset in launch.inside:
            parameters[i] = (workspace, offset)
        words += [launch.function.ptr, launch.grid[0], launch.block[0], len(parameters)]
        words += [number for parameter in parameters for number in parameter]
    return words


def _constant(value: Any) -> tuple[int, int]:
    if isinstance(value, np.ndarray):  # kept by the plan
        return _LIES_THERE, value.__array_interface__["data"][0]
    return _ITSELF, 0 if value is None else int(value)


@cache
def _driver(library: str) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(library)
    except OSError as error:
        raise DeviceError(
            f"the driver cannot be loaded: {error}",
            where='engine "cuda"',
            fix="install the NVIDIA driver (is there an `nvidia-smi`?), or use device='cpu'",
        ) from None


@cache
def _launch_kernel(library: str) -> int:
    return ctypes.cast(_driver(library).cuLaunchKernel, ctypes.c_void_p).value or 0


def _error_name(library: str, code: int) -> str:
    name = ctypes.c_char_p()
    _driver(library).cuGetErrorName(code, ctypes.byref(name))
    return f"{(name.value or b'an unknown error').decode()} ({code})"
