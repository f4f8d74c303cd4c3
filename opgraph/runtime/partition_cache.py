"""The cache of compiled partitions: a partition is compiled once, independent of its ids and names.

The key of a partition is its structure (kinds, attributes, connections, declared dtypes and shapes, constants by their
bits), the engine, and the logical tensors that it is compiled for. A rebuilt graph reuses the partitions of the first.
oneDNN's key holds ids and names as well, so a rebuilt graph is compiled again there.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

from opgraph.errors import InvalidArguments
from opgraph.ir.logical_tensor import LogicalTensor
from opgraph.ir.op import Op
from opgraph.partition.partition import FUSED, NATIVE, Partition
from opgraph.runtime.engine import Engine

#: As in oneDNN.
DEFAULT_CAPACITY = 1024
#: Partitions with more bytes of constants are not cached: a cache must not keep weights alive.
MAX_CONSTANT_BYTES = 1 << 16

#: The key of one entry.
Key: TypeAlias = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class CacheInfo:
    """The contents of the cache in numbers, and its hits and misses."""

    hits: int
    misses: int
    size: int
    capacity: int


class PartitionCache:
    """Compiled partitions by key; the least recently used is evicted first. Thread-safe."""

    def __init__(self, capacity: int = DEFAULT_CAPACITY) -> None:
        self._entries: OrderedDict[Key, Any] = OrderedDict()
        self._lock = threading.Lock()
        self.capacity = capacity
        self._hits = self._misses = 0

    def find(self, key: Key) -> Any:
        """Returns the entry, or None."""
        with self._lock:
            found = self._entries.get(key)
            if found is None:
                self._misses += 1
            else:
                self._hits += 1
                self._entries.move_to_end(key)
            return found

    def store(self, key: Key, entry: Any) -> None:
        """Stores an entry, and evicts entries beyond the capacity."""
        with self._lock:
            self._entries[key] = entry
            while len(self._entries) > self.capacity:
                self._entries.popitem(last=False)

    def set_capacity(self, capacity: int) -> None:
        """Sets the largest number of entries; 0 empties the cache and switches it off.

        Raises:
            InvalidArguments: the capacity is no int, or negative.
        """
        if type(capacity) is not int or capacity < 0:
            raise InvalidArguments(f"{capacity!r} is no capacity", where="set_capacity", fix="give an int >= 0")
        with self._lock:
            self.capacity = capacity
            while len(self._entries) > capacity:
                self._entries.popitem(last=False)

    def info(self) -> CacheInfo:
        """Counts since the start of the process."""
        with self._lock:
            return CacheInfo(self._hits, self._misses, len(self._entries), self.capacity)


CACHE = PartitionCache()


def get_compiled_partition_cache_capacity() -> int:
    """The largest number of compiled partitions in the cache. Source: oneDNN Graph."""
    return CACHE.capacity


def set_compiled_partition_cache_capacity(capacity: int) -> None:
    """Sets the largest number of compiled partitions (1024 at first); 0 empties the cache and switches it off.

    Raises:
        InvalidArguments: the capacity is no int, or negative.

    Source: oneDNN Graph.
    """
    CACHE.set_capacity(capacity)


def compiled_partition_cache_info() -> CacheInfo:
    """Hits, misses, entries and capacity of the cache of compiled partitions."""
    return CACHE.info()


# -- keys -----------------------------------------------------------------------------------------------------------


class Structure:
    """The computation of a partition, as a key with a precomputed hash."""

    __slots__ = ("_hash", "parts")

    def __init__(self, parts: tuple[object, ...]) -> None:
        self.parts = parts
        self._hash = hash(parts)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Structure) and self.parts == other.parts)


_structures: WeakKeyDictionary[Partition, Structure | None] = WeakKeyDictionary()


def key_of(
    partition: Partition, inputs: Sequence[LogicalTensor], outputs: Sequence[LogicalTensor], engine: Engine
) -> Key | None:
    """The key of a compilation; None if it is not cached, or its arguments need the checks of a compilation."""
    structure = _structures.get(partition, partition)
    if structure is partition:
        structure = _structures[partition] = _structure(partition)
    if structure is None or type(engine) is not Engine:
        return None
    parts: list[object] = [structure, engine]
    for ports, tensors in ((partition.input_ports, inputs), (partition.output_ports, outputs)):
        given: dict[int, LogicalTensor] = {}
        for tensor in tensors:
            if type(tensor) is not LogicalTensor or given.setdefault(tensor.id, tensor) is not tensor:
                return None
        for port in ports:
            found = given.get(port.id)
            if found is None:
                return None
            parts += (found.dtype, found.dims, found.layout, found.strides, found.property)
    return tuple(parts)


def _structure(partition: Partition) -> Structure | None:
    """A partition's structure; None if it runs in a library that reads more than its ops, or has large constants."""
    if partition.kind != FUSED and partition.provider != NATIVE:
        return None
    number: dict[int, int] = {}
    parts: list[object] = [partition.kind, partition.engine]
    size = 0
    for tensor in partition.constants:
        assert tensor.data is not None
        size += tensor.data.nbytes
        number[tensor.id] = len(number)
        parts += (tensor.dtype, tensor.dims, tensor.data.tobytes() if size <= MAX_CONSTANT_BYTES else b"")
    if size > MAX_CONSTANT_BYTES:
        return None
    for tensor in partition.input_ports:
        number[tensor.id] = len(number)
        parts += (tensor.dtype, tensor.dims, tensor.layout, tensor.property)
    for op in partition.ops:
        parts.append(op.kind)
        parts += [number[t.id] for t in op.inputs]
        if op._attrs:
            parts.append(_attributes(op))
        for tensor in op.outputs:
            number[tensor.id] = len(number)
            parts += (tensor.dtype, tensor.dims)
    parts += [number[t.id] for t in partition.output_ports]
    parts += [(unit.name, unit.kind, number.get(unit.root.outputs[0].id)) for unit in partition.unit_matches]
    rows = partition.rows
    if rows.axes or rows.inside:
        forms = sorted((number[i], form) for i, form in rows.forms.items() if i in number)
        opened = [place for place, op in enumerate(partition.ops) if op.id in rows.inside]
        parts += [rows.axes, *forms, *sorted(number[i] for i in rows.sums if i in number), *opened]
        parts += sorted((number[i], cut) for i, cut in rows.cuts.items() if i in number)
    return Structure(tuple(parts))


def _attributes(op: Op) -> tuple[object, ...]:
    """Names and values, in the record's order; numbers as text, as equal ones may be different (0.0 and -0.0)."""
    return tuple([(n, repr(v) if isinstance(v, (float, tuple)) else v) for n, v in op._attrs.items()])
