"""CUDA kernels of loops with sums: their source, and the arguments with the cut of the space."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

from opgraph.codegen.emitter import Emitter
from opgraph.codegen.kernel import KernelSource, source_of, text_of
from opgraph.codegen.reduction_finalize import emit_totals
from opgraph.ir import dtypes
from opgraph.loops.layout import KEPT, Layout
from opgraph.schedule.cuda_tiles import BLOCK_SIZE, Tiling
from opgraph.schedule.levels import Levels
from opgraph.schedule.schedule import CudaSums, Schedule

_COLUMNS = 32  # columns of a block of the second stage, if each column has its sum


@dataclass(frozen=True, slots=True, kw_only=True)
class SumLaunch:
    """One pass over the data: one kernel or two.

    Attributes:
        source: source of the first stage.
        totals: source of the second stage; None if there is only one.
        stores, sums: the stores of the whole loop that it computes, and those of them that are sums.
        blocks: thread blocks of both stages.
        words: arguments passed by value (64-bit words) of both stages.
        work: elements of the workspace, of dtype `addend`.
        addend: dtype of the addends.
        threads: threads of a block of the first stage.
        places: index of each operand among the loads and stores of the whole loop; None: it is in the workspace.
        inside: (index among the operands, bytes from the start of the workspace) of the operands in the workspace.
        room: bytes of the workspace, if `inside` needs more than `work`.
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
        """Bytes of the workspace."""
        return max(self.work * dtypes.BY_NAME[self.addend].itemsize, self.room)


def sum_launch(schedule: CudaSums) -> SumLaunch:
    """The launch of a schedule that adds up in tiles, for all stores of its loop."""
    loop, layout, tiling = schedule.loop, schedule.layout, schedule.tiling
    sums = layout.sums
    rank, operands, count = len(layout.dims), len(layout.strides), len(sums)
    index = "og::u32" if schedule.narrow else "og::i64"
    tx, tm = tiling.threads
    names = [*[f"x{i}" for i in range(len(loop.loads))], *[f"y{i}" for i in range(len(loop.stores))]]
    pointers = ", ".join(f"void* {n}" for n in names)
    bounds = f"{BLOCK_SIZE}, {schedule.blocks}" if schedule.blocks else f"{BLOCK_SIZE}"
    chosen = [str(schedule.vector), str(schedule.unroll), str(tx), str(tm), index, str(tiling.kept)]
    chosen += [str(schedule.group)] if schedule.group else []
    head = f'extern "C" __global__ void __launch_bounds__({bounds}) '
    first = [
        f"{head}ENTRY({pointers}, const og::Tiles<{rank}, {operands}, {count}> tiles, void* work) {{",
        f"  void* const base[] = {{{', '.join(names)}}};",
        f"  og::sum_tiles<Fused, {', '.join(chosen)}>(base, tiles, (Fused::Addend*)work);",
        "}",
    ]
    source = source_of(schedule, "cuda/tiled_sums.cuh", "\n".join(first))
    blocks, words = totals_words(layout, tiling)
    return SumLaunch(
        source=source,
        totals=totals_source(schedule, tiling) if blocks else None,
        stores=tuple(range(len(loop.stores))),
        sums=tuple(i - len(loop.loads) for i in sums),
        blocks=(tiling.blocks, blocks),
        words=(_tiles(layout, tiling), words),
        work=tiling.work,
        addend=addend_of(schedule),
        places=tuple(range(len(names))),
    )


def addend_of(schedule: Schedule) -> str:
    """The dtype of the addends in the kernel of a schedule."""
    return "f64" if Levels(schedule.loop, schedule.layout.variant).addend() == "double" else "f32"


def totals_source(schedule: Schedule, tiling: Tiling) -> KernelSource:
    """The second stage: a separate text, shared by partitions with such sums. Both stages compile at the same time."""
    adding = Emitter(schedule.loop, schedule.layout.variant)
    adding.put("struct Fused {")
    adding.emit_sums()
    emit_totals(adding)
    results = [f"y{k}" for k in range(len(adding.sums))]
    entry = [
        f'extern "C" __global__ void __launch_bounds__({BLOCK_SIZE}) '
        f"ENTRY({', '.join(f'void* {n}' for n in results)}, "
        f"const og::AllLeft<{tiling.kept + 2}, {len(results)}> left, void* work) {{",
        f"  void* const y[] = {{{', '.join(results)}}};",
        "  og::totals<Fused>(y, left, (const Fused::Addend*)work);",
        "}",
    ]
    return replace(text_of(adding.functor(), "cuda/reduction_finalize.cuh", "\n".join(entry)), schedule=schedule.name)


def _tiles(layout: Layout, tiling: Tiling) -> tuple[int, ...]:
    """The words of og::Tiles."""
    last = len(layout.dims) - 1
    order = (*tiling.order, last)
    words = [tiling.groups, tiling.rows, tiling.columns, tiling.row_chunk, tiling.column_chunk]
    words += [tiling.row_chunks, tiling.column_chunks, *tiling.parts, *(layout.dims[a] for a in order)]
    return (*words, *(strides[a] for strides in layout.strides for a in order))


def totals_words(layout: Layout, tiling: Tiling) -> tuple[int, tuple[int, ...]]:
    """Blocks of the second stage, and the words of og::AllLeft."""
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
