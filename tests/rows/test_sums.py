"""Fused partitions that end in sums: the fused ops, the loop's text, and numbers that are right and reproducible."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from schedules import in_order

import opgraph as og
from opgraph.codegen.kernel import host_source
from opgraph.ir import dtypes
from opgraph.loops.interpret import interpret
from opgraph.loops.layout import bind
from opgraph.loops.loop import Loop
from opgraph.loops.lower import Lowered, lower
from opgraph.loops.text import parse_loop
from opgraph.runtime import threads
from opgraph.runtime.fallback import InterpretedKernel
from opgraph.schedule.cpu_tiles import ELEMENTS_PER_CELL, MAX_CELLS, ONE_BOX, boxes_of
from opgraph.schedule.merged_axes import STRETCH, merged_axes

torch = pytest.importorskip("torch")

FLOATS = ("f64", "f32", "bf16", "f16")
#: A product and its sum; another value, stored and summed.
PAIR = """graph(x: {t}[*], d: {t}[*], a: {t}[*], b: {t}[*]) -> (dx, da, db)
  %0 = Multiply(x, d)
  da = SumTo(%0, a)
  dx = Abs(%0)
  db = SumTo(dx, b)
"""


def cut(text: str) -> list[list[str]]:
    return [[op.kind for op in p.ops] for p in og.parse(text).get_partitions()]


def lowered(text: str, **options: Any) -> Lowered:
    (partition,) = og.parse(text).get_partitions()
    return lower(partition, **options)


def samples(shape: tuple[int, ...], dtype: str = "f32", seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtypes.get(dtype).numpy)


def truth(value: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """The sum of values to a shape, in their own dtype: f64, or wider."""
    lead = value.ndim - len(shape)
    axes = tuple(i for i in range(value.ndim) if i < lead or (shape[i - lead] == 1 and value.shape[i] != 1))
    return np.asarray(value.sum(axis=axes)).reshape(shape)


def as_torch(array: np.ndarray) -> Any:
    from opgraph.runtime.providers.torch import from_numpy

    return from_numpy(np.ascontiguousarray(array))


def assert_sum(got: np.ndarray, value: np.ndarray, shape: tuple[int, ...]) -> None:
    """Checks that the error is at most twice that of torch's sum of the same values, or one rounding of the result."""
    exact = truth(value.astype(np.longdouble), shape)
    peer = as_torch(value).sum_to_size(shape).to(torch.float64).numpy()
    assert got.shape == exact.shape
    if not exact.size:
        return
    off = np.abs(got.astype(np.longdouble) - exact).max()
    one = float(torch.finfo(as_torch(value).dtype).eps) * np.abs(exact).max()
    assert off <= max(2 * np.abs(peer - exact).max(), one), f"{off} from the truth; torch {np.abs(peer - exact).max()}"


# -- fusion -----------------------------------------------------------------------------------------------------------


def test_sums_of_any_shape_are_fused_with_their_producers() -> None:
    inputs = "x: f32[n,8,4,4], d: f32[n,8,4,4], s: f32[], c: f32[8], r: f32[n,1,1,1], w: f32[4,1]"
    text = f"""graph({inputs}) -> (dx, a, b, e, f)
      %0 = Multiply(x, d)
      dx = Tanh(%0)
      a = SumTo(dx, s)
      b = SumTo(%0, c, data_format="NCX")
      e = SumTo(%0, r)
      f = SumTo(dx, w)"""
    assert cut(text) == [["Multiply", "Tanh", "SumTo", "SumTo", "SumTo", "SumTo"]]


def test_gradients_sharing_only_inputs_are_one_kernel() -> None:
    text = """graph(x: f32[n,8], d: f32[n,8], s: f32[8], b: f32[8]) -> (dx, ds, db)
      dx = Multiply(d, s)
      %0 = Multiply(d, x)
      ds = SumTo(%0, s)
      db = SumTo(d, b)"""
    assert cut(text) == [["Multiply", "Multiply", "SumTo", "SumTo"]]


def test_sum_of_an_input_is_a_kernel() -> None:
    graph = og.parse("graph(d: f32[n,8], b: f32[8]) -> (y)\n y = SumTo(d, b)")
    (part,) = graph.get_partitions()
    assert (part.kind, part.provider) == ("fused", "opgraph")
    assert og.compile(graph)(d=np.ones((3, 8), np.float32), b=np.zeros(8, np.float32)).tolist() == [3.0] * 8


