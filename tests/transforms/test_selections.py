"""Comparisons of a value with elements selected from it: forward and backward use one computation of the value."""

from __future__ import annotations

import numpy as np
import pytest

import opgraph as og
from opgraph.ir import dtypes
from opgraph.transforms.selections import comparisons

#: Norms in small ops, which forward computes as one unit, and a division by a number of each row.
VALUES = {
    "an RMSNorm": "%1 = Multiply(x, x)\n  %2 = ReduceMean(%1, axes=[1], keep_dims=true)\n  %3 = Add(%2, 0.00001)\n"
    "  %4 = Sqrt(%3)\n  %5 = Divide(x, %4)\n  v = Multiply(%5, w)",
    "by the sum": "%1 = ReduceSum(x, axes=[1], keep_dims=true)\n  %2 = Divide(x, %1)\n  v = Multiply(%2, w)",
    "a Sigmoid": "%1 = Sigmoid(x)\n  %2 = Multiply(%1, x)\n  v = Multiply(%2, w)",
}  # fmt: skip
MAX = "m = ReduceMax(v, axes=[{axis}], keep_dims=true)\n  "
CHOICE = "\n  s = Sin(x)\n  y = Select(c, s, v)"
#: Ops that read the value and its largest elements.
READERS = {
    "both": MAX + "y = Multiply(v, m)",
    "dropped axis": "m = ReduceMin(v, axes=[{axis}], keep_dims=false)\n"
    "  n = Unsqueeze(m, axes=[{axis}])\n  y = Add(v, n)",
    "written out": MAX + "c = Equal(v, m)" + CHOICE,
    "as sizes": "a = Abs(v)\n  m = ReduceMax(a, axes=[{axis}], keep_dims=true)\n  c = GreaterEqual(a, m)\n"
    "  y = Select(c, v, x)",
}  # fmt: skip
#: Comparisons in which the value, the selected elements, or both go through other ops first.
WAYS = {
    "difference": MAX + "d = Subtract(v, m)\n  c = Equal(d, 0.0)" + CHOICE,
    "sign": MAX + "d = Subtract(v, m)\n  g = Sign(d)\n  s = Sin(x)\n  h = Multiply(g, s)\n  y = Add(h, v)",
    "root": MAX + "d = Subtract(m, v)\n  r = Sqrt(d)\n  g = StopGradient(r)\n  s = Sin(x)\n  h = Multiply(g, s)\n"
    "  y = Add(h, v)",
    "power": MAX + "d = Subtract(m, v)\n  r = Pow(d, beta=0.5)\n  g = StopGradient(r)\n  s = Sin(x)\n"
    "  h = Multiply(g, s)\n  y = Add(h, v)",
    "quotient": MAX + "d = Divide(v, m)\n  c = Equal(d, 1.0)" + CHOICE,
    "share": MAX + "d = Divide(v, m)\n  e = Subtract(1.0, d)\n  r = Sqrt(e)\n  g = StopGradient(r)\n  s = Sin(x)\n"
    "  h = Multiply(g, s)\n  y = Add(h, v)",
    "angle": MAX + "d = Divide(v, m)\n  r = Acos(d)\n  g = StopGradient(r)\n  s = Sin(x)\n  h = Multiply(g, s)\n"
    "  y = Add(h, v)",
    "whole number": MAX + "d = Divide(v, m)\n  r: s32[40,33] = TypeCast(d)\n  g: f32[40,33] = TypeCast(r)\n"
    "  s = Sin(x)\n  h = Multiply(g, s)\n  y = Add(h, v)",
    "remainder": MAX + "d = Mod(v, m, fmod=1)\n  s = Sin(x)\n  y = Multiply(d, s)",
    "both scaled": MAX + "p = Multiply(v, 2.0)\n  q = Multiply(m, 2.0)\n  c = Equal(p, q)" + CHOICE,
    "both moved": MAX + "p = Add(v, 1.0)\n  q = Add(m, 1.0)\n  c = GreaterEqual(p, q)" + CHOICE,
    "of positive ones": "r = ReLU(v)\n  m = ReduceMax(r, axes=[{axis}], keep_dims=true)\n  c = Equal(v, m)" + CHOICE,
    "of some": "b = Less(x, 1.0)\n  r = Select(b, -1000.0, v)\n  m = ReduceMax(r, axes=[{axis}], keep_dims=true)\n"
    "  c = Equal(v, m)" + CHOICE,
    "of a join": "r = Concat(v, x, axis={axis})\n  m = ReduceMax(r, axes=[{axis}], keep_dims=true)\n"
    "  c = Equal(v, m)" + CHOICE,
    "of both axes": MAX + "n = ReduceMax(m, axes=[0, 1], keep_dims=true)\n  c = Equal(v, n)" + CHOICE,
    "of two": MAX + "n = ReduceMin(v, axes=[{axis}], keep_dims=true)\n  k = Maximum(m, n)\n  c = Equal(v, k)" + CHOICE,
    "the larger one": MAX + "k = Maximum(v, m)\n  c = Equal(v, k)" + CHOICE,
    "a piece": "r = Slice(v, starts=[0], ends=[1], axes=[{axis}])\n  c = GreaterEqual(v, r)" + CHOICE,
    "sign beside a piece": "r = Slice(v, starts=[0], ends=[1], axes=[{axis}])\n  d = Subtract(v, r)\n  g = Sign(d)\n"
    "  s = Sin(x)\n  h = Multiply(g, s)\n  y = Add(h, v)",
    "of a piece": "r = Slice(v, starts=[0], ends=[20], axes=[{axis}])\n"
    "  m = ReduceMax(r, axes=[{axis}], keep_dims=true)\n  c = Equal(v, m)" + CHOICE,
    "pools": "a = Unsqueeze(v, axes=[0, 1])\n  p = MaxPool(a, strides=[1, 1], kernel=[3, 3], pads_begin=[1, 1],"
    " pads_end=[1, 1])\n  c = GreaterEqual(a, p)\n  u = Unsqueeze(x, axes=[0, 1])\n  s = Sin(u)\n"
    "  z = Select(c, s, a)\n  y = Squeeze(z, axes=[0, 1])",
}  # fmt: skip


