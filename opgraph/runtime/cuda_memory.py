"""Device memory that kernels keep: constants, axis positions, and memory that captured graphs read."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from typing import Any

import numpy as np

from opgraph.runtime import cuda

_SHORTEST = 1024  # positions

_let_go: list[Any] = []
_positions: dict[tuple[int, np.dtype[Any]], tuple[int, Uploaded]] = {}
_kept: dict[int, Any] = {}
_lock = threading.Lock()


class Uploaded:
    """The values of an array on a GPU.

    Freeing device memory waits for the device and breaks a capture that another thread has begun. So collected memory
    is put in a list, and the next upload frees it: uploads are not allowed during a capture either.

    Attributes:
        ptr: the device address.
    """

    __slots__ = ("__weakref__", "ptr")

    def __init__(self, memory: Any) -> None:
        self.ptr = int(memory.ptr)
        weakref.finalize(self, _let_go.append, memory)


def uploaded(array: np.ndarray) -> Uploaded:
    """Copies a row-major array to the current device, and waits for the copy.

    Raises:
        DeviceError: there is no memory, a capture is in progress, or the GPU had a fault.
    """
    _let_go.clear()
    return Uploaded(cuda.copied_to_device(array))


def positions(count: int, dtype: np.dtype[Any], device: int) -> int:
    """The address of at least `count` values 0, 1, 2, ... on `device`, which must be the current one.

    All kernels share one array for each dtype. It doubles when a longer one is needed. Shorter ones stay, since launch
    plans and captured graphs hold their addresses: together they are no longer than the longest.

    Raises:
        DeviceError: as for `uploaded`.
    """
    with _lock:
        length, found = _positions.get((device, dtype), (0, None))
        if found is None or length < count:
            length = max(_SHORTEST, 1 << (count - 1).bit_length())
            found = uploaded(np.arange(length, dtype=dtype))
            _positions[device, dtype] = length, found
            keep([found])
    return found.ptr


def keep(held: Iterable[Any]) -> None:
    """Keeps objects for the life of the process: a captured graph reads their memory, and may live as long."""
    _kept.update((id(each), each) for each in held)
