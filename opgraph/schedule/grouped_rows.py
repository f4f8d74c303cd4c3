"""Rows of groups: [N,H,W,G,C] reduced over H, W and C (GroupNorm with the channels last).

Such a row consists of many short runs, each adjacent to a run of the next row. If rows are walked side by side, the
lanes of a vector are channels. Each channel is reduced along H and W separately; then the results of the channels of a
group are joined. So memory is read in its order, for any size of a group (`kernels/cpu/grouped_reduction.h`).
"""

from __future__ import annotations

from dataclasses import replace
from math import lcm, prod

from opgraph.loops.layout import ADDED, GROUP, KEPT, Layout, Variant
from opgraph.loops.loop import Loop
from opgraph.loops.space import Strides
from opgraph.schedule.cpu_tiles import ENOUGH, ONE_BOX, Boxes, boxes_interleaved, boxes_of_few
from opgraph.schedule.interleaved_rows import FEW_LANES, LANES, joins, moved

#: Strips of lanes are whole vectors if groups allow it, or whole halves.
_WHOLE = (16, 8, 1)
#: Fewest elements of a lane's row in a piece: values that exist once per lane are recomputed for each piece.
LEAST = 64


def grouped(loop: Loop, layout: Layout) -> Layout | None:
    """The layout with the elements of a run as lanes, next to those of the next row. None if there are no such runs, or
    if walking runs costs less: the length of a row's runs exceeds their number, as in BatchNorm over [N,C,H,W] of small
    images.
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
    """True if each operand walks `axis` and the last axis as one, or does not move along the last axis."""
    run = layout.dims[-1]
    pairs = [(own[axis], own[-1]) for own in layout.strides]
    return any(pair == (run, 1) for pair in pairs) and all(a == b * run or b == 0 for a, b in pairs)


def width_of(layout: Layout) -> int:
    """Lanes of a strip: as many whole groups as fit in LANES, and whole vectors where possible."""
    unit = next(u for u in (lcm(layout.group, whole) for whole in _WHOLE) if u <= LANES)
    return LANES // unit * unit


def boxes_of_groups(layout: Layout) -> Boxes:
    """The cut: boxes have all lanes. They are whole rows if that makes enough boxes, otherwise pieces of rows."""
    lanes = layout.dims[-1]
    whole = boxes_interleaved(layout, lanes)
    if whole.count >= ENOUGH or layout.size <= ONE_BOX:
        return whole
    pieces = boxes_of_few(layout, lanes, least=LEAST * lanes)
    return pieces if pieces.count > whole.count else whole
