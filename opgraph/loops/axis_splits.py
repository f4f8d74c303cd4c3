"""Operands whose axes a loop splits into several: [N,C,H,W] into [N,G,C/G,H,W] if groups of channels are rows.

A cut has, for each axis of the operand, the sizes of its pieces, 0 for sizes that are only known with the arrays; an
empty entry is an axis of size 1 that the operand lacks. An axis is cut by its stride alone, row-major or not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import TypeAlias

import numpy as np

from opgraph.errors import InvalidShape
from opgraph.loops.loop import Cut, Load, Loop

Shape: TypeAlias = tuple[int, ...]
Strides: TypeAlias = tuple[int, ...]


def spread(load: Load, shape: Shape, fill: int = 1) -> Shape:
    """The shape (or, with fill 0, the strides) of an operand, with the row axes inserted if it lacks them."""
    if not load.rows:
        return shape
    rank, rest = len(shape) + len(load.rows), iter(shape)
    return tuple(fill if i - rank in load.rows else next(rest) for i in range(rank))


def cut_shapes(loop: Loop, shapes: Sequence[Shape]) -> list[Shape]:
    """The shapes of all loads, with the axes of the loop.

    Raises:
        InvalidShape: an axis does not have the elements of its pieces.
    """
    found = [_parts(load.cut, s) for load, s in zip(loop.loads, shapes, strict=True)]
    known: dict[int, int] = {}  # place from the end of the space -> size, as far as one operand determines it
    for load, sizes, shape in zip(loop.loads, found, shapes, strict=True):
        if not load.broadcasts(shape):
            continue  # an index, or one axis that is not the last
        for place, size in enumerate(reversed(spread(load, tuple(d for part in sizes for d in part)))):
            if size not in (1, -1):  # 1 may be broadcast
                known[place] = size
    whole = []
    for load, sizes, shape in zip(loop.loads, found, shapes, strict=True):
        if any(d < 0 for part in sizes for d in part):
            ends = spread(load, tuple(range(sum(map(len, sizes)))), -1)
            place_of = {own: len(ends) - 1 - i for i, own in enumerate(ends) if own >= 0}
            sizes = _completed(sizes, load.cut, shape, place_of, known)
        whole.append(tuple(d for part in sizes for d in part))
    return whole


def _parts(cut: Cut, shape: Shape) -> list[list[int]]:
    """The sizes of the pieces of each axis; -1 for unknown pieces if an axis has several of them."""
    if not cut:
        return [[d] for d in shape]
    if sum(bool(part) for part in cut) != len(shape):
        raise InvalidShape(
            f"an array has {len(shape)} dimensions, not {sum(bool(part) for part in cut)}",
            where="arrays of one fused kernel",
            fix="give an array of the declared rank",
        )
    rest = iter(shape)
    made = []
    for part in cut:
        if not part:
            made.append([1])
            continue
        size, product = next(rest), prod(d for d in part if d)
        unknown = part.count(0)
        if unknown > 1:
            made.append([d or -1 for d in part])
            continue
        if size % product or (not unknown and size != product):
            raise _does_not_fit(size, part)
        made.append([d or size // product for d in part])
    return made


def _completed(
    sizes: list[list[int]],
    cut: Cut,
    shape: Shape,
    place_of: Mapping[int, int],
    known: Mapping[int, int],
) -> list[list[int]]:
    """Fills in unknown pieces from other operands; if these do not suffice, the first one gets the whole rest."""
    at, rest, made = 0, iter(shape), []
    for part, declared in zip(sizes, cut, strict=True):
        size = next(rest) if declared else 1
        own = [known.get(place_of[at + i], -1) if d < 0 else d for i, d in enumerate(part)]
        if -1 in own:
            product, first = prod(d for d in own if d >= 0), own.index(-1)
            own = [1 if d < 0 and i != first else d for i, d in enumerate(own)]
            own[first] = size // product if product else 0
        if prod(own) != size:
            raise _does_not_fit(size, own)
        made.append(own)
        at += len(part)
    return made


def _does_not_fit(size: int, part: Sequence[int]) -> InvalidShape:
    text = " x ".join(str(d) if d else "?" for d in part)
    return InvalidShape(
        f"an axis of {size} elements is not {text}",
        where="arrays of one fused kernel",
        fix="give arrays whose sizes fit together",
    )


def cut_strides(cut: Cut, sizes: Shape, strides: Strides) -> Strides:
    """The strides along the pieces.

    Args:
        sizes: of all pieces.
        strides: of the operand's own axes.
    """
    if not cut:
        return strides
    rest, at, made = iter(strides), 0, []
    for part in cut:
        if not part:
            made.append(0)
            at += 1
            continue
        step = next(rest)
        made += [step * prod(sizes[at + i + 1 : at + len(part)]) for i in range(len(part))]
        at += len(part)
    return tuple(made)


def joined(cut: Cut, sizes: Shape) -> Shape:
    """The shape of an operand whose pieces have these sizes."""
    if not cut:
        return sizes
    at, made = 0, []
    for part in cut:
        if part:
            made.append(prod(sizes[at : at + len(part)]))
        at += max(len(part), 1)
    return tuple(made)


def has_cuts(loop: Loop) -> bool:
    """True if an operand is cut."""
    return any(x.cut for x in loop.loads) or any(s.cut for s in loop.stores)


def run_cut(
    loop: Loop,
    arrays: Sequence[np.ndarray | None],
    run: Callable[[Loop, Sequence[np.ndarray | None]], list[np.ndarray]],
) -> list[np.ndarray]:
    """Runs a loop by a function that does not support cuts, on arrays reshaped to the loop's axes."""
    shapes = cut_shapes(loop, [(1,) if a is None else a.shape for a in arrays])
    whole = replace(
        loop, loads=tuple(replace(x, cut=()) for x in loop.loads), stores=tuple(replace(s, cut=()) for s in loop.stores)
    )
    made = run(whole, [None if a is None else a.reshape(s) for a, s in zip(arrays, shapes, strict=True)])
    return [m.reshape(joined(s.cut, m.shape)) for m, s in zip(made, loop.stores, strict=True)]