def test_reader_of_a_sum_is_a_separate_kernel() -> None:
    text = """graph(x: f32[n,8], b: f32[8]) -> (y)
      %0 = Tanh(x)
      %1 = SumTo(%0, b)
      y = Multiply(%1, b)"""
    assert cut(text) == [["Tanh", "SumTo"], ["Multiply"]]
    why = {row.kind: row.why for row in og.parse(text).explain().ops}
    assert "a sum is whole only when its loop has ended" in why["Multiply"]


def test_reader_of_a_column_mean_is_a_separate_kernel() -> None:
    """x - mean(x): the loop over x runs twice."""
    text = """graph(x: f32[64,8], b: f32[8]) -> (y)
      %0 = Tanh(x)
      %1 = SumTo(%0, b)
      %2 = Multiply(%1, 0.015625)
      %3 = Multiply(%0, 2.0)
      y = Subtract(%3, %2)"""
    graph = og.parse(text)
    parts = [sorted(op.kind for op in p.ops) for p in graph.get_partitions()]
    assert parts == [["Multiply", "SumTo", "Tanh"], ["Multiply", "Subtract"]]
    x = samples((64, 8))
    whole = og.compile(graph)(x=x, b=x[0])
    np.testing.assert_allclose(whole, 2 * np.tanh(x) - np.tanh(x).mean(0), rtol=1e-5, atol=1e-6)


def test_sum_is_not_fused_into_a_larger_shape() -> None:
    """Its loop would run once for each row of z."""
    text = """graph(x: f32[8], z: f32[2,8], s: f32[]) -> (y, t)
      %0 = Add(x, 1.0)
      t = SumTo(%0, s)
      y = Multiply(z, %0)"""
    graph = og.parse(text)
    assert len(graph.get_partitions()) == 2
    x = np.ones(8, np.float32)
    assert og.compile(graph)(x=x, z=np.ones((2, 8), np.float32), s=np.float32(0))["t"] == 16


def test_unused_sum_is_not_fused_into_a_larger_shape() -> None:
    text = "graph(x: f32[8], z: f32[2,8], s: f32[]) -> (y)\n %0 = Add(x, 1.0)\n %1 = SumTo(%0, s)\n y = Multiply(z, %0)"
    assert cut(text) == [["Add", "SumTo"], ["Multiply"]]


def test_sums_are_fused_only_over_certainly_equal_shapes() -> None:
    text = "graph(x: f32[?,8], z: f32[?,8], s: f32[]) -> (y, t)\n %0 = Tanh(x)\n t = SumTo(%0, s)\n y = Add(%0, z)"
    assert cut(text) == [["Tanh", "SumTo"], ["Add"]]
    assert cut(text.replace("?", "n")) == [["Tanh", "SumTo", "Add"]]


def test_sum_may_take_the_shape_of_a_computed_parameter() -> None:
    """The sum has the shape of exp(b), which the kernel computes for each element."""
    text = """graph(x: f32[n,8], d: f32[n,8], b: f32[]) -> (y)
      %0 = Exp(b)
      %1 = Multiply(x, %0)
      %2 = Multiply(%1, d)
      y = SumTo(%2, %0)"""
    assert str(lowered(text).loop).splitlines()[-1] == "  store f32 t2 summed to x0"
    x, d = samples((5, 8)), samples((5, 8), seed=1)
    got = og.compile(og.parse(text))(x=x, d=d, b=np.float32(0.5))
    np.testing.assert_allclose(got, (x * d).sum() * np.exp(0.5), rtol=1e-5)


def test_broadcast_to_may_take_the_shape_of_a_computed_value() -> None:
    text = """graph(x: f32[n,1], z: f32[8], d: f32[8]) -> (y, s)
      %0 = Add(x, z)
      y = Tanh(%0)
      %1 = BroadcastTo(d, %0)
      s = SumTo(%1, d)"""
    assert len(cut(text)) == 1
    got = og.compile(og.parse(text))(x=np.zeros((3, 1), np.float32), z=np.zeros(8, np.float32), d=samples((8,)))
    np.testing.assert_allclose(got["s"], 3 * samples((8,)), rtol=1e-6)


