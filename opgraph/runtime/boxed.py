"""What kernels/host_sums.h is told of the boxes that a call is cut into."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from opgraph.ir import dtypes
from opgraph.loops.beside import LANES
from opgraph.loops.boxes import Boxes, boxes_of, boxes_of_rows
from opgraph.loops.few_columns import boxes_of_columns
from opgraph.loops.groups import boxes_of_groups, width_of
from opgraph.loops.layout import ADDED, KEPT, Layout
from opgraph.loops.loop import Loop
from opgraph.loops.passes import pass_counts
from opgraph.loops.short_rows import STRETCH, LongRows, long_rows


@dataclass(frozen=True, slots=True)
class Boxed:
    """How a space is cut.

    Attributes:
        boxes: the cut.
        long: the long rows that these are boxes of, if any; `sizes` are the item sizes of its spread operands.
        planes: doubles for each cell: a sum of doubles keeps what each addition rounds off beside the sum.
    """

    boxes: Boxes
    long: LongRows | None
    sizes: tuple[int, ...]
    planes: int

    def numbers(self, *, at_once: bool) -> tuple[list[int], int]:
        """The numbers that follow the layout, and how many doubles the boxes leave for the second stage.

        Args:
            at_once: whether a box may write results that it completes before the others are done.
        """
        boxes, long = self.boxes, self.long
        spread: list[int] = []
        for s, size in zip(long.spread if long is not None else (), self.sizes, strict=True):
            spread += [s.operand, long.short if long is not None else 1, s.outer, s.inner, size]
        scratch = leaves = 0
        sums: list[int] = []
        for one in boxes.sums:
            left = -1 if one.whole and at_once else leaves
            group = long.short if long is not None and one.operand in long.grouped else 1
            tile = long.short if long is not None and one.operand in long.tiled else 0
            sums += [one.operand, one.cells, scratch, left, group, tile, *one.strides]
            scratch += self.planes * one.cells
            leaves += 0 if left < 0 else self.planes * one.cells
        leaves = -(-leaves // 8) * 8  # boxes of different threads write to cache lines of their own
        head = [boxes.count, leaves, len(self.sizes), *boxes.box, *boxes.counts]
        return head + spread + sums, boxes.count * leaves


@dataclass(frozen=True, slots=True)
class BoxedRows:
    """How rows that are reduced are cut.

    Attributes:
        boxes: the cut.
        stages: how often all boxes are done, one after the other.
        numbers: those that follow the layout (kernels/host_rows.h).
        work: doubles of memory that a call needs.
    """

    boxes: Boxes
    stages: int
    numbers: list[int]
    work: int


def boxed_reductions(loop: Loop, layout: Layout) -> BoxedRows:
    """The cut of a layout of at least one element."""
    beside = layout.variant.beside
    grouped = layout.variant.grouped
    boxes = _cut(loop, layout)
    planes = _planes(loop, layout, any(s.dtype == "f64" for s in loop.statements))
    leaves = 0
    sums: list[int] = []
    for one in boxes.sums:
        sums += [one.operand, one.cells, 0, leaves, 1, 0, *one.strides]
        leaves += planes * one.cells
    leaves = -(-leaves // 8) * 8
    numbers = [boxes.count, leaves, layout.row_rank, *boxes.box, *boxes.counts, *sums]
    work, stages = boxes.count * leaves, 1
    if grouped:
        numbers += [layout.group, width_of(layout), int(boxes.are_pieces)]
        passes, reduced, most = pass_counts(loop)
        stages, lanes = passes if boxes.are_pieces else 1, layout.dims[-1]
        rows = prod(layout.dims[: -1 - layout.row_rank])
        work += (rows * reduced + boxes.count * most if boxes.are_pieces else boxes.count * reduced) * lanes
    elif boxes.are_pieces and beside:
        numbers[1] = leaves = pass_counts(loop)[2] * -(-boxes.box[-1] // LANES) * LANES
        work = boxes.count * leaves
    elif boxes.are_pieces:
        stages, reduced, most = pass_counts(loop)
        rows = prod(layout.dims[: -layout.row_rank])
        work += rows * reduced + 2 * boxes.count * most
    return BoxedRows(boxes, stages, numbers, work)


def _cut(loop: Loop, layout: Layout) -> Boxes:
    if layout.variant.grouped:
        return boxes_of_groups(layout)
    return boxes_of_columns(loop, layout) if layout.variant.beside else boxes_of_rows(layout)


def _planes(loop: Loop, layout: Layout, wide: bool = False) -> int:
    """Doubles for each cell: where addends are doubles, one more for what additions round off."""
    summed = zip(loop.stores, layout.variant.operands[len(loop.loads) :], strict=True)
    return 2 if wide or any(store.dtype == "f64" and kind in (ADDED, KEPT) for store, kind in summed) else 1


def boxed_rows(loop: Loop, layout: Layout) -> tuple[Layout, Boxed | None]:
    """The layout to run, its rows made long, and how it is cut; None where it need not be, and any piece will do."""
    if not layout.size:
        return layout, None
    planes = _planes(loop, layout)
    long = long_rows(layout, len(loop.loads))
    if long is not None:
        sizes = tuple(dtypes.get(loop.loads[s.operand].dtype).itemsize for s in long.spread)
        boxes = boxes_of(long.layout, longest=STRETCH, unit=long.short if long.grouped else 1)
        return long.layout, Boxed(boxes, long, sizes, planes)
    return layout, Boxed(boxes_of(layout), None, (), planes) if layout.variant.has_sums else None
