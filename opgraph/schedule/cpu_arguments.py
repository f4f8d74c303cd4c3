"""The arguments of a CPU kernel that follow from its schedule: the numbers that kernels/cpu reads."""

from __future__ import annotations

from math import prod

from opgraph.ir import dtypes
from opgraph.loops.layout import ADDED, KEPT
from opgraph.schedule.grouped_rows import width_of
from opgraph.schedule.interleaved_rows import LANES
from opgraph.schedule.reduction_passes import pass_counts
from opgraph.schedule.schedule import GROUPS, INTERLEAVED, CpuSchedule


def arguments(schedule: CpuSchedule, *, at_once: bool) -> tuple[list[int], int]:
    """The numbers of a call, and the doubles of memory that it needs.

    Args:
        at_once: true if a box may write its complete results before the other boxes are done.
    """
    layout = schedule.layout
    numbers = [len(layout.dims), layout.size, *layout.dims, *(s for strides in layout.strides for s in strides)]
    if schedule.boxes is None:
        return numbers, 0
    more, work = _of_rows(schedule) if layout.row_rank else _of_elements(schedule, at_once)
    return numbers + more, work


def _of_elements(schedule: CpuSchedule, at_once: bool) -> tuple[list[int], int]:
    """See kernels/cpu/tiled_sums.h. The doubles are the partial sums of boxes for the second stage."""
    boxes, merged = schedule.boxes, schedule.merged
    assert boxes is not None, "elements in boxes"
    spread: list[int] = []
    for s in merged.spread if merged is not None else ():
        size = dtypes.get(schedule.loop.loads[s.operand].dtype).itemsize
        spread += [s.operand, merged.short if merged is not None else 1, s.outer, s.inner, size]
    planes, scratch, leaves = _planes(schedule), 0, 0
    sums: list[int] = []
    for one in boxes.sums:
        left = -1 if one.whole and at_once else leaves
        group = merged.short if merged is not None and one.operand in merged.grouped else 1
        tile = merged.short if merged is not None and one.operand in merged.tiled else 0
        sums += [one.operand, one.cells, scratch, left, group, tile, *one.strides]
        scratch += planes * one.cells
        leaves += 0 if left < 0 else planes * one.cells
    leaves = _lines(leaves)
    head = [boxes.count, leaves, len(merged.spread) if merged is not None else 0, *boxes.box, *boxes.counts]
    return head + spread + sums, boxes.count * leaves


def _of_rows(schedule: CpuSchedule) -> tuple[list[int], int]:
    """See kernels/cpu/inner_reduction.h."""
    loop, layout, boxes = schedule.loop, schedule.layout, schedule.boxes
    assert boxes is not None, "rows in boxes"
    planes, leaves = _planes(schedule), 0
    sums: list[int] = []
    for one in boxes.sums:
        sums += [one.operand, one.cells, 0, leaves, 1, 0, *one.strides]
        leaves += planes * one.cells
    leaves = _lines(leaves)
    numbers = [boxes.count, leaves, layout.row_rank, *boxes.box, *boxes.counts, *sums]
    work = boxes.count * leaves
    _, reduced, most = pass_counts(loop)
    if schedule.name in GROUPS:
        numbers += [layout.group, width_of(layout), int(boxes.split_rows)]
        lanes, rows = layout.dims[-1], prod(layout.dims[: -1 - layout.row_rank])
        work += (rows * reduced + boxes.count * most if boxes.split_rows else boxes.count * reduced) * lanes
    elif boxes.split_rows and schedule.name in INTERLEAVED:
        numbers[1] = leaves = most * -(-boxes.box[-1] // LANES) * LANES
        work = boxes.count * leaves
    elif boxes.split_rows:
        work += prod(layout.dims[: -layout.row_rank]) * reduced + 2 * boxes.count * most
    return numbers, work


def _lines(doubles: int) -> int:
    """Rounds up to whole cache lines, so that boxes of different threads write to different lines."""
    return -(-doubles // 8) * 8


def _planes(schedule: CpuSchedule) -> int:
    """Doubles for each cell: if addends are doubles, a second one holds the rounding errors of the additions."""
    loop, layout = schedule.loop, schedule.layout
    summed = zip(loop.stores, layout.variant.operands[len(loop.loads) :], strict=True)
    wide = layout.row_rank > 0 and any(s.dtype == "f64" for s in loop.statements)
    return 2 if wide or any(store.dtype == "f64" and kind in (ADDED, KEPT) for store, kind in summed) else 1
