"""The iteration space of a loop: the shape to which its operands broadcast, and the strides of operands in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from opgraph.errors import InvalidShape
from opgraph.ir.shapes import ShapeMismatch, broadcast
from opgraph.loops.axis_splits import cut_shapes, has_cuts, spread
from opgraph.loops.loop import Load, Loop, Store

Shape: TypeAlias = tuple[int, ...]
Strides: TypeAlias = tuple[int, ...]

#: A load that stands for the alignment of a result with all axes of the space.
PLAIN = Load(name="", dtype="")


def iteration_shape(loads: Sequence[Load], shapes: Sequence[Shape]) -> Shape:
    """The shape that the operands broadcast to.

    Raises:
        InvalidShape: the operands do not broadcast.
    """
    plain = [spread(load, s) for load, s in zip(loads, shapes, strict=True) if load.broadcasts(s)]
    rank = max(map(len, plain), default=0)
    for load, shape in zip(loads, shapes, strict=True):
        if load.align == "channel" and not load.broadcasts(shape):
            plain.append((*shape, *[1] * (rank - 2)))
    try:
        dims = broadcast(plain) if plain else ()
    except ShapeMismatch as error:
        raise InvalidShape(error.what, where="arrays of one fused kernel", fix=error.fix) from None
    return dims  # type: ignore[return-value]  # broadcasting known sizes gives known sizes


def space_of(loop: Loop, shapes: Sequence[Shape]) -> Shape:
    """The iteration space of a loop: the shape to which its operands broadcast, with its row axes.

    Raises:
        InvalidShape: the operands do not broadcast.
    """
    return space_of_cut(loop, cut_shapes(loop, shapes) if has_cuts(loop) else shapes)


def space_of_cut(loop: Loop, shapes: Sequence[Shape]) -> Shape:
    """Like `space_of`, for shapes whose axes are cut already."""
    shape = iteration_shape(loop.loads, shapes)
    missing = max((-a for a in loop.row_axes), default=0) - len(shape)  # if all operands are single numbers
    return (*[1] * missing, *shape)


def lies_over(loop: Loop, loads: Sequence[int], result: int, *, sums_last: bool) -> bool:
    """True if a result may overwrite an array of its shape: each element is written after all reads of it.

    A "dropped" row value lies along other axes of the space than an operand that broadcasts, so later rows may read
    what it overwrites.

    Args:
        loads: indices of the loads that read the array.
        result: index of the store.
        sums_last: True if sums are written after all reads.
    """
    store, read = loop.stores[result], loop.reads()
    aligns = ("rows",) if store.per_row == "dropped" else ("right", "channel")
    found = [load for load in (loop.loads[i] for i in loads) if load.name in read]
    if store.to is not None:
        return sums_last or not found
    return all(load.align in aligns and load.cut == store.cut for load in found)


def row_shape(store: Store, shape: Shape, row_axes: Sequence[int]) -> Shape:
    """The shape of a store of one value for each row."""
    if store.per_row == "dropped":
        return tuple(d for a, d in enumerate(shape) if a not in row_axes)
    return tuple(1 if a in row_axes else d for a, d in enumerate(shape))


def summed_to(loop: Loop, to: Sequence[str], shapes: Sequence[Shape]) -> tuple[Shape, Load]:
    """The shape of a sum to the common shape of these loads, and a load with the alignment of the sum.

    Args:
        shapes: of every load.
    """
    wanted = set(to)
    named = [(load, s) for load, s in zip(loop.loads, shapes, strict=True) if load.name in wanted]
    if len(named) == 1:
        load, shape = named[0]
        return (spread(load, shape), PLAIN) if load.rows else (shape, load)
    return iteration_shape([load for load, _ in named], [s for _, s in named]), PLAIN


def summed_axes(like: Load, shape: Shape, space: Shape) -> tuple[int, ...]:
    """The axes of the space that a sum to `shape` adds up; the sum has the alignment of the load `like`."""
    kept = aligned_strides(like, shape, (1,) * len(shape), len(space))
    return tuple(i for i, stride in enumerate(kept) if stride == 0 and space[i] != 1)


def aligned_strides(load: Load, shape: Shape, strides: Strides, rank: int) -> Strides:
    """Strides along the whole iteration space; 0 where the operand is broadcast."""
    if load.broadcasts(shape):
        shape, strides = spread(load, shape), spread(load, strides, 0)
        moved = [0 if d == 1 else s for d, s in zip(shape, strides, strict=True)]
        return (*[0] * (rank - len(shape)), *moved)
    axis = min(1, rank - 1) if load.align == "channel" else load.axis % rank
    return tuple(0 if i != axis or shape[0] == 1 else strides[0] for i in range(rank))
