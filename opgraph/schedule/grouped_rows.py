"""Rows of groups: [N,H,W,G,C] reduced over H, W and C (GroupNorm with the channels last).

Such a row is many short runs, each right beside one of the next row. Walked side by side, the lanes of a vector are
channels: each is reduced along H and W by itself, and what the channels of a group make is then joined, so memory is
read as it lies, whatever the size of a group (`kernels/cpu/grouped_reduction.h`).
"""

from __future__ import annotations

from dataclasses import replace
from math import lcm, prod

from opgraph.loops.layout import ADDED, GROUP, KEPT, Layout, Variant
from opgraph.loops.loop import Loop
from opgraph.loops.space import Strides
from opgraph.schedule.cpu_tiles import ENOUGH, ONE_BOX, Boxes, boxes_interleaved, boxes_of_few
from opgraph.schedule.interleaved_rows import FEW_LANES, LANES, joins, moved

#: Strips of lanes are whole vectors where groups allow it, or whole halves.
_WHOLE = (16, 8, 1)
#: Elements of a lane's row in a piece, at least: what there is one of for each lane is worked out for each piece.
LEAST = 64


def grouped(loop: Loop, layout: Layout) -> Layout | None:
    """The layout with the elements of a run as lanes beside those of the next row; None where there are none, or where
    runs cost less: those of a row are longer than they are many, as in BatchNorm over [N,C,H,W] of small images.
    """
    outer = len(layout.dims) - layout.row_rank
    run = layout.dims[-1]
    if layout.row_rank < 2 or not outer or not layout.size or run > LANES or not joins(loop):
        return None
    if prod(layout.dims[outer:-1]) < run:
        return None
    axis = next((a for a in reversed(range(outer)) if _are_neighbours(layout, a)), None)
    if axis is None or layout.dims[axis] * run < FEW_LANES:
        return None
    rest = [a for a in range(len(layout.dims) - 1) if a != axis]
    strides: list[Strides] = []
    kinds = list(layout.variant.operands)
    for place, own in enumerate(layout.strides):
        is_group = own[-1] == 0 and own[axis] != 0
        if kinds[place] in (ADDED, KEPT) and own[-1] == 0:
            return None  # a sum has a cell for each lane
        if is_group and any(own[a] for a in range(outer, len(own))):
            return None
        kinds[place] = GROUP if is_group else kinds[place]
        strides.append((*(own[a] for a in rest), own[axis] if is_group else own[-1]))
    dims = (*(layout.dims[a] for a in rest), layout.dims[axis] * run)
    joined = replace(
        layout,
        dims=dims,
        strides=tuple(strides),
        row_rank=layout.row_rank - 1,
        variant=Variant("".join(kinds), False),
        group=run,
    )
    return moved(loop, joined, turns=False)


def _are_neighbours(layout: Layout, axis: int) -> bool:
    """Whether all operands walk an axis and the last one as one, or have a value for each place of the first alone."""
    run = layout.dims[-1]
    pairs = [(own[axis], own[-1]) for own in layout.strides]
    return any(pair == (run, 1) for pair in pairs) and all(a == b * run or b == 0 for a, b in pairs)


def width_of(layout: Layout) -> int:
    """Lanes of a strip: as many whole groups as LANES holds, and whole vectors where that can be."""
    unit = next(u for u in (lcm(layout.group, whole) for whole in _WHOLE) if u <= LANES)
    return LANES // unit * unit


def boxes_of_groups(layout: Layout) -> Boxes:
    """The cut: boxes have all lanes. They are whole rows where that makes enough of them, or pieces of rows."""
    lanes = layout.dims[-1]
    whole = boxes_interleaved(layout, lanes)
    if whole.count >= ENOUGH or layout.size <= ONE_BOX:
        return whole
    pieces = boxes_of_few(layout, lanes, least=LEAST * lanes)
    return pieces if pieces.count > whole.count else whole
