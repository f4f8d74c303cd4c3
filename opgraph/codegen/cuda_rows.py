"""CUDA kernels of loops over rows: their source, and their arguments."""

from __future__ import annotations

from dataclasses import replace
from math import prod

from opgraph.codegen.cuda_row_cut import BLOCKS, CHUNK, RowCut, adds_up, row_cut
from opgraph.codegen.cuda_sums import SumLaunch, sum_launches, totals_source, totals_words
from opgraph.codegen.emitter import Emitter
from opgraph.codegen.kernel import source_of
from opgraph.loops.apart import sums_apart, without_sums
from opgraph.loops.layout import KEPT, Layout
from opgraph.loops.loop import Loop
from opgraph.loops.passes import pass_counts
from opgraph.loops.tiles import Tiling


def row_launches(loop: Loop, layout: Layout, *, alignment: int = 16) -> list[SumLaunch]:
    """The launches for a layout with rows, of at least one row: one, unless there are sums that it cannot add up.

    Rows of nothing have no sums: who calls says that they are 0.

    Args:
        alignment: the power of two up to 16 that divides the address of every contiguous operand.
    """
    if layout.size == 0:
        rest = without_sums(loop, layout)
        return row_launch(*rest, alignment=alignment) if rest else []
    if layout.sums and not adds_up(layout, row_cut(loop, layout, alignment=alignment)):
        return _apart(loop, layout, alignment)
    return row_launch(loop, layout, tuple(range(len(loop.stores))), alignment=alignment)


def row_launch(loop: Loop, layout: Layout, stores: tuple[int, ...], *, alignment: int = 16) -> list[SumLaunch]:
    """The launch for a layout with rows, of at least one row; one for each stage where blocks share rows.

    Args:
        stores: which stores of the caller's loop those of `loop` are.
        alignment: the power of two up to 16 that divides the address of every contiguous operand.
    """
    cut = row_cut(loop, layout, alignment=alignment)
    sums = layout.sums
    assert not sums or adds_up(layout, cut), "sums that the kernel of rows does not add up"
    outer = len(layout.dims) - layout.row_rank
    rows, length = prod(layout.dims[:outer]), prod(layout.dims[outer:])
    chunk = max(CHUNK, -(-rows // (BLOCKS * cut.groups))) if sums else 1
    chunks = -(-rows // chunk)
    parts: list[int] = []
    work = 0
    for place in sums if chunks > 1 else ():
        parts.append(work)
        each = length if layout.variant.operands[place] == KEPT else 1
        work += -(-each * chunks // cut.vector) * cut.vector  # packs are left in one access
    parts = parts or [-1] * len(sums)
    names = [*[f"x{i}" for i in range(len(loop.loads))], *[f"y{i}" for i in range(len(loop.stores))]]
    tiling = Tiling((*range(outer),), 0, (0, 0), 1, rows, length, chunk, length, tuple(parts), work)
    blocks, left = totals_words(layout, tiling) if sums else (0, ())
    source = source_of(loop, layout.variant, "rows.cuh", "\n".join(_entries(loop, layout, cut, names)))
    packs = length // cut.vector
    emitter = Emitter(loop, layout.variant)
    words = [rows, chunk, length, packs, layout.dims[-1] // cut.vector, cut.pieces, -(-packs // cut.pieces)]
    words += [*(parts or [0]), *layout.dims, *(step for strides in layout.strides for step in strides)]
    launch = SumLaunch(
        source=source,
        totals=totals_source(emitter, tiling) if blocks else None,
        stores=stores,
        sums=tuple(stores[i - len(loop.loads)] for i in sums),
        blocks=(-(-chunks // cut.groups), blocks),
        words=(tuple(words), left),
        work=work,
        addend="f64" if emitter.addend() == "double" else "f32",
        places=(*range(len(loop.loads)), *(len(loop.loads) + i for i in stores)),
        threads=cut.block,
    )
    if cut.pieces == 1:
        return [launch]
    work, shared = rows * cut.pieces * pass_counts(loop)[1], launch.blocks[0]
    made = []
    for stage in range(_stages(loop)):
        grid = shared if stage == pass_counts(loop)[0] else shared * cut.pieces
        entry = source if stage == 0 else replace(source, entry=f"{source.entry}_{stage}")
        made.append(replace(launch, source=entry, blocks=(grid, 0), work=work, addend="f64"))
    return made


def _stages(loop: Loop) -> int:
    """Of rows in pieces: one for each pass, and one for the results of rows."""
    return pass_counts(loop)[0] + any(s.per_row != "" for s in loop.stores)


def _entries(loop: Loop, layout: Layout, cut: RowCut, names: list[str]) -> list[str]:
    """The entry points: one, or that of each stage."""
    sums, operands = len(layout.sums), len(layout.strides)
    chosen = [str(n) for n in (cut.vector, cut.packs, cut.threads)]
    chosen += ["true" if flag else "false" for flag in (cut.held, cut.whole)] if cut.pieces == 1 else []
    index = "og::u32" if cut.narrow else "og::i64"
    chosen += [f"{cut.small}ull", index, str(layout.row_rank), str(cut.beside), str(cut.lead), f"{cut.loose}ull"]
    # Where a block takes many rows or packs one after the other, a compiler that saves registers for a second block
    # spills (sm_80), or asks for some operands late.
    bounds = f"{cut.block}, 1" if sums or not cut.held else f"{cut.block}"
    text = []
    for stage in range(_stages(loop) if cut.pieces > 1 else 1):
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


def _apart(loop: Loop, layout: Layout, alignment: int) -> list[SumLaunch]:
    parts, loads = sums_apart(loop, layout), len(loop.loads)
    adding = sum_launches(*parts.sums, alignment=alignment)
    making = row_launch(*parts.values, (), alignment=alignment) if parts.values is not None else []
    # The row values lie behind what these leave, each from a multiple of 256 bytes on.
    room = max(item.bytes for item in (*adding, *making))
    rows = prod(layout.dims[: len(layout.dims) - layout.row_rank])
    starts = [-(-room // 256) * 256 + k * -(-rows * 8 // 256) * 256 for k in range(parts.count)]
    room = starts[-1] + rows * 8 if starts else room
    made = []
    for item in making:
        places = (*range(loads), *[None] * parts.count)
        inside = tuple((loads + k, start) for k, start in enumerate(starts))
        made.append(replace(item, places=places, inside=inside, room=room))
    for item in adding:
        stores, sums = (tuple(parts.summed[i] for i in own) for own in (item.stores, item.sums))
        places = (*range(loads), *[None] * parts.count, *(loads + i for i in stores))
        inside = tuple((loads + k, start) for k, start in enumerate(starts))
        made.append(replace(item, stores=stores, sums=sums, places=places, inside=inside, room=room))
    if parts.rest is not None:
        made += row_launch(*parts.rest, parts.others, alignment=alignment)
    return made