def test_value_read_only_for_its_shape_is_not_computed() -> None:
    text = """graph(x: f32[n,1], z: f32[8], d: f32[8]) -> (y, s)
      %0 = Add(x, z)
      %1 = BroadcastTo(d, %0)
      y = Tanh(%1)
      s = SumTo(y, %0)"""
    low = lowered(text)
    assert [s.kind for s in low.loop.statements] == ["Tanh"]
    got = og.compile(og.parse(text))(x=np.zeros((3, 1), np.float32), z=np.zeros(8, np.float32), d=samples((8,)))
    np.testing.assert_array_equal(got["s"], got["y"])
    assert got["y"].shape == (3, 8)
    alone = og.parse(text.replace("(y, s)", "(y)").rsplit("\n", 1)[0])
    assert og.compile(alone)(x=np.zeros((3, 1), np.float32), z=np.zeros(8, np.float32), d=samples((8,))).shape == (3, 8)


def test_channel_operand_used_as_a_shape_is_read_from_memory() -> None:
    text = """graph(x: f32[2,3,4,4], b: f32[3]) -> (y)
      %0 = Exp(b)
      %1 = Tanh(x)
      y = SumTo(%1, %0, data_format="NCX")"""
    assert len(cut(text)) == 2
    x = samples((2, 3, 4, 4))
    got = og.compile(og.parse(text))(x=x, b=np.zeros(3, np.float32))
    np.testing.assert_allclose(got, np.tanh(x).sum((0, 2, 3)), rtol=1e-5)


def test_data_of_shape_operands_is_never_read() -> None:
    text = "graph(x: f32[n], l: {l}[n,n2], s: f32[1]) -> (y, t)\n y = BroadcastTo(x, l)\n t = SumTo(y, s)"
    for kind in ("f32", "boolean", "s8"):
        low = lowered(text.format(l=kind).replace("n2", "n"))
        variant = bind(low.loop, [(4,), (4, 4), (1,)], [(1,), (4, 1), (1,)]).variant
        assert "x1" not in host_source(in_order(low.loop, variant)).functor
        assert "x2" not in host_source(in_order(low.loop, variant)).functor


# -- the loop ---------------------------------------------------------------------------------------------------------

TEXT = """
loop(parallel *)
  x0 = load f32
  x1 = load f32
  x2 = load bf16 align=channel
  x3 = load f32
  t0: f32 = Multiply(x0, x1, auto_broadcast="numpy")  # 0
  store f32 t0
  store f32 t0 summed to x2
  store f32 x0 summed to ()
  store f32 t0 summed to x1, x3
""".strip()


def test_loop_with_sums_prints_and_parses_back() -> None:
    assert str(parse_loop(TEXT)) == TEXT


@pytest.mark.parametrize("bad", ["summed to t0", "summed to", "summed to x9", "summed"])
def test_sum_target_must_be_a_load(bad: str) -> None:
    with pytest.raises((og.errors.ModelError, AssertionError)):
        parse_loop(TEXT.replace("summed to ()", bad))


def test_sums_of_integers_are_refused() -> None:
    with pytest.raises(AssertionError, match="no float"):
        parse_loop("loop(parallel *)\n  x0 = load s32\n  store s32 x0 summed to ()")


def test_interpreter_computes_the_sums_of_a_loop() -> None:
    x, y = samples((2, 3, 4)), samples((4,))
    c = np.zeros(3, dtypes.get("bf16").numpy)
    loop = parse_loop(TEXT)
    each, channel, total, row = interpret(loop, [x, y, c, y[:1]])
    np.testing.assert_allclose(each, x * y)
    np.testing.assert_allclose(channel, (x * y).sum((0, 2)), rtol=1e-5)
    np.testing.assert_allclose(total, x.sum(), rtol=1e-5)
    np.testing.assert_allclose(row, (x * y).sum((0, 1)), rtol=1e-5)
    assert (channel.shape, total.shape, row.shape) == ((3,), (), (4,))


def test_rounding_each_rounds_values_before_the_sum() -> None:
    text = "graph(x: bf16[n], s: bf16[]) -> (y)\n %0 = Exp(x)\n y = SumTo(%0, s)"
    assert [s.rounds for s in lowered(text).loop.statements] == [False]
    assert [s.rounds for s in lowered(text, rounding="each").loop.statements] == [True]
    cast = "graph(x: f32[n], s: bf16[]) -> (y)\n %0: bf16[n] = TypeCast(x)\n y: bf16[] = SumTo(%0, s)"
    assert [s.rounds for s in lowered(cast).loop.statements] == [True]


