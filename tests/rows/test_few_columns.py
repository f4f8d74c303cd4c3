"""Extremes of few long columns on the CPU: threads share them, and the bits do not depend on the number of threads."""

from __future__ import annotations

import numpy as np
import pytest
from schedules import followed

import opgraph as og
from opgraph.ir import dtypes
from opgraph.runtime import threads
from opgraph.schedule.schedule import OUTER, SPLIT_OUTER

#: Several extremes at once, ops after one of them, and results written in the same pass.
EXTREMES = """graph(x: {t}[b,n,c], w: f32[c]) -> (y, h, l, p, s, r)
  wide: f32[b,n,c] = TypeCast(x)
  y = Multiply(wide, w)
  h = ReduceMax(y, axes=[1])
  l = ReduceMin(wide, axes=[1], keep_dims=true)
  a = Abs(wide)
  q = Add(a, 0.6)
  p = ReduceProd(q, axes=[1])
  s = ReduceSum(wide, axes=[1])
  r = Sqrt(h)
"""


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_shared_columns_have_thread_independent_bits(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    f = og.compile(og.parse(EXTREMES.format(t=dtype)))
    _, parallel = threads.team(1 << 30)
    for shape in [(1, 50_003, 9), (1, 9_000, 64), (2, 3_001, 77), (1, 700, 300), (1, 70_001, 8)]:
        rng = np.random.default_rng(shape[-1])
        x = rng.uniform(-1, 1, shape).astype(dtypes.get(dtype).numpy)
        x[0, 77, 3], x[0, -1, 4] = np.nan, -np.inf
        w = rng.normal(size=shape[-1]).astype(np.float32)
        monkeypatch.setattr(threads, "team", lambda size: (1, None))
        one = f(x=x, w=w)
        assert followed(f)[-1] == SPLIT_OUTER
        wide = x.astype(np.float32)
        np.testing.assert_array_equal(one["y"], wide * w)
        np.testing.assert_array_equal(one["h"], (wide * w).max(1))
        np.testing.assert_array_equal(one["l"], wide.min(1, keepdims=True))
        with np.errstate(all="ignore"):
            np.testing.assert_array_equal(one["r"], np.sqrt(one["h"]))
            exact = np.abs(wide) + np.float32(0.6)
            np.testing.assert_allclose(one["p"], exact.astype(np.float64).prod(1).astype(np.float32), rtol=1e-6)
            np.testing.assert_array_equal(one["s"], wide.astype(np.float64).sum(1).astype(np.float32))
        for count in (2, 3, 7):
            monkeypatch.setattr(threads, "team", lambda size, count=count: (count, parallel))
            more = f(x=x, w=w)
            assert all(more[name].tobytes() == one[name].tobytes() for name in one), (shape, count)
        monkeypatch.setattr(threads, "team", lambda size: (2, None))  # a pool of Python threads
        more = f(x=x, w=w)
        assert all(more[name].tobytes() == one[name].tobytes() for name in one), shape


def test_unsuitable_columns_are_not_split() -> None:
    extreme = og.compile(og.parse("graph(x: f32[n,c]) -> (y)\n  y = ReduceMax(x, axes=[0])"))
    extreme(x=np.ones((40, 4096), np.float32))
    assert followed(extreme)[-1] == OUTER  # threads have enough work
    waiting = og.compile(
        og.parse("graph(x: f32[n,c]) -> (y)\n  m = ReduceMax(x, axes=[0], keep_dims=true)\n  y = Subtract(x, m)")
    )
    waiting(x=np.ones((40_000, 8), np.float32))
    assert followed(waiting)[-1] == OUTER
    exact = og.compile(og.parse("graph(x: f64[n,c]) -> (y)\n  s = ReduceSum(x, axes=[0])\n  y = Sqrt(s)"))
    assert exact(x=np.full((40_000, 8), 0.1)).shape == (8,)
    assert followed(exact)[-1] == OUTER
