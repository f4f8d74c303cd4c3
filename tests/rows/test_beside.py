"""Rows side by side: reductions along axes other than the last, and of short rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from random_rows import row_graph
from row_truth import as_torch, assert_near
from schedules import cpu_schedule

import opgraph as og
from opgraph.ir import dtypes
from opgraph.loops.layout import bind
from opgraph.loops.lower import lower
from opgraph.runtime import threads
from opgraph.schedule.interleaved_rows import LANES
from opgraph.schedule.schedule import INNER, OUTER, TRANSPOSED_INNER, CpuSchedule

#: Two dependent reductions, a value for each row, an operand along the row, sums of both kinds.
ALONG = """graph(x: {t}[n,c,l], w: {t}[c,1], k: {t}[n,1,l]) -> (y, m, dw, dk)
  e = Tanh(x)
  m = ReduceMax(e, axes=[1], keep_dims=true)
  d = Subtract(e, m)
  p = Exp(d)
  s = ReduceSum(p, axes=[1], keep_dims=true)
  q = Divide(p, s)
  v = Multiply(q, w)
  y = Add(v, k)
  dw = SumTo(v, w)
  dk = SumTo(v, k)
"""
SHORT = """graph(x: {t}[n,c], w: {t}[c], b: {t}[n,1]) -> (y, m, dw, s)
  z = Multiply(x, b)
  m = ReduceMean(z, axes=[1])
  u = Unsqueeze(m, axes=[1])
  d = Subtract(z, u)
  q = Square(d)
  v = ReduceMean(q, axes=[1], keep_dims=true)
  r = Sqrt(v)
  a = Add(r, 0.5)
  o = Divide(d, a)
  y = Multiply(o, w)
  dw = SumTo(y, w)
  s = ReduceMin(z, axes=[1], keep_dims=true)
