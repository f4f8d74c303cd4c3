"""Rows on the CPU whose elements all fit into a few vectors: the bits are those of rows that are walked in blocks."""

from __future__ import annotations

import re

import numpy as np
import pytest
from by_lanes import both_ways, needs_lanes
from schedules import cpu_schedule

import opgraph as og
from opgraph.ir import dtypes
from opgraph.loops.layout import bind
from opgraph.loops.lower import lower
from opgraph.runtime import threads
from opgraph.schedule.schedule import INNER, PERSISTENT_INNER, TRANSPOSED_INNER

pytestmark = needs_lanes

#: All reductions, a value that is saved for a later pass, operands and results of all kinds, two column sums.
ROWS = """graph(x: {t}[*,n,c], h: f16[*,n,c], w: f32[{w}c], b: bf16[n,1], a: f32[]) -> (y, z, k, m, s, q, t, dw, dv)
  wide: f32[*,n,c] = TypeCast(x)
  half: f32[*,n,c] = TypeCast(h)
  row: f32[n,1] = TypeCast(b)
  low = ReduceMin(half, axes=[-1], keep_dims=true)
  m = ReduceMax(wide, axes=[-1])
  u = Unsqueeze(m, axes=[-1])
  d = Subtract(wide, u)
  e = Exp(d)
  s = ReduceSum(e, axes=[-1])
  t = ReduceSum(half, axes=[-1])
  r = Unsqueeze(s, axes=[-1])
  p = Divide(e, r)
  g = Multiply(p, w)
  v = Multiply(half, row)
  o = Add(g, v)
  up = Greater(o, low)
  f = Select(up, o, a)
  q = ReduceProd(v, axes=[-1])
  y: {t}[*,n,c] = TypeCast(f)
  z: f16[*,n,c] = TypeCast(g)
  k = Greater(wide, half)
  dw = SumTo(f, w)
  dv = SumTo(g, w)
"""
SOFTMAX = """graph(x: f32[n,c]) -> (y, m, s)
  y = SoftMax(x, axis=-1)
  m = ReduceMax(x, axes=[1])
  s = ReduceSum(x, axes=[1])
"""


def feeds(shape: tuple[int, ...], dtype: str, w: tuple[int, ...] = (), step: int = 1) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(shape[-1])

    def sample(dtype: str, *dims: int) -> np.ndarray:
        return rng.normal(size=dims).astype(dtypes.get(dtype).numpy)

    return {
        "x": sample(dtype, *shape[:-1], shape[-1] * step)[..., ::step],
        "h": sample("f16", *shape),
        "w": sample("f32", *w, shape[-1]),
        "b": sample("bf16", shape[-2], 1),
        "a": np.array(0.9, np.float32),
    }


def entries(f: og.Executable) -> set[str]:
    return {re.findall(r"og::(launch_\w+<[^>]*>)\(", source)[-1] for source in f.kernels.values()}


def text(columns: int, dtype: str = "f32", rank: int = 2, w: str = "") -> str:
    """The graph with a known row size, so that only one form is compiled."""
    return ROWS.format(t=dtype, w=w).replace("*,", "l," * (rank - 2)).replace("c]", f"{columns}]")


