"""CUDA schedules: the choice for a loop, and the numbers of each schedule."""

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

_BYTES_IN_FLIGHT = 32  # bytes that a thread loads before it computes, for the memory latency of an H200
_ELEMENTS_PER_THREAD = 16  # more would take registers from the other threads of a multiprocessor
#: Instructions per element, by the records' costs, beyond which a thread computes one element after the other: NVRTC
#: would take 3 s for a pack's body, and the work shared by all its elements is 4% of such a kernel.
SINGLES_COST = 400
SINGLES = 4  # elements of a thread, as in kernels/cuda/pointwise_scalar.cuh
_ROLLED_UNROLL = 2  # packs of a thread, one after the other: enough to make the code before them cheap by comparison
#: Instructions per element, by the records' costs, beyond which the source text has only a few elements. Below it,
#: NVRTC takes 0.1 s at most, and memory limits the kernel's speed.
ROLLED_COST = 64
#: The same limit for a kernel whose memory takes longer than its arithmetic: it needs many loads at a time.
_BY_MEMORY_COST = 100
#: Machine instructions that an H200 executes while it copies a byte (7.75, specs/sass.md), plus the estimate's error.
_MEANWHILE = 10
#: Most machine instructions of the elements in the source text: NVRTC takes about 0.06 s for them. With fewer elements,
#: more than 3% of a kernel's instructions would be moves of the next elements.
_CODE = 1000
#: Machine instructions per unit of the records' costs (sm_90, kernels of specs/sass.md): in f64, in f32, with
#: approximate instructions.
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
    """Packs of elements, with the arithmetic of all or of a few in the source text; or one element after the other."""
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
    """Sums of tiles; several loops if some of the sums do not fit in one."""
    if layout.row_rank or not layout.variant.has_sums:
        return None
    parts = []
    for part, own, stores in passes(loop, layout, packed_vector(loop, layout, target.alignment, whole_rows=False)):
        parts.append(Part(schedule=_sums(part, own, target), stores=stores))
    if len(parts) == 1:
        return parts[0].schedule
    return LoopFission(name=LOOP_FISSION, loop=loop, layout=layout, sums=tuple(parts))


def rows(loop: Loop, layout: Layout, target: Cuda) -> Schedule | None:
    """Rows, at least one. Sums that the row kernel does not add up have separate loops."""
    if not layout.row_rank:
        return None
    tiles = row_tiles(loop, layout, alignment=target.alignment)
    if not layout.sums or (layout.size and adds_up(layout, tiles)):
        return _rows(loop, layout, tiles)
    if layout.size:
        return _fission(loop, layout, target)
    rest = without_sums(loop, layout)  # empty sums are 0; the caller writes them
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
    """Loops for the row values that sums need, for the sums, and for the other results."""
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
    # For long loops compilers make room for a second block, and spill. For short loops in 16 bits that a whole block
    # adds up, they take 60 registers where 48 suffice; with 48, a fifth block runs.
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
    """The elements of a pack that are in the source text, a divisor of `vector`; 0: all of each pack (a small kernel).

    NVRTC takes about 60 us per machine instruction, and the text of a large kernel would have 13 or 25 elements.
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
    # One f32 at a time takes 4% more instructions, for constants that two elements would share.
    while group > (1 if wide else 2) and group * estimate > _CODE:
        group //= 2
    return group


def _bytes(values: Levels) -> int:
    """Bytes that an element reads and writes."""
    read = [(x.dtype, kind) for x, kind in values.loads if not x.is_position]
    moved = [*read, *((s.dtype, kind) for s, kind in zip(values.loop.stores, values.store_kinds, strict=True))]
    return sum(dtypes.BY_NAME[dtype].itemsize for dtype, kind in moved if kind in (CONTIGUOUS, STRIDED))