def test_sum_without_reduced_axes_is_an_ordinary_store() -> None:
    loop = parse_loop("loop(parallel *)\n  x0 = load f32\n  x1 = load f32\n  store f32 x0 summed to x1")
    assert bind(loop, [(4, 5), (4, 5)], [(5, 1), (5, 1)]).variant.operands == "cuc"
    assert bind(loop, [(4, 5), (5,)], [(5, 1), (1,)]).variant.operands == "cuk"
    assert bind(loop, [(4, 5), (4, 1)], [(5, 1), (1, 1)]).variant.operands == "cua"
    assert bind(loop, [(1, 1), ()], [(1, 1), ()]).variant.operands == "uuu"


# -- boxes ------------------------------------------------------------------------------------------------------------


def loop_to(count: int) -> Loop:
    loads = "".join(f"  x{i} = load f32\n" for i in range(count + 1))
    return parse_loop(
        "loop(parallel *)\n" + loads + "\n".join(f"  store f32 x0 summed to x{i + 1}" for i in range(count))
    )


def dense(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(int(np.prod(shape[i + 1 :], dtype=np.int64)) for i in range(len(shape)))


@pytest.mark.parametrize(
    "shape",
    [
        (5,),
        (8_000_000,),
        (8192, 1024),
        (3, 2_000_000),
        (2_000_000, 3),
        (64, 512, 49),
        (16, 64, 16, 64),
        (128, 2048, 16),
    ],
    ids=str,
)
def test_boxes_cover_the_space_within_the_limits(shape: tuple[int, ...]) -> None:
    patterns = [
        tuple(s if k else 1 for s, k in zip(shape, keep)) for keep in itertools.product((0, 1), repeat=len(shape))
    ]
    size = int(np.prod(shape))
    for chosen in [*[(p,) for p in patterns], tuple(patterns)]:
        loop = loop_to(len(chosen))
        shapes = [shape, *chosen]
        layout = bind(loop, shapes, [dense(s) for s in shapes])
        if not layout.variant.has_sums:
            continue
        boxes = boxes_of(layout)
        assert all((n - 1) * b < d <= n * b for n, b, d in zip(boxes.counts, boxes.box, layout.dims))
        assert sum(s.cells for s in boxes.sums) <= MAX_CELLS
        if len(chosen) == 1:
            (one,) = boxes.sums
            left = 0 if one.whole else one.cells * boxes.count
            assert left * ELEMENTS_PER_CELL <= 2 * max(size, ONE_BOX)
            assert size <= ONE_BOX or np.prod(boxes.box) <= size // 2 or size < 4 * ONE_BOX


# -- short rows -------------------------------------------------------------------------------------------------------


def long_of(*shapes: tuple[int, ...], sums: int = 0) -> Any:
    """Long rows of x0 + x1 + ..., stored, and summed to the last shapes."""
    names = [f"x{i}" for i in range(len(shapes))]
    lines = [f"  {n} = load f32" for n in names]
    lines += [f"  t{i}: f32 = Add({'x0' if i == 0 else f't{i - 1}'}, {n})  # {i}" for i, n in enumerate(names[1:])]
    added = f"t{len(names) - 2}"
    lines += [f"  store f32 {added}", *[f"  store f32 {added} summed to {n}" for n in names[len(names) - sums :]]]
    layout = bind(parse_loop("loop(parallel *)\n" + "\n".join(lines)), shapes, [dense(s) for s in shapes])
    return merged_axes(layout, len(shapes))


def test_rows_of_small_images_are_merged_across_channels() -> None:
    long = long_of((32, 64, 4, 4), (64, 1, 1), sums=1)
    assert (long.layout.dims, long.layout.variant.operands) == ((32, 1024), "ccck")
    assert [(s.operand, s.outer, s.inner) for s in long.spread] == [(1, 1, 0)]
    assert (long.short, long.grouped, long.tiled) == (16, {3}, set())


def test_short_rows_are_merged_into_longer_ones() -> None:
    long = long_of((4096, 8), (8,), sums=1)
    assert (long.layout.dims, long.layout.variant.operands) == ((16, 2048), "ccck")
    assert [(s.operand, s.outer, s.inner) for s in long.spread] == [(1, 0, 1)]
    assert (long.short, long.grouped, long.tiled) == (8, set(), {3})


@pytest.mark.parametrize(
    ("shapes", "sums"),
    [
        (((32, 64, 16, 16), (64, 1, 1)), 1),
        (((4, 64, 4, 4), (64, 1, 1)), 0),
        (((4096, 8), (4096, 1)), 1),
        (((4099, 8), (8,)), 1),
        (((512, 8), (8,)), 0),
    ],
    ids=["long enough", "used too few times", "another value for each row", "a prime number of rows", "one stretch"],
)
def test_other_rows_are_not_merged(shapes: tuple[tuple[int, ...], ...], sums: int) -> None:
    assert long_of(*shapes, sums=sums) is None


@pytest.mark.parametrize(("sums", "short"), [(32, 127), (33, 124), (33, 127), (40, 121), (64, 64), (100, 41)])
def test_merged_rows_have_no_more_cells_than_a_box(sums: int, short: int) -> None:
    stores = [f"  store f32 t{i} summed to x1" for i in range(sums)]
    lines = [f"  t{i}: f32 = Multiply(x0, {i}.5)  # {i}" for i in range(sums)]
    text = "\n".join(["loop(parallel *)", "  x0 = load f32", "  x1 = load f32", *lines, *stores])
    shapes = (50, 64, short), (64, 1)
    layout = bind(parse_loop(text), shapes, [dense(s) for s in shapes])
    long = merged_axes(layout, 2)
    boxes = boxes_of(layout) if long is None else boxes_of(long.layout, longest=STRETCH, unit=long.short)
    assert sum(one.cells for one in boxes.sums) <= MAX_CELLS
    assert (long is None) == (sums * short > MAX_CELLS)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    "shape",
    [(32, 64, 4, 4), (40, 7, 3, 3), (9, 600, 2, 2), (17, 129, 7, 7), (2048, 3, 5), (4096, 8), (8, 3, 600, 4)],
    ids=str,
)
def test_merged_rows_with_sums_are_right(shape: tuple[int, ...], dtype: str) -> None:
    """Parameters of every pattern, read and summed to."""
    text = PAIR.format(t=dtype).replace("dx = Abs(%0)", "%1 = Multiply(%0, a)\n  %2 = Multiply(%1, b)\n  dx = Abs(%2)")
    f = og.compile(og.parse(text))
    x = samples(shape, dtype)
    for a, b in itertools.pairwise(patterns(shape)):
        one, two = np.ones(a, x.dtype), np.full(b, 2, x.dtype)
        sign = np.where(np.arange(one.size) % 3 == 0, -1, 1).astype(x.dtype).reshape(a)  # exact factors that differ
        got = f(x=x, d=np.ones_like(x), a=one * sign, b=two)
        np.testing.assert_array_equal(got["dx"], np.abs(x * sign * two).reshape(shape))
        assert_sum(got["da"], x, a)
        assert_sum(got["db"], np.abs(x) * np.asarray(2, x.dtype), b)
        x = -x