@pytest.mark.parametrize(("dtype", "columns"), [("f32", 17), ("f32", 64), ("bf16", 79)])
def test_persistent_rows_give_the_bits_of_blocked_rows(
    dtype: str, columns: int, no_cache: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert entries(og.compile(og.parse(text(columns, dtype)))) == {f"launch_persistent<Fused, {-(-columns // 16)}>"}
    for rows in (16, 43):
        both_ways(text(columns, dtype), feeds((rows, columns), dtype), monkeypatch)


def test_persistent_rows_with_strides_and_moving_sums(no_cache: None, monkeypatch: pytest.MonkeyPatch) -> None:
    both_ways(text(20), feeds((37, 20), "f32", step=3), monkeypatch)
    # Sums over n: each row of the innermost axis has separate cells; over l: all its rows share them.
    both_ways(text(30, rank=3, w="n,"), feeds((5, 19, 30), "f32", w=(19,)), monkeypatch)
    both_ways(text(30, rank=3, w="l,1,"), feeds((5, 19, 30), "f32", w=(5, 1)), monkeypatch)


def test_persistent_rows_with_nan_infinities_and_far_elements(no_cache: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for columns in (32, 50, 100):
        x = np.random.default_rng(columns).uniform(-86.9, 0, (24, columns)).astype(np.float32)
        x[:, 3] = 0
        x[1, 15], x[2, 7], x[3, 9], x[4, 11], x[5, 13] = -87.0, -87.00001, -88, -150, -np.inf
        x[6] += 3e38
        x[7] *= 1e-40
        x[8, 1], x[9, columns - 1], x[10, 2], x[11, 0] = np.nan, -np.nan, np.inf, np.nan
        x[12] = -np.inf
        x[13], x[14, 1:], x[15] = -0.0, -0.0, np.where(np.arange(columns) % 3, 0.0, -0.0)
        both_ways(SOFTMAX.replace("c]", f"{columns}]"), {"x": x}, monkeypatch)


def test_persistent_rows_on_any_threads_and_over_operands(monkeypatch: pytest.MonkeyPatch) -> None:
    f = og.compile(og.parse(text(40)))
    given = feeds((6000, 40), "f32")
    _, parallel = threads.team(1 << 30)
    monkeypatch.setattr(threads, "team", lambda size: (1, None))
    one = f(given)
    for count in (2, 3, 7):
        monkeypatch.setattr(threads, "team", lambda size, count=count: (count, parallel))
        more = f(given)
        assert all(more[name].tobytes() == one[name].tobytes() for name in one), count
    softmax = og.compile(og.parse("graph(x: f32[n,c]) -> (y)\n  y = SoftMax(x, axis=-1)"))
    x = given["x"].copy()
    apart = softmax(x=x)
    np.testing.assert_array_equal(softmax(x=x, out=x), apart)


def test_rows_that_fit_vectors_use_the_persistent_schedule() -> None:
    def way(text: str, *shape: int, lanes: bool = True) -> tuple[str, int]:
        (part,) = og.parse(text).get_partitions()
        loop = lower(part).loop
        layout = bind(loop, [shape], [(shape[1], 1)])
        schedule = cpu_schedule(loop, layout, lanes=lanes)
        return schedule.name, schedule.vectors

    softmax = "graph(x: {t}[n,c]) -> (y)\n  y = SoftMax(x, axis=-1)"
    total = "graph(x: {t}[n,c]) -> (y)\n  y = ReduceSum(x, axes=[-1])"
    assert [way(softmax.format(t="f32"), 100, n) for n in (8, 24, 128, 129)] == [
        (TRANSPOSED_INNER, 0), (PERSISTENT_INNER, 2), (PERSISTENT_INNER, 8), (INNER, 0),
    ]  # fmt: skip
    assert [way(total.format(t="bf16"), 100, n) for n in (4, 8, 48)] == [
        (TRANSPOSED_INNER, 0), (PERSISTENT_INNER, 1), (PERSISTENT_INNER, 3),
    ]  # fmt: skip
    others = [(TRANSPOSED_INNER, 0), (TRANSPOSED_INNER, 0), (INNER, 0)]
    assert [way(total.format(t="f64"), 100, n) for n in (8, 48, 49)] == others
    assert [way(total.format(t="f32"), 100, n, lanes=False) for n in (8, 48, 49)] == others
    assert way(total.format(t="f32"), 15, 40) == (INNER, 0)


def test_rows_of_known_size_are_compiled_ahead_for_any_count() -> None:
    known = og.compile(og.parse("graph(x: f32[n,40]) -> (y)\n  y = SoftMax(x, axis=-1)"))
    unknown = og.compile(og.parse("graph(x: f32[n,c]) -> (y)\n  y = SoftMax(x, axis=-1)"))
    assert entries(known) == {"launch_persistent<Fused, 3>"} and entries(unknown) == {"launch_inner<Fused, false>"}
