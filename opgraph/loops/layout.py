"""Binds a loop to the shapes and strides of one call: the collapsed iteration space, and the kernel variant."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from opgraph.errors import InvalidShape
from opgraph.ir.logical_tensor import row_major
from opgraph.loops.axis_splits import cut_shapes, cut_strides, has_cuts, joined
from opgraph.loops.loop import Loop
from opgraph.loops.space import (
    PLAIN,
    Shape,
    Strides,
    aligned_strides,
    row_shape,
    space_of_cut,
    summed_to,
)

#: How an operand moves along the innermost axis.
UNIFORM = "u"  # one value for the whole call
ROW = "r"  # one value for each row
RUN = "b"  # one value for each run of a row that has several runs
CONTIGUOUS = "c"  # the next element in memory
STRIDED = "s"  # a stride known at run time
GROUP = "g"  # one value for a group of neighbouring rows, where rows lie side by side
TURNED = "t"  # read and written through a tile, where rows lie side by side
#: How a sum moves. A sum that reduces nothing at these shapes is an ordinary store.
ADDED = "a"  # the row is added up
KEPT = "k"  # one sum for each column


@dataclass(frozen=True, slots=True)
class Variant:
    """How the operands of a loop move.

    Attributes:
        operands: one of u, r, b, c, s, g, t for each load, then for each store; a or k for a sum.
        flat: True if the whole space is one row.
    """

    operands: str
    flat: bool

    @property
    def has_sums(self) -> bool:
        """True if an operand is a sum."""
        return ADDED in self.operands or KEPT in self.operands


@dataclass(frozen=True, slots=True)
class Layout:
    """One call's iteration space.

    Attributes:
        shape: of the space before collapsing, and of every result that is not a sum.
        results: shape of each store.
        dims: extents after collapsing, outermost first; the last one is the row.
        strides: for each load, then each store: its stride, in elements, along each of `dims`; for a sum, 0 along
            those that it adds up.
        variant: the kernel variant for this call.
        row_rank: if rows are reduced, the number of last `dims` that form a row; else 0, and the last one is the row.
        group: the number of neighbouring lanes that are one row, if a schedule makes lanes of groups.
    """

    shape: Shape
    results: tuple[Shape, ...]
    dims: Shape
    strides: tuple[Strides, ...]
    variant: Variant
    row_rank: int = 0
    group: int = 1

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.dims)

    @property
    def sums(self) -> list[int]:
        """Places of the sums among the operands."""
        return [i for i, kind in enumerate(self.variant.operands) if kind in (ADDED, KEPT)]


def bind(
    loop: Loop, shapes: Sequence[Shape], strides: Sequence[Strides], out_strides: Sequence[Strides | None] | None = None
) -> Layout:
    """The layout of one call.

    Args:
        shapes, strides: of each load, strides in elements; for an index load its extent along its axis and (1,); those
            of a position are ignored.
        out_strides: of each store; row-major if omitted.
    """
    if has_cuts(loop):
        shapes = cut_shapes(loop, shapes)
        strides = [cut_strides(x.cut, s, st) for x, s, st in zip(loop.loads, shapes, strides, strict=True)]
    shape = space_of_cut(loop, shapes)
    rank = len(shape)
    read = loop.reads()  # a load that only provides its shape must not prevent the merging of axes
    aligned = []
    for load, s, st in zip(loop.loads, shapes, strides, strict=True):
        if load.name not in read:
            aligned.append((0,) * rank)
        elif load.is_position:  # strides of a row-major array: its offset is then the position of the element
            aligned.append(aligned_strides(PLAIN, shape, row_major(shape), rank))
        else:
            aligned.append(aligned_strides(load, s, st, rank))
    results = []
    row_axes = tuple(a + rank for a in loop.row_axes)
    _check_row_values(loop, shape, row_axes, aligned)
    for store, given in zip(loop.stores, out_strides or [None] * len(loop.stores), strict=True):
        result, like = (shape, PLAIN) if store.to is None else summed_to(loop, store.to, shapes)
        if store.per_row:
            result = row_shape(store, shape, row_axes)
        results.append(joined(store.cut, result))
        if given is not None and len(given) != len(results[-1]):
            raise InvalidShape(
                f"an output array has {len(given)} dimensions, the result {len(results[-1])}",
                where="out",
                fix="give an array of the result's shape",
            )
        steps = row_major(result) if given is None else cut_strides(store.cut, result, given)
        if store.per_row == "dropped":
            kept_steps = iter(steps)
            aligned.append(tuple(0 if a in row_axes else next(kept_steps) for a in range(rank)))
        else:
            aligned.append(aligned_strides(like, result, steps, rank))
    dims, collapsed, row_rank = _collapsed_rows(shape, aligned, row_axes, len(loop.loads))
    flat = len(dims) == 1
    kinds = [_operand_kind(s, flat, row_rank) for s in collapsed]
    for i, store in enumerate(loop.stores, start=len(loop.loads)):
        if store.to is not None and any(s == 0 and d > 1 for s, d in zip(collapsed[i], dims, strict=True)):
            kinds[i] = ADDED if collapsed[i][-1] == 0 else KEPT
    return Layout(shape, tuple(results), dims, collapsed, Variant("".join(kinds), flat), row_rank)


def _check_row_values(loop: Loop, shape: Shape, row_axes: Sequence[int], aligned: Sequence[Strides]) -> None:
    """Raises InvalidShape if one value for each row is computed from an operand that changes along the row."""
    if not row_axes:
        return
    makers = {s.result: s for s in loop.statements}
    found, waiting = set(), [s.value for s in loop.stores if s.per_row]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            maker = makers.get(name)
            waiting += [] if maker is None or maker.reduces else [a for a in maker.args if isinstance(a, str)]
    for load, steps in zip(loop.loads, aligned):
        if load.name in found and any(steps[a] for a in row_axes):
            raise InvalidShape(
                f"one value for each row meets several along axes {list(row_axes)} of {list(shape)}",
                where="arrays of one fused kernel",
                fix="give an array of size 1 along these axes",
            )


def memory_order(axes: Sequence[int], strides: Sequence[Strides]) -> list[int]:
    """Axes, outermost first, in the memory order of the operand that moves along the most of them."""
    leading = max(strides, key=lambda own: sum(own[axis] != 0 for axis in axes))
    return sorted(axes, key=lambda axis: -abs(leading[axis]))


def _order_of_results(shape: Shape, strides: Sequence[Strides], loads: int) -> list[int]:
    """The axes of more than one element, outermost first, in the memory order of the first result that is not a sum
    along any of them; if all are sums, in that of the operand with the most axes."""
    axes = [axis for axis, extent in enumerate(shape) if extent != 1]
    whole = [own for own in strides[loads:] if all(own[axis] for axis in axes)]
    return memory_order(axes, whole[:1] or strides)


def _collapse(shape: Sequence[int], strides: Sequence[Sequence[int]]) -> tuple[Shape, tuple[Strides, ...]]:
    """Drops axes of extent 1 and merges neighbouring axes that are one axis for every operand."""
    dims: list[int] = []
    kept: list[list[int]] = [[] for _ in strides]
    for axis, extent in enumerate(shape):
        if extent == 1:
            continue
        if dims and all(k[-1] == s[axis] * extent for k, s in zip(kept, strides)):
            dims[-1] *= extent
            for k, s in zip(kept, strides):
                k[-1] = s[axis]
        else:
            dims.append(extent)
            for k, s in zip(kept, strides):
                k.append(s[axis])
    if not dims:
        return (1,), tuple((0,) for _ in strides)
    return tuple(dims), tuple(tuple(k) for k in kept)


def _collapsed_rows(
    shape: Shape, strides: Sequence[Strides], row_axes: Sequence[int], loads: int
) -> tuple[Shape, tuple[Strides, ...], int]:
    """Collapsed extents and strides, with the row axes moved to the end, and the number of row axes that remain;
    without rows, in memory order."""
    if not row_axes:
        order = _order_of_results(shape, strides, loads)
        return *_collapse([shape[a] for a in order], [[own[a] for a in order] for own in strides]), 0
    groups = [[a for a in range(len(shape)) if a not in row_axes], list(row_axes)]
    parts = [_collapse([shape[a] for a in axes], [[s[a] for a in axes] for s in strides]) for axes in groups]
    (outer, outer_strides), (row, row_strides) = parts
    if outer == (1,):  # one row
        return row, row_strides, len(row)
    return (*outer, *row), tuple((*a, *b) for a, b in zip(outer_strides, row_strides)), len(row)


def _operand_kind(strides: Strides, flat: bool, row_rank: int = 0) -> str:
    if not any(strides):
        return UNIFORM
    if row_rank and any(strides[-row_rank:]) and strides[-1] == 0:
        return RUN
    if strides[-1] == 0:
        return ROW
    return CONTIGUOUS if strides[-1] == 1 else STRIDED
