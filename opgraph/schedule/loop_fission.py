"""Splits one loop into several, each for some of its results (CUDA).

Some sums cannot share a loop: the partial sums for each row and for each column of one large matrix would take as much
memory as the matrix itself. The loop then runs several times, each time for some of its stores.

Sums of a loop over rows that the row kernel does not add up have a separate loop, without rows. The sum of
dy (x - mean) rstd over images, for each channel, needs the results of reductions over each row. The first loop computes
these row values and writes them to memory. The next one reads them as operands and adds up. The last one computes the
other results; it comes last since results may alias operands.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from opgraph.ir import dtypes
from opgraph.loops.layout import ROW, RUN, UNIFORM, Layout, Variant
from opgraph.loops.loop import Arg, Axes, Load, Loop, Statement, Store
from opgraph.schedule.cuda_tiles import tiled

#: Most elements of the tiles' partial sums: this number, or 1/16 of the space if that is more.
_LEFT = 65536


def without_sums(loop: Loop, layout: Layout) -> tuple[Loop, Layout, tuple[int, ...]] | None:
    """The loop with only its other results, its layout, and the indices of these results; None if there are none."""
    first = len(loop.loads)
    sums = layout.sums
    others = [i for i in range(len(loop.stores)) if first + i not in sums]
    return (loop.with_stores(others), selected(layout, first, others), tuple(others)) if others else None


def row_values(loop: Loop, layout: Layout) -> tuple[tuple[Loop, Layout] | None, tuple[Loop, Layout]]:
    """Two loops with their layouts, for a loop over rows with sums. The results of the first are only the row values
    that the sums need, one for each row in order. The second computes the sums; its last loads are the row values.

    The first one is None if sums need no row values.
    """
    first = len(loop.loads)
    summed = tuple(i - first for i in layout.sums)
    needed, borrowed = _needed(loop, layout, summed)
    types = loop.dtype_of()
    # The types in which they are computed: f16 and bf16 values are f32 until they are rounded.
    wide = {name: "f32" if dtypes.BY_NAME[types[name]].compute == "float" else types[name] for name in borrowed}
    along_rows = _row_strides(layout)
    kind = ROW if any(along_rows) else UNIFORM
    values = None
    if borrowed:
        stores = tuple(Store(value=name, dtype=wide[name], per_row="kept") for name in borrowed)
        own = replace(loop, stores=stores).with_stores(range(len(stores)))
        values = own, _with_operands(layout, first, [], [(along_rows, kind)] * len(stores), layout.row_rank)
    loads = [replace(x, align="right", rows=()) if x.align == "rows" else x for x in loop.loads]
    names = {name: f"x{first + i}" for i, name in enumerate(borrowed)}
    loads += [Load(name=names[name], dtype=wide[name]) for name in borrowed]
    adding = Loop(
        axes=(Axes(kind="parallel"),),
        loads=tuple(loads),
        statements=tuple(replace(s, args=_renamed(s, names)) for s in loop.statements if s.result in needed),
        stores=tuple(replace(s, value=names.get(s.value, s.value)) for s in (loop.stores[i] for i in summed)),
    )
    kept = [(layout.strides[first + i], layout.variant.operands[first + i]) for i in summed]
    bound = _with_operands(layout, first, [(along_rows, kind)] * len(borrowed), kept, 0)
    bound = replace(bound, results=tuple(layout.results[i] for i in summed))
    return values, (adding, bound)


def _needed(loop: Loop, layout: Layout, summed: tuple[int, ...]) -> tuple[set[str], list[str]]:
    """The statements that compute sums, and the row values that these read."""
    depth = loop.depths()
    fixed = {x.name for x, kind in zip(loop.loads, layout.variant.operands) if kind in (UNIFORM, ROW)}
    for s in loop.statements:
        if s.reduces or all(a in fixed for a in s.args if isinstance(a, str)):
            fixed.add(s.result)
    wanted = {loop.stores[i].value for i in summed}
    needed: set[str] = set()
    borrowed = []
    for s in reversed(loop.statements):
        if s.result not in wanted:
            continue
        if s.result in fixed and depth[s.result] > 0:
            borrowed.append(s.result)
        else:
            needed.add(s.result)
            wanted.update(a for a in s.args if isinstance(a, str))
    return needed, borrowed[::-1]


def _row_strides(layout: Layout) -> tuple[int, ...]:
    """Strides of an operand with one value for each row, in order."""
    outer = len(layout.dims) - layout.row_rank
    return tuple(prod(layout.dims[axis + 1 : outer]) if axis < outer else 0 for axis in range(len(layout.dims)))


def _with_operands(
    layout: Layout,
    first: int,
    loads: list[tuple[tuple[int, ...], str]],
    stores: list[tuple[tuple[int, ...], str]],
    row_rank: int,
) -> Layout:
    """The same space with more loads after the `first` existing ones, and other stores (each with strides and kind)."""
    own = [ROW if kind == RUN and not row_rank else kind for kind in layout.variant.operands[:first]]
    strides = (*layout.strides[:first], *(s for s, _ in (*loads, *stores)))
    kinds = "".join([*own, *(kind for _, kind in (*loads, *stores))])
    results = tuple(layout.shape for _ in stores)
    variant = Variant(kinds, layout.variant.flat)
    return replace(layout, results=results, strides=strides, variant=variant, row_rank=row_rank)


def _renamed(s: Statement, names: dict[str, str]) -> tuple[Arg, ...]:
    return tuple(names.get(a, a) if isinstance(a, str) else a for a in s.args)


def passes(loop: Loop, layout: Layout, vector: int) -> list[tuple[Loop, Layout, tuple[int, ...]]]:
    """The loop once for each run, with some of its stores, their layout and indices. Elementwise stores come last.

    They may overwrite an input that the other passes still read.
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
    """The layout of all `first` loads and of some stores."""
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
