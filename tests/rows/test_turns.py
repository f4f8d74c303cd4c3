"""Rows on the CPU that alternate in their last pass, and that prefetch memory."""

from __future__ import annotations

import numpy as np
import pytest
from by_lanes import both_ways, functor, needs_lanes

import opgraph as og
from opgraph.ir import dtypes

pytestmark = needs_lanes

NORM = """graph(x: {t}[n,c], w: f32[c], b: f32[c]) -> (y, m)
  wide: f32[n,c] = TypeCast(x)
  m = ReduceMean(wide, axes=[1])
  n = LayerNorm(wide, w, b, keep_stats=false)
  y: {t}[n,c] = TypeCast(n)
"""


def feeds(rows: int, columns: int, dtype: str) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(columns)
    x, w, b = (rng.normal(size=n).astype(np.float32) for n in ((rows, columns), columns, columns))
    return {"x": x.astype(dtypes.get(dtype).numpy), "w": w, "b": b}


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_alternating_rows_do_not_change_bits(dtype: str, no_cache: None, monkeypatch: pytest.MonkeyPatch) -> None:
    # Four short rows in the first cache, rows that do not alternate, and rows in parts of 1024; remaining rows, and
    # rows that each begin at another place in a cache line.
    for rows, columns in [(1, 70), (7, 100), (9, 512), (6, 1500), (5, 4096), (7, 4099), (3, 5120), (2, 20_000)]:
        both_ways(NORM.format(t=dtype), feeds(rows, columns, dtype), monkeypatch)


def test_prefetched_rows_larger_than_the_caches_keep_their_bits(
    no_cache: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = NORM.format(t="f32")
    assert "og::fetch(x0 + x0_next + i)" in functor(og.compile(og.parse(text)))
    both_ways(text, feeds(800, 4099, "f32"), monkeypatch)


def test_row_result_may_overwrite_its_operand(no_cache: None) -> None:
    f = og.compile(
        og.parse("graph(x: f32[n,c], w: f32[c], b: f32[c]) -> (y)\n  y = LayerNorm(x, w, b, keep_stats=false)")
    )
    for rows, columns in [(7, 100), (9, 4099)]:
        given = feeds(rows, columns, "f32")
        apart = f(**given)
        np.testing.assert_array_equal(f(**given, out=given["x"]), apart)
