"""A random graph over the whole registry that runs: every op on operands that fit it, with arrays for its inputs.

One seed is one scenario. Each value is stored with its result in f64 by the definitions, so that a step has the shapes
and can keep operands in the domain of an op. `random_steps` has the kinds of steps, `random_arrays` the layouts.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import numpy as np
from random_rows import row_graph, sizes

import opgraph as og
from opgraph.errors import OpGraphError
from opgraph.ir import dtypes, opdef
from opgraph.ir.logical_tensor import LogicalTensor
from opgraph.runtime.reference import by_reference

#: No value has more elements.
LARGEST = 150_000
#: The same for further arrays: `[n]` and `[n,1]` may broadcast to `[n,n]`.
_LARGEST_OF_OTHERS = 1 << 24
SPECIAL = (0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1e-45, 1e-310, 6e-8, 65504.0, 3e38, -1.0, 1.0)


@dataclass
class Scenario:
    """A graph and arrays for it.

    Attributes:
        feeds: one dict of arrays for each binding of its symbols; the first one fits by construction.
        smooth: inputs are irregular numbers of moderate size, so that differences approximate a gradient.
    """

    graph: og.Graph
    feeds: list[dict[str, np.ndarray]]
    smooth: bool


@dataclass
class Growing:
    """A scenario under construction.

    Attributes:
        dtype: the dtype of most values.
        dims: the declared sizes of the widest shape: an int or a symbol each.
        bindings: symbol -> size, one dict for each call.
        truth: the value of each tensor, by id, for the first binding.
        largest: the most elements of a value.
        reuses: an existing value replaces most further inputs of its shape.
    """

    rng: random.Random
    dtype: str
    dims: tuple[int | str, ...]
    bindings: list[dict[str, int]]
    smooth: bool
    largest: int = LARGEST
    reuses: bool = False
    graph: og.Graph = field(default_factory=og.Graph)
    values: list[LogicalTensor] = field(default_factory=list)
    truth: dict[int, np.ndarray] = field(default_factory=dict)
    inputs: dict[str, LogicalTensor] = field(default_factory=dict)
    feeds: list[dict[str, np.ndarray]] = field(default_factory=list)
    depth: dict[int, int] = field(default_factory=dict)

    def shape(self, tensor: LogicalTensor) -> tuple[int, ...]:
        return self.truth[tensor.id].shape

    def sized(self, dims: Sequence[int | str], binding: int = 0) -> tuple[int, ...]:
        return tuple(self.bindings[binding][d] if isinstance(d, str) else d for d in dims)

    def numbers(self, dtype: str, shape: tuple[int, ...], low: float = -4.0, high: float = 4.0) -> np.ndarray:
        """Random values of a dtype: irregular ones, or steps with ties and zeros, or with special ones among them."""
        draw = np.random.default_rng(self.rng.getrandbits(32))
        target = dtypes.get(dtype)
        if target.category == "bool":
            return draw.random(shape) < 0.5
        if target.category == "int":
            info: Any = np.iinfo(target.numpy if target.name not in ("s4", "u4") else np.int8)
            found = draw.integers(max(-9, info.min), 10, shape, endpoint=True)
            if self.rng.random() < 0.15:
                found = np.where(draw.random(shape) < 0.2, draw.choice([info.min, info.max], shape), found)
            return np.asarray(found).astype(target.numpy)
        how = 0 if self.smooth else self.rng.choice((0, 0, 1, 1, 2))
        found = draw.uniform(low, high, shape)
        if how == 1:
            found = np.clip(np.round(found * 4) / 4, low, high)
        elif how == 2:
            found = np.where(draw.random(shape) < 0.15, draw.choice(SPECIAL, shape), found)
        with np.errstate(all="ignore"):
            return np.asarray(found).astype(target.numpy)

    def input(self, dtype: str, dims: Sequence[int | str] | None = None, low: float = -4.0, high: float = 4.0) -> Any:
        """A new input of a broadcast of the widest shape, or of given sizes."""
        if self.reuses and dims is not None and (low, high) == (-4.0, 4.0) and self.rng.random() < 0.7:
            there = [t for t in self.values if t.dtype == dtype and self.graph_dims(t) == tuple(dims)]
            if there:
                return self.rng.choice(there)
        name = f"x{len(self.inputs)}"
        dims = self.part_of_widest() if dims is None else tuple(dims)
        declared: Any = dims
        if self.rng.random() < 0.06:
            declared = tuple(None if self.rng.random() < 0.5 else d for d in dims)
        tensor = self.graph.input(name, dtype, declared)
        for number, found in enumerate(self.feeds):
            found[name] = self.numbers(dtype, self.sized(dims, number), low, high)
        self.inputs[name] = tensor
        self.keep(tensor, self.feeds[0][name], 0)
        return tensor

    def part_of_widest(self) -> tuple[int | str, ...]:
        """The widest shape, with some axes 1 and some leading ones left out."""
        how = self.rng.random()
        if how < 0.45:
            return self.dims
        kept = tuple(1 if self.rng.random() < 0.35 else d for d in self.dims)
        return kept[self.rng.randrange(len(kept) + 1) :] if how < 0.8 else kept

    def constant(self, dtype: str) -> Any:
        """A constant, a scalar or an array."""
        shape = () if self.rng.random() < 0.6 else self.sized(self.part_of_widest())
        if any(isinstance(d, str) for d in self.dims) and shape:
            shape = (1,)
        value = self.numbers(dtype, shape)
        tensor = self.graph.constant(f"k{len(self.values)}_{self.rng.randrange(1000)}", value)
        self.keep(tensor, value, 0)
        return tensor

    def fixed(self, numbers: Sequence[int]) -> Any:
        """An input of whole numbers that are the same in every call: a shape, axes."""
        tensor = self.graph.input(f"x{len(self.inputs)}", "s32", (len(numbers),))
        for found in self.feeds:
            found[str(tensor.name)] = np.array(numbers, np.int32)
        self.inputs[str(tensor.name)] = tensor
        self.keep(tensor, self.feeds[0][str(tensor.name)], 0)
        return tensor

    def scalar(self, dtype: str, number: float) -> Any:
        """A constant number."""
        with np.errstate(over="ignore"):  # infinity is allowed
            array = np.asarray(number, dtypes.get(dtype).numpy)
        tensor = self.graph.constant(f"c{len(self.truth)}", array)
        self.keep(tensor, array, 0)
        return tensor

    def graph_dims(self, tensor: LogicalTensor) -> tuple[int | str, ...]:
        """The declared shape if every size or symbol of it is known, else the actual one."""
        dims = tensor.dims
        if dims is None or any(d is None or (isinstance(d, str) and d not in self.bindings[0]) for d in dims):
            return self.shape(tensor)
        return tuple(d for d in dims if d is not None)

    def keep(self, tensor: LogicalTensor, value: np.ndarray, depth: int) -> None:
        if tensor.dtype in dtypes.FLOATS:
            with np.errstate(all="ignore"):
                value = value.astype(np.float64)
        self.truth[tensor.id] = value
        self.depth[tensor.id] = depth
        self.values.append(tensor)

    def add(self, kind: str, *args: LogicalTensor, outputs: int | None = None, **attrs: Any) -> list[LogicalTensor]:
        """The results of one more op; empty if the op is refused or its result would be large."""
        known = [self.truth[t.id] for t in args]
        sizes = [a.shape for a in known]
        try:
            if opdef.get(kind, where="").is_pointwise and np.prod(np.broadcast_shapes(*sizes)) > self.largest:
                return []
        except ValueError:
            pass  # an op along a channel axis, or one that is refused below
        try:
            if any(not t.has_known_shape for t in args):
                self._tried(kind, args, outputs, attrs)
            made = self.graph.add_op(kind, *args, outputs=outputs, **attrs)
        except OpGraphError as error:
            assert len(str(error).splitlines()) == 3, str(error)
            return []
        op = self.graph.ops[-1]
        record = opdef.get(kind, where="")
        results: list[np.ndarray] = []
        with np.errstate(all="ignore"):
            for part in record.parts(op):
                working = ["f64" if t.dtype in dtypes.FLOATS else t.dtype for t in part.outputs]
                given = [self.truth[t.id] for t in part.inputs]
                results += by_reference(part, opdef.get(part.kind, where=""), given, working)
        tensors = list(made) if isinstance(made, tuple) else [made]
        for tensor, value in zip(tensors, results, strict=True):
            self.keep(tensor, value, 1 + max((self.depth[t.id] for t in args), default=0))
        return tensors

    def _tried(self, kind: str, args: Sequence[LogicalTensor], outputs: int | None, attrs: Mapping[str, Any]) -> None:
        """Refuses an op that the declared sizes leave open, if the sizes of the first binding do not fit."""
        graph = og.Graph()
        given = [t if t.is_constant else graph.input(f"t{t.id}", t.dtype, self.shape(t)) for t in dict.fromkeys(args)]
        known = dict(zip(dict.fromkeys(args), given, strict=True))
        graph.add_op(kind, *(known[t] for t in args), outputs=outputs, **attrs)

    def value(self, dtype: str, like: tuple[int, ...] | None = None) -> Any:
        """A value of a dtype: an existing one, a cast of one of another dtype, an input, or a constant.

        Args:
            like: a shape that it should broadcast with, if there is such a value.
        """
        how = self.rng.random()
        if how < 0.07:
            return self.constant(dtype)
        there = [t for t in self.values if t.dtype == dtype]
        if like is not None:
            there = [t for t in there if _broadcasts(self.shape(t), like)]
        if there and how < 0.9:
            return self.rng.choice(there[-5:] if self.rng.random() < 0.6 else there)
        if self.values and how < 0.95 and dtype in _CASTS:
            found = self.add("TypeCast", self.rng.choice(self.values), dtype=dtype)
            if found:
                return found[0]
        return self.input(dtype)

    def within(self, tensor: LogicalTensor, low: float, high: float) -> LogicalTensor:
        """The value, clamped if it leaves a range."""
        truth = self.truth[tensor.id]
        if tensor.dtype not in dtypes.FLOATS or np.all((truth >= low) & (truth <= high)) or self.rng.random() < 0.12:
            return tensor
        made = self.add("Clamp", tensor, min=float(np.float32(low)), max=float(np.float32(high)))
        return made[0] if made else tensor


_CASTS = ("f64", "f32", "bf16", "f16", "s64", "s32", "s8", "u8", "boolean")


def _broadcasts(a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    return all(x == y or 1 in (x, y) for x, y in zip(a[::-1], b[::-1], strict=False))


def scenario(seed: int, *, dtype: str | None = None, smooth: bool | None = None) -> Scenario:
    """The scenario of a seed.

    Args:
        dtype: of most values; None: drawn, mostly floats.
        smooth: inputs are irregular numbers; None: drawn.
    """
    from random_steps import step  # the steps are typed with Growing

    rng = random.Random(seed)
    if dtype is None and rng.random() < 0.08:
        return _of_rows(seed, rng)
    chosen = rng.choice(("f64",) * 4 + ("f32",) * 5 + ("bf16", "f16"))
    apart = random.Random(f"integers of {seed}")
    if dtype is None and apart.random() < 0.06:
        chosen = apart.choice(("s32", "s32", "s64", "s8", "u8", "boolean"))
    irregular = rng.random() < 0.5
    rank = rng.choice((0, 1, 1, 2, 2, 2, 3, 3, 4))
    sizes = _sizes(rng, rank)
    symbols = {}
    dims: list[int | str] = list(sizes)
    if rng.random() < 0.25:
        for axis, size in enumerate(sizes):
            if size not in symbols.values() and rng.random() < 0.7:
                dims[axis] = f"n{axis}"
                symbols[f"n{axis}"] = size
    bindings = [symbols]
    if symbols:
        bindings += [_other_sizes(rng, dims) for _ in range(2)]
    grown = Growing(rng, dtype or chosen, tuple(dims), bindings, irregular if smooth is None else smooth)
    grown.feeds = [{} for _ in bindings]
    for _ in range(rng.randint(1, 3)):
        grown.input(grown.dtype)
    for _ in range(rng.choice((2, 4, 6, 8, 12, 16, 24))):
        step(grown)
    choose_outputs(grown)
    graph = grown.graph.finalize()
    others = [feeds for feeds in grown.feeds[1:] if largest_value(graph, feeds) <= _LARGEST_OF_OTHERS]
    return Scenario(graph, [grown.feeds[0], *others], grown.smooth)


def square_scenario(seed: int) -> Scenario:
    """The scenario of a seed whose axes all have one size, so that one value fits along any of them."""
    from random_steps import SQUARE_STEPS, step

    rng = random.Random(f"square {seed}")
    rank, first = rng.choice((2, 3, 3, 3, 4, 4)), rng.choice((2, 3, 3, 4, 5))
    how = rng.choice(("numbers", "numbers", "one symbol", "symbols"))
    names = [f"n{axis if how == 'symbols' else 0}" for axis in range(rank)]
    bindings = [dict.fromkeys(names, size) for size in (first, 3, 6)] if how != "numbers" else [{}]
    grown = Growing(
        rng,
        rng.choice(("f64", "f32", "f32", "f32", "bf16", "f16")),
        tuple(names) if how != "numbers" else (first,) * rank,
        bindings,
        rng.random() < 0.7,
        reuses=True,
    )
    grown.feeds = [{} for _ in bindings]
    for _ in range(rng.randint(1, 2)):
        grown.input(grown.dtype)
    for axes in range(rng.randint(0, 2)):
        grown.input(grown.dtype, grown.dims[-1 - axes :])
    for _ in range(rng.choice((2, 3, 4, 6, 8, 12))):
        step(grown, SQUARE_STEPS)
    choose_outputs(grown)
    return Scenario(grown.graph.finalize(), grown.feeds, grown.smooth)


def axes_scenario(seed: int) -> Scenario:
    """The scenario of a seed whose axes have few sizes, including 1, and whose values have any number of axes: equal
    sizes are one symbol, reshapes cut and join axes, and operands of one element have various numbers of axes."""
    from random_steps import AXES_STEPS, step

    rng = random.Random(f"axes {seed}")
    sizes = rng.choice(_FEW_SIZES)
    shape = tuple(rng.choice(sizes) for _ in range(rng.choice((1, 2, 2, 3, 3, 3, 4, 4, 5))))
    names = [f"n{size}" for size in shape if size > 1] if rng.random() < 0.4 else []
    dims = tuple(f"n{size}" if f"n{size}" in names else size for size in shape)
    bindings = [{name: int(name[1:]) for name in names}]
    bindings += [{name: rng.choice((1, 2, 3, 4, 6)) for name in names} for _ in range(2 if names else 0)]
    dtype = rng.choice(("f64", "f64", "f32", "f32", "f32", "bf16"))
    grown = Growing(rng, dtype, dims, bindings, rng.random() < 0.7, reuses=True)
    grown.feeds = [{} for _ in bindings]
    grown.input(dtype)
    for _ in range(rng.randint(0, 2)):
        grown.input(dtype, dims[rng.randint(0, len(dims)) :])
    if rng.random() < 0.4:
        grown.input(dtype, (1,) * rng.randint(0, len(dims) + 1))
    for _ in range(rng.choice((2, 3, 4, 5, 6, 8, 12))):
        step(grown, AXES_STEPS)
    choose_outputs(grown)
    return Scenario(grown.graph.finalize(), grown.feeds, grown.smooth)


def largest_value(graph: og.Graph, feeds: Mapping[str, np.ndarray]) -> int:
    """The number of elements of the largest value: [n] and [n,1] broadcast to [n,n].

    If its sizes are not declared, each axis is assumed to be as large as in the largest operand.
    """
    sizes = {d: size for t in graph.inputs for d, size in zip(t.dims or (), feeds[str(t.name)].shape, strict=False)}
    shapes = {t.id: feeds[str(t.name)].shape for t in graph.inputs}
    for op in graph.ops:
        read = [shapes[t.id] for t in op.inputs if t.id in shapes]
        together = [max(axis) for axis in zip_longest(*(shape[::-1] for shape in read), fillvalue=1)][::-1]
        for tensor in op.outputs:
            declared = tensor.dims is not None and None not in tensor.dims
            dims = tensor.dims if declared else together
            shapes[tensor.id] = tuple(d if isinstance(d, int) else sizes.get(d, 1) for d in dims)
    return max(map(math.prod, shapes.values()), default=0)


def _other_sizes(rng: random.Random, dims: Sequence[int | str]) -> dict[str, int]:
    """Other sizes for the symbols of a shape, of no more elements than a value may have."""
    while True:
        found = dict(zip(dims, _sizes(rng, len(dims)), strict=True))
        symbols = {name: size for name, size in found.items() if isinstance(name, str)}
        if math.prod(symbols.get(d, d) if isinstance(d, str) else d for d in dims) <= LARGEST:
            return symbols


def _of_rows(seed: int, rng: random.Random) -> Scenario:
    """A graph with several reductions along the same axes."""
    dtype = rng.choice(("f64", "f32", "f32", "f16", "bf16"))
    graph = row_graph(seed, dtype, not_last=rng.random() < 0.3)
    rank = max(len(t.dims or ()) for t in graph.inputs)
    feeds, apart = [], random.Random(f"rows of {seed}")
    for number in range(2):
        near = apart.random() < 2 * _NEAR
        extents = near_a_threshold(apart, rank) if near else sizes(seed + number, rank)
        draw = np.random.default_rng([seed, number])
        shapes = {
            str(t.name): tuple(d if isinstance(d, int) else extents[int(str(d)[1:])] for d in t.dims or ())
            for t in graph.inputs
        }
        numpy = dtypes.get(dtype).numpy
        feeds.append({n: np.asarray(draw.standard_normal(s)).astype(numpy) for n, s in shapes.items()})
    return Scenario(graph, feeds, True)


#: Sizes of most axes.
_COMMON = (1, 1, 2, 3, 3, 4, 5, 7, 8, 13, 16, 17, 31, 33, 64, 97)
#: Lengths of an axis at which kernels walk it differently: a vector, rows side by side, lanes, rows at once, columns in
#: pieces, turns, stretches, cells of a sum, the L1 cache (specs/loops.md), the buffer of a row of f64 and of f32.
_LENGTHS = (16, 48, 64, 128, 256, 1024, 2048, 4096, 8192, 32_768, 65_536)
#: Numbers of elements in all: one box, threads and pieces of long rows, a few boxes.
_ELEMENTS = (32_768, 32_768, 65_536, 65_536, 100_000)
#: Sizes of the axes of one seed with few sizes.
_FEW_SIZES = ((1, 2, 3), (1, 2, 2, 3), (1, 3), (2,), (3,), (4,), (1,), (1, 1, 2), (1, 2, 4), (1, 2, 3, 4, 6), (0, 1, 2))
#: The part of the seeds with such sizes, and the most elements of their arrays if one axis is long.
_NEAR, _MOST = 0.14, 40_000


def _sizes(rng: random.Random, rank: int) -> tuple[int, ...]:
    """The sizes of an array: most are small; some are near a threshold at which kernels walk differently."""
    if rank and rng.random() < _NEAR:
        return near_a_threshold(rng, rank)
    while True:
        found = tuple(0 if rng.random() < 0.04 else rng.choice(_COMMON) for _ in range(rank))
        if math.prod(found) <= 8_000:
            return found


def near_a_threshold(rng: random.Random, rank: int) -> tuple[int, ...]:
    """Sizes of which one, or the product of all, is next to a threshold at which kernels walk differently."""
    off = rng.choice((-1, 0, 0, 1))
    if rng.random() < 0.6:
        length = rng.choice(_LENGTHS) + off
        others = _of_at_most(rng, rank - 1, _MOST // length)
    else:
        others = _of_at_most(rng, rank - 1, rng.choice((4, 40, 400)))
        length = rng.choice(_ELEMENTS) // math.prod(others) + off
    place = rng.choice((rank - 1, rank - 1, 0, rng.randrange(rank)))
    return (*others[:place], length, *others[place:])


def _of_at_most(rng: random.Random, rank: int, elements: int) -> tuple[int, ...]:
    """Sizes with a product of at most `elements`, or of 1."""
    found: list[int] = []
    for _ in range(rank):
        found.append(rng.choice([size for size in _COMMON if size <= max(elements // math.prod(found), 1)]))
    rng.shuffle(found)
    return tuple(found)


def choose_outputs(grown: Growing) -> None:
    """Chooses outputs: every value without a reader; sometimes others, inputs and constants."""
    rng, graph = grown.rng, grown.graph
    made = [t for op in graph.ops for t in op.outputs]
    if not made:
        made = [graph.add_op("Identity", grown.values[0])]
    wanted: list[LogicalTensor] = [made[-1], *rng.sample(made, min(len(made), rng.choice((0, 0, 1, 2))))]
    if rng.random() < 0.12:
        wanted.append(rng.choice(grown.values))  # an input or a constant, perhaps
    if rng.random() < 0.06:
        wanted.append(wanted[0])  # twice
    if rng.random() < 0.5:
        graph.output(*wanted)
        return
    chosen: Mapping[int, LogicalTensor] = {t.id: t for t in wanted}
    graph.set_outputs(chosen.values())
