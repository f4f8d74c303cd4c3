"""Plans memory for the values between the steps of an executable: one block, planned by the lifetimes of the values."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable
from dataclasses import dataclass

#: Every buffer starts at a multiple of this: the size of a cache line, and of an AVX-512 vector.
ALIGNMENT = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """A value between two steps, before it has a place.

    Attributes:
        id: the id of its tensor.
        name: for display.
        size: in bytes.
        first, last: the step that makes it, and the last one that reads it.
        may_lie_over: values that the step `first` reads for the last time and may overwrite while reading.
    """

    id: int
    name: str
    size: int
    first: int
    last: int
    may_lie_over: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffer:
    """A planned value.

    Attributes:
        value: the value.
        offset: in bytes, from the start of the block.
        over: the value whose memory it takes over in the step that makes it; None if it takes over none.
    """

    value: Value
    offset: int
    over: int | None

    @property
    def end(self) -> int:
        """The offset after its last byte."""
        return self.offset + self.value.size


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """A block of memory and the places of its values; prints as a table.

    Attributes:
        buffers: in the order in which they are made.
        size: bytes of the block.
    """

    buffers: tuple[Buffer, ...]
    size: int

    @property
    def size_apart(self) -> int:
        """The bytes that the same values would take side by side."""
        return sum(_rounded(b.value.size) for b in self.buffers)

    def clashes(self) -> list[tuple[int, int]]:
        """Pairs of values, by id, that share bytes while both are needed; empty if the plan is correct.

        A value may take over another's memory in the last step that reads that one: this is no clash.
        """
        found = []
        alive: list[Buffer] = []
        for buffer in sorted(self.buffers, key=lambda b: b.value.first):
            alive = [b for b in alive if b.value.last >= buffer.value.first]
            for other in alive:
                shares = max(other.offset, buffer.offset) < min(other.end, buffer.end)
                takes_over = buffer.over == other.value.id and other.value.last == buffer.value.first
                if shares and not takes_over:
                    found.append((other.value.id, buffer.value.id))
            alive.append(buffer)
        return found

    def __str__(self) -> str:
        head = f"{len(self.buffers)} values in {self.size} bytes ({self.size_apart} side by side)"
        over = {b.value.id: b.value.name for b in self.buffers}
        rows = [("value", "bytes", "offset", "steps", "over")]
        for b in self.buffers:
            steps = f"{b.value.first}-{b.value.last}"
            rows.append(
                (b.value.name, str(b.value.size), str(b.offset), steps, over[b.over] if b.over is not None else "")
            )
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([head, *lines])


def planned(values: Iterable[Value]) -> MemoryPlan:
    """Chooses a place for each value, such that no two values that are needed at once share a byte.

    In the order of steps, a new value takes the place of one that it may overwrite, else the smallest gap that is large
    enough, else the end. The cost per value is a logarithm plus the number of gaps.
    """
    order = sorted(values, key=lambda v: (v.first, -v.size, v.id))
    gaps = _Gaps()
    placed: dict[int, Buffer] = {}
    taken_over: set[int] = set()
    ending: list[tuple[int, int]] = []  # (last step, id) of values that are alive
    for value in order:
        while ending and ending[0][0] < value.first:
            _, id = ending.pop(0)
            if id not in taken_over:
                gaps.give(placed[id].offset, _rounded(placed[id].value.size))
        over = next((i for i in value.may_lie_over if _may_take(value, placed.get(i), taken_over)), None)
        if over is not None:
            taken_over.add(over)
        offset = placed[over].offset if over is not None else gaps.take(_rounded(value.size))
        placed[value.id] = Buffer(value=value, offset=offset, over=over)
        insort(ending, (value.last, value.id))
    return MemoryPlan(tuple(placed.values()), gaps.end)


def _may_take(value: Value, other: Buffer | None, taken: set[int]) -> bool:
    if other is None or other.value.id in taken:
        return False
    return other.value.size == value.size and other.value.last == value.first


def _rounded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


class _Gaps:
    """The free pieces of a block that grows at its end."""

    def __init__(self) -> None:
        self.end = 0
        self._free: list[tuple[int, int]] = []  # (offset, size), by offset, no two touching

    def take(self, size: int) -> int:
        """Allocates a piece; returns its offset."""
        fitting = [(free, offset) for offset, free in self._free if free >= size]
        if not size or not fitting:
            return self._grow(size)
        free, offset = min(fitting)
        self._free.remove((offset, free))
        if free > size:
            insort(self._free, (offset + size, free - size))
        return offset

    def _grow(self, size: int) -> int:
        offset = self.end
        if size and self._free and sum(self._free[-1]) == self.end:  # the last gap grows instead
            offset = self._free.pop()[0]
        self.end = max(self.end, offset + size)
        return offset

    def give(self, offset: int, size: int) -> None:
        """Frees a piece, and joins it with free neighbours."""
        joined: list[tuple[int, int]] = []
        for at, free in self._free:
            if at + free == offset:
                offset, size = at, size + free
            elif offset + size == at:
                size += free
            else:
                joined.append((at, free))
        if size:
            insort(joined, (offset, size))
        self._free = joined
