"""How a loop with sums is cut for a GPU: into tiles, one for each block of threads, by sizes alone.

What the names mean is said at the top of kernels/sums.cuh. Where sums do not go together (those of each row and those
of each column of one large matrix would leave as much behind as the matrix itself), the loop runs several times, each
time for some of its stores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from opgraph.loops.layout import KEPT, Layout, Variant
from opgraph.loops.loop import Loop

#: Threads of a block (kernels/pointwise.cuh).
BLOCK_SIZE = 256
#: Elements of a tile: 32 for each thread.
_TILE = 32 * BLOCK_SIZE
#: Rows that a sum for each column adds up in one tile, at least: what tiles leave is then 1/64 of the data.
_ROWS = 64
#: Threads side by side where each column has its own sum: 512 bytes of f32.
_NARROW = 32
#: Tiles that contribute to one result, at most; beyond, tiles grow.
_TERMS = 16384
#: What tiles may leave behind: so many elements, or 1/16 of the space.
_LEFT = 65536


@dataclass(frozen=True, slots=True)
class Tiling:
    """The cut of one layout, with the names of kernels/sums.cuh.

    Attributes:
        order: the outer axes, those kept by some sum first.
        kept: how many of them some sum keeps.
        threads: along the columns (TX) and along the rows (TM).
        parts: where in the workspace each sum's tiles leave what they add up to; -1: they complete it.
        work: elements of the workspace.
    """

    order: tuple[int, ...]
    kept: int
    threads: tuple[int, int]
    groups: int
    rows: int
    columns: int
    row_chunk: int
    column_chunk: int
    parts: tuple[int, ...]
    work: int

    @property
    def row_chunks(self) -> int:
        """How many tiles lie along the rows."""
        return -(-self.rows // self.row_chunk)

    @property
    def column_chunks(self) -> int:
        """How many tiles lie along the columns."""
        return -(-self.columns // self.column_chunk)

    @property
    def blocks(self) -> int:
        """Number of tiles."""
        groups = BLOCK_SIZE // (self.threads[0] * self.threads[1])
        return -(-self.groups // groups) * self.row_chunks * self.column_chunks


def tiled(layout: Layout, vector: int) -> Tiling:
    """The cut for a layout with sums, of at least one element.

    Args:
        vector: how many neighbouring columns one thread takes at a time.
    """
    sums = layout.sums
    outer = range(len(layout.dims) - 1)
    keeps = [a for a in outer if any(layout.strides[i][a] for i in sums)]
    order = (*keeps, *[a for a in outer if a not in keeps])
    groups, rows = (prod(layout.dims[a] for a in axes) for axes in (keeps, order[len(keeps) :]))
    columns = layout.dims[-1]
    for_each_column = KEPT in layout.variant.operands
    packs = -(-columns // vector)
    tx = min(_NARROW if for_each_column else BLOCK_SIZE, _power_of_two(packs))
    tm = min(BLOCK_SIZE // tx, _power_of_two(rows))
    tg = BLOCK_SIZE // (tx * tm)
    if for_each_column:
        column_chunk = tx * vector
        row_chunk = max(_ROWS, _TILE // column_chunk, -(-rows // _TERMS))
    else:
        column_chunk = _up(max(_TILE // (tg * tm), -(-columns // _TERMS)), tx * vector)
        chunks = -(-columns // column_chunk)
        row_chunk = max(_TILE // (tg * min(columns, column_chunk)), -(-rows * chunks // _TERMS))
    row_chunk = min(_up(row_chunk, tm), max(rows, 1))
    tiling = Tiling(order, len(keeps), (tx, tm), groups, rows, columns, row_chunk, min(column_chunk, columns), (), 0)
    parts, work = [], 0
    for place in sums:
        whole = all(layout.strides[place][a] for a in keeps) and tiling.row_chunks == 1
        is_column = layout.variant.operands[place] == KEPT
        if whole and (is_column or tiling.column_chunks == 1):
            parts.append(-1)
            continue
        parts.append(work)
        work += groups * tiling.row_chunks * (columns if is_column else tiling.column_chunks)
    return replace(tiling, parts=tuple(parts), work=work)


def passes(loop: Loop, layout: Layout, vector: int) -> list[tuple[Loop, Layout, tuple[int, ...]]]:
    """The loop, as often as it has to run, each time with some of its stores, and which; elementwise ones come last.

    They may be written over an input that the other passes still read.
    """
    first = len(loop.loads)
    sums = [i - first for i in layout.sums]
    together = [i for i in range(len(loop.stores)) if i not in sums]
    alone: list[list[int]] = []
    for i in sums:
        for group in (together, *alone):
            if _fits(layout, first, [*group, i], vector):
                group.append(i)
                break
        else:
            alone.append([i])
    groups = [sorted(g) for g in (*alone, together) if g]
    return [(loop.with_stores(g), selected(layout, first, g), tuple(g)) for g in groups]


def selected(layout: Layout, first: int, stores: Sequence[int]) -> Layout:
    """The layout of all loads (there are `first`) and some stores."""
    places = [*range(first), *(first + i for i in stores)]
    kinds = "".join(layout.variant.operands[p] for p in places)
    return replace(
        layout,
        results=tuple(layout.results[i] for i in stores),
        strides=tuple(layout.strides[p] for p in places),
        variant=Variant(kinds, layout.variant.flat),
    )


def _fits(layout: Layout, first: int, stores: Sequence[int], vector: int) -> bool:
    part = selected(layout, first, sorted(stores))
    return len(part.sums) == 1 or tiled(part, vector).work <= max(_LEFT, layout.size // 16)


def _power_of_two(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def _up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
