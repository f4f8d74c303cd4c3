"""Merges short rows into long ones: a short innermost axis and the next one are walked as one row.

A gradient of a [C,1,1] parameter in [N,C,4,4] has rows of 16 elements, too short for a vectorised loop. All large
operands walk [C,4,4] as one row of 16 C. A small operand does not; it is spread over a stretch of that row, and the
stretch is used for every index of N. A sum over the 4x4 is first one sum for each column, and is folded at the end.
"""

from __future__ import annotations

from dataclasses import dataclass

from opgraph.loops.layout import ADDED, CONTIGUOUS, KEPT, STRIDED, UNIFORM, Layout, Variant
from opgraph.schedule.cpu_tiles import MAX_CELLS

#: Rows shorter than this are short.
SHORT = 128
#: Elements of a stretch over which small operands are spread, and most such operands (kernels/cpu/tiled_sums.h).
STRETCH, MAX_SPREAD = 2048, 4
#: Fewest uses of a stretch.
_USES = 8


@dataclass(frozen=True, slots=True)
class Spread:
    """A small operand: element c of the long row is its element (c / short) * outer + (c % short) * inner."""

    operand: int
    outer: int
    inner: int


@dataclass(frozen=True, slots=True)
class MergedAxes:
    """A layout with long rows.

    Attributes:
        layout: the layout whose last axis was two axes.
        short: extent of the last axis before the merge.
        spread: the operands that do not walk the long row; their stride in `layout` is 1.
        grouped, tiled: sums whose results each add up `short` neighbouring columns, or columns that lie `short` apart.
    """

    layout: Layout
    short: int
    spread: tuple[Spread, ...]
    grouped: frozenset[int]
    tiled: frozenset[int]


def merged_axes(layout: Layout, loads: int) -> MergedAxes | None:
    """The same layout with long rows; None if rows are not short, or if an operand prevents it.

    Args:
        loads: the number of operands that are loads.
    """
    if len(layout.dims) < 2 or layout.dims[-1] >= SHORT:
        return None
    *outer, extent, short = layout.dims
    kinds = layout.variant.operands
    walking = [own[-2] == own[-1] * short for own in layout.strides]
    spread: list[Spread] = []
    grouped: set[int] = set()
    tiled: set[int] = set()
    for place, (*before, step, inner) in enumerate(layout.strides):
        if walking[place]:
            continue
        if step and inner:
            return None
        if place < loads and not any(before):
            spread.append(Spread(place, step, inner))
        elif place >= loads and kinds[place] in (ADDED, KEPT):
            (tiled if inner else grouped).add(place)
        else:
            return None
    times, longest = extent, _longest(layout, grouped | tiled)
    if extent * short > longest:
        if not grouped and all(s.outer == 0 for s in spread):
            # All indices of the next axis have the same values: as many of them as fill a stretch are one row.
            times = next((n for n in range(longest // short, 0, -1) if extent % n == 0), 0)
        elif tiled or short > longest:
            return None
    if times * short < SHORT or layout.size < _USES * times * short or len(spread) > MAX_SPREAD:
        return None
    among = {s.operand for s in spread}
    strides = []
    for place, (*before, step, inner) in enumerate(layout.strides):
        last = 1 if place in among else step if place in grouped else inner
        between = step * times if walking[place] else 0
        strides.append((*before, between, last) if times < extent else (*before, last))
    dims = (*outer, extent // times, times * short) if times < extent else (*outer, times * short)
    row_kinds = [
        kind if kind == UNIFORM else KEPT if place in grouped | tiled else _kind(kind, s[-1])
        for place, (kind, s) in enumerate(zip(kinds, strides, strict=True))
    ]
    variant = Variant("".join(row_kinds), len(dims) == 1)
    made = Layout(layout.shape, layout.results, dims, tuple(strides), variant)
    return MergedAxes(made, short, tuple(spread), frozenset(grouped), frozenset(tiled))


def _longest(layout: Layout, folded: set[int]) -> int:
    """The longest row of a box: at most a stretch, and every sum has a cell for each of its columns."""
    kinds = layout.variant.operands
    sums = [place for place, kind in enumerate(kinds) if kind in (ADDED, KEPT)]
    along = sum(place in folded or kinds[place] == KEPT for place in sums)
    return min(STRETCH, (MAX_CELLS - (len(sums) - along)) // max(along, 1))


def _kind(kind: str, stride: int) -> str:
    """How an operand moves along the long row; a sum over all of it stays one."""
    if kind in (ADDED, KEPT) or stride == 0:
        return kind
    return CONTIGUOUS if stride == 1 else STRIDED
