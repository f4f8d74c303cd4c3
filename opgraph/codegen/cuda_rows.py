"""CUDA kernels of loops over rows: how many threads take a row, their source, and their arguments."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import log2, prod

from opgraph.codegen.cuda_row_functor import Held, held_by
from opgraph.codegen.cuda_sums import SumLaunch, second_stage, sum_launches, totals_entry, totals_words
from opgraph.codegen.kernel import NARROW, packed_vector, source_of
from opgraph.ir import dtypes
from opgraph.loops.apart import sums_apart, without_sums
from opgraph.loops.layout import CONTIGUOUS, KEPT, Layout
from opgraph.loops.loop import Loop
from opgraph.loops.tiles import BLOCK_SIZE, Tiling, sums_of

_WARP = 32
_LONGEST = 512  # threads of a row: with 128 registers each
#: Of a thread: registers in which a row waits, where there are more threads than a warp; the same within a warp, and in
#: f64, whose arithmetic takes more itself.
_REGISTERS, _FEWER = 64, 32
#: Of a thread: bytes that it loads before it computes, instructions of all passes.
_WANTED, _INSTRUCTIONS = 64, 4096
_SEGMENT = 64  # bytes that neighbouring threads load of a row together, at least
#: Where something is added up over rows: rows that a group takes, at least, and groups' blocks, about.
_CHUNK, _BLOCKS = 16, 512


@dataclass(frozen=True, slots=True)
class RowCut:
    """How a row is shared out, with the names of kernels/rows.cuh.

    Attributes:
        vector: V, neighbouring elements of a pack.
        packs: P, of a thread.
        threads: T, of a row.
        held: whether a row is read once.
        whole: whether all threads have P packs.
        small: bits of the operands that are the same for all rows, and read again in each pass.
        narrow: places are found in 32-bit arithmetic.
    """

    vector: int
    packs: int
    threads: int
    held: bool
    whole: bool
    small: int
    narrow: bool

    @property
    def groups(self) -> int:
        """Rows that a block takes side by side."""
        return 1 if self.threads > _WARP else BLOCK_SIZE // self.threads

    @property
    def block(self) -> int:
        """Threads of a block."""
        return self.groups * self.threads


def row_cut(loop: Loop, layout: Layout, *, alignment: int = 16) -> RowCut:
    """How rows of a layout are shared out: by sizes alone.

    Args:
        alignment: the power of two up to 16 that divides the address of every contiguous operand.
    """
    vector = packed_vector(loop, layout, alignment)
    while layout.dims[-1] % vector:
        vector //= 2
    packs = prod(layout.dims[-layout.row_rank :]) // vector
    outer = len(layout.dims) - layout.row_rank
    small = [i for i in range(len(loop.loads)) if not any(layout.strides[i][:outer]) and outer]
    held = held_by(loop, layout.variant, frozenset(loop.loads[i].name for i in small))
    types = [*(x.dtype for x in loop.loads), *(x.dtype for x in loop.stores)]
    kinds = layout.variant.operands
    moving = [dtypes.BY_NAME[t].itemsize for t, kind in zip(types, kinds, strict=True) if kind == CONTIGUOUS]
    threads, each, fits = _threads(packs, vector, held, min(moving, default=4))
    narrow = layout.size < NARROW and all(abs(s) < NARROW for strides in layout.strides for s in strides)
    return RowCut(vector, each, threads, fits, packs == threads * each, sum(1 << i for i in small), narrow)


def _threads(packs: int, vector: int, held: Held, narrowest: int) -> tuple[int, int, bool]:
    """Threads of a row, packs of each, and whether they hold all of it."""
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


def adds_up(layout: Layout, cut: RowCut) -> bool:
    """Whether the kernel of rows adds up the sums of a layout, too: those over all rows, where rows are held."""
    outer = len(layout.dims) - layout.row_rank
    over_all = not any(any(layout.strides[i][:outer]) for i in sums_of(layout))
    return cut.held and layout.row_rank == 1 and over_all


def row_launches(loop: Loop, layout: Layout, *, alignment: int = 16) -> list[SumLaunch]:
    """The launches for a layout with rows, of at least one row: one, unless there are sums that it cannot add up.

    Rows of nothing have no sums: who calls says that they are 0.

    Args:
        alignment: the power of two up to 16 that divides the address of every contiguous operand.
    """
    if layout.size == 0:
        rest = without_sums(loop, layout)
        return [row_launch(*rest, alignment=alignment)] if rest else []
    if sums_of(layout) and not adds_up(layout, row_cut(loop, layout, alignment=alignment)):
        return _apart(loop, layout, alignment)
    return [row_launch(loop, layout, tuple(range(len(loop.stores))), alignment=alignment)]


def row_launch(loop: Loop, layout: Layout, stores: tuple[int, ...], *, alignment: int = 16) -> SumLaunch:
    """The launch for a layout with rows, of at least one row.

    Args:
        stores: which stores of the caller's loop those of `loop` are.
        alignment: the power of two up to 16 that divides the address of every contiguous operand.
    """
    cut = row_cut(loop, layout, alignment=alignment)
    sums = sums_of(layout)
    assert not sums or adds_up(layout, cut), "sums that the kernel of rows does not add up"
    rank, operands, outer = len(layout.dims), len(layout.strides), len(layout.dims) - layout.row_rank
    rows, length = prod(layout.dims[:outer]), prod(layout.dims[outer:])
    chunk = max(_CHUNK, -(-rows // (_BLOCKS * cut.groups))) if sums else 1
    chunks = -(-rows // chunk)
    parts: list[int] = []
    work = 0
    for place in sums if chunks > 1 else ():
        parts.append(work)
        each = length if layout.variant.operands[place] == KEPT else 1
        work += -(-each * chunks // cut.vector) * cut.vector  # packs are left in one access
    parts = parts or [-1] * len(sums)
    names = [*[f"x{i}" for i in range(len(loop.loads))], *[f"y{i}" for i in range(len(loop.stores))]]
    template = f"<{rank}, {operands}, {len(sums)}>"
    chosen = [str(n) for n in (cut.vector, cut.packs, cut.threads)]
    chosen += ["true" if flag else "false" for flag in (cut.held, cut.whole)]
    chosen += [f"{cut.small}ull", "og::u32" if cut.narrow else "og::i64", str(layout.row_rank)]
    # Where a block takes many rows or packs one after the other, a compiler that saves registers for a second block
    # spills (sm_80), or asks for some operands late.
    bounds = f"{cut.block}, 1" if sums or not cut.held else f"{cut.block}"
    text = [
        f'extern "C" __global__ void __launch_bounds__({bounds}) '
        f"ENTRY({', '.join(f'void* {n}' for n in names)}, const og::RowSpace{template} space, void* work) {{",
        f"  void* const base[] = {{{', '.join(names)}}};",
        f"  og::reduce_rows<Fused, {', '.join(chosen)}>(base, space, (Fused::Addend*)work);",
        "}",
    ]
    tiling = Tiling((*range(outer),), 0, (0, 0), 1, rows, length, chunk, length, tuple(parts), work)
    blocks, left = totals_words(layout, tiling) if sums else (0, ())
    if blocks:
        text += totals_entry([names[i] for i in sums], tiling)
    source = source_of(loop, layout.variant, "rows.cuh", "\n".join(text))
    words = [rows, chunk, length, length // cut.vector, layout.dims[-1] // cut.vector, *(parts or [0]), *layout.dims]
    words += [step for strides in layout.strides for step in strides]
    return SumLaunch(
        source=source,
        totals=second_stage(source) if blocks else None,
        stores=stores,
        sums=tuple(stores[i - len(loop.loads)] for i in sums),
        blocks=(-(-chunks // cut.groups), blocks),
        words=(tuple(words), left),
        work=work,
        addend="f64" if "using Addend = double" in source.functor else "f32",
        places=(*range(len(loop.loads)), *(len(loop.loads) + i for i in stores)),
        threads=cut.block,
    )


def _apart(loop: Loop, layout: Layout, alignment: int) -> list[SumLaunch]:
    parts, loads = sums_apart(loop, layout), len(loop.loads)
    adding = sum_launches(*parts.sums, alignment=alignment)
    # The row values lie behind what sums leave, each from a multiple of 256 bytes on.
    room = max(item.bytes for item in adding)
    rows = prod(layout.dims[: len(layout.dims) - layout.row_rank])
    starts = [-(-room // 256) * 256 + k * -(-rows * 8 // 256) * 256 for k in range(parts.count)]
    room = starts[-1] + rows * 8 if starts else room
    made = []
    if parts.values is not None:
        item = row_launch(*parts.values, (), alignment=alignment)
        places = (*range(loads), *[None] * parts.count)
        inside = tuple((loads + k, start) for k, start in enumerate(starts))
        made.append(replace(item, places=places, inside=inside, room=room))
    for item in adding:
        stores, sums = (tuple(parts.summed[i] for i in own) for own in (item.stores, item.sums))
        places = (*range(loads), *[None] * parts.count, *(loads + i for i in stores))
        inside = tuple((loads + k, start) for k, start in enumerate(starts))
        made.append(replace(item, stores=stores, sums=sums, places=places, inside=inside, room=room))
    if parts.rest is not None:
        made.append(row_launch(*parts.rest, parts.others, alignment=alignment))
    return made


def _power_of_two(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()
