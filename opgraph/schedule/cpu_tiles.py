"""Cuts a loop with sums into pieces. Any number of threads may run them, with the same bits each time.

A box is a piece of the collapsed iteration space. A box accumulates each sum in cells, one for each result of the sum
that the box contributes to. If several boxes contribute to a result, their cells are added up in a fixed order.
The cut depends only on sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from opgraph.loops.layout import Layout
from opgraph.loops.space import Shape, Strides

#: Most cells of all sums of a box together (kernels/cpu/tiled_sums.h: each thread has an array for them).
MAX_CELLS = 4096
#: Most elements of a space that is one box.
ONE_BOX = 32 * 1024
#: Fewest and most elements of a box, where there is a choice. Between these, there are enough boxes for 64 cores.
SMALLEST, LARGEST = 16 * 1024, 128 * 1024
_BOXES = 256
_ANY = 1 << 62
#: Reduced rows are cut if there are at most FEW_ROWS and each is at least LONG_ROW long. Else threads have enough work.
FEW_ROWS, LONG_ROW = 32, 64 * 1024
#: Enough boxes to keep threads busy.
ENOUGH = 16
#: Long pieces are multiples of this number of elements.
_WHOLE = 64
#: Elements of the space for each cell that a sum over several boxes may leave.
ELEMENTS_PER_CELL = 64


@dataclass(frozen=True, slots=True)
class BoxedSum:
    """One sum.

    Attributes:
        operand: its index among loads and stores.
        strides: strides of its cells in a box, along each axis; 0 along the axes that are summed.
        cells: the number of cells.
        whole: true if each cell is complete within one box.
    """

    operand: int
    strides: Strides
    cells: int
    whole: bool


@dataclass(frozen=True, slots=True)
class Boxes:
    """The cut of one layout.

    Attributes:
        box: extents of a box; boxes at the end of an axis may be smaller.
        counts: boxes along each axis.
        sums: the sums, in the order of the stores.
        split_rows: true if rows are reduced and each box is a piece of one row or of neighbouring ones.
    """

    box: Shape
    counts: Shape
    sums: tuple[BoxedSum, ...]
    split_rows: bool = False

    @property
    def count(self) -> int:
        """Number of boxes."""
        return prod(self.counts)


def boxes_of(layout: Layout, *, longest: int = _ANY, unit: int = 1) -> Boxes:
    """The cut for a layout of at least one element.

    Args:
        longest: the longest extent of a box along the last axis.
        unit: that extent is a multiple of it.
    """
    return _boxes(layout, _box(layout.dims, _keeps(layout), longest, unit), may_be_whole=True)


def boxes_of_rows(layout: Layout) -> Boxes:
    """The cut of a layout whose rows are reduced: boxes of whole rows, or of pieces if rows are few and long."""
    dims, outer = layout.dims, len(layout.dims) - layout.row_rank
    length = prod(dims[outer:])
    if prod(dims[:outer]) <= FEW_ROWS and length >= LONG_ROW:
        box = [1] * len(dims)
        _grow(box, dims, range(outer, len(dims)), _wanted(dims))
        return _boxes(layout, box, split_rows=True)
    box = [*[1] * outer, *dims[outer:]]
    _grow(box, dims, range(outer), _wanted(dims))
    return _boxes(layout, _with_fewer_cells(box, layout, range(outer)))


def boxes_interleaved(layout: Layout, lanes: int) -> Boxes:
    """The cut of a layout whose rows lie side by side: boxes of whole rows, at least `lanes` neighbours each."""
    dims, first = layout.dims, len(layout.dims) - 1 - layout.row_rank
    wanted = _wanted(dims)
    box = [*[1] * first, *dims[first:-1], 1]
    box[-1] = _even(dims[-1], max(wanted // prod(box), lanes), lanes)
    _grow(box, dims, range(first), wanted)
    return _boxes(layout, _with_fewer_cells(box, layout, range(first)))


def boxes_of_few(layout: Layout, lanes: int, *, least: int = 1) -> Boxes:
    """The cut of a layout of few long rows side by side: each box is a piece of `lanes` neighbours.

    Args:
        least: fewest elements of a box.
    """
    dims, first = layout.dims, len(layout.dims) - 1 - layout.row_rank
    box = [*[1] * (len(dims) - 1), min(dims[-1], lanes)]
    _grow(box, dims, range(first, len(dims) - 1), max(min(max(prod(dims) // _BOXES, SMALLEST), LARGEST), least))
    return _boxes(layout, box, split_rows=True)


def _keeps(layout: Layout) -> list[tuple[bool, ...]]:
    """For each sum, the axes that it does not reduce."""
    return [tuple(stride != 0 for stride in layout.strides[place]) for place in layout.sums]


def _wanted(dims: Shape) -> int:
    """Desired number of elements of a box."""
    size = prod(dims)
    return size if size <= ONE_BOX else min(max(size // _BOXES, SMALLEST), LARGEST)


def _grow(box: list[int], dims: Shape, axes: Sequence[int], wanted: int) -> None:
    """Makes a box longer along some axes, from the innermost one outwards, up to `wanted` elements."""
    for axis in reversed(axes):
        box[axis] = _even(dims[axis], max(wanted // prod(box), 1), 1)


def _with_fewer_cells(box: list[int], layout: Layout, axes: Sequence[int]) -> list[int]:
    """A box that is larger if sums (for example one for each column) would leave too many cells."""
    dims, size = layout.dims, prod(layout.dims)
    for kept in _keeps(layout):
        for axis in reversed(axes):
            left = _cells_left(dims, box, kept)
            if not kept[axis] and left * ELEMENTS_PER_CELL > max(size, ONE_BOX):
                box[axis] = _even(dims[axis], box[axis] * -(-left * ELEMENTS_PER_CELL // max(size, 1)), 1)
    return box


def _cells_left(dims: Shape, box: Sequence[int], kept: Sequence[bool]) -> int:
    """The number of cells of a sum in all boxes together."""
    return prod(d if k else -(-d // b) for d, b, k in zip(dims, box, kept, strict=True))


def _boxes(layout: Layout, box: Sequence[int], *, split_rows: bool = False, may_be_whole: bool = False) -> Boxes:
    counts = tuple(-(-d // b) for d, b in zip(layout.dims, box, strict=True))
    sums = []
    for place, kept in zip(layout.sums, _keeps(layout), strict=True):
        whole = may_be_whole and all(k or n == 1 for k, n in zip(kept, counts, strict=True))
        sums.append(BoxedSum(place, *_cell_strides(box, kept), whole))
    return Boxes(tuple(box), counts, tuple(sums), split_rows)


def _box(dims: Shape, keeps: Sequence[tuple[bool, ...]], longest: int, unit: int) -> Shape:
    size, last, wanted = prod(dims), len(dims) - 1, _wanted(dims)
    box = [1] * len(dims)
    # The longest possible stretch of memory: from the innermost axis outwards.
    for axis in reversed(range(len(dims))):
        most = min(wanted // prod(box), _room(box, axis, keeps))
        box[axis] = _even(dims[axis], min(most, longest), unit) if axis == last else _even(dims[axis], most, 1)
    # Fewer and larger boxes if a sum would leave too many cells.
    for kept in keeps:
        for axis in reversed(range(len(dims))):
            left = _cells_left(dims, box, kept)
            if kept[axis] or left * ELEMENTS_PER_CELL <= max(size, ONE_BOX):
                continue
            shrink = -(-left * ELEMENTS_PER_CELL // size)
            most = min(box[axis] * shrink, _room(box, axis, keeps), longest if axis == last else _ANY)
            box[axis] = _even(dims[axis], most, unit if axis == last else 1)
    return tuple(box)


def _room(box: Sequence[int], axis: int, keeps: Sequence[tuple[bool, ...]]) -> int:
    """The largest extent along an axis with at most MAX_CELLS cells."""
    cells = [
        (prod(b for i, (b, k) in enumerate(zip(box, kept, strict=True)) if k and i != axis), kept) for kept in keeps
    ]
    fixed = sum(n for n, kept in cells if not kept[axis])
    growing = sum(n for n, kept in cells if kept[axis])
    return max((MAX_CELLS - fixed) // growing, 1) if growing else _ANY


def _even(extent: int, most: int, unit: int) -> int:
    """An extent of at most `most` that cuts the axis into pieces of nearly equal size, in whole units; at least one."""
    if extent <= most:
        return extent
    if unit == 1 and most >= _WHOLE:
        unit = _WHOLE
    pieces = -(-extent // max(most // unit * unit, unit))
    return -(-extent // (pieces * unit)) * unit


def _cell_strides(box: Sequence[int], kept: tuple[bool, ...]) -> tuple[Strides, int]:
    strides = [0] * len(box)
    cells = 1
    for axis in reversed(range(len(box))):
        if kept[axis]:
            strides[axis] = cells
            cells *= box[axis]
    return tuple(strides), cells