CASES = [
    *(("an RMSNorm", reader, axis, "f32") for reader in READERS for axis in (0, 1)),
    ("an RMSNorm", "both", 0, "bf16"),
    *((value, "both", 1, "bf16") for value in VALUES),
]


def _graph(value: str, reader: str, axis: int, dtype: str) -> og.Graph:
    text = reader.format(axis=axis)
    return og.parse(f"graph(x: {dtype}[40,33], w: {dtype}[40,33]) -> (y)\n  {VALUES[value]}\n  {text}")


@pytest.mark.slow
@pytest.mark.parametrize(("value", "reader", "axis", "dtype"), CASES)
def test_some_element_equals_its_maximum_in_backward(value: str, reader: str, axis: int, dtype: str) -> None:
    graph = _graph(value, READERS[reader], axis, dtype)
    rng = np.random.default_rng(3)
    x, w = (rng.uniform(0.5, 3.0, (40, 33)).astype(dtypes.get(dtype).numpy) for _ in range(2))
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


@pytest.mark.parametrize("axis", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("way", WAYS)
def test_forward_and_backward_select_the_same_elements(way: str, axis: int) -> None:
    graph = _graph("an RMSNorm", WAYS[way], axis, "f32")
    rng = np.random.default_rng(3)
    x, w, d = (rng.uniform(0.5, 3.0, (40, 33)).astype(np.float32) for _ in range(3))
    y, pullback = og.compile(graph, wrt=("x", "w")).vjp(x=x, w=w)
    names = {t.name for t in og.gradient(graph, ("x", "w")).inputs}
    feeds = {name: array for name, array in (("x", x), ("w", w), ("d_y", d)) if name in names}
    want = {"y": og.evaluate(graph, x=x, w=w), **og.evaluate(og.gradient(graph, ("x", "w")), feeds)}
    got = {"y": y, **{f"d_{name}": array for name, array in pullback(d).items()}}
    for name, array in got.items():
        assert np.abs(array - want[name]).max() <= 1e-4 * np.abs(want[name]).max(), name


def test_comparing_two_slices_is_no_comparison_with_a_selection() -> None:
    graph = og.parse(
        "graph(x: f32[64,64]) -> (y)\n  v = Sin(x)\n  a = Slice(v, starts=[0], ends=[32], axes=[1])\n"
        "  b = Slice(v, starts=[32], ends=[64], axes=[1])\n  c = Greater(a, b)\n  y = Select(c, a, b)"
    )
    assert not comparisons(graph)
    kept = og.compile(graph, wrt=("x",)).saved_tensors()
    assert sum(s.bytes or 0 for s in kept) == 64 * 64 * 4 + 64 * 32
