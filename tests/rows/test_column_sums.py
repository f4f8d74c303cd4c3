"""Few long columns on the CPU: all threads add them, and the bits do not depend on the number of threads."""

from __future__ import annotations

import numpy as np
import pytest
from schedules import followed
from ulp import assert_as_accurate_as

import opgraph as og
from opgraph.ir import dtypes
from opgraph.ir.logical_tensor import port_name
from opgraph.runtime import threads
from opgraph.schedule.schedule import OUTER, SPLIT_COLUMN_SUM

torch = pytest.importorskip("torch")

#: A sum of each column of a written result, and the sum of the operand itself.
BOTH = """graph(x: {t}[n,c], w: f32[c]) -> (y, s, p, m)
  wide: f32[n,c] = TypeCast(x)
  v = Multiply(wide, w)
  y: {t}[n,c] = TypeCast(v)
  s = ReduceSum(v, axes=[0])
  p = ReduceSum(wide, axes=[0], keep_dims=true)
  m = ReduceMean(wide, axes=[0])
"""
SHAPES = [(100_003, 5), (40_000, 8), (65_537, 1), (9_000, 33), (4_100, 64), (2_000, 300)]


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
def test_column_sums_do_not_depend_on_the_number_of_threads(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    f = og.compile(og.parse(BOTH.format(t=dtype)))
    _, parallel = threads.team(1 << 30)
    assert parallel is not None
    for shape in SHAPES:
        rng = np.random.default_rng(shape[1])
        x = rng.normal(size=shape).astype(dtypes.get(dtype).numpy)
        w = rng.normal(size=shape[1]).astype(np.float32)
        monkeypatch.setattr(threads, "team", lambda size: (1, None))
        one = f(x=x, w=w)
        wide, t = x.astype(np.float64), torch.from_numpy(x.astype(np.float32))
        products = x.astype(np.float32) * w
        np.testing.assert_array_equal(one["y"], products.astype(x.dtype))
        assert_as_accurate_as(one["s"], (t * torch.from_numpy(w)).sum(0).numpy(), products.astype(np.float64).sum(0))
        assert_as_accurate_as(one["p"], t.sum(0, keepdim=True).numpy(), wide.sum(0, keepdims=True))
        assert_as_accurate_as(one["m"], t.mean(0).numpy(), wide.mean(0))
        for count in (2, 3, 7):
            monkeypatch.setattr(threads, "team", lambda size, count=count: (count, parallel))
            more = f(x=x, w=w)
            assert all(more[name].tobytes() == one[name].tobytes() for name in one), (shape, count)


def test_few_columns_are_split_along_their_length() -> None:
    text = "graph(x: f32[n,c]) -> (s)\n  s = ReduceSum(x, axes=[0])"
    few, many = og.compile(og.parse(text)), og.compile(og.parse(text))
    few(x=np.ones((40_000, 8), np.float32))
    many(x=np.ones((100, 4096), np.float32))
    assert followed(few)[-1] == SPLIT_COLUMN_SUM and followed(many)[-1] == OUTER


@pytest.mark.parametrize("order", ["rows first", "columns first", "every other"])
def test_column_sums_of_any_strides_are_accurate(order: str) -> None:
    text = "graph(x: f32[b,n,c]) -> (s, m)\n  a = Abs(x)\n  s = ReduceSum(a, axes=[1])\n  m = ReduceMean(a, axes=[1])"
    f = og.compile(og.parse(text))
    x = np.random.default_rng(0).normal(size=(3, 20_000, 6)).astype(np.float32)
    if order == "columns first":
        x = np.ascontiguousarray(x.transpose(0, 2, 1)).transpose(0, 2, 1)
    if order == "every other":
        x = np.repeat(x, 2, axis=1)[:, ::2]
    exact = np.abs(x).astype(np.float64).sum(1)
    got, t = f(x=x), torch.from_numpy(np.ascontiguousarray(x)).abs()
    assert_as_accurate_as(got["s"], t.sum(1).numpy(), exact)
    assert_as_accurate_as(got["m"], t.mean(1).numpy(), exact / 20_000)


def test_reader_of_a_column_maximum_is_right() -> None:
    f = og.compile(
        og.parse("graph(x: f32[n,c]) -> (y)\n  s = ReduceMax(x, axes=[0], keep_dims=true)\n  y = Subtract(x, s)")
    )
    x = np.random.default_rng(0).normal(size=(30_000, 8)).astype(np.float32)
    np.testing.assert_array_equal(f(x=x), x - x.max(0, keepdims=True))


def test_value_derived_from_a_column_sum_is_right() -> None:
    f = og.compile(og.parse("graph(x: f32[n,c]) -> (s, y)\n  s = ReduceSum(x, axes=[0])\n  y = Sqrt(s)"))
    got = f(x=np.ones((40_000, 8), np.float32))
    assert len(f.partitions) == 1
    assert got["s"].tolist() == [40_000] * 8 and got["y"].tolist() == [200] * 8


def test_nan_and_infinity_stay_in_their_column() -> None:
    f = og.compile(og.parse("graph(x: f32[n,c]) -> (s)\n  s = ReduceSum(x, axes=[0])"))
    x = np.ones((20_000, 8), np.float32)
    x[777, 3], x[19_999, 5], x[5, 6], x[6, 6] = np.nan, np.inf, np.inf, -np.inf
    want = np.full(8, 20_000, np.float32)
    want[3], want[5], want[6] = np.nan, np.inf, np.nan
    np.testing.assert_array_equal(f(x=x), want)


@pytest.mark.parametrize("shape", [(40_000, 8), (4_100, 64), (300, 70, 3, 3)], ids=str)
@pytest.mark.parametrize("dtype", ["f32", "f64"])
def test_short_rows_with_several_sums_are_accurate(shape: tuple[int, ...], dtype: str) -> None:
    """Gradients of several parameters. The long row made of short ones belongs to a box, with a cell in each sum."""
    w = "w: {t}[c]" if len(shape) == 2 else "w: {t}[c,1,1]"
    names = [f"s{k}" for k in range(1, 6)]
    lines = [f"graph(x: {{t}}[{'n,c' if len(shape) == 2 else 'n,c,h,l'}], {w}) -> ({', '.join(names)})"]
    lines += [f"  t{k} = Multiply(x, {k}.0)\n  s{k} = SumTo(t{k}, w)" for k in range(1, 6)]
    f = og.compile(og.parse("\n".join(lines).format(t=dtype)))
    x = np.random.default_rng(0).normal(size=shape).astype(dtypes.get(dtype).numpy)
    got = f(x=x, w=np.zeros((shape[1], 1, 1) if len(shape) > 2 else shape[1], x.dtype))
    axes = tuple(a for a in range(len(shape)) if a != 1)
    for k, name in enumerate(names, start=1):
        terms = x * x.dtype.type(k)
        peer = torch.from_numpy(terms).sum(axes, keepdim=len(shape) > 2).numpy().reshape(got[name].shape)
        exact = terms.astype(np.longdouble).sum(axes).astype(np.float64).reshape(peer.shape)
        assert_as_accurate_as(got[name], peer, exact, floor=0.5 if dtype == "f32" else 1.0, label=name)


def test_sum_to_the_shape_of_a_row_sum_has_that_shape():
    """Second derivatives of a norm over axes one of which has size 1. The shape of the inner sum used to be taken for
    that of its operand, so nothing was summed."""
    g = og.Graph()
    x = g.input("x", "f64", (33, 1, 17))
    centred = g.add_op("Subtract", x, g.add_op("ReduceMean", x, axes=[0, 1, 2], keep_dims=True))
    variance = g.add_op("ReduceMean", g.add_op("Square", centred), axes=[0, 1, 2], keep_dims=True)
    wide = g.add_op("Add", variance, g.constant("least", 0.01, dtype="f64"))
    y = g.add_op("Multiply", centred, g.add_op("Rsqrt", wide))
    like = g.input("like", "f64", (2, 1, 1))
    g.set_outputs([y, g.add_op("Subtract", x, variance), g.add_op("BroadcastTo", wide, like)])
    second = og.gradient(og.gradient(g, ("x",)), ("x",))
    draw = np.random.default_rng(0)
    feeds = {port_name(t): draw.normal(size=t.dims) for t in second.inputs}
    np.testing.assert_allclose(og.compile(second)(feeds), og.evaluate(second, feeds), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("like", ["[1,c]", "[c]", "[n,1]", "[1,1]"])
def test_sum_to_beside_a_column_mean_is_right(like: str) -> None:
    f = og.compile(
        og.parse(f"""graph(x: f64[n,c], w: f64[n,c], like: boolean{like}) -> (s, m, y)
  v = Multiply(x, w)
  s = SumTo(v, like)
  m = ReduceMean(x, axes=[0], keep_dims=true)
  y = Neg(v)
""")
    )
    for n, c in ((5, 7), (110, 300), (3_000, 20), (2, 50_000)):
        rng = np.random.default_rng(c)
        x, w = rng.normal(size=(2, n, c))
        shape = {"[1,c]": (1, c), "[c]": (c,), "[n,1]": (n, 1), "[1,1]": (1, 1)}[like]
        got = f(x=x, w=w, like=np.zeros(shape, bool))
        axes = {"[1,c]": 0, "[c]": 0, "[n,1]": 1, "[1,1]": None}[like]
        np.testing.assert_allclose(got["s"].ravel(), np.sum(x * w, axis=axes).ravel(), rtol=1e-12, atol=1e-10)
        np.testing.assert_allclose(got["m"], x.mean(0, keepdims=True), rtol=1e-12, atol=1e-12)
        np.testing.assert_array_equal(got["y"], -(x * w))
