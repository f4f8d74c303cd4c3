"""Schedules of CUDA: which one a loop gets, and their numbers."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from opgraph.ir import dtypes
from opgraph.loops.layout import CONTIGUOUS, KEPT, STRIDED, Layout
from opgraph.loops.loop import Loop
from opgraph.schedule.cuda_row_tiles import BLOCKS, CHUNK, RowTiles, adds_up, row_tiles
from opgraph.schedule.cuda_tiles import BLOCK_SIZE, NARROW, packed_vector, tiled
from opgraph.schedule.fast_math import approximate
from opgraph.schedule.levels import Levels
from opgraph.schedule.loop_fission import passes, row_values, without_sums
from opgraph.schedule.reduction_passes import pass_counts
from opgraph.schedule.schedule import (
    INNER,
    LOOP_FISSION,
    OUTER,
    PERSISTENT_INNER,
    PERSISTENT_OUTER,
    POINTWISE,
    POINTWISE_SCALAR,
    POINTWISE_UNROLLED,
    SPLIT_INNER,
    SPLIT_OUTER,
    TILED_SUM,
    CudaPointwise,
    CudaRows,
    CudaSums,
    LoopFission,
    Part,
    Schedule,
)

_BYTES_IN_FLIGHT = 32  # that one thread loads before it computes, for the memory latency of an H200
_ELEMENTS_PER_THREAD = 16  # more would cost registers that the other threads of a multiprocessor need
#: Instructions per element, by the records' costs, beyond which a thread does one element after the other: NVRTC would
#: take 3 s for a pack's body, and what is the same for all its elements is 4% of such a kernel.
SINGLES_COST = 400
SINGLES = 4  # of a thread, as in kernels/cuda/pointwise_scalar.cuh
_ROLLED_UNROLL = 2  # packs of a thread, one after the other: enough that what comes before them counts little
#: Instructions per element, by the records' costs, beyond which the text has a few elements: below, NVRTC takes 0.1 s
#: at most, and memory decides how long the kernel takes.
ROLLED_COST = 64
#: One whose memory takes longer than its arithmetic, so beyond this one. Then its loads have to be many at a time.
_BY_MEMORY_COST = 100
#: Machine instructions for each byte that an H200 copies meanwhile (7.75, specs/sass.md), and what the estimate is off.
_MEANWHILE = 10
#: Machine instructions of the elements that the text has: NVRTC takes some 0.06 s for them. With fewer elements more
#: than 3% of a kernel's instructions would be moves of what comes next.
_CODE = 1000
#: Machine instructions for one of the records' costs (sm_90, kernels of specs/sass.md): in f64, in f32, by approximate
#: instructions.
_WIDE, _EXACT, _APPROXIMATE = 3.6, 1.65, 0.7
_MANY = 48  # statements


@dataclass(frozen=True, slots=True)
class Cuda:
    """A GPU as a target.

    Attributes:
        alignment: the power of two up to 16 that divides the address of every contiguous operand.
    """

    alignment: int = 16


def pointwise(loop: Loop, layout: Layout, target: Cuda) -> CudaPointwise | None:
    """Packs of elements, with all of their arithmetic in the text, or that of a few, or one element after the other."""
    if layout.row_rank or layout.variant.has_sums:
        return None
    kinds, flat = layout.variant.operands, layout.variant.flat
    values = Levels(loop, layout.variant)
    sizes = [0 if x.is_position else dtypes.BY_NAME[x.dtype].itemsize for x in loop.loads]
    vector = packed_vector(loop, layout, target.alignment)
    loaded = sum(vector * s for s, k in zip(sizes, kinds) if k in (CONTIGUOUS, STRIDED))
    unroll = max(min(_BYTES_IN_FLIGHT // loaded, _ELEMENTS_PER_THREAD // vector, 4), 1) if loaded else 1
    name, group = POINTWISE, 0
    if values.cost > SINGLES_COST:
        name, vector, unroll = POINTWISE_SCALAR, 1, 1
    elif group := group_of(values, vector):
        name, unroll = POINTWISE_UNROLLED, max(unroll, _ROLLED_UNROLL)
    narrow = layout.size < NARROW and all(abs(s) < NARROW for strides in layout.strides for s in strides)
    tile = BLOCK_SIZE * (SINGLES if name == POINTWISE_SCALAR else unroll * (vector if flat else 1))
    return CudaPointwise(
        name=name,
        loop=loop,
        layout=layout,
        vector=vector,
        unroll=unroll,
        narrow=narrow and not flat,
        group=group,
        tile=tile,
    )


def sums(loop: Loop, layout: Layout, target: Cuda) -> Schedule | None:
    """Sums of tiles; in several loops where some of the sums do not go together."""
    if layout.row_rank or not layout.variant.has_sums:
        return None
    parts = []
    for part, own, stores in passes(loop, layout, packed_vector(loop, layout, target.alignment, whole_rows=False)):
        parts.append(Part(schedule=_sums(part, own, target), stores=stores))
    if len(parts) == 1:
        return parts[0].schedule
    return LoopFission(name=LOOP_FISSION, loop=loop, layout=layout, sums=tuple(parts))


def rows(loop: Loop, layout: Layout, target: Cuda) -> Schedule | None:
    """Rows, of at least one row; sums that the kernel of rows does not add up have loops of their own."""
    if not layout.row_rank:
        return None
    tiles = row_tiles(loop, layout, alignment=target.alignment)
    if not layout.sums or (layout.size and adds_up(layout, tiles)):
        return _rows(loop, layout, tiles)
    if layout.size:
        return _fission(loop, layout, target)
    rest = without_sums(loop, layout)  # sums of nothing are 0, which the caller writes
    part = _part(*rest, target) if rest else None
    return LoopFission(name=LOOP_FISSION, loop=loop, layout=layout, rest=part)


def _rows(loop: Loop, layout: Layout, tiles: RowTiles) -> CudaRows:
    outer = len(layout.dims) - layout.row_rank
    count = prod(layout.dims[:outer])
    if tiles.pieces > 1:
        name = SPLIT_INNER if tiles.neighbours == 1 else SPLIT_OUTER
    elif tiles.held:
        name = PERSISTENT_INNER if tiles.neighbours == 1 else PERSISTENT_OUTER
    else:
        name = INNER if tiles.neighbours == 1 else OUTER
    chunk = max(CHUNK, -(-count // (BLOCKS * tiles.groups))) if layout.sums else 1
    stages = pass_counts(loop)[0] + any(s.per_row != "" for s in loop.stores) if tiles.pieces > 1 else 1
    return CudaRows(name=name, loop=loop, layout=layout, tiles=tiles, rows=chunk, stages=stages)


def _part(loop: Loop, layout: Layout, stores: tuple[int, ...], target: Cuda) -> Part:
    return Part(schedule=_rows(loop, layout, row_tiles(loop, layout, alignment=target.alignment)), stores=stores)


def _fission(loop: Loop, layout: Layout, target: Cuda) -> LoopFission:
    """Row values that sums need, sums, and the other results."""
    values, adding = row_values(loop, layout)
    added, rest = sums(*adding, target), without_sums(loop, layout)
    assert added is not None, "a loop with sums"
    summed = [i - len(loop.loads) for i in layout.sums]
    whole = Part(schedule=added, stores=tuple(range(len(summed))))
    parts = added.sums if isinstance(added, LoopFission) else (whole,)
    return LoopFission(
        name=LOOP_FISSION,
        loop=loop,
        layout=layout,
        values=_part(*values, (), target).schedule if values is not None else None,
        count=len(adding[0].loads) - len(loop.loads),
        sums=tuple(Part(schedule=part.schedule, stores=tuple(summed[i] for i in part.stores)) for part in parts),
        rest=_part(*rest, target) if rest is not None else None,
    )


def _sums(loop: Loop, layout: Layout, target: Cuda) -> CudaSums:
    vector = packed_vector(loop, layout, target.alignment, whole_rows=False)
    tiling = tiled(layout, vector)
    group = group_of(Levels(loop, layout.variant), vector)
    # Of long loops compilers make room for a second block, and spill. Of short ones in 16 bits that all of a block adds
    # up they take 60 registers where 48 do, with which a fifth block runs.
    blocks = 1 if len(loop.statements) > _MANY else 5 if vector == 8 and tiling.threads[1] == 1 else 0
    return CudaSums(
        name=TILED_SUM,
        loop=loop,
        layout=layout,
        tiling=tiling,
        vector=vector,
        unroll=1 if group else _unroll_of_sums(loop, layout, vector),
        group=group,
        narrow=layout.size < NARROW and tiling.blocks < NARROW,
        blocks=blocks,
    )


def _unroll_of_sums(loop: Loop, layout: Layout, vector: int) -> int:
    if KEPT in layout.variant.operands:
        return 1  # a thread has one pack in a row
    kinds = layout.variant.operands
    read = loop.reads()
    loaded = sum(
        vector * dtypes.BY_NAME[x.dtype].itemsize
        for x, kind in zip(loop.loads, kinds)
        if x.name in read and not x.is_position and kind in (CONTIGUOUS, STRIDED)
    )
    return max(min(_BYTES_IN_FLIGHT // loaded, 4), 1) if loaded else 1


def group_of(values: Levels, vector: int) -> int:
    """How many elements of a pack the text has, a divisor of `vector`; 0: all of each pack, as the kernel is small.

    NVRTC takes some 60 us for a machine instruction, and the text of a large kernel would have 13 or 25 elements.
    """
    loop, cost = values.loop, values.cost
    if cost <= ROLLED_COST:
        return 0
    wide = any(dtypes.BY_NAME[s.dtype].compute == "double" for s in loop.statements)
    by_tables = approximate(loop, values.variant)
    estimate = 0.0
    for s in values.varying():
        factor = _WIDE if wide else _APPROXIMATE if s.result in by_tables else _EXACT
        estimate += factor * s.record.cost
    if cost <= _BY_MEMORY_COST and estimate <= _MEANWHILE * _bytes(values):
        return 0
    group = vector
    # One f32 at a time takes 4% more instructions: constants for one, where two can share them.
    while group > (1 if wide else 2) and group * estimate > _CODE:
        group //= 2
    return group


def _bytes(values: Levels) -> int:
    """That an element reads and writes."""
    read = [(x.dtype, kind) for x, kind in values.loads if not x.is_position]
    moved = [*read, *((s.dtype, kind) for s, kind in zip(values.loop.stores, values.store_kinds, strict=True))]
    return sum(dtypes.BY_NAME[dtype].itemsize for dtype, kind in moved if kind in (CONTIGUOUS, STRIDED))
