"""Joins inside kernels: `cat` of equal parts, `slice_scatter` and `constant_pad_nd` at a multiple of the part's size.

A kernel computes every element of a value from elements at the same place, but an element of a join is at another place
in its part. So the axis of n = k * h elements that a join fills is split into two axes (k, h); the first one numbers
the blocks. An operand of n elements there is the same memory with strides (h * s, s). One of any other size m becomes
(1, m), and a part becomes (1, h): it is broadcast to each block, and the block's number selects among the parts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

aten = torch.ops.aten

#: The most blocks of a join in a kernel: each element of the join costs the arithmetic of all parts.
MOST_PARTS = 4
#: The fewest contiguous elements of a block: a kernel's innermost loop runs over them.
SHORTEST_BLOCK = 4


@dataclass(frozen=True, slots=True)
class AxisSplit:
    """An axis that a kernel treats as two axes.

    Attributes:
        axis: counted from the right: -1 is the last one.
        size: the elements of the axis; values with another size there do not have the split axis.
        parts: the number of blocks.
    """

    axis: int
    size: int
    parts: int

    @property
    def block(self) -> int:
        """The number of elements of a block."""
        return self.size // self.parts

    def shape(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """The shape of a value in a kernel."""
        place = len(sizes) + self.axis
        if place < 0:
            return tuple(sizes)
        blocks = (self.parts, self.block) if sizes[place] == self.size else (1, sizes[place])
        return (*sizes[:place], *blocks, *sizes[place + 1 :])

    def strides(self, sizes: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
        """The strides that belong to `shape`."""
        place = len(sizes) + self.axis
        if place < 0:
            return tuple(strides)
        step = strides[place]
        return (*strides[:place], self.block * step, step, *strides[place + 1 :])

    def axes(self, rank: int, reduced: Iterable[int]) -> list[int]:
        """The axes of a reduction, from 0, in the kernel's rank; the split axis becomes two."""
        place = rank + self.axis
        moved = [axis + (0 <= place < axis) for axis in reduced]
        return sorted([*moved, place + 1] if place in moved else moved)

    def reduces(self, rank: int, reduced: Sequence[int], keeps: bool) -> bool:
        """True if the result of a reduction has its axes at the places that `shape` assumes."""
        return keeps or all(axis < rank + self.axis for axis in reduced)


@dataclass(frozen=True, slots=True)
class Join:
    """The parts of a join, and their places.

    Attributes:
        split: the axis that it fills.
        parts: block number -> a node of a block's size.
        rest: the value of the other blocks: a node of a block's or of the whole size, or a number.
    """

    split: AxisSplit
    parts: Mapping[int, Node]
    rest: Any


def join_of(node: Node) -> Join | None:
    """The join that a node computes; None if it is none, or if its parts are not blocks of one size."""
    if node.op != "call_function":
        return None
    found = _JOINS.get(node.target)  # type: ignore[call-overload]
    join = found(node) if found is not None else None
    if join is None or not 1 < join.split.parts <= MOST_PARTS:
        return None
    together = join.split.block
    for size in node.meta["val"].shape[node.meta["val"].dim() + join.split.axis + 1 :]:
        together *= size
    return join if together >= SHORTEST_BLOCK else None


def split_of(
    nodes: Sequence[Node], reductions: Iterable[tuple[int, Sequence[int], bool]]
) -> tuple[AxisSplit | None, list[Node]]:
    """The split of a kernel of some nodes, and the joins among them that do not fit this split.

    Args:
        nodes: the nodes of one kernel.
        reductions: for each reduction among them: rank, axes from 0, True if it keeps the axes.
    """
    joins = {n: join.split for n in nodes if (join := join_of(n)) is not None}
    if not joins:
        return None, []
    split = Counter(joins.values()).most_common(1)[0][0]
    if not all(split.reduces(*reduction) for reduction in reductions):
        return None, list(joins)
    return split, [n for n, own in joins.items() if own != split]


def _cat(node: Node) -> Join | None:
    parts: Any = node.args[0]
    shapes = [p.meta["val"].shape for p in parts]
    if any(shape != shapes[0] for shape in shapes) or not shapes[0]:
        return None
    axis: Any = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    axis = axis % len(shapes[0]) - len(shapes[0])
    rest = parts[-1]
    selected = {place: part for place, part in enumerate(parts) if part is not rest}
    return Join(AxisSplit(axis, len(parts) * int(shapes[0][axis]), len(parts)), selected, rest)


def _slice_scatter(node: Node) -> Join | None:
    given = _arguments(node)
    sizes = node.meta["val"].shape
    axis = given["dim"] % len(sizes) - len(sizes)
    start = slice(given["start"], given["end"]).indices(sizes[axis])[0]
    return _block(given["src"], start, sizes, axis, given["self"]) if given["step"] == 1 else None


def _arguments(node: Node) -> dict[str, Any]:
    """The arguments of `slice_scatter`, by name."""
    names = ("self", "src", "dim", "start", "end", "step")
    return {"dim": 0, "start": None, "end": None, "step": 1, **dict(zip(names, node.args)), **node.kwargs}


def _pad(node: Node) -> Join | None:
    part: Any = node.args[0]
    pads: Any = node.args[1]
    fill = node.args[2] if len(node.args) > 2 else node.kwargs.get("value", 0)
    padded = [i // 2 for i in range(0, len(pads), 2) if pads[i] or pads[i + 1]]
    if len(padded) != 1 or min(pads) < 0:
        return None
    return _block(part, pads[2 * padded[0]], node.meta["val"].shape, -1 - padded[0], fill)


def _block(part: Node, start: int, sizes: Sequence[int], axis: int, rest: Any) -> Join | None:
    size, block = int(sizes[axis]), int(part.meta["val"].shape[axis])
    if not block or size % block or start % block:
        return None
    return Join(AxisSplit(axis, size, size // block), {start // block: part}, rest)


_JOINS = {
    aten.cat.default: _cat, aten.slice_scatter.default: _slice_scatter, aten.constant_pad_nd.default: _pad,
}  # fmt: skip


def part_sizes(module: GraphModule) -> Iterator[tuple[Any, Any, Any]]:
    """For each part that such a join puts into an axis: the sizes of the axis and of the part, and the part's first
    place.

    Args:
        module: a graph whose sizes may be symbols. Nothing compares them here, which would fix their values.
    """
    for node in module.graph.nodes:
        if node.op != "call_function" or node.target not in (aten.slice_scatter.default, aten.constant_pad_nd.default):
            continue
        sizes = node.meta["val"].shape
        if node.target is aten.constant_pad_nd.default:
            part, pads = node.args[:2]
            firsts = {len(sizes) - 1 - place: pads[2 * place] for place in range(len(pads) // 2)}
        else:
            given = _arguments(node)
            part = given["src"]
            firsts = {given["dim"] % len(sizes): 0 if given["start"] is None else given["start"]}
        for axis, first in firsts.items():
            yield sizes[axis], part.meta["val"].shape[axis], first.meta["val"] if isinstance(first, Node) else first
