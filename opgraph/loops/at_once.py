"""Rows that are done at once: all elements of one are in a few vectors of 16 floats.

What is done once a row (the fold of its lanes, the walk to the next one) takes as long as some 30 elements, where rows
are walked in blocks. With the number of vectors known when the kernel is compiled, only the fold is left of that.
Shorter rows still lie side by side (`opgraph.loops.beside`), as do all short ones on machines without such vectors.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from math import prod

from opgraph.loops.beside import FEW_ROWS, beside
from opgraph.loops.groups import grouped
from opgraph.loops.layout import ADDED, Layout
from opgraph.loops.loop import Loop
from opgraph.loops.passes import KEEP_COST, pass_counts

#: Floats of a vector (kernels/lanes.h), and vectors of a row at most.
WIDTH, MAX_VECTORS = 16, 8
#: What is done in floats, whatever it is in memory.
_FLOATS = frozenset({"f32", "f16", "bf16", "boolean"})


def walked(loop: Loop, layout: Layout, *, lanes: bool) -> Layout:
    """The layout with the way in which its rows are walked: at once, side by side, in groups, or one after the other.

    Args:
        lanes: whether the machine has vectors of 16 floats.
    """
    if not layout.row_rank:
        return layout
    groups = grouped(loop, layout)
    if groups is not None:
        return groups
    if not lanes or not _fits(loop, layout):
        return beside(loop, layout) or layout
    vectors = -(-layout.dims[-1] // WIDTH)
    return beside(loop, layout, longest=_longest(loop)) or replace(
        layout, variant=replace(layout.variant, vectors=vectors)
    )


def _fits(loop: Loop, layout: Layout) -> bool:
    dims = layout.dims
    if layout.row_rank != 1 or ADDED in layout.variant.operands or any(x.is_position for x in loop.loads):
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