@pytest.mark.parametrize("dtype", ["f64", "f32", "bf16", "boolean", "s8", "s64"])
def test_merged_rows_without_sums_are_right(dtype: str) -> None:
    text = f"graph(c: boolean[*], x: {dtype}[*], a: {dtype}[*]) -> (y)\n y = Select(c, x, a)"
    f = og.compile(og.parse(text))
    rng = np.random.default_rng(0)
    for shape in [(40, 64, 3, 3), (4096, 6), (16, 600, 3, 3)]:
        x = rng.integers(0, 2, shape).astype(dtypes.get(dtype).numpy)
        for like in patterns(shape):
            a = rng.integers(0, 2, like).astype(x.dtype)
            c = rng.integers(0, 2, shape[-1:]).astype(bool)
            np.testing.assert_array_equal(f(c=c, x=x, a=a), np.where(c, x, a).reshape(shape))


# -- numbers ----------------------------------------------------------------------------------------------------------


def patterns(shape: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Every shape that broadcasts to this one by 1s or by missing axes."""
    for keep in itertools.product((False, True), repeat=len(shape)):
        yield tuple(s if k else 1 for s, k in zip(shape, keep))
    for rank in range(len(shape)):
        yield shape[len(shape) - rank :]


@pytest.mark.parametrize("dtype", FLOATS)
def test_every_sum_pattern_is_as_accurate_as_torch(dtype: str) -> None:
    f = og.compile(og.parse(PAIR.format(t=dtype)))
    for shape in [(4, 3, 5), (2, 70, 3, 40), (33, 1, 300)]:
        x, d = samples(shape, dtype), np.ones(shape, dtypes.get(dtype).numpy)
        zero = {p: np.zeros(p, x.dtype) for p in patterns(shape)}
        for a, b in itertools.pairwise(zero):
            got = f(x=x, d=d, a=zero[a], b=zero[b])
            np.testing.assert_array_equal(got["dx"], np.abs(x))
            assert_sum(got["da"], x, a)
            assert_sum(got["db"], np.abs(x), b)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("n", [1, 31, 32, 33, 255, 256, 257, 511, 4095, 4097, 32767, 32769, 65537, 200_001])
def test_sums_of_sizes_around_strip_and_box_limits(n: int, dtype: str) -> None:
    f = og.compile(og.parse(PAIR.format(t=dtype)))
    for shape in [(n,), (n, 3), (3, n)]:
        x, d = samples(shape, dtype), np.ones(shape, dtypes.get(dtype).numpy)
        for a, b in [((), shape[-1:]), ((*shape[:-1], 1), (1,) * len(shape))]:
            got = f(x=x, d=d, a=np.zeros(a, x.dtype), b=np.zeros(b, x.dtype))
            np.testing.assert_array_equal(got["dx"], np.abs(x))
            assert_sum(got["da"], x, a)
            assert_sum(got["db"], np.abs(x), b)


@pytest.mark.parametrize("dtype", FLOATS)
def test_sums_of_millions_of_elements_are_as_accurate_as_torch(dtype: str) -> None:
    f = og.compile(og.parse(f"graph(x: {dtype}[*], s: {dtype}[*]) -> (y)\n y = SumTo(x, s)"))
    for shape, to in [((1 << 22,), ()), ((1 << 12, 1 << 10), (1 << 10,)), ((1 << 10, 1 << 12), (1 << 10, 1))]:
        x = samples(shape, dtype)
        assert_sum(f(x=x, s=np.zeros(to, x.dtype)), x, to)
        assert_sum(f(x=np.abs(x), s=np.zeros(to, x.dtype)), np.abs(x), to)


def test_f64_sum_is_compensated() -> None:
    """1 + 1e-16 + 1e-16 + ... is 1 in plain additions; along rows, along columns, in one number."""
    x = np.full((1 << 10, 1 << 8), 1e-16)
    x[0] = 1.0
    x[:, 0] = x[:, 0] * 0.5
    f = og.compile(og.parse("graph(x: f64[*], s: f64[*]) -> (y)\n y = SumTo(x, s)"))
    for to in [(), (1 << 8,), (1 << 10, 1)]:
        got, exact = f(x=x, s=np.zeros(to)), truth(x.astype(np.longdouble), to)
        assert np.abs(got - exact).max() <= np.spacing(np.float64(exact.max()))


def test_channel_sums_follow_the_data_format() -> None:
    x, c = samples((6, 5, 3, 4)), np.zeros(5, np.float32)
    text = 'graph(x: f32[*], c: f32[5]) -> (y)\n %0 = Abs(x)\n y = SumTo(%0, c, data_format="{}")'
    ncx = og.compile(og.parse(text.format("NCX")))(x=x, c=c)
    np.testing.assert_allclose(ncx, np.abs(x).sum((0, 2, 3)), rtol=1e-6)
    nxc = og.compile(og.parse(text.format("NXC")))(x=np.moveaxis(x, 1, 3), c=c)
    np.testing.assert_allclose(nxc, np.abs(x).sum((0, 2, 3)), rtol=1e-6)


def test_sums_of_two_dtypes_are_one_kernel() -> None:
    text = """graph(x: f32[n,8], s: f64[], b: bf16[8]) -> (p, q)
      %0: f64[n,8] = TypeCast(x)
      %1: bf16[n,8] = TypeCast(x)
      p = SumTo(%0, s)
      q = SumTo(%1, b)"""
    graph = og.parse(text)
    assert len(graph.get_partitions()) == 1
    x = samples((50, 8))
    got = og.compile(graph)(x=x, s=np.float64(0), b=np.zeros(8, dtypes.get("bf16").numpy))
    np.testing.assert_allclose(got["p"], x.astype(np.float64).sum(), rtol=1e-15)
    assert_sum(got["q"], x.astype(dtypes.get("bf16").numpy), (8,))


@pytest.mark.parametrize("dtype", FLOATS)
def test_nan_and_infinity_pass_through_sums(dtype: str) -> None:
    f = og.compile(og.parse(PAIR.format(t=dtype)))
    for value in (np.nan, np.inf, -np.inf):
        x = np.ones((4, 300), dtypes.get(dtype).numpy)
        x[2, 7] = value
        got = f(x=x, d=np.ones_like(x), a=np.zeros(300, x.dtype), b=np.zeros((4, 1), x.dtype))
        expected = np.full(300, 4.0)
        expected[7] = value
        np.testing.assert_array_equal(got["da"].astype(np.float64), expected)
        assert np.isnan(got["db"][2, 0]) if np.isnan(value) else got["db"][2, 0] == np.inf
        assert np.isfinite(got["db"][[0, 1, 3], 0].astype(np.float64)).all()


def test_sum_of_nothing_is_zero() -> None:
    f = og.compile(og.parse(PAIR.format(t="f32")))
    x, a, b = np.zeros((0, 3), np.float32), np.ones(3, np.float32), np.ones((0, 1), np.float32)
    got = f(x=x, d=x, a=a, b=b)
    assert got["da"].tolist() == [0, 0, 0] and got["db"].shape == (0, 1) and got["dx"].shape == (0, 3)
    outs = {"dx": np.ones((0, 3), np.float32), "da": np.ones(3, np.float32), "db": np.ones((0, 1), np.float32)}
    f.bind(x=x, d=x, a=a, b=b, out=outs)()
    assert outs["da"].tolist() == [0, 0, 0]


def test_sum_of_a_scalar_is_the_scalar() -> None:
    f = og.compile(og.parse(PAIR.format(t="f32")))
    got = f(x=np.float32(3), d=np.float32(-2), a=np.zeros((), np.float32), b=np.zeros((), np.float32))
    assert (got["dx"], got["da"], got["db"]) == (6, -6, 6)


# -- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "view",
    [
        lambda x: np.asfortranarray(x),
        lambda x: np.repeat(x, 2, axis=1)[:, ::2],
        lambda x: x[::-1, ::-1],
        lambda x: np.broadcast_to(x[:1], x.shape),
        lambda x: np.broadcast_to(x[:, :1], x.shape),
        lambda x: np.broadcast_to(x[:1, :1], x.shape),
    ],
    ids=["transposed", "every second", "backwards", "rows broadcast", "columns broadcast", "one number"],
)
@pytest.mark.parametrize("to", [(), (90,), (700, 1), (1, 90)], ids=str)
def test_sums_of_inputs_with_any_strides(view: Any, to: tuple[int, ...]) -> None:
    f = og.compile(og.parse(PAIR.format(t="f32")))
    x, d = view(samples((700, 90))), samples((700, 90), seed=1)
    zero = np.zeros(to, np.float32)
    got = f(x=x, d=d, a=zero, b=zero)
    np.testing.assert_array_equal(got["dx"], np.abs(x * d))
    assert_sum(got["da"], x * d, to)
    assert_sum(got["db"], np.abs(x * d), to)


@pytest.mark.parametrize("to", [(), (90,), (700, 1)], ids=str)
def test_sums_are_written_into_out_arrays(to: tuple[int, ...]) -> None:
    f = og.compile(og.parse(PAIR.format(t="f32")))
    x, d, zero = samples((700, 90)), samples((700, 90), seed=1), np.zeros(to, np.float32)
    plain = f(x=x, d=d, a=zero, b=zero)
    outs = {
        "dx": np.empty((90, 700), np.float32).T,
        "da": np.empty((*to, 3), np.float32)[..., 1],
        "db": np.empty(to, np.float32),
    }
    f(x=x, d=d, a=zero, b=zero, out=outs)
    for name, out in outs.items():
        np.testing.assert_array_equal(out, plain[name])
        out[...] = 7
    again = f.bind(x=x, d=d, a=zero, b=zero, out=outs)
    for _ in range(2):
        again()
        for name, out in outs.items():
            np.testing.assert_array_equal(out, plain[name])


def test_sum_may_overwrite_its_parameter() -> None:
    text = """graph(x: f32[n,n], p: f32[n], q: f32[n,1]) -> (dp, dq)
      %0 = Multiply(x, p)
      %1 = Multiply(%0, q)
      dp = SumTo(%1, q)
      dq = SumTo(%1, p)"""
    f = og.compile(og.parse(text))
    x, p, q = samples((600, 600)), samples((600,), seed=1), samples((600, 1), seed=2)
    plain = f(x=x, p=p, q=q)
    outs = {"dp": q.copy(), "dq": p.copy()}
    f(x=x, p=outs["dq"], q=outs["dp"], out=outs)
    for name, value in plain.items():
        np.testing.assert_array_equal(outs[name], value)


def test_sum_does_not_overwrite_memory_still_to_be_read() -> None:
    """A box completes row sums whose memory holds factors of columns, which later boxes read."""
    text = """graph(x: f32[1,n,n], p: f32[n]) -> (s)
      %0 = Multiply(x, p)
      s = SumTo(%0, p, data_format="NCX")"""
    f = og.compile(og.parse(text))
    x, p = samples((1, 600, 600)), samples((600,), seed=1)
    plain = f(x=x, p=p)
    f(x=x, p=p, out=p)
    np.testing.assert_array_equal(p, plain)
    p = samples((600,), seed=1)
    f.bind(x=x, p=p, out=p)()
    np.testing.assert_array_equal(p, plain)


def test_output_of_another_shape_is_refused() -> None:
    f = og.compile(og.parse("graph(x: f32[*], s: f32[*]) -> (y)\n y = SumTo(x, s)"))
    with pytest.raises(og.errors.InvalidShape):
        f(x=samples((4, 5)), s=np.zeros(5, np.float32), out=np.zeros((4, 5), np.float32))


# -- threads ----------------------------------------------------------------------------------------------------------

SPACES = [(300_007,), (40, 30, 100), (2000, 3, 40), (3, 100_000), (500, 600), (200, 70, 2, 4)]


@pytest.mark.parametrize("shape", SPACES, ids=str)
@pytest.mark.parametrize("dtype", ["f32", "f64"])
def test_multithreaded_sums_give_the_bits_of_one_thread(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], dtype: str
) -> None:
    f = og.compile(og.parse(PAIR.format(t=dtype)))
    _, parallel = threads.team(1 << 30)
    assert parallel is not None
    x, d = samples(shape, dtype), samples(shape, dtype, seed=1)
    for a, b in itertools.pairwise(patterns(shape)):
        one = None
        for count, address in [(1, None), (2, parallel), (3, parallel), (7, parallel), (2, None), (5, None)]:
            monkeypatch.setattr(threads, "team", lambda size, team=(count, address): team)
            got = f(x=x, d=d, a=np.zeros(a, x.dtype), b=np.zeros(b, x.dtype))
            one = one or got
            for name in got:
                assert got[name].tobytes() == one[name].tobytes(), (a, b, count, name)


def test_concurrent_calls_do_not_interfere() -> None:
    from concurrent.futures import ThreadPoolExecutor

    f = og.compile(og.parse(PAIR.format(t="f32")))
    x = [samples((300, 1000), seed=i) for i in range(4)]
    zero, one = np.zeros(1000, np.float32), np.ones((300, 1000), np.float32)
    calls = [lambda v=v: f(x=v, d=one, a=zero, b=zero)["da"] for v in x]
    alone = [call() for call in calls]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(20):
            for got, expected in zip(pool.map(lambda call: call(), calls), alone, strict=True):
                np.testing.assert_array_equal(got, expected)


# -- without a compiler -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_torch", [True, False])
def test_sums_without_a_compiler_are_the_same(with_torch: bool) -> None:
    graph = og.parse(PAIR.format(t="bf16"))
    (partition,) = graph.get_partitions()
    with warnings.catch_warnings(action="ignore"):
        fallback = InterpretedKernel(lower(partition), partition)
    fallback._with_torch = with_torch
    f = og.compile(graph)
    x = samples((6, 5, 40), "bf16")
    d = np.ones_like(x)
    for a, b in itertools.pairwise(patterns(x.shape)):
        zeros = {"a": np.zeros(a, x.dtype), "b": np.zeros(b, x.dtype)}
        feeds = {"x": x, "d": d, **zeros}
        got = dict(
            zip([t.name for t in partition.output_ports], fallback([feeds[t.name] for t in partition.input_ports]))
        )
        for name, value in f(x=x, d=d, **zeros).items():
            np.testing.assert_array_equal(got[name], value)
