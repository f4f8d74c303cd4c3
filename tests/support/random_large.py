"""Random graphs over large arrays, of sizes on both sides of thresholds at which kernels are cut or walked differently.

The arrays of `random_scenario` are mostly small: one box, one thread and short rows are enough for them. Here an array
has 16,000 to 260,000 elements: few long rows, many short ones, tall and wide columns, and three to five axes, some of
which an operand has. Most axes are symbols, and one executable is called below and above a size in turns.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import numpy as np
from random_rows import row_graph
from random_scenario import Growing, Scenario, choose_outputs, largest_value
from random_steps import LARGE_STEPS, step

import opgraph as og
from opgraph.ir import dtypes
from opgraph.ir.logical_tensor import LogicalTensor

#: Numbers of elements at which a schedule changes. Each is drawn as often as it is listed.
ELEMENTS = (
    16_384,  # the smallest of several boxes (schedule/cpu_tiles.py)
    32_768,  # more are several boxes; columns are added up, or cut (cpu_tiles.py, split_columns.py)
    32_768,
    65_536,  # threads (runtime/threads.py); the size of the L2 cache (partition/reduction_analysis.py)
    65_536,
    100_000,
    131_072,  # rows whose columns are added up at once (kernels/cpu/row_column_sums.h)
    262_144,  # 16 boxes of the smallest size: enough of them, so that rows need not be cut (cpu_tiles.py: ENOUGH)
)
#: Thresholds of huge arrays: results that bypass the caches (kernels/math/lane_memory.h), rows that are prefetched
#: (cpu/row_lanes.h), boxes of more than the smallest size (cpu_tiles.py).
HUGE = (1 << 20, 3 << 20, 1 << 22, 5 << 20)
#: Lengths of an axis at which a schedule changes.
LENGTHS = (
    8,  # lanes that are rows (interleaved_rows.py), rows added up (sum_columns.h), short runs (reduction_analysis.py)
    12,  # addends that are added one by one (kernels/cpu/boxes.h: few)
    16,  # a vector, enough rows to be side by side, rows of a tile (cpu.py, interleaved_rows.py, pointwise.h)
    24,  # short rows in two operands (interleaved_rows.py: SHORT_ROW)
    32,  # few rows (cpu_tiles.py: FEW_ROWS), lanes of a sum (cpu/boxes.h)
    48,  # short rows in one operand (interleaved_rows.py: SHORT_ROW)
    64,  # neighbouring rows, runs of a group, a block of a row (interleaved_rows.py, grouped_rows.py, row_vectors.h)
    128,  # rows of eight vectors, short rows made long, columns of a tile (cpu.py, merged_axes.py, pointwise.h)
    256,  # a strip, columns in a box, long columns (cpu/f16_strips.h, split_columns.py)
    512,  # a thread's chunk is a multiple of this (pointwise.h)
    1024,  # columns of a turn (inner_reduction.h); 4 KiB of f32: one set of a cache, copied in blocks (pointwise.h)
    2048,  # a stretch (merged_axes.py), rows in turns (cpu/inner_reduction.h: first_cache)
    4096,  # cells of a box (cpu_tiles.py: MAX_CELLS)
    8192,  # rows that are written from the end (cpu/row_lanes.h: near_elements)
    16_384,  # elements of the smallest box
    21_845,  # three values of f32 kept for each element of a row (cpu/row_vectors.h: keep_bytes)
    32_768,  # one of f64, two of f32; one box
    65_536,  # rows that are cut (cpu_tiles.py: LONG_ROW), one kept value of f32
    131_072,  # the largest box (cpu_tiles.py: LARGEST)
)
_SMALL = (1, 1, 2, 2, 3, 3, 4, 5, 6, 7)
#: No value has more elements.
_LARGEST = 400_000


def large_scenario(seed: int, *, huge: bool = False) -> Scenario:
    """The scenario of a seed.

    Args:
        huge: its arrays have a million elements and more.
    """
    rng = random.Random(f"large {seed}")
    kind = rng.random()
    dtype = rng.choice(("f64", "f64", "f32", "f32", "f32", "bf16", "f16"))
    if kind < 0.2:
        return _of_rows(rng, dtype, huge)
    if kind < 0.6:
        return _of_sums(rng, dtype, huge)
    rank = rng.choice((1, 2, 2, 2, 3, 3, 3, 4, 5))
    shape = large_sizes(rng, rank, huge=huge)
    dims: list[int | str] = list(shape)
    if rng.random() < 0.75:
        for axis, size in enumerate(shape):
            if size > 1 and shape.count(size) == 1 and rng.random() < 0.75:
                dims[axis] = f"n{axis}"
    first = {d: size for d, size in zip(dims, shape, strict=True) if isinstance(d, str)}
    bindings = [first, *(_other_sizes(rng, dims, huge) for _ in range(2) if first)]
    grown = Growing(rng, dtype, tuple(dims), bindings, rng.random() < 0.7, largest=_most(huge))
    grown.feeds = [{} for _ in bindings]
    for _ in range(rng.randint(1, 2)):
        grown.input(dtype, grown.dims)
    for _ in range(rng.choice((1, 2, 3) if huge else (2, 3, 4, 5, 6, 8))):
        step(grown, LARGE_STEPS)
    choose_outputs(grown)
    graph = grown.graph.finalize()
    later = [feeds for feeds in grown.feeds[1:] if largest_value(graph, feeds) <= grown.largest]
    return Scenario(graph, [grown.feeds[0], *later], grown.smooth)


def _of_rows(rng: random.Random, dtype: str, huge: bool) -> Scenario:
    """A graph with several reductions along the same axes, all of whose sizes are symbols."""
    graph = row_graph(rng.getrandbits(32), dtype, not_last=rng.random() < 0.5)
    rank = max(len(t.dims or ()) for t in graph.inputs)
    numpy, feeds = dtypes.get(dtype).numpy, []
    while len(feeds) < (1 if huge else 3):
        extents = large_sizes(rng, rank, huge=huge)
        draw = np.random.default_rng(rng.getrandbits(32))
        shapes = {
            str(t.name): tuple(d if isinstance(d, int) else extents[int(str(d)[1:])] for d in t.dims or ())
            for t in graph.inputs
        }
        found = {n: np.asarray(draw.standard_normal(s)).astype(numpy) for n, s in shapes.items()}
        if largest_value(graph, found) <= _most(huge):
            feeds.append(found)
    return Scenario(graph, feeds, True)


def _most(huge: bool) -> int:
    return 2 * max(HUGE) if huge else _LARGEST


class _Sums:
    """A graph over one shape: reductions along a few sets of axes, and sums to the shapes of its inputs.

    Attributes:
        reads_sums: other ops read the results of reductions; else columns may be added up by a loop of their own.
        is_costly: either side of a choice costs so much that kernels use branches.
    """

    def __init__(
        self, rng: random.Random, dtype: str, dims: tuple[int | str, ...], axes: Sequence[tuple[int, ...]]
    ) -> None:
        self.rng, self.dtype, self.dims, self.axes = rng, dtype, dims, axes
        self.graph = og.Graph()
        self.inputs = 0
        self.whole = [self._input(self.dims) for _ in range(rng.randint(1, 2))]
        self.parts = [self._input(self._part()) for _ in range(rng.randint(0, 2))]
        self.made: list[LogicalTensor] = []
        self.reductions = rng.choice((_SUMS, _REDUCTIONS))
        self.reads_sums = rng.random() < 0.6
        self.is_costly = dtype != "f64" and rng.random() < 0.2

    def _input(self, dims: Sequence[int | str], dtype: str = "") -> LogicalTensor:
        self.inputs += 1
        return self.graph.input(f"x{self.inputs - 1}", dtype or self.dtype, tuple(dims))

    def _part(self) -> tuple[int | str, ...]:
        """The shape, or a suffix of it, with some axes 1: those of a reduction, or any."""
        axes = self.rng.choice(self.axes)
        some = self.rng.random() < 0.5
        ones = {a for a in range(len(self.dims)) if (a in axes if some else self.rng.random() < 0.5)}
        kept = tuple(1 if a in ones else d for a, d in enumerate(self.dims))
        return kept if self.rng.random() < 0.5 else kept[next((a for a, d in enumerate(kept) if d != 1), len(kept)) :]

    def begin_with_part(self, axis: int) -> None:
        """Makes kernels read an input of size 1 along this axis first."""
        part = self._input([1 if a == axis else d for a, d in enumerate(self.dims)])
        self.whole.append(self.graph.add_op("Multiply", part, self.whole[-1]))
        self.made.append(self.whole[-1])

    def step(self) -> None:
        rng, pick = self.rng, self.rng.choice
        kind = rng.random()
        value = pick(self.whole[-3:])
        if kind < 0.3:
            other = pick([*self.whole, *self.parts])
            made = self.graph.add_op(
                pick(("Add", "Subtract", "Multiply", "Maximum")), *pick(((value, other), (other, value)))
            )
            self.whole.append(made)
        elif kind < 0.45:
            made = self.graph.add_op(pick(_CHEAP), value)
            self.whole.append(made)
        elif kind < (0.6 if self.is_costly else 0.52):
            other = pick([*self.whole, *self.parts])
            condition = self.graph.add_op("Less", value, other)
            if self.is_costly:
                other, value = self._through(_COSTLY[:5], other), self._through(_COSTLY[5:], value)
            made = self.graph.add_op("Select", condition, other, value)
            self.whole.append(made)
        elif kind < 0.8:
            keep = rng.random() < 0.7
            made = self.graph.add_op(pick(self.reductions), value, axes=pick(self.axes), keep_dims=keep)
            if keep and self.reads_sums:
                self.parts.append(made)
        else:
            made = self.graph.add_op("SumTo", value, self._input(self._part(), "boolean"))
            if self.reads_sums:
                self.parts.append(made)
        self.made.append(made)

    def _through(self, kinds: Sequence[str], value: LogicalTensor) -> LogicalTensor:
        for kind in self.rng.sample(kinds, 3):
            value = self.graph.add_op(kind, value)
        return value

    def ended(self) -> og.Graph:
        """The finalized graph; its outputs are some values, and the last one."""
        rng = self.rng
        wanted = [*rng.sample(self.made, min(len(self.made), rng.choice((1, 2, 3, 4, 10)))), self.made[-1]]
        chosen = list({t.id: t for t in wanted}.values())
        self.graph.set_outputs(chosen)
        return self.graph.finalize()


_CHEAP = ("Sigmoid", "Abs", "Neg", "Tanh", "Square", "ReLU", "Erf")
_COSTLY = ("Mish", "Tanh", "Atan", "GELU", "Swish", "SoftPlus", "Asinh", "Erf", "Sigmoid", "HardSwish")
#: Reductions that become sums of columns, and others with them.
_SUMS = ("ReduceSum", "ReduceMean")
_REDUCTIONS = ("ReduceSum", "ReduceSum", "ReduceMean", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceL2", "ReduceProd")


def _of_sums(rng: random.Random, dtype: str, huge: bool) -> Scenario:
    """A graph whose ops go over one space, mostly in one loop."""
    rank = rng.choice((1, 2, 2, 2, 3, 3, 4, 5))
    axes = [_some_axes(rng, rank) for _ in range(rng.choice((1, 1, 2)))]
    groups = rank > 2 and rng.random() < 0.5
    apart = rng.random() < 0.5  # an operand lacks an axis of rows, between two that it has or anywhere
    if groups:  # the axes of a group norm with the channels last
        rank = 5 if apart else rank
        axes = [tuple(a for a in range(1, rank) if a != rank - 2)]

    def drawn() -> tuple[int, ...]:
        while True:
            found = _sizes_of_groups(rng, rank) if groups and not huge else large_sizes(rng, rank, huge=huge)
            if math.prod(found) <= _most(huge):
                return found

    # If sizes are declared, the choice of kernels depends on them, too (reduction_analysis.py: CACHED).
    are_declared = rng.random() < 0.25
    grown = _Sums(rng, dtype, drawn() if are_declared else tuple(f"n{axis}" for axis in range(rank)), axes)
    if apart and rank > 1:
        grown.begin_with_part(2 if groups else rng.choice(axes[0]))
    for _ in range(rng.choice((2, 3) if huge else (2, 4, 5, 6, 8, 10))):
        grown.step()
    graph, feeds = grown.ended(), []
    for _ in range(1 if huge or are_declared else 3):
        extents = drawn()
        draw = np.random.default_rng(rng.getrandbits(32))
        found = {}
        for tensor in graph.inputs:
            shape = tuple(d if isinstance(d, int) else extents[int(str(d)[1:])] for d in tensor.dims or ())
            numbers = draw.random(shape) < 0.5 if tensor.dtype == "boolean" else draw.uniform(-2, 2, shape)
            found[str(tensor.name)] = np.asarray(numbers).astype(dtypes.get(tensor.dtype).numpy)
        feeds.append(found)
    return Scenario(graph, feeds, True)


def _some_axes(rng: random.Random, rank: int) -> tuple[int, ...]:
    """Axes to reduce: the leading ones, or any."""
    if rank > 1 and rng.random() < 0.5:
        return tuple(range(rng.randint(1, rank - 1)))
    return tuple(a for a in range(rank) if rng.random() < 0.5) or (rng.randrange(rank),)


def _sizes_of_groups(rng: random.Random, rank: int) -> tuple[int, ...]:
    """Sizes whose last axis is a run of a row, and the one before it is the axis of neighbouring rows."""
    wanted = rng.choice(ELEMENTS)
    run, groups = (
        rng.choice((1, 2, 3, 4, 5, 8, 16, 31, 32, 63, 64, 65)),
        rng.choice((1, 2, 3, 4, 7, 8, 16, 32, 33, 100)),
    )
    batch = rng.choice((1, 1, 2, 3, 15, 16))
    left = max(wanted // (run * groups * batch), 1)
    inner = [1] * (rank - 3)
    for place in range(rank - 3):
        inner[place] = max(left + rng.choice((-1, 0, 1)), 1) if place == 0 else rng.choice((1, 2, 3, 7, 8))
        left = max(left // inner[place], 1)
    return (batch, *inner, groups, run)


def large_sizes(rng: random.Random, rank: int, *, huge: bool = False) -> tuple[int, ...]:
    """The sizes of an array: all but one are drawn, and that one reaches a number of elements, or just misses it."""
    wanted = rng.choice(HUGE if huge else ELEMENTS)
    found: list[int] = []
    for _ in range(rank - 1):
        room = max(wanted // math.prod(found), 1)
        near = [n + off for n in LENGTHS for off in (-1, 0, 0, 1) if n + off <= room]
        small = [n for n in _SMALL if n <= room]
        found.append(rng.choice(near if near and rng.random() < 0.55 else small))
    length = max(wanted // math.prod(found) + rng.choice((-1, 0, 0, 1, 1)), 1)
    found.insert(rng.choice((rank - 1, 0, rng.randrange(rank))), length)
    return tuple(found)


def _other_sizes(rng: random.Random, dims: Sequence[int | str], huge: bool) -> dict[str, int]:
    """Other sizes for the symbols of a shape, of no more elements than a value may have, no two alike."""
    while True:
        found = {d: size for d, size in zip(dims, large_sizes(rng, len(dims)), strict=True) if isinstance(d, str)}
        sizes = [found.get(d, d) if isinstance(d, str) else d for d in dims]
        if math.prod(sizes) <= _most(huge):
            return found
