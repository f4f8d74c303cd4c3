"""CUDA kernels of loops with sums: their source, and the arguments that say how the space is cut."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from opgraph.codegen.emitter import Emitter
from opgraph.codegen.kernel import BYTES_IN_FLIGHT, NARROW, KernelSource, packed_vector, source_of, text_of
from opgraph.codegen.rolled import group_of
from opgraph.codegen.tier import approximate
from opgraph.codegen.totals import put_totals
from opgraph.ir import dtypes
from opgraph.loops.layout import CONTIGUOUS, KEPT, STRIDED, Layout
from opgraph.loops.loop import Loop
from opgraph.loops.tiles import BLOCK_SIZE, Tiling, passes, tiled

_MANY = 48  # statements
_COLUMNS = 32  # that a block of the second stage takes where each column has its sum


@dataclass(frozen=True, slots=True, kw_only=True)
class SumLaunch:
    """One pass over the data: one kernel or two.

    Attributes:
        source: of the first stage.
        totals: of the second one, None where the first does it all.
        stores: which stores of the whole loop it makes, and which of these are sums.
        blocks: of both stages.
        words: arguments passed by value (64-bit words) of both stages.
        work: elements of the workspace, of `addend`.
        addend: dtype of what is added up.
        threads: of a block of the first stage.
        places: of each operand among the loads and stores of the whole loop; None: in the workspace.
        inside: (place among the operands, bytes from the start of the workspace) of these.
        room: bytes of the workspace, where `inside` needs more than `work`.
    """

    source: KernelSource
    totals: KernelSource | None
    stores: tuple[int, ...]
    sums: tuple[int, ...]
    blocks: tuple[int, int]
    words: tuple[tuple[int, ...], tuple[int, ...]]
    work: int
    addend: str
    places: tuple[int | None, ...]
    threads: int = BLOCK_SIZE
    inside: tuple[tuple[int, int], ...] = ()
    room: int = 0

    @property
    def bytes(self) -> int:
        """Of the workspace."""
        return max(self.work * dtypes.BY_NAME[self.addend].itemsize, self.room)


def sum_launches(loop: Loop, layout: Layout, *, alignment: int = 16) -> list[SumLaunch]:
    """The launches for a layout with sums, of at least one element.

    Args:
        alignment: the power of two up to 16 that divides the address of every contiguous operand.
    """
    vector = packed_vector(loop, layout, alignment, whole_rows=False)
    made = []
    for part, selected, stores in passes(loop, layout, vector):
        made.append(_launch(part, selected, stores, packed_vector(part, selected, alignment, whole_rows=False)))
    return made


def _launch(loop: Loop, layout: Layout, stores: tuple[int, ...], vector: int) -> SumLaunch:
    if not layout.variant.has_sums:
        raise AssertionError("a pass without a sum")
    tiling = tiled(layout, vector)
    sums = layout.sums
    rank, operands, count = len(layout.dims), len(layout.strides), len(sums)
    narrow = layout.size < NARROW and tiling.blocks < NARROW
    index = "og::u32" if narrow else "og::i64"
    tx, tm = tiling.threads
    names = [*[f"x{i}" for i in range(len(loop.loads))], *[f"y{i}" for i in range(len(loop.stores))]]
    pointers = ", ".join(f"void* {n}" for n in names)
    emitter = Emitter(loop, layout.variant, approximate(loop, layout.variant))
    group = group_of(emitter, vector)
    unroll = 1 if group else _unroll(loop, layout, vector)
    # Of long loops compilers make room for a second block, and spill. Of short ones in 16 bits that all of a block adds
    # up they take 60 registers where 48 do, with which a fifth block runs.
    blocks = 1 if len(loop.statements) > _MANY else 5 if vector == 8 and tm == 1 else 0
    bounds = f"{BLOCK_SIZE}, {blocks}" if blocks else f"{BLOCK_SIZE}"
    head = f'extern "C" __global__ void __launch_bounds__({bounds}) '
    first = [
        f"{head}ENTRY({pointers}, const og::Tiles<{rank}, {operands}, {count}> tiles, void* work) {{",
        f"  void* const base[] = {{{', '.join(names)}}};",
        f"  og::sum_tiles<Fused, {vector}, {unroll}, {tx}, {tm}, {index}, {tiling.kept}{f', {group}' if group else ''}>"
        "(base, tiles, (Fused::Addend*)work);",
        "}",
    ]
    source = source_of(loop, layout.variant, "sums.cuh", "\n".join(first), rolled=group > 0)
    blocks, words = totals_words(layout, tiling)
    return SumLaunch(
        source=source,
        totals=totals_source(emitter, tiling) if blocks else None,
        stores=stores,
        sums=tuple(stores[i - len(loop.loads)] for i in sums),
        blocks=(tiling.blocks, blocks),
        words=(_tiles(layout, tiling), words),
        work=tiling.work,
        addend="f64" if emitter.addend() == "double" else "f32",
        places=(*range(len(loop.loads)), *(len(loop.loads) + i for i in stores)),
    )


def totals_source(emitter: Emitter, tiling: Tiling) -> KernelSource:
    """The second stage: a text of its own, which partitions with such sums share, and which compiles beside the first.

    Args:
        emitter: of the first stage's loop.
    """
    adding = Emitter(emitter.loop, emitter.variant)
    adding.put("struct Fused {")
    adding.put_sums()
    put_totals(adding)
    results = [f"y{k}" for k in range(len(adding.sums))]
    entry = [
        f'extern "C" __global__ void __launch_bounds__({BLOCK_SIZE}) '
        f"ENTRY({', '.join(f'void* {n}' for n in results)}, "
        f"const og::AllLeft<{tiling.kept + 2}, {len(results)}> left, void* work) {{",
        f"  void* const y[] = {{{', '.join(results)}}};",
        "  og::totals<Fused>(y, left, (const Fused::Addend*)work);",
        "}",
    ]
    return text_of(adding.functor(), "totals.cuh", "\n".join(entry))


def _unroll(loop: Loop, layout: Layout, vector: int) -> int:
    if KEPT in layout.variant.operands:
        return 1  # a thread has one pack in a row
    kinds = layout.variant.operands
    read = loop.reads()
    loaded = sum(
        vector * dtypes.BY_NAME[x.dtype].itemsize
        for x, kind in zip(loop.loads, kinds)
        if x.name in read and not x.is_position and kind in (CONTIGUOUS, STRIDED)
    )
    return max(min(BYTES_IN_FLIGHT // loaded, 4), 1) if loaded else 1


def _tiles(layout: Layout, tiling: Tiling) -> tuple[int, ...]:
    """og::Tiles."""
    last = len(layout.dims) - 1
    order = (*tiling.order, last)
    words = [tiling.groups, tiling.rows, tiling.columns, tiling.row_chunk, tiling.column_chunk]
    words += [tiling.row_chunks, tiling.column_chunks, *tiling.parts, *(layout.dims[a] for a in order)]
    return (*words, *(strides[a] for strides in layout.strides for a in order))


def totals_words(layout: Layout, tiling: Tiling) -> tuple[int, tuple[int, ...]]:
    """Blocks of the second stage, and og::AllLeft."""
    blocks = 0
    words: list[int] = []
    for place, part in zip(layout.sums, tiling.parts, strict=True):
        strides, is_column = layout.strides[place], layout.variant.operands[place] == KEPT
        inner = tiling.columns if is_column else tiling.column_chunks
        # Axes of the workspace: those kept by some sum, the chunks of rows, the chunks of columns.
        axes = []
        weight = tiling.row_chunks * inner
        for axis in reversed(tiling.order[: tiling.kept]):
            axes.append((layout.dims[axis], weight, strides[axis]))
            weight *= layout.dims[axis]
        axes = axes[::-1]
        kept = [a for a in axes if a[2]]
        added = [a for a in axes if not a[2]]
        added += [(tiling.row_chunks, inner, 0), (1 if is_column else tiling.column_chunks, 1, 0)]
        cells, terms = prod(a[0] for a in kept), prod(a[0] for a in added)
        columns = tiling.columns if is_column else 1
        ordered = [*kept, *added]
        words += [blocks, part, cells, terms if part >= 0 else 0, columns]
        words += [a[0] for a in ordered] + [a[1] for a in ordered] + [a[2] for a in ordered]
        words += [len(kept), strides[-1]]
        blocks += cells * -(-columns // (_COLUMNS if is_column else 1)) if part >= 0 else 0
    return blocks, tuple(words)
