"""Cuts a loop with sums into tiles for a GPU, one for each thread block, by sizes alone.

The top of kernels/cuda/tiled_sums.cuh explains the names.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

from opgraph.ir import dtypes
from opgraph.loops.layout import CONTIGUOUS, KEPT, Layout
from opgraph.loops.loop import Loop

#: Threads of a block (kernels/cuda/pointwise.cuh).
BLOCK_SIZE = 256
#: Most bytes that a thread moves in one access.
_BYTES_PER_ACCESS = 16
NARROW = 2**31 - 2**16  # with the last, partly empty tile still below 2^31
#: Elements of a tile: 32 for each thread.
_TILE = 32 * BLOCK_SIZE
#: Fewest rows that a sum for each column adds up in one tile: the partial sums are then 1/64 of the data.
_ROWS = 64
#: Threads side by side if each column has its own sum: 512 bytes of f32.
_NARROW = 32
#: Most tiles that contribute to one result; tiles grow to stay below it.
_TERMS = 16384


@dataclass(frozen=True, slots=True)
class Tiling:
    """The cut of one layout, with the names of kernels/cuda/tiled_sums.cuh.

    Attributes:
        order: the outer axes; the axes that some sum keeps come first.
        kept: the number of outer axes that some sum keeps.
        threads: threads along the columns (TX) and along the rows (TM).
        parts: offset in the workspace of each sum's partial sums; -1: its tiles complete it.
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
        """Number of tiles along the rows."""
        return -(-self.rows // self.row_chunk)

    @property
    def column_chunks(self) -> int:
        """Number of tiles along the columns."""
        return -(-self.columns // self.column_chunk)

    @property
    def blocks(self) -> int:
        """Number of tiles."""
        groups = BLOCK_SIZE // (self.threads[0] * self.threads[1])
        return -(-self.groups // groups) * self.row_chunks * self.column_chunks


def tiled(layout: Layout, vector: int) -> Tiling:
    """The cut for a layout with sums, of at least one element.

    Args:
        vector: neighbouring columns that one thread takes at a time.
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


def packed_vector(loop: Loop, layout: Layout, alignment: int, *, whole_rows: bool = True) -> int:
    """The number of neighbouring elements that a thread may move at a time.

    Args:
        whole_rows: true if rows must consist of whole packs.
    """
    operands = [x.dtype for x in loop.loads] + [s.dtype for s in loop.stores]
    sizes = [dtypes.BY_NAME[d].itemsize for d in operands]
    in_memory = [not x.is_position for x in loop.loads] + [True] * len(loop.stores)
    runs = [kind == CONTIGUOUS and m for kind, m in zip(layout.variant.operands, in_memory, strict=True)]
    moving = [size for size, runs_on in zip(sizes, runs, strict=True) if runs_on]
    if not moving:
        return 1
    # Twice 16 bytes of the widest type: f64 next to booleans would fill 128 bytes of registers for each operand.
    vector = min(_BYTES_PER_ACCESS // min(moving), max(2 * _BYTES_PER_ACCESS // max(moving), 1))
    rows = [layout.dims[-1]] if whole_rows and not layout.variant.flat else []
    for strides, runs_on in zip(layout.strides, runs, strict=True):
        rows.extend(strides[:-1] if runs_on else ())
    while vector > 1 and (
        any(r % vector for r in rows) or any(min(_BYTES_PER_ACCESS, vector * m) > alignment for m in moving)
    ):
        vector //= 2
    return vector


def _power_of_two(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def _up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
