"""Engine and Stream: the device of a partition, and its order with other work."""

from __future__ import annotations

from dataclasses import dataclass

from opgraph.errors import DeviceError, InvalidArguments
from opgraph.ir.modes import ENGINE_KINDS


@dataclass(frozen=True, slots=True)
class Engine:
    """A device.

    Args:
        kind: "cpu" or "cuda".
        index: which one, for "cuda".

    Raises:
        InvalidArguments: the kind is unknown, or the index is impossible.
        DeviceError: the GPU does not exist, or CuPy is missing.

    Source: oneDNN `engine`.
    """

    kind: str = "cpu"
    index: int = 0

    def __post_init__(self) -> None:
        if self.kind not in ENGINE_KINDS:
            raise InvalidArguments(
                f"unknown engine kind {self.kind!r}", where="Engine", fix=f"use one of {', '.join(ENGINE_KINDS)}"
            )
        if type(self.index) is not int or self.index < 0 or (self.kind == "cpu" and self.index):
            raise InvalidArguments(f"there is no {self.kind}:{self.index}", where="Engine", fix="use index 0")
        if self.kind == "cuda":
            from opgraph.runtime import cuda  # needs CuPy

            count = cuda.device_count()
            if self.index >= count:
                raise DeviceError(
                    f"there is no GPU {self.index}", where="Engine", fix=f"this machine has {count}; use device='cpu'"
                )

    def __str__(self) -> str:
        return self.kind if self.kind == "cpu" else f"{self.kind}:{self.index}"


def engine_of(device: str | Engine) -> Engine:
    """Returns the engine for "cpu", "cuda", "cuda:1" or an Engine.

    Raises:
        InvalidArguments: it is none of these.
    """
    if isinstance(device, Engine):
        return device
    kind, _, index = str(device).partition(":")
    if index and not (index.isascii() and index.isdigit()):
        raise InvalidArguments(f"unknown device {device!r}", where="device", fix='use "cpu", "cuda" or "cuda:1"')
    return Engine(kind, int(index or 0))


#: Attributes with the address of other libraries' streams: CuPy's, torch's, and the protocol of CUDA Python.
STREAM_ADDRESSES = ("ptr", "cuda_stream", "__cuda_stream__")


class Stream:
    """A queue of work on an engine.

    Args:
        engine: the device.
        handle: for "cuda": a torch or CuPy stream, anything with `__cuda_stream__`, or a raw stream address; None: the
            caller's current stream, looked up at every execution.

    On the CPU, work is done when a call returns; `wait` does nothing there.

    Raises:
        InvalidArguments: `engine` is no Engine, a CPU stream has a handle, or the handle is no stream.

    Source: oneDNN `stream`.
    """

    def __init__(self, engine: Engine, handle: object | None = None) -> None:
        if not isinstance(engine, Engine):
            raise InvalidArguments(f"{engine!r} is no Engine", where="Stream", fix='pass og.Engine("cpu")')
        if engine.kind == "cpu" and handle is not None:
            raise InvalidArguments("a CPU stream has no handle", where="Stream", fix="leave handle out")
        if handle is not None and type(handle) is not int and not any(hasattr(handle, a) for a in STREAM_ADDRESSES):
            raise InvalidArguments(
                f"{type(handle).__name__} is no stream",
                where="Stream",
                fix="pass a torch or CuPy stream, or the address of one as an int",
            )
        self.engine = engine
        self.handle = handle

    def wait(self) -> None:
        """Waits for all work on the stream."""
        if self.engine.kind == "cuda":
            from opgraph.runtime import cuda_arrays

            cuda_arrays.synchronize(self)
