"""Error messages of the CUDA engine: for kernels that NVRTC refuses, and for calls that CUDA refuses."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from opgraph.codegen.kernel import KernelSource
from opgraph.errors import DeviceError

_SHOWN = 20
#: cudaErrorStreamCaptureUnsupported and the errors after it; the driver has the same numbers.
_CAPTURE = range(900, 909)
#: Errors after which CUDA refuses all calls of the process: hardware exceptions, illegal accesses, failed launches.
_LOST = (214, 702, 709, 710, *range(714, 720), 700)
_LINE_NUMBER = re.compile(r"\((\d+)\): ")


def refused(log: str, source: KernelSource, labels: Sequence[str]) -> DeviceError:
    """The error for a log of NVRTC.

    Args:
        log: as NVRTC wrote it, lines such as `kernel.cu(12): error: ...`.
        labels: label of each op of the kernel, by tag.
    """
    code = source.code.splitlines()
    numbers = sorted({int(n) for n in _LINE_NUMBER.findall(log) if 0 < int(n) <= len(code)})
    text = [f"    {line}" for line in log.strip().splitlines()[:_SHOWN]]
    text += [f"    {number:5d} | {code[number - 1]}" for number in numbers[:_SHOWN]]
    tags = sorted({source.tags[n] for n in numbers if n in source.tags})
    return DeviceError(
        "\n".join([f"NVRTC refused kernel {source.entry}:", *text]),
        where=", ".join(labels[t] for t in tags if t < len(labels)) or f"kernel {source.entry}",
        fix="this is a bug of opgraph, unless CuPy or NVRTC is broken: report it with the source (f.kernels)",
    )


def too_old(device: int, capability: str, entry: str) -> DeviceError:
    """The error for a kernel that NVRTC refuses because the GPU is older than kernels are written for.

    Args:
        capability: as in "75".
    """
    return DeviceError(
        f"GPU {device} has compute capability {capability[:-1]}.{capability[-1]}, and kernel {entry} needs 8.0",
        where='engine "cuda"',
        fix="use a GPU of 8.0 or newer (A100, RTX 30), or device='cpu'; kernels without bf16 may run on older ones",
    )


def no_memory(what: str, size: int, free: int, total: int) -> DeviceError:
    """The error for an allocation of `size` bytes on a GPU that has `free` of `total` bytes."""
    return DeviceError(
        f"the GPU has no memory for {what}: it takes {size / 2**30:.2f} GiB, {free / 2**30:.2f} of {total / 2**30:.2f} "
        "GiB are free",
        where='engine "cuda"',
        fix="free arrays (and cupy.get_default_memory_pool().free_all_blocks()), or give `out=` or `donate=`",
    )


def is_fault(error: Any) -> bool:
    """True if a process cannot use CUDA any more after this error."""
    return int(error.status) in _LOST


def refused_by_cuda(what: str, error: Any) -> DeviceError:
    """The error for a call that the CUDA runtime or driver refused.

    Args:
        what: the object that was to be loaded or copied.
        error: CuPy's CUDARuntimeError or CUDADriverError.
    """
    status = int(error.status)
    if status in _CAPTURE:
        return refused_in_capture(what, error)
    if is_fault(error):
        fix = "start a new process: CUDA refuses this one everything after a fault; compute-sanitizer finds its kernel"
    else:
        fix = "check `nvidia-smi`: is the GPU healthy, free, and its driver as new as CuPy's CUDA?"
    return DeviceError(f"CUDA refused {what}: {error}", where='engine "cuda"', fix=fix)


def refused_in_capture(what: str, error: Exception) -> DeviceError:
    """The error for a call that is not allowed while a CUDA graph is captured; `what` as above."""
    return DeviceError(
        f"CUDA refused {what}: {error}",
        where='engine "cuda"',
        fix="make the same call once before the capture: compiling and uploading are not allowed in one",
    )
