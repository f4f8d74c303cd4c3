"""CUDA kernels of loops over rows: their source, and their arguments."""

from __future__ import annotations

from dataclasses import replace
from math import prod

from opgraph.codegen.cuda_sums import SumLaunch, addend_of, sum_launch, totals_source, totals_words
from opgraph.codegen.kernel import source_of
from opgraph.loops.layout import KEPT
from opgraph.schedule.cuda_row_tiles import adds_up
from opgraph.schedule.cuda_tiles import Tiling
from opgraph.schedule.reduction_passes import pass_counts
from opgraph.schedule.schedule import CudaRows, CudaSums, LoopFission, Schedule


def launches(schedule: Schedule) -> list[SumLaunch]:
    """The launches of a schedule with sums or rows (at least one row), in order."""
    if isinstance(schedule, LoopFission):
        return _fission_launches(schedule)
    if isinstance(schedule, CudaSums):
        return [sum_launch(schedule)]
    assert isinstance(schedule, CudaRows), schedule.name
    return row_launches(schedule)


def row_launches(schedule: CudaRows) -> list[SumLaunch]:
    """The launch of a schedule of rows; one for each stage if blocks share rows."""
    loop, layout, cut = schedule.loop, schedule.layout, schedule.tiles
    sums = layout.sums
    assert not sums or adds_up(layout, cut), "sums that the kernel of rows does not add up"
    outer = len(layout.dims) - layout.row_rank
    rows, length = prod(layout.dims[:outer]), prod(layout.dims[outer:])
    chunk = schedule.rows
    chunks = -(-rows // chunk)
    parts: list[int] = []
    work = 0
    for place in sums if chunks > 1 else ():
        parts.append(work)
        each = length if layout.variant.operands[place] == KEPT else 1
        work += -(-each * chunks // cut.vector) * cut.vector  # one access writes a pack
    parts = parts or [-1] * len(sums)
    names = [*[f"x{i}" for i in range(len(loop.loads))], *[f"y{i}" for i in range(len(loop.stores))]]
    tiling = Tiling((*range(outer),), 0, (0, 0), 1, rows, length, chunk, length, tuple(parts), work)
    blocks, left = totals_words(layout, tiling) if sums else (0, ())
    source = source_of(schedule, "cuda/inner_reduction.cuh", "\n".join(_entries(schedule, names)))
    packs = length // cut.vector
    words = [rows, chunk, length, packs, layout.dims[-1] // cut.vector, cut.pieces, -(-packs // cut.pieces)]
    words += [*(parts or [0]), *layout.dims, *(step for strides in layout.strides for step in strides)]
    launch = SumLaunch(
        source=source,
        totals=totals_source(schedule, tiling) if blocks else None,
        stores=tuple(range(len(loop.stores))),
        sums=tuple(i - len(loop.loads) for i in sums),
        blocks=(-(-chunks // cut.groups), blocks),
        words=(tuple(words), left),
        work=work,
        addend=addend_of(schedule),
        places=tuple(range(len(names))),
        threads=cut.block,
    )
    if cut.pieces == 1:
        return [launch]
    work, shared = rows * cut.pieces * pass_counts(loop)[1], launch.blocks[0]
    made = []
    for stage in range(schedule.stages):
        grid = shared if stage == pass_counts(loop)[0] else shared * cut.pieces
        entry = source if stage == 0 else replace(source, entry=f"{source.entry}_{stage}")
        made.append(replace(launch, source=entry, blocks=(grid, 0), work=work, addend="f64"))
    return made


def _entries(schedule: CudaRows, names: list[str]) -> list[str]:
    """The entry points: a single one, or one for each stage."""
    layout, cut = schedule.layout, schedule.tiles
    sums, operands = len(layout.sums), len(layout.strides)
    chosen = [str(n) for n in (cut.vector, cut.packs, cut.threads)]
    chosen += ["true" if flag else "false" for flag in (cut.held, cut.whole)] if cut.pieces == 1 else []
    index = "og::u32" if cut.narrow else "og::i64"
    chosen += [f"{cut.small}ull", index, str(layout.row_rank), str(cut.neighbours), str(cut.lead), f"{cut.loose}ull"]
    # If a block takes many rows or packs one after the other, a compiler that saves registers for a second block
    # spills (sm_80), or loads some operands late.
    bounds = f"{cut.block}, 1" if sums or not cut.held else f"{cut.block}"
    text = []
    for stage in range(schedule.stages):
        call = f"reduce_rows<Fused, {', '.join(chosen)}>(base, space, (Fused::Addend*)work)"
        if cut.pieces > 1:
            call = f"reduce_pieces<Fused, {', '.join([*chosen, str(stage)])}>(base, space, (double*)work)"
        text += [
            f'extern "C" __global__ void __launch_bounds__({bounds}) '
            f"ENTRY{f'_{stage}' if stage else ''}({', '.join(f'void* {n}' for n in names)}, "
            f"const og::RowSpace<{len(layout.dims)}, {operands}, {sums}> space, void* work) {{",
            f"  void* const base[] = {{{', '.join(names)}}};",
            f"  og::{call};",
            "}",
        ]
    return text


def _fission_launches(schedule: LoopFission) -> list[SumLaunch]:
    loads, count = len(schedule.loop.loads), schedule.count
    making = launches(schedule.values) if schedule.values is not None else []
    adding = [(launch, part.stores) for part in schedule.sums for launch in launches(part.schedule)]
    # The row values follow the partial sums in the workspace, each at a multiple of 256 bytes.
    room = max((item.bytes for item in (*(launch for launch, _ in adding), *making)), default=0)
    rows = prod(schedule.layout.dims[: len(schedule.layout.dims) - schedule.layout.row_rank])
    starts = [-(-room // 256) * 256 + k * -(-rows * 8 // 256) * 256 for k in range(count)]
    room = starts[-1] + rows * 8 if starts else room
    inside = tuple((loads + k, start) for k, start in enumerate(starts))
    made = []
    for item in making:
        made.append(replace(item, places=(*range(loads), *[None] * count), inside=inside, room=room))
    for item, own in adding:
        item = _of_whole(item, own, loads, count)
        made.append(replace(item, inside=inside, room=room))
    if schedule.rest is not None:
        made += [_of_whole(item, schedule.rest.stores, loads) for item in launches(schedule.rest.schedule)]
    return made


def _of_whole(launch: SumLaunch, stores: tuple[int, ...], loads: int, count: int = 0) -> SumLaunch:
    """The launch of one part, with stores of the whole loop; `count` row values are in the workspace."""
    own, sums = (tuple(stores[i] for i in places) for places in (launch.stores, launch.sums))
    return replace(launch, stores=own, sums=sums, places=(*range(loads), *[None] * count, *(loads + i for i in own)))
