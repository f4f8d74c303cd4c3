"""Import and export of other libraries' arrays for the CPU engine, on the same memory."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import numpy as np

from opgraph.errors import InvalidArguments
from opgraph.runtime.memory_overlap import repeats_memory, share_memory

#: A function that gets each torch tensor that a kernel is about to write to: torch's dispatch modes see no such write.
write_observer: ContextVar[Callable[[Any], None] | None] = ContextVar("write_observer", default=None)

_PLAIN = (np.ndarray, np.generic, bool, int, float)


def imported(
    feeds: Mapping[Any, Any] | None, named: dict[str, Any]
) -> tuple[Mapping[Any, Any] | None, dict[str, Any], str | None]:
    """Returns the arguments with foreign arrays viewed as NumPy arrays, and the kind of the results (None: NumPy).

    Raises:
        InvalidArguments: an array is on a GPU, or NumPy cannot view it.
    """
    kind = None
    for value in named.values():
        if not isinstance(value, _PLAIN):
            kind = _kind(value)
            break
    if feeds is not None and isinstance(feeds, Mapping):
        for value in feeds.values():
            if not isinstance(value, _PLAIN):
                kind = kind or _kind(value)
                break
    if kind is None:
        return feeds, named, None
    seen = None if feeds is None else {k: _as_numpy(v, str(k)) for k, v in feeds.items()}
    return seen, {k: _as_numpy(v, k) for k, v in named.items()}, kind


def exported(array: np.ndarray, kind: str) -> Any:
    """Returns a result in the kind of the arguments. A constant is copied: torch has no read-only tensors."""
    if kind == "torch":
        from opgraph.runtime.providers.torch import from_numpy

        return from_numpy(array if array.flags.writeable else array.copy())
    return array


def check_donated(name: str, array: np.ndarray, others: Sequence[Any]) -> None:
    """Raises InvalidArguments if a donated input is not writable, or overlaps itself or `others`, the other inputs."""
    if not array.flags.writeable:
        raise donation_refused(name, "its array is read-only")
    if repeats_memory(array.shape, array.strides, array.itemsize):
        raise donation_refused(name, "its array overlaps itself")
    if overlaps(array, others):
        raise donation_refused(name, "its array overlaps that of another input")


def overlaps(array: np.ndarray, others: Iterable[Any]) -> bool:
    """True if an array shares memory with one of others."""
    return any(share_memory(array, other) for other in others)


def donation_refused(name: str, reason: str) -> InvalidArguments:
    """The error for an array that cannot be donated."""
    return InvalidArguments(
        f"the input cannot be donated: {reason}", where=f'input "{name}"', fix="give a copy, or compile without donate"
    )


def counted(arrays: Iterable[Any], where: str) -> list[Any]:
    """Selects the torch tensors with a version counter from arrays that a kernel is about to write to.

    Raises:
        InvalidArguments: a tensor requires a gradient while gradients are recorded.
    """
    torch: Any = sys.modules.get("torch")
    found = []
    for array in arrays:
        if type(array) is not np.ndarray and torch is not None and isinstance(array, torch.Tensor):
            found += [] if array.is_inference() else [array]
    for tensor in found:
        if tensor.requires_grad and torch.is_grad_enabled():
            raise InvalidArguments(
                "a tensor that requires a gradient would be written to, and autograd would not know",
                where=where,
                fix="give tensor.detach(), or call it under torch.no_grad()",
            )
    observer = write_observer.get()
    if observer is not None:
        for tensor in found:
            observer(tensor)
    return found


def written(tensors: Iterable[Any]) -> None:
    """Increments torch's version counters of written tensors. Autograd then detects writes to tensors that it saved."""
    for tensor in tensors:
        sys.modules["torch"].autograd.graph.increment_version(tensor)