"""


def samples(shape: tuple[int, ...], dtype: str, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtypes.get(dtype).numpy)


def feeds(text: str, sizes: dict[str, int], dtype: str) -> dict[str, np.ndarray]:
    graph = og.parse(text)
    shapes = {t.name: tuple(sizes.get(str(d), 1) for d in t.dims or ()) for t in graph.inputs}
    return {str(n): samples(s, dtype, seed) for seed, (n, s) in enumerate(shapes.items())}


def schedule_of(text: str, given: dict[str, np.ndarray]) -> CpuSchedule:
    (part,) = og.parse(text).get_partitions()
    low = lower(part)
    arrays = [given[str(t.name)] for t in low.loads if t is not None]
    layout = bind(low.loop, [a.shape for a in arrays], [tuple(s // a.itemsize for s in a.strides) for a in arrays])
    return cpu_schedule(low.loop, layout, lanes=False)


def as_good_as_the_reference(text: str, given: dict[str, np.ndarray]) -> dict[str, Any]:
    graph = og.parse(text)
    got, exact = og.compile(graph)(**given), og.evaluate(graph, **given)
    peer = og.evaluate(graph, given, dtype=None)
    for name, value in exact.items():
        scale = np.abs(value).max(initial=0)
        own = np.abs(got[name].astype(np.float64) - value).max(initial=0)
        theirs = np.abs(peer[name].astype(np.float64) - value).max(initial=0)
        assert got[name].shape == value.shape
        assert own <= 2 * theirs + np.finfo(np.float32 if got[name].itemsize > 2 else np.float16).eps * scale, name
    return dict(got)


@pytest.mark.parametrize("dtype", ["f32", "f64", "bf16"])
@pytest.mark.parametrize("sizes", [(2, 5, 64), (3, 7, 77), (1, 300, 9), (2, 3, 8), (1, 2, 1000), (4, 1, 30)])
def test_rows_along_an_inner_axis_are_accurate(sizes: tuple[int, int, int], dtype: str) -> None:
    text = ALONG.format(t=dtype)
    given = feeds(text, dict(zip("ncl", sizes, strict=True)), dtype)
    if sizes[1] > 1:
        found = schedule_of(text, given)
        assert found.name == OUTER and found.layout.dims[-1] == sizes[2]
    as_good_as_the_reference(text, given)


@pytest.mark.parametrize("dtype", ["f32", "f64", "f16"])
@pytest.mark.parametrize("sizes", [(16, 8), (LANES + 1, 3), (1000, 16), (200, 11), (70, 1), (15, 8)])
def test_short_rows_are_transposed_and_accurate(sizes: tuple[int, int], dtype: str) -> None:
    text = SHORT.format(t=dtype)
    given = feeds(text, dict(zip("nc", sizes, strict=True)), dtype)
    if sizes[1] > 1:
        assert schedule_of(text, given).name == (TRANSPOSED_INNER if sizes[0] >= 16 else INNER)
    as_good_as_the_reference(text, given)


def test_long_and_single_rows_use_the_inner_schedule() -> None:
    text = "graph(x: f32[n,c]) -> (y)\n y = SoftMax(x, axis=-1)"
    assert schedule_of(text, {"x": samples((100, 65), "f32", 0)}).name == INNER
    assert schedule_of(text, {"x": samples((1, 8), "f32", 0)}).name == INNER
    columns = "graph(x: f32[n,c]) -> (y)\n y = ReduceSum(x, axes=[0])"
    assert schedule_of(columns, {"x": samples((100, 7), "f32", 0)}).name == INNER
    assert schedule_of(columns, {"x": samples((100, 8), "f32", 0)}).name == OUTER


def test_transposed_strided_and_reversed_operands_are_right() -> None:
    """Transposed, with gaps, reversed."""
    text = SHORT.format(t="f32")
    given = feeds(text, {"n": 100, "c": 8}, "f32")
    exact = og.evaluate(og.parse(text.replace("f32", "f64")), {n: v.astype(np.float64) for n, v in given.items()})
    peer = {n: (v * (1 + 2.0**-23)).astype(np.float32) for n, v in exact.items()}  # one rounding, at every element
    x = given["x"]
    for laid in (
        np.asfortranarray(x),
        np.repeat(x, 2, axis=1)[:, ::2],
        x[::-1].copy()[::-1],
        np.repeat(x, 3, axis=0)[::3],
    ):
        made = og.compile(og.parse(text))(**{**given, "x": laid})
        for name, value in exact.items():
            assert_near(made[name], value, peer[name])


@pytest.mark.parametrize(("text", "sizes"), [(ALONG, (6, 40, 700)), (SHORT, (30000, 8))])
def test_bits_do_not_depend_on_threads_or_neighbouring_rows(
    text: str, sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = text.format(t="f32")
    given = feeds(text, dict(zip("ncl", sizes, strict=False)), "f32")
    f = og.compile(og.parse(text))
    wanted = f(**given)
    for count in (1, 2, 5):
        monkeypatch.setattr(threads, "team", lambda size, count=count: (count, None))
        made = f(**given)
        assert all(made[n].tobytes() == v.tobytes() for n, v in wanted.items())
    if text.startswith("graph(x: f32[n,c],"):
        some = {n: v if n == "w" else v[100:150] for n, v in given.items()}
        assert f(**some)["y"].tobytes() == wanted["y"][100:150].tobytes()


def test_nan_infinity_and_in_place_results_are_right() -> None:
    text = "graph(x: f32[n,c]) -> (y)\n y = SoftMax(x, axis=-1)"
    x = samples((100, 8), "f32", 0)
    x[3, 4], x[50, 0], x[60] = np.nan, np.inf, -np.inf
    f = og.compile(og.parse(text))
    with np.errstate(all="ignore"):
        wide = og.evaluate(og.parse(text.replace("f32", "f64")), x=x.astype(np.float64))
    assert_near(f(x=x), wide, as_torch(x).softmax(-1).numpy())
    place = x.copy()
    f(x=place, out=place)
    assert place.tobytes() == f(x=x).tobytes()


def test_f64_sum_is_compensated() -> None:
    x = np.tile([1e16, 1.0, -1e16, 1.0, 1.0, 1e16, -1e16, 1.0], (100, 1))
    assert (og.compile(og.parse("graph(x: f64[n,c]) -> (y)\n y = ReduceSum(x, axes=[-1])"))(x=x) == 4).all()
    columns = og.parse("graph(x: f64[n,c]) -> (y)\n y = ReduceSum(x, axes=[0])")
    assert (og.compile(columns)(x=np.ascontiguousarray(x.T)) == 4).all()


def test_reductions_of_unknown_size_along_any_axis_are_kernels() -> None:
    for text in (
        "graph(x: f32[n,c,h,w]) -> (y)\n y = SoftMax(x, axis=1)",
        "graph(x: f32[n,c,h,w]) -> (y)\n y = ReduceMean(x, axes=[1])",
        "graph(x: f32[n,c]) -> (y)\n y = ReduceMax(x, axes=[0])",
        "graph(x: f32[n,8]) -> (y)\n y = ReduceMax(x, axes=[-1])",
        "graph(x: f32[64,512,64,64]) -> (y)\n t = Tanh(x)\n y = LogSoftmax(t, axis=1)",
    ):
        assert [p.kind for p in og.parse(text).get_partitions()] == ["fused"], text


@pytest.mark.parametrize("seed", range(5))
def test_random_row_graphs_without_the_last_axis_agree(seed: int) -> None:
    graph = row_graph(seed, not_last=True)
    f = og.compile(graph)
    for extents in ((3, 5, 2, 9), (17, 2, 70, 64), (1, 130, 1, 8)):
        choose = np.random.default_rng(seed)
        given = {
            str(t.name): choose.standard_normal(
                tuple(d if isinstance(d, int) else extents[int(str(d)[1:])] for d in t.dims or ())
            )
            for t in graph.inputs
        }
        got, exact = f(given), og.evaluate(graph, given)
        for name, value in exact.items() if isinstance(exact, dict) else [("y", exact)]:
            own = got[name] if isinstance(got, dict) else got
            np.testing.assert_allclose(own, value, rtol=1e-9, atol=1e-9, err_msg=name)
