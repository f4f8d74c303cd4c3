"""Gradients through the largest elements of values that backward computes again: some element equals the largest."""

from __future__ import annotations

import numpy as np
import pytest

import opgraph as og

#: Norms in small ops, which forward computes as one unit, and a division by a number of each row.
VALUES = {
    "an RMSNorm": "%1 = Multiply(x, x)\n  %2 = ReduceMean(%1, axes=[1], keep_dims=true)\n  %3 = Add(%2, 0.00001)\n"
    "  %4 = Sqrt(%3)\n  %5 = Divide(x, %4)\n  v = Multiply(%5, w)",
    "by the sum": "%1 = ReduceSum(x, axes=[1], keep_dims=true)\n  %2 = Divide(x, %1)\n  v = Multiply(%2, w)",
    "a Sigmoid": "%1 = Sigmoid(x)\n  %2 = Multiply(%1, x)\n  v = Multiply(%2, w)",
}  # fmt: skip
#: What reads the value and its largest elements.
READERS = {
    "both": "m = ReduceMax(v, axes=[{axis}], keep_dims=true)\n  y = Multiply(v, m)",
    "dropped axis": "m = ReduceMin(v, axes=[{axis}], keep_dims=false)\n"
    "  n = Unsqueeze(m, axes=[{axis}])\n  y = Add(v, n)",
    "written out": "m = ReduceMax(v, axes=[{axis}], keep_dims=true)\n  c = Equal(v, m)\n"
    "  s = Sin(x)\n  y = Select(c, s, v)",
    "as sizes": "a = Abs(v)\n  m = ReduceMax(a, axes=[{axis}], keep_dims=true)\n  c = GreaterEqual(a, m)\n"
    "  y = Select(c, v, x)",
}  # fmt: skip


CASES = [
    *(("an RMSNorm", reader, axis, "f32") for reader in READERS for axis in (0, 1)),
    ("an RMSNorm", "both", 0, "bf16"),
    *((value, "both", 1, "bf16") for value in VALUES),
]


@pytest.mark.parametrize(("value", "reader", "axis", "dtype"), CASES)
def test_some_element_is_the_largest_in_backward_too(value: str, reader: str, axis: int, dtype: str) -> None:
    text = (
        f"graph(x: {dtype}[40,33], w: {dtype}[40,33]) -> (y)\n  {VALUES[value]}\n  {READERS[reader].format(axis=axis)}"
    )
    graph = og.parse(text)
    rng = np.random.default_rng(3)
    x, w = (rng.uniform(0.5, 3.0, (40, 33)).astype(og.ir.dtypes.get(dtype).numpy) for _ in range(2))
    ones = np.ones_like(x)
    _, pullback = og.compile(graph, wrt=("x", "w")).vjp(x=x, w=w)
    got = pullback(ones)
    want = og.compile(og.gradient(graph, ("x", "w")))(x=x, w=w, d_y=ones)
    limit = 1e-4 if dtype == "f32" else 0.05
    for name in ("x", "w"):
        a, b = (
            np.asarray(found[f"d_{name}"] if f"d_{name}" in found else found[name], np.float64) for found in (got, want)
        )
        assert np.isfinite(a).all(), name
        assert np.abs(a - b).max() <= limit * np.abs(b).max(), name
