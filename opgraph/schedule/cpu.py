"""Schedules of the CPU: which one a loop gets, and their numbers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod

from opgraph.loops.layout import ADDED, TURNED, Layout
from opgraph.loops.loop import Loop
from opgraph.schedule.cpu_tiles import boxes_of, boxes_of_rows
from opgraph.schedule.grouped_rows import boxes_of_groups, grouped
from opgraph.schedule.interleaved_rows import FEW_ROWS, interleaved
from opgraph.schedule.merged_axes import STRETCH, MergedAxes, merged_axes
from opgraph.schedule.reduction_passes import KEEP_COST, pass_counts
from opgraph.schedule.schedule import (
    GROUPED,
    INNER,
    OUTER,
    PERSISTENT_INNER,
    POINTWISE,
    POINTWISE_TILED,
    SPLIT_COLUMN_SUM,
    SPLIT_GROUPED,
    SPLIT_INNER,
    SPLIT_OUTER,
    TILED_SUM,
    TRANSPOSED_INNER,
    CpuSchedule,
)
from opgraph.schedule.split_columns import boxes_of_columns, column_sums

#: Floats of a vector (kernels/math/lanes.h), and vectors of a row at most.
WIDTH, MAX_VECTORS = 16, 8
#: What is done in floats, whatever it is in memory.
_FLOATS = frozenset({"f32", "f16", "bf16", "boolean"})


@dataclass(frozen=True, slots=True)
class Cpu:
    """The CPU as a target.

    Attributes:
        lanes: whether the machine has vectors of 16 floats.
    """

    lanes: bool


def split_column_sum(loop: Loop, layout: Layout, target: Cpu) -> CpuSchedule | None:
    """Few long columns that are added up, as a loop with sums."""
    found = column_sums(loop, layout)
    if found is None:
        return None
    summing, columns = found
    if not columns.variant.has_sums:  # a loop over rows that reduces nothing
        return tiled_elements(summing, columns, target) or pointwise(summing, columns, target)
    merged = merged_axes(columns, len(summing.loads))
    return _in_boxes(SPLIT_COLUMN_SUM, summing, columns, merged)


def grouped_rows(loop: Loop, layout: Layout, target: Cpu) -> CpuSchedule | None:
    """Rows of short runs, each beside one of the next row: lanes are the elements of a run and of its neighbours."""
    found = grouped(loop, layout) if layout.row_rank else None
    if found is None:
        return None
    boxes = boxes_of_groups(found)
    if boxes.split_rows:
        return CpuSchedule(name=SPLIT_GROUPED, loop=loop, layout=found, boxes=boxes, stages=pass_counts(loop)[0])
    return CpuSchedule(name=GROUPED, loop=loop, layout=found, boxes=boxes)


def short_or_strided_rows(loop: Loop, layout: Layout, target: Cpu) -> CpuSchedule | None:
    """Neighbouring rows as lanes, as they lie in memory or transposed in tiles; or rows of a few vectors, whose
    elements stay in registers from pass to pass.

    What is done once a row (the fold of its lanes, the walk to the next one) takes as long as some 30 elements, where
    rows are walked in blocks. With the number of vectors known when the kernel is compiled, only the fold is left.
    """
    if not layout.row_rank:
        return None
    fits = _fits(loop, layout, target)
    found = interleaved(loop, layout, longest=_longest(loop) if fits else 0)
    if found is not None:
        boxes = boxes_of_columns(loop, found)
        is_transposed = TURNED in found.variant.operands
        name = SPLIT_OUTER if boxes.split_rows else TRANSPOSED_INNER if is_transposed else OUTER
        return CpuSchedule(name=name, loop=loop, layout=found, boxes=boxes)
    if not fits:
        return None
    vectors = -(-layout.dims[-1] // WIDTH)
    return CpuSchedule(name=PERSISTENT_INNER, loop=loop, layout=layout, boxes=boxes_of_rows(layout), vectors=vectors)


def rows_in_blocks(loop: Loop, layout: Layout, target: Cpu) -> CpuSchedule | None:
    """One row after the other, in blocks of elements; few long ones in pieces."""
    if not layout.row_rank:
        return None
    boxes = boxes_of_rows(layout) if layout.size else None
    if boxes is not None and boxes.split_rows:
        return CpuSchedule(name=SPLIT_INNER, loop=loop, layout=layout, boxes=boxes, stages=pass_counts(loop)[0])
    return CpuSchedule(name=INNER, loop=loop, layout=layout, boxes=boxes)


def tiled_elements(loop: Loop, layout: Layout, target: Cpu) -> CpuSchedule | None:
    """Elements in tiles, whose sums a second stage adds up, or whose short rows are made long."""
    merged = merged_axes(layout, len(loop.loads)) if layout.size else None
    if layout.variant.has_sums:
        return _in_boxes(TILED_SUM, loop, layout, merged)
    return _in_boxes(POINTWISE_TILED, loop, layout, merged) if merged is not None else None


def pointwise(loop: Loop, layout: Layout, target: Cpu) -> CpuSchedule:
    """Elements in any number, one after the other."""
    return CpuSchedule(name=POINTWISE, loop=loop, layout=layout)


def _in_boxes(name: str, loop: Loop, layout: Layout, merged: MergedAxes | None) -> CpuSchedule:
    if merged is not None:
        unit = merged.short if merged.grouped else 1
        boxes = boxes_of(merged.layout, longest=STRETCH, unit=unit)
        return CpuSchedule(name=name, loop=loop, layout=merged.layout, boxes=boxes, merged=merged)
    return CpuSchedule(name=name, loop=loop, layout=layout, boxes=boxes_of(layout) if layout.size else None)


def _fits(loop: Loop, layout: Layout, target: Cpu) -> bool:
    """Whether a row is a few vectors of floats."""
    dims = layout.dims
    if not target.lanes or layout.row_rank != 1 or ADDED in layout.variant.operands:
        return False
    if any(x.is_position for x in loop.loads):
        return False
    used = {x.dtype for x in loop.loads} | {s.dtype for s in loop.statements} | {s.dtype for s in loop.stores}
    return used <= _FLOATS and 0 < dims[-1] <= WIDTH * MAX_VECTORS and prod(dims[:-1]) >= FEW_ROWS


@lru_cache(maxsize=1024)
def _longest(loop: Loop) -> int:
    """The elements of a row, in all operands, up to which turning tiles costs less.

    Each pass has a fold, which exponentials and their like wait for; the turn costs as much for each operand. Measured
    on rows of 4 to 20 elements of sums, SoftMax, norms and their gradients.
    """
    passes = pass_counts(loop)[0]
    costly = any(s.record.cost >= KEEP_COST for s in loop.statements if not s.reduces)
    return 8 * passes + (8 if costly and passes > 2 else 0)
