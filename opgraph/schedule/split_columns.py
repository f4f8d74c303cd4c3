"""Few long columns: if rows that lie side by side are too few for all threads, they are cut along their length.

The sum of a [4M,8] down its columns has 8 rows of 4M elements. A box has whole rows, so one thread would do all the
work. As a loop with sums it is also cut along the columns, and the partial sums of boxes are added up in a fixed order.
This is faster for loops in which nothing depends on a sum. For other values that are reduced once (extremes, products,
sums next to another reduction), boxes are pieces of columns, and the results of the pieces are joined in their order
(`kernels/cpu/split_outer_reduction.h`).
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

from opgraph.loops.layout import ADDED, CONTIGUOUS, KEPT, ROW, STRIDED, TURNED, UNIFORM, Layout, Variant, memory_order
from opgraph.loops.loop import Axes, Loop, Store
from opgraph.schedule.cpu_tiles import ENOUGH, ONE_BOX, Boxes, boxes_interleaved, boxes_of_few
from opgraph.schedule.interleaved_rows import LANES, interleaved, joins
from opgraph.schedule.reduction_passes import pass_counts

#: Columns of at least this length are not walked in strips of LANES, one strip after the other: their cache lines lie
#: far apart in memory.
LONG = 256
#: Neighbours in a box (kernels/cpu/split_outer_reduction.h).
MOST_LANES = 4 * LANES


def column_sums(loop: Loop, layout: Layout) -> tuple[Loop, Layout] | None:
    """The same as a loop with sums; None if one row after the other, or rows side by side, is faster."""
    if not layout.row_rank or layout.size <= ONE_BOX or not _only_adds(loop):
        return None
    outer = len(layout.dims) - layout.row_rank
    along = any(own[-1] == 1 for own in layout.strides[: len(loop.loads)])
    across = any(1 in own[:outer] for own in layout.strides[: len(loop.loads)])
    aside = interleaved(loop, layout)
    if along or not across or (aside is not None and boxes_interleaved(aside, LANES).count >= ENOUGH):
        return None
    made = {s.result: s for s in loop.statements}
    stores = []
    for store in loop.stores:
        if store.per_row:
            reduction = made[store.value]
            stores.append(Store(value=str(reduction.args[0]), dtype=store.dtype, total=reduction.row.total))
        else:
            stores.append(replace(store, cut=()))
    statements = tuple(s for s in loop.statements if not s.reduces)
    summing = Loop(axes=(Axes(kind="parallel"),), loads=loop.loads, statements=statements, stores=tuple(stores))
    return summing, _in_order(loop, layout)


def _only_adds(loop: Loop) -> bool:
    """True if each reduction is a sum or a mean of a value, stored unchanged, and nothing depends on one."""
    depth = loop.depths()
    reduced = {s.result: s for s in loop.statements if s.reduces}
    if any(depth[s.result] != s.reduces for s in loop.statements if depth[s.result]):
        return False
    for s in reduced.values():
        if not s.row.is_sum or not isinstance(s.args[0], str):
            return False
    for store in loop.stores:
        made = reduced.get(store.value)
        if (made is None) == bool(store.per_row) or (made is not None and made.dtype != store.dtype):
            return False
    return not any(load.align == "rows" for load in loop.loads)


def _in_order(loop: Loop, layout: Layout) -> Layout:
    """The layout with its axes in memory order, and with sums in place of reductions of rows."""
    rank, loads = len(layout.dims), len(loop.loads)
    order = memory_order(range(rank), layout.strides[:loads])
    strides = [tuple(own[axis] for axis in order) for own in layout.strides]
    kinds = []
    for place, own in enumerate(strides):
        if place >= loads and (loop.stores[place - loads].per_row or loop.stores[place - loads].to is not None):
            kinds.append(KEPT if own[-1] else ADDED)
        elif not any(own):
            kinds.append(UNIFORM)
        else:
            kinds.append(ROW if own[-1] == 0 else CONTIGUOUS if own[-1] == 1 else STRIDED)
    variant = Variant("".join(kinds), rank == 1)
    dims = tuple(layout.dims[axis] for axis in order)
    return replace(layout, dims=dims, strides=tuple(strides), variant=variant, row_rank=0)


def boxes_of_columns(loop: Loop, layout: Layout) -> Boxes:
    """The cut of a layout whose rows lie side by side: whole rows if there are enough boxes of them, else pieces."""
    whole = boxes_interleaved(layout, LANES)
    length = prod(layout.dims[-1 - layout.row_rank : -1])
    apart = layout.dims[-1] > LANES and length >= LONG
    if (whole.count >= ENOUGH and not apart) or layout.size <= ONE_BOX or not joins(loop):
        return whole
    if pass_counts(loop)[0] > 1 or any(kind in (ADDED, KEPT, TURNED) for kind in layout.variant.operands):
        return whole
    pieces = boxes_of_few(layout, MOST_LANES)
    return pieces if pieces.count > 2 * whole.count else whole
