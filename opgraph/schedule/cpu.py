"""CPU schedules: the choice for a loop, and the numbers of each schedule."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

from opgraph.ir import dtypes
from opgraph.loops.layout import ADDED, CONTIGUOUS, TURNED, Layout, Variant
from opgraph.loops.loop import Loop
from opgraph.schedule.cpu_tiles import boxes_of, boxes_of_rows
from opgraph.schedule.grouped_rows import boxes_of_groups, grouped
from opgraph.schedule.interleaved_rows import FEW_ROWS, LANES, interleaved
from opgraph.schedule.levels import ELEMENT, Levels
from opgraph.schedule.merged_axes import STRETCH, MergedAxes, merged_axes
from opgraph.schedule.reduction_passes import KEEP_COST, ROUNDING, kept_values, pass_counts, passes_of
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

#: Floats of a vector (kernels/math/lanes.h), and most vectors of a row.
WIDTH, MAX_VECTORS = 16, 8
#: Most bytes of a row, or of rows that are lanes, that are kept for a later pass (kernels/cpu/row_vectors.h).
KEEP_BYTES = 256 * 1024
#: Types that are computed in f32, whatever their type in memory.
_FLOATS = frozenset({"f32", "f16", "bf16", "boolean"})


@dataclass(frozen=True, slots=True)
class Cpu:
    """The CPU as a target.

    Attributes:
        lanes: true if the machine has vectors of 16 floats.
    """

    lanes: bool


def split_column_sum(loop: Loop, layout: Layout, target: Cpu) -> CpuSchedule | None:
    """Few long columns that are summed, as a loop with sums."""
    found = column_sums(loop, layout)
    if found is None:
        return None
    summing, columns = found
    if not columns.variant.has_sums:  # a loop over rows that reduces nothing
        return tiled_elements(summing, columns, target) or pointwise(summing, columns, target)
    merged = merged_axes(columns, len(summing.loads))
    return _in_boxes(SPLIT_COLUMN_SUM, summing, columns, merged)


def grouped_rows(loop: Loop, layout: Layout, target: Cpu) -> CpuSchedule | None:
    """Rows of short runs, each next to one of the next row: lanes are the elements of a run and of its neighbours."""
    found = grouped(loop, layout) if layout.row_rank else None
    if found is None:
        return None
    boxes = boxes_of_groups(found)
    if boxes.split_rows:
        return CpuSchedule(name=SPLIT_GROUPED, loop=loop, layout=found, boxes=boxes, stages=pass_counts(loop)[0])
    return CpuSchedule(name=GROUPED, loop=loop, layout=found, boxes=boxes)


def short_or_strided_rows(loop: Loop, layout: Layout, target: Cpu) -> CpuSchedule | None:
    """Neighbouring rows as lanes, in memory order or transposed in tiles; or rows of a few vectors, whose elements stay
    in registers from pass to pass.

    If rows are walked in blocks, the work per row (the fold of its lanes, the step to the next row) takes as long as
    about 30 elements. If the number of vectors is known at compile time, only the fold remains.
    """
    if not layout.row_rank:
        return None
    is_short = _fits(loop, layout, target)
    found = interleaved(loop, layout, longest=_longest(loop) if is_short else 0)
    if found is not None:
        boxes = boxes_of_columns(loop, found)
        is_transposed = TURNED in found.variant.operands
        name = SPLIT_OUTER if boxes.split_rows else TRANSPOSED_INNER if is_transposed else OUTER
        fits = name != SPLIT_OUTER and _waiting_fit(loop, found.variant, LANES * prod(layout.dims[-layout.row_rank :]))
        return CpuSchedule(name=name, loop=loop, layout=found, boxes=boxes, fits=fits)
    if not is_short:
        return None
    vectors = -(-layout.dims[-1] // WIDTH)
    return CpuSchedule(name=PERSISTENT_INNER, loop=loop, layout=layout, boxes=boxes_of_rows(layout), vectors=vectors)


def rows_in_blocks(loop: Loop, layout: Layout, target: Cpu) -> CpuSchedule | None:
    """One row after the other, in blocks of elements; few long rows in pieces."""
    if not layout.row_rank:
        return None
    boxes = boxes_of_rows(layout) if layout.size else None
    if boxes is not None and boxes.split_rows:
        return CpuSchedule(name=SPLIT_INNER, loop=loop, layout=layout, boxes=boxes, stages=pass_counts(loop)[0])
    fits = _waiting_fit(loop, layout.variant, prod(layout.dims[-layout.row_rank :]))
    return CpuSchedule(name=INNER, loop=loop, layout=layout, boxes=boxes, fits=fits)


def tiled_elements(loop: Loop, layout: Layout, target: Cpu) -> CpuSchedule | None:
    """Elements in tiles. A second stage adds up their sums, or their short rows are merged into long ones."""
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
    """True if a row is a few vectors of floats."""
    dims = layout.dims
    if not target.lanes or layout.row_rank != 1 or ADDED in layout.variant.operands:
        return False
    if any(x.is_position for x in loop.loads):
        return False
    used = {x.dtype for x in loop.loads} | {s.dtype for s in loop.statements} | {s.dtype for s in loop.stores}
    return used <= _FLOATS and 0 < dims[-1] <= WIDTH * MAX_VECTORS and prod(dims[:-1]) >= FEW_ROWS


def _waiting_fit(loop: Loop, variant: Variant, elements: int) -> bool:
    """True if some values are kept for a later pass, and those of this number of elements fit in the buffer."""
    each = _waiting_bytes(loop, variant)
    return each > 0 and elements <= KEEP_BYTES // each // 8 * 8


@lru_cache(maxsize=1024)
def _waiting_bytes(loop: Loop, variant: Variant) -> int:
    """Bytes of each element that are kept for a later pass."""
    levels = Levels(loop, replace(variant, operands=variant.operands.replace(TURNED, CONTIGUOUS)))
    is_element = {name: level == ELEMENT for name, level in levels.levels.items()}
    kept = kept_values(passes_of(loop, is_element, keep=True, rounding=ROUNDING))
    return sum(
        4 if dtypes.BY_NAME[d].compute == "float" else dtypes.BY_NAME[d].numpy.itemsize
        for d in map(levels.dtypes.__getitem__, kept)
    )


@lru_cache(maxsize=1024)
def _longest(loop: Loop) -> int:
    """The most elements of a row, in all operands together, for which transposing tiles costs less.

    Each pass has a fold, and exponentials and similar functions wait for it. The transpose costs the same for each
    operand. Measured on rows of 4 to 20 elements of sums, SoftMax, norms and their gradients.
    """
    passes = pass_counts(loop)[0]
    costly = any(s.record.cost >= KEEP_COST for s in loop.statements if not s.reduces)
    return 8 * passes + (8 if costly and passes > 2 else 0)
