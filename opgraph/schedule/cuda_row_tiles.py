"""Distribution of rows over the threads of a GPU. It depends only on sizes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import log2, prod

from opgraph.ir import dtypes
from opgraph.loops.layout import CONTIGUOUS, KEPT, Layout
from opgraph.loops.loop import Loop
from opgraph.schedule.cuda_tiles import BLOCK_SIZE, NARROW, packed_vector
from opgraph.schedule.reduction_passes import pass_counts
from opgraph.schedule.row_registers import Held, held_by

_WARP = 32
_LONGEST = 512  # threads of a row: with 128 registers each
#: Most registers of a thread that hold a row: for more threads than a warp; within a warp, and in f64, whose arithmetic
#: takes more registers.
_REGISTERS, _FEWER = 64, 32
#: Of a thread: bytes that it loads before it computes, instructions of all passes.
_WANTED, _INSTRUCTIONS = 64, 4096
_SEGMENT = 64  # fewest bytes of a row that neighbouring threads load together
#: If values are summed over rows: fewest rows of a group, and the approximate number of blocks.
CHUNK, BLOCKS = 16, 512
#: If rows make fewer blocks than _FEW_BLOCKS, several blocks share a row. A piece has at least _PIECE elements, with
#: those of the neighbouring rows in the same block.
_FEW_BLOCKS, _PIECE = 128, 16384
#: Rows may begin at any element if they have at least _ENOUGH packs, and accesses would otherwise be below _WIDE bytes.
_ENOUGH, _WIDE = 16, 8
_SHARED = 40 * 1024  # bytes of shared memory of a block


@dataclass(frozen=True, slots=True)
class RowTiles:
    """Distribution of a row over threads, with the names of kernels/cuda/inner_reduction.cuh.

    Attributes:
        vector: V, neighbouring elements of a pack.
        packs: P, packs of a thread.
        threads: T, threads of a row.
        held: true if a row is read once.
        whole: true if all threads have P packs.
        small: bits of the operands that are the same for all rows, and read again in each pass.
        narrow: true if offsets are computed in 32-bit arithmetic.
        neighbours: neighbouring rows that neighbouring threads take; 1: neighbouring threads share a row.
        lead: if rows begin at any element, the operand at whose multiples packs begin; -1: rows are whole packs.
        loose: bits of the operands whose packs are then not aligned.
        pieces: blocks that share a row.
    """

    vector: int
    packs: int
    threads: int
    held: bool
    whole: bool
    small: int
    narrow: bool
    neighbours: int = 1
    lead: int = -1
    loose: int = 0
    pieces: int = 1

    @property
    def groups(self) -> int:
        """Rows that a block takes side by side."""
        if self.neighbours > 1:
            return self.neighbours
        return 1 if self.threads > _WARP else BLOCK_SIZE // self.threads

    @property
    def block(self) -> int:
        """Threads of a block."""
        return self.groups * self.threads


def row_tiles(loop: Loop, layout: Layout, *, alignment: int = 16) -> RowTiles:
    """Distributes the rows of a layout over threads, by sizes alone.

    Args:
        alignment: the power of two up to 16 that divides the address of every contiguous operand.
    """
    across = _runs_across(loop, layout)
    vector, lead, loose = (1, -1, 0) if across else _packed(loop, layout, alignment)
    packs = prod(layout.dims[-layout.row_rank :]) // vector
    outer = len(layout.dims) - layout.row_rank
    small = [i for i in range(len(loop.loads)) if not any(layout.strides[i][:outer]) and outer]
    held = held_by(loop, layout.variant, frozenset(loop.loads[i].name for i in small))
    moving = [_item(loop, i) for i, kind in enumerate(layout.variant.operands) if kind == CONTIGUOUS]
    if across:
        threads, each, fits = _threads_across(packs, held, pass_counts(loop)[2], layout.dims[outer - 1])
    else:
        threads, each, fits = _threads(packs, vector, held, min(moving, default=4))
    narrow = layout.size < NARROW and all(abs(s) < NARROW for strides in layout.strides for s in strides)
    whole = lead < 0 and packs == threads * each
    cut = RowTiles(vector, each, threads, fits, whole, sum(1 << i for i in small), narrow, lead=lead, loose=loose)
    cut = replace(cut, neighbours=BLOCK_SIZE // threads) if across else cut
    blocks = -(-prod(layout.dims[:outer]) // cut.groups)
    if fits or blocks >= (BLOCKS if across else _FEW_BLOCKS):
        return cut
    return replace(cut, pieces=max(min(-(-BLOCKS // max(blocks, 1)), packs * vector * cut.neighbours // _PIECE), 1))


def _packed(loop: Loop, layout: Layout, alignment: int) -> tuple[int, int, int]:
    """Elements of a pack; `lead` and `loose` of RowTiles."""
    whole = packed_vector(loop, layout, alignment)
    while layout.dims[-1] % whole:
        whole //= 2
    kinds, outer = layout.variant.operands, len(layout.dims) - layout.row_rank
    if layout.row_rank > 1 or KEPT in kinds:  # a thread has the same columns in each row
        return whole, -1, 0
    runs = [
        i
        for i, kind in enumerate(kinds)
        if kind == CONTIGUOUS and not (i < len(loop.loads) and loop.loads[i].is_position)
    ]
    moving = [i for i in runs if all(layout.strides[i][:outer])]
    flat = replace(layout, strides=tuple((*[0] * outer, *s[outer:]) for s in layout.strides))
    vector = packed_vector(loop, flat, alignment, whole_rows=False)
    if whole * min((_item(loop, i) for i in runs), default=_WIDE) >= _WIDE:
        return whole, -1, 0
    while vector > whole and vector * _ENOUGH <= layout.dims[-1]:
        lead = next(iter(moving), -1)
        loose = [i for i in runs if lead < 0 or any(_apart(layout, i, lead, d, vector) for d in range(outer))]
        # Operands that are the same for several rows are in a cache: element by element is fast enough for them.
        if not any(i in moving or i >= len(loop.loads) for i in loose):
            return vector, lead, sum(1 << i for i in loose)
        vector //= 2
    return whole, -1, 0


def _item(loop: Loop, i: int) -> int:
    """Bytes of an element of operand i."""
    operand = loop.loads[i] if i < len(loop.loads) else loop.stores[i - len(loop.loads)]
    return dtypes.BY_NAME[operand.dtype].itemsize


def _apart(layout: Layout, i: int, lead: int, axis: int, vector: int) -> bool:
    """True if the packs of two operands begin at different columns somewhere along an axis."""
    return (layout.strides[i][axis] - layout.strides[lead][axis]) % vector != 0


def _runs_across(loop: Loop, layout: Layout) -> bool:
    """True if memory runs across neighbouring rows, not along a row, for most operands that move along both."""
    outer, read = len(layout.dims) - layout.row_rank, loop.reads()
    if not outer:
        return False
    votes = 0
    for i, strides in enumerate(layout.strides):
        if strides[-1] and strides[outer - 1] and (i >= len(loop.loads) or loop.loads[i].name in read):
            votes += (abs(strides[outer - 1]) < abs(strides[-1])) * 2 - 1
    return votes > 0


def _threads_across(packs: int, held: Held, most_reductions: int, nearby: int) -> tuple[int, int, bool]:
    """`_threads` where neighbouring threads take neighbouring rows: a warp of rows at least, or all `nearby` ones."""
    registers = max(held.waiting // 4, 1)
    room = _FEWER if held.is_wide else _REGISTERS
    most = max(min(room // registers, _INSTRUCTIONS // max(held.instructions, 1), 32), 1)
    wanted = max(min(_WANTED // max(held.loaded, 1), most), 1)
    # All threads reduce in shared memory, in two buffers in turn.
    fits = 2 * 8 * BLOCK_SIZE * most_reductions <= _SHARED
    threads = min(_power_of_two(-(-packs // wanted)), BLOCK_SIZE // min(_power_of_two(nearby), _WARP) if fits else 1)
    each = max(-(-packs // threads), 1)
    return (threads, each, True) if each <= most else (threads, wanted, False)


def _threads(packs: int, vector: int, held: Held, narrowest: int) -> tuple[int, int, bool]:
    """Threads of a row, packs of each thread, and true if they hold the whole row."""
    registers = max(vector * (held.waiting + held.added) // 4, 1)
    room = _FEWER if held.is_wide else _REGISTERS
    most = max(min(room // registers, _INSTRUCTIONS // (vector * max(held.instructions, 1)), 32), 1)
    wanted = max(min(_WANTED // max(vector * held.loaded, 1), most), 1)
    fewest = min(_power_of_two(packs), _power_of_two(-(-_SEGMENT // (vector * narrowest))), _WARP)
    found = []
    threads = fewest
    while threads <= _LONGEST:
        each = max(-(-packs // threads), 1)
        if each <= most:
            in_warp = threads <= _WARP and each * registers <= _FEWER
            key = (not in_warp, packs % threads != 0, abs(log2(each / wanted)), threads)
            found.append((key, threads, each))
        threads *= 2
    if not found:
        return _LONGEST, wanted, False
    _, threads, each = min(found)
    return threads, each, True


def adds_up(layout: Layout, cut: RowTiles) -> bool:
    """True if the row kernel also adds up the sums of a layout: those over all rows, where rows are held."""
    outer = len(layout.dims) - layout.row_rank
    over_all = not any(any(layout.strides[i][:outer]) for i in layout.sums)
    return cut.held and cut.neighbours == 1 and layout.row_rank == 1 and over_all


def _power_of_two(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()
