"""Rows on the CPU: 16 floats at a time with AVX-512 give the same bits as one float at a time."""

from __future__ import annotations

import numpy as np
import pytest
from by_lanes import both_ways, functor, needs_lanes
from ulp import assert_as_accurate_as

import opgraph as og
from opgraph.ir import dtypes

pytestmark = needs_lanes

#: All reductions, a value saved in the result and one in a buffer, a truth value, operands of all kinds (contiguous,
#: one number, one for each row and each column), results of 16 bits, and sums of both kinds.
ROWS = """graph(x: {t}[n,c], h: f16[n,c], w: f32[c], b: bf16[n,1], a: f32[]) -> (y, z, k, m, s, q, dw, db)
  wide: f32[n,c] = TypeCast(x)
  half: f32[n,c] = TypeCast(h)
  row: f32[n,1] = TypeCast(b)
  low = ReduceMin(half, axes=[1], keep_dims=true)
  m = ReduceMax(wide, axes=[1])
  u = Unsqueeze(m, axes=[1])
  d = Subtract(wide, u)
  e = Exp(d)
  s = ReduceSum(e, axes=[1])
  t = Unsqueeze(s, axes=[1])
  p = Divide(e, t)
  g = Multiply(p, w)
  v = Multiply(half, row)
  o = Add(g, v)
  up = Greater(o, low)
  f = Select(up, o, a)
  q = ReduceProd(f, axes=[1])
  y: {t}[n,c] = TypeCast(f)
  z: f16[n,c] = TypeCast(g)
  k = Greater(wide, half)
  dw = SumTo(f, w)
  db = SumTo(g, row)
"""

#: Only column sums: several rows are processed at a time.
COLUMNS = """graph(x: f32[n,c], g: bf16[n,c], w: f32[c]) -> (y, dw, db)
  wide: f32[n,c] = TypeCast(g)
  m = ReduceMean(x, axes=[1], keep_dims=true)
  d = Subtract(x, m)
  y = Multiply(d, w)
  v = Multiply(wide, d)
  dw = SumTo(v, w)
  db = SumTo(wide, w)
"""


def feeds(shape: tuple[int, int], dtype: str, step: int = 1) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(shape[1])
    rows, columns = shape

    def sample(dtype: str, *dims: int) -> np.ndarray:
        return rng.normal(size=dims).astype(dtypes.get(dtype).numpy)

    return {
        "x": sample(dtype, rows, columns * step)[:, ::step],
        "h": sample("f16", rows, columns),
        "w": sample("f32", columns),
        "b": sample("bf16", rows, 1),
        "a": np.array(0.9, np.float32),
    }


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_vector_rows_give_the_bits_of_scalar_rows(dtype: str, no_cache: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for columns in (65, 79, 128, 256, 513, 40_000):  # the last does not fit into the buffer
        both_ways(ROWS.format(t=dtype), feeds((3, columns), dtype), monkeypatch)
    if dtype == "f32":
        both_ways(ROWS.format(t=dtype), feeds((2, 150), dtype, step=3), monkeypatch)


def test_vector_rows_handle_nan_and_infinities(no_cache: None, monkeypatch: pytest.MonkeyPatch) -> None:
    given = feeds((8, 333), "f32")
    for row, (column, value) in enumerate([(0, np.nan), (332, np.nan), (100, -np.nan), (17, np.inf), (300, -np.inf)]):
        given["x"][row, column] = given["h"][row, column] = value
    given["x"][5:] = -np.inf
    given["h"][6] = np.nan
    both_ways(ROWS.format(t="f32"), given, monkeypatch)


def test_column_sums_over_several_rows(no_cache: None, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    for rows, columns in [(1, 65), (7, 64 * 3), (8, 200), (9, 77), (70, 1000), (3, 20_000)]:
        x, g = rng.normal(size=(2, rows, columns)).astype(np.float32)
        given = {"x": x, "g": g.astype(dtypes.get("bf16").numpy), "w": rng.normal(size=columns).astype(np.float32)}
        both_ways(COLUMNS, given, monkeypatch)
        exact = (given["g"].astype(np.float64) * (x - x.mean(1, keepdims=True, dtype=np.float64))).sum(0)
        got = og.compile(og.parse(COLUMNS))(given)
        peer = (given["g"].astype(np.float32) * (x - x.mean(1, keepdims=True))).sum(0)
        assert_as_accurate_as(got["dw"], peer, exact)
        np.testing.assert_array_equal(got["db"], given["g"].astype(np.float64).sum(0).astype(np.float32))


def test_row_exponentials_near_and_far_from_the_maximum(no_cache: None, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "graph(x: f32[n,c]) -> (y, m)\n  y = SoftMax(x, axis=-1)\n  m = ReduceMax(x, axes=[1])"
    assert "og::exp_of_row<near>(" in functor(og.compile(og.parse(text)))
    for columns in (65, 128, 1000):
        x = np.random.default_rng(columns).uniform(-86.9, 0, (12, columns)).astype(np.float32)
        x[:, 3] = 0
        x[1, 60], x[2, 7], x[3, 9], x[4, 11], x[5, 64] = -87.0, -87.00001, -88, -150, -np.inf
        x[6] += 3e38
        x[7] *= 1e-40
        x[8, 1], x[9, 2] = np.nan, np.inf
        x[10] = -np.inf
        both_ways(text, {"x": x}, monkeypatch)


@pytest.mark.parametrize("like", ["f32[n,1]", "f32[]"], ids=("rows", "all"))
def test_column_sums_beside_row_sums(like: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row's sum goes to a separate cell, so such rows are not processed together."""
    text = f"""graph(x: f32[n,c], w: f32[c], b: {like}) -> (y, dw, db)
      m = ReduceMean(x, axes=[1], keep_dims=true)
      d = Subtract(x, m)
      y = Multiply(d, w)
      v = Multiply(x, d)
      dw = SumTo(v, w)
      db = SumTo(v, b)
    """
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(9, 77)).astype(np.float32), rng.normal(size=77).astype(np.float32)
    given = {"x": x, "w": w, "b": np.zeros((9, 1) if "n" in like else (), np.float32)}
    both_ways(text, given, monkeypatch)
    got = og.compile(og.parse(text))(given)
    for name, exact in og.evaluate(og.parse(text), given).items():
        np.testing.assert_allclose(got[name], exact, rtol=1e-5, atol=1e-6 * np.abs(exact).max())
