"""Arrays and streams of any library, as the CUDA engine takes them: by address, in place."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from functools import cache
from typing import Any

from opgraph.errors import InvalidArguments
from opgraph.runtime import cuda
from opgraph.runtime.device_array import DeviceArray, Library, RawStream
from opgraph.runtime.engine import Stream


def seen(value: Any, device: int, what: str, name: object = "") -> DeviceArray:
    """Views an array on GPU `device` without a copy.

    Args:
        value: a torch or CuPy array, an object there with `__cuda_array_interface__` or DLPack, or a DeviceArray.
        what, name: the role and name of the array, for messages.

    Raises:
        InvalidArguments: it is no array, lies on another device, or cannot be read in place.
    """
    found = value if type(value) is DeviceArray else _viewed(value, what, name)
    if found is not None and found.device == device:
        return found
    where = _place(what, name)
    if found is None:
        raise InvalidArguments(
            f"got {type(value).__module__}.{type(value).__name__}, which is no array on a GPU",
            where=where,
            fix=f'pass cupy.asarray(x) or x.to("cuda:{device}"), or compile with device="cpu"',
        )
    place = "the CPU" if found.device < 0 else f"cuda:{found.device}"
    raise InvalidArguments(
        f"the array is on {place}, the kernel on cuda:{device}",
        where=where,
        fix=f'move it: x.to("cuda:{device}"), or compile for its device',
    )


def _place(what: str, name: object) -> str:
    return f'{what} "{name}"' if name != "" else what


def _viewed(value: Any, what: str, name: object) -> DeviceArray | None:
    torch = sys.modules.get("torch")
    try:
        if torch is not None and isinstance(value, torch.Tensor):
            return _torch_library().view(value)
        array = cuda.as_cupy(value)
        return None if array is None else cuda.CUPY.view(array)
    except (TypeError, ValueError, BufferError, RuntimeError) as error:
        raise InvalidArguments(
            f"an array of {type(value).__module__} cannot be read in place: {error}",
            where=_place(what, name),
            fix="pass a plain strided array of a dtype that opgraph has",
        ) from None


@cache
def _torch_library() -> Library:
    from opgraph.runtime.providers.torch_cuda import TORCH  # imports torch, which the caller has done already

    return TORCH


def library_of(arrays: Iterable[DeviceArray | None]) -> Library:
    """The library that allocates results and has the current stream: torch if it owns any of the arrays, else CuPy."""
    for array in arrays:
        if array is not None and array.library is not cuda.CUPY:
            return array.library
    return cuda.CUPY


def synchronize(stream: Stream) -> None:
    """Waits for all work on the stream; without a handle, for all work on its device."""
    cuda.wait(stream.engine.index, raw_stream(stream))


def raw_stream(stream: Stream) -> Any:
    """The stream that a handle stands for, as an object with `ptr`; None without a handle."""
    handle: Any = stream.handle
    if handle is None or hasattr(handle, "ptr"):
        return handle
    if hasattr(handle, "cuda_stream"):
        return RawStream(ptr=handle.cuda_stream)
    return RawStream(ptr=handle if type(handle) is int else handle.__cuda_stream__()[1])