class Watched:
    """Torch tensors by name, with their version counters and addresses at construction; other arrays are ignored.

    Attributes:
        is_any: True if there is a tensor.
    """

    def __init__(self, arrays: Iterable[tuple[str, Any]]) -> None:
        torch: Any = sys.modules.get("torch")
        self._found: list[tuple[str, Any, int | None, int]] = []
        for name, array in arrays if torch is not None else ():
            if isinstance(array, torch.Tensor):
                held = array.detach()  # shares the version counter, and holds no autograd graph
                version = None if array.is_inference() else held._version
                self._found.append((name, held, version, held.data_ptr()))
        self.is_any = bool(self._found)

    def check_addresses(self, where: str) -> None:
        """Raises InvalidArguments if the memory of a tensor is elsewhere now: `share_memory_` and `resize_` move it."""
        for name, tensor, _, address in self._found:
            if tensor.data_ptr() != address:
                raise InvalidArguments(
                    f'the memory of "{name}" was moved, by share_memory_, resize_ or a queue of torch.multiprocessing',
                    where=where,
                    fix="do that before the first call, or give a copy: tensor.clone()",
                )

    def check(self, where: str) -> None:
        """Raises InvalidArguments if a tensor was changed in place, or its memory was moved, since construction."""
        self.check_addresses(where)
        for name, tensor, before, _ in self._found:
            now = None if before is None else tensor._version
            if now != before:
                raise InvalidArguments(
                    f'"{name}", which backward reads, was changed in place after forward: torch counts {now} changes '
                    f"of it, {before} then",
                    where=where,
                    fix=f'call the pullback before "{name}" is changed, or give forward a copy: {name}.clone()',
                )


def zeros(shape: Sequence[int], dtype: np.dtype[Any], like: Any) -> np.ndarray:
    """Returns zeros that take almost no memory: all elements share one address."""
    return np.broadcast_to(np.zeros((), dtype), tuple(shape))


def check_out(
    name: str, array: np.ndarray, inputs: Sequence[Any], outs: Sequence[Any], *, over: Collection[int] = ()
) -> None:
    """Raises InvalidArguments if `array` is not writable, or if writing to it would destroy data that is still read.

    Args:
        inputs: the arrays that are read.
        outs: the other arrays that are written.
        over: positions of inputs that `array` may coincide with exactly, in the same dtype.
    """
    where = f'output "{name}"'
    if not array.flags.writeable:
        raise InvalidArguments("the output array is read-only", where=where, fix="give a writable array")
    if not array.flags.c_contiguous and repeats_memory(array.shape, array.strides, array.itemsize):
        raise InvalidArguments(
            "the output array overlaps itself", where=where, fix="give an array without broadcast axes"
        )
    for place, other in enumerate(inputs):
        if not np.may_share_memory(array, other) or not share_memory(array, other):
            continue
        if not (place in over and _is_same(array, other)):
            raise overlap_refused(where, over)
    for other in outs:
        if share_memory(array, other):
            raise outputs_refused(where)


def _is_same(array: np.ndarray, other: np.ndarray) -> bool:
    """True if both are the same elements in the same order and dtype. If dtypes differ, C++ lets a compiler write the
    one before it reads the other."""
    looks = [(a.__array_interface__["data"], a.dtype, a.shape, a.strides) for a in (array, other)]
    return looks[0] == looks[1]


def overlap_refused(where: str, over: Collection[int]) -> InvalidArguments:
    """The error for an output that overlaps an input; `over` has the inputs that it may coincide with exactly."""
    other = ", or exactly that of an input of its dtype that is read element by element" if over else ""
    return InvalidArguments(
        "the output array overlaps an input that is still read", where=where, fix=f"give a buffer of its own{other}"
    )


def outputs_refused(where: str) -> InvalidArguments:
    """The error for an output that overlaps another output."""
    return InvalidArguments("the output array overlaps another output", where=where, fix="give a buffer of its own")


def assign(target: np.ndarray, result: np.ndarray) -> None:
    """Copies a result that is not in `target` yet: an input or constant that is an output, or a library's own array."""
    if target is not result:
        target[...] = result


def _kind(value: Any) -> str:
    torch = sys.modules.get("torch")
    return "torch" if torch is not None and isinstance(value, torch.Tensor) else "dlpack"


def _as_numpy(value: Any, name: str) -> Any:
    if isinstance(value, _PLAIN):
        return value
    try:
        if _kind(value) == "torch":
            from opgraph.runtime.providers.torch import to_numpy

            return to_numpy(value)
        if hasattr(value, "__dlpack__"):
            return np.from_dlpack(value)
    except (RuntimeError, TypeError, BufferError, ValueError) as error:
        raise InvalidArguments(
            f"an array of {type(value).__module__} cannot be read on the CPU: {error}",
            where=f'input "{name}"',
            fix="move it to the CPU, or compile for its device",
        ) from None
    return value  # binding refuses it, with its type
