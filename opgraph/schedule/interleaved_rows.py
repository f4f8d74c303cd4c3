"""Rows side by side: a vector's lanes are neighbouring rows instead of elements of one row.

If the elements of a row lie far apart and those of neighbouring rows lie together (a softmax over the channels of NCX),
this walks memory in order. If rows are short, it avoids work for single rows: tiles of rows are transposed on the way
in and out. The axis of the lanes comes last, after the axes of a row.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

from opgraph.ir import dtypes
from opgraph.loops.layout import ADDED, CONTIGUOUS, GROUP, KEPT, ROW, RUN, STRIDED, TURNED, UNIFORM, Layout
from opgraph.loops.loop import Loop

#: Rows that are walked together (kernels/cpu/outer_reduction.h).
LANES = 64
#: Rows are short if they have at most SHORT_ROW elements, in all transposed operands together: each operand adds the
#: cost of its transpose, but the work per row stays the same. For fewer rows than FEW_ROWS a transpose does not pay.
SHORT_ROW, FEW_ROWS = 48, 16
#: Fewer neighbours than this leave most of a vector empty.
FEW_LANES = 8
#: Bytes of all tiles: they stay in the second-level cache.
TILE_BYTES = 256 * 1024


def interleaved(loop: Loop, layout: Layout, *, longest: int = 0) -> Layout | None:
    """The layout with rows side by side; None if one row after the other is faster.

    Args:
        longest: the limit for short rows in place of SHORT_ROW; a single operand then counts as two.
    """
    outer = len(layout.dims) - layout.row_rank
    if not layout.row_rank or not outer or not layout.size:
        return None
    kinds = layout.variant.operands
    row_values = {i for i, s in enumerate(loop.stores, start=len(loop.loads)) if s.per_row}
    large = [
        own
        for i, own in enumerate(layout.strides)
        if i not in row_values and kinds[i] not in (ADDED, KEPT) and any(own[outer:]) and any(own[:outer])
    ]
    along = sum(own[-1] == 1 for own in large)
    across = [sum(own[axis] == 1 for own in large) for axis in range(outer)]
    lane = max(range(outer), key=lambda axis: (across[axis], axis))
    if across[lane] > along and layout.dims[lane] >= FEW_LANES:
        return _moved(loop, layout, lane, turns=False)
    lane = outer - 1
    length = prod(layout.dims[outer:])
    turned = length * max(len(large), 2) if longest else length * len(large)
    if layout.row_rank > 1 or turned > (longest or SHORT_ROW) or layout.dims[lane] < FEW_ROWS or not large:
        return None
    items = [0 if x.is_position else dtypes.get(x.dtype).itemsize for x in loop.loads]
    items += [dtypes.get(s.dtype).itemsize for s in loop.stores]
    if LANES * length * sum(items) > TILE_BYTES:
        return None
    return _moved(loop, layout, lane, turns=True)


def joins(loop: Loop) -> bool:
    """True if the results of pieces of a row can be joined. A sum of f64 carries more than its value."""
    reduced = [s for s in loop.statements if s.reduces]
    return all(s.row.how != "add" for s in reduced) or all(s.dtype != "f64" for s in reduced)


def _moved(loop: Loop, layout: Layout, lane: int, *, turns: bool) -> Layout:
    order = [*(a for a in range(len(layout.dims)) if a != lane), lane]
    strides = tuple(tuple(own[a] for a in order) for own in layout.strides)
    return moved(loop, replace(layout, dims=tuple(layout.dims[a] for a in order), strides=strides), turns=turns)


def moved(loop: Loop, layout: Layout, *, turns: bool) -> Layout:
    """The layout whose lanes are its last axis, with the letters for how operands move from lane to lane.

    Args:
        turns: true if tiles are transposed.
    """
    row_values = {i for i, s in enumerate(loop.stores, start=len(loop.loads)) if s.per_row}
    kinds = []
    for place, (own, before) in enumerate(zip(layout.strides, layout.variant.operands, strict=True)):
        is_load = place < len(loop.loads)
        in_row, step = any(own[-1 - layout.row_rank : -1]), own[-1]
        if before in (ADDED, KEPT):
            kinds.append(KEPT if step else ADDED)
        elif before == GROUP:
            kinds.append(GROUP)
        elif place in row_values:
            kinds.append(ROW)
        elif is_load and not in_row:
            kinds.append(ROW if any(own) else UNIFORM)
        elif is_load and not step:
            kinds.append(RUN)
        elif step == 1:
            kinds.append(CONTIGUOUS)
        else:
            is_memory = not (is_load and loop.loads[place].is_position)
            kinds.append(TURNED if turns and in_row and is_memory else STRIDED)
    return replace(layout, variant=replace(layout.variant, operands="".join(kinds), flat=False))
