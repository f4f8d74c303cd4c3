"""DeviceArray: the description of an array of any library for GPU kernels, and the interface to that library."""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any, Protocol, TypeAlias

import numpy as np

from opgraph.runtime.memory_overlap import repeats_memory

Shape: TypeAlias = tuple[int, ...]


class Library(Protocol):
    """A library that owns arrays on a GPU: torch or CuPy."""

    name: str
    #: True if memory that it allocated during a capture stays with the captured graph.
    keeps_for_graphs: bool

    def view(self, owner: Any) -> DeviceArray:
        """Describes one of its arrays, without touching the data."""

    def empty(self, shape: Shape, dtype: np.dtype[Any], device: int) -> tuple[Any, int]:
        """Returns a new row-major array from the library's own allocator, and its address."""

    def dense(self, owner: Any) -> Any:
        """Returns the array in row-major order, copied on the device if necessary."""

    def adopted(self, memory: Adopted, dtype: np.dtype[Any], device: int) -> Any:
        """Creates an array of that dtype on foreign memory."""

    def stream(self, device: int) -> Any:
        """The library's current stream on a device: an object with `ptr`."""

    def using(self, stream: Any, device: int) -> AbstractContextManager[Any]:
        """Returns a context manager: a stream (an object with `ptr`) becomes the library's current one on a device."""

    def to_host(self, owner: Any) -> np.ndarray:
        """A copy in host memory, complete when this returns."""

    def from_host(self, array: np.ndarray, device: int) -> Any:
        """A copy on the device."""


class DeviceArray:
    """An array on a GPU, viewed without a copy.

    Attributes:
        owner: the library's own object; keeps the memory alive.
        pointer: device address of the first element.
        dtype: NumPy's.
        shape, strides: strides in elements.
        device: index of the GPU; -1: not on a GPU.
        library: the owner's.
    """

    __slots__ = ("device", "dtype", "library", "owner", "pointer", "shape", "strides")

    def __init__(
        self,
        owner: Any,
        pointer: int,
        dtype: np.dtype[Any],
        shape: Shape,
        strides: Shape,
        device: int,
        library: Library,
    ) -> None:
        self.owner = owner
        self.pointer = pointer
        self.dtype = dtype
        self.shape = shape
        self.strides = strides
        self.device = device
        self.library = library

    def at(self, pointer: int) -> DeviceArray:
        """Returns the same array description with another address."""
        return DeviceArray(self.owner, pointer, self.dtype, self.shape, self.strides, self.device, self.library)

    @property
    def key(self) -> tuple[Shape, Shape, int]:
        """The key of the launch plan; of the address, it holds the alignment only."""
        return (self.shape, self.strides, self.pointer & 15)

    @property
    def overlaps_itself(self) -> bool:
        """True if two elements may lie on the same memory, as after `expand`."""
        return repeats_memory(self.shape, self.strides)

    def may_share(self, other: DeviceArray) -> bool:
        """True if the two spans of memory overlap; they may still have no element in common."""
        (a, b), (c, d) = self._span(), other._span()
        return a < d and c < b

    def is_same(self, other: DeviceArray) -> bool:
        """True if both are the same elements in the same order, of one dtype."""
        looks = [(a.pointer, a.dtype, a.shape, a.strides) for a in (self, other)]
        return looks[0] == looks[1]

    def _span(self) -> tuple[int, int]:
        if 0 in self.shape:
            return self.pointer, self.pointer
        reach = [(d - 1) * s for d, s in zip(self.shape, self.strides)]
        low, high = sum(r for r in reach if r < 0), sum(r for r in reach if r > 0)
        size = self.dtype.itemsize
        return self.pointer + low * size, self.pointer + (high + 1) * size


class Adopted:
    """Foreign row-major memory, in a form that libraries take without a copy; they keep this object.

    Args:
        keep: the object that keeps the memory alive.
    """

    def __init__(self, pointer: int, shape: Shape, dtype: np.dtype[Any], keep: Any) -> None:
        self.kept = keep
        plain = dtype if dtype.kind in "biuf" else np.dtype(f"u{dtype.itemsize}")  # there is no typestr of bf16
        self.__cuda_array_interface__ = {"shape": shape, "typestr": plain.str, "data": (pointer, False), "version": 3}


class RawStream(SimpleNamespace):
    """A stream by its address, as CuPy takes it: `RawStream(ptr=...)`, created at each launch without a Python call."""

    ptr: int

    def __cuda_stream__(self) -> tuple[int, int]:
        """The stream protocol of CUDA Python: its version, and the address."""
        return 0, self.ptr


def alignment(pointers: list[int]) -> int:
    """The largest power of two up to 16 that divides every address."""
    bits = 16
    for pointer in pointers:
        bits |= pointer
    return bits & -bits
