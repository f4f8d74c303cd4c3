"""Graphs whose kernels walk rows on a GPU, and a way to run them without one."""

from __future__ import annotations

from typing import Any

import numpy as np
from emulator import FakeCupy
from row_graphs import SPELLED, as_dict, samples

import opgraph as og
from opgraph.ir.logical_tensor import row_major
from opgraph.loops.layout import Layout, bind
from opgraph.loops.loop import Loop
from opgraph.loops.lower import lower

NORMS = {
    "LayerNorm": "t = LayerNorm(g, w, w, keep_stats=false)",
    "RMSNorm": "t = RMSNorm(g, w)",
    "LogSoftmax": "l = LogSoftmax(g, axis=-1)\n  t = Multiply(l, w)",
}
BACKWARD = """graph(x: {t}[n,c], w: {t}[c], b: {t}[c], d_y: {t}[n,c]) -> (dx, dw, db)
  y, m, v = LayerNorm(x, w, b)
  dx, dw, db = LayerNormBackward(x, d_y, m, v, w, b)
"""


def run(cupy: FakeCupy, f: Any, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The results, which must not depend on the order of threads, warps and blocks."""
    got: dict[str, np.ndarray] = {}
    for backwards in (False, True):
        cupy.backwards = backwards
        made = f({k: cupy.asarray(v) for k, v in feeds.items()})
        made = {k: v.host for k, v in as_dict(made).items()}
        assert all(made[k].tobytes() == v.tobytes() for k, v in got.items())
        got = made
    cupy.backwards = False
    return got


def compiled(text: str, dtype: str) -> Any:
    return og.compile(og.parse(text.format(t=dtype)), device="cuda")


def unit(dtype: str) -> float:
    """The relative change by rounding a result."""
    return 2.0 ** -{"f64": 53, "f32": 24, "f16": 11, "bf16": 8}[dtype]


_OF_CHANNELS = {"g": (12, 1, 1), "b": (12, 1, 1)}
OTHERS = {
    "a batch norm, whose rows are several runs": (
        "graph(x: {t}[n,c,h], m: {t}[c], v: {t}[c], w: {t}[c], b: {t}[c]) -> (y, rm, rv)\n"
        '  y, rm, rv, k, l = BatchNormForwardTraining(x, m, v, w, b, data_format="NCX", epsilon=1e-5)',
        {"x": (6, 3, 20), "m": (3,), "v": (3,), "w": (3,), "b": (3,)},
    ),
    "a group norm between pointwise ops": (
        "graph(x: {t}[n,12,h,w], g: {t}[12], b: {t}[12]) -> (y)\n  t = Tanh(x)\n"
        '  k = GroupNorm(t, g, b, groups=3, keep_stats=false, data_format="NCX")\n  y = Multiply(k, x)',
        {"x": (2, 12, 5, 7), "g": (12,), "b": (12,)},
    ),
    "a group norm that is spelled around reshapes": (
        SPELLED.replace("f32", "{t}"),
        {"x": (3, 12, 5, 6), **_OF_CHANNELS},
    ),
    "an operand that changes with the runs": (
        "graph(x: {t}[n,k,l], w: {t}[k,1]) -> (y)\n  p = Multiply(x, w)\n"
        "  m = ReduceMax(p, axes=[1,2], keep_dims=true)\n  y = Subtract(p, m)",
        {"x": (4, 3, 50), "w": (3, 1)},
    ),
    "a sum for each run, apart": (
        "graph(x: {t}[n,c,h], w: {t}[c,1]) -> (y, dw)\n  m = ReduceMean(x, axes=[0,2], keep_dims=true)\n"
        "  y = Subtract(x, m)\n  p = Multiply(y, x)\n  dw = SumTo(p, w)",
        {"x": (40, 3, 90), "w": (3, 1)},
    ),
    "one number for all rows": (
        "graph(x: {t}[n,c], k: {t}[]) -> (y, dk)\n  s = SoftMax(x, axis=-1)\n  y = Multiply(s, k)\n"
        "  p = Multiply(s, x)\n  dk = SumTo(p, k)",
        {"x": (90, 70), "k": ()},
    ),
    "neighbours in memory are neighbouring rows": (
        "graph(x: {t}[n,c,h]) -> (y, m)\n  y = SoftMax(x, axis=1)\n  m = ReduceMin(x, axes=[1])",
        {"x": (3, 50, 70)},
    ),
    "the same, read again": (
        "graph(x: {t}[n,c,h], w: {t}[c,1]) -> (y, dw)\n  s = SoftMax(x, axis=1)\n  y = Multiply(s, w)\n"
        "  p = Multiply(s, x)\n  dw = SumTo(p, w)",
        {"x": (3, 700, 33), "w": (700, 1)},
    ),
    "few rows beside each other, in pieces": (
        "graph(x: {t}[n,c]) -> (a, b)\n  a = ReduceMean(x, axes=[0])\n  b = ReduceMax(x, axes=[0])",
        {"x": (40_000, 5)},
    ),
    "two columns, whose threads meet in a warp and then in a block": (
        "graph(x: {t}[n,c]) -> (a, b, y)\n  a = ReduceMean(x, axes=[0])\n  b = ReduceMin(x, axes=[0])\n"
        "  y = SoftMax(x, axis=0)",
        {"x": (300, 2)},
    ),
    "three columns of several matrices, not held": (
        "graph(x: {t}[n,k,c]) -> (y)\n  y = SoftMax(x, axis=1)",
        {"x": (3, 3000, 3)},
    ),
    "few long rows, in pieces": ("graph(x: {t}[n,c]) -> (y)\n  y = SoftMax(x, axis=-1)", {"x": (2, 150_001)}),
    "one row of several runs, in pieces": (
        "graph(x: {t}[n,c]) -> (a, b, d)\n  a = ReduceMax(x, axes=[0,1])\n"
        "  m = ReduceMean(x, axes=[0,1], keep_dims=true)\n  b = ReduceL2(x, axes=[0,1])\n  d = Subtract(x, m)",
        {"x": (700, 301)},
    ),
    "pieces, and a sum for each run": (
        "graph(x: {t}[n,c,h], w: {t}[c,1]) -> (y, dw)\n  m = ReduceMean(x, axes=[0,2], keep_dims=true)\n"
        "  y = Subtract(x, m)\n  p = Multiply(y, x)\n  dw = SumTo(p, w)",
        {"x": (300, 3, 301), "w": (3, 1)},
    ),
    "sums for each group of rows, apart": (
        "graph(x: {t}[n,c,h], w: {t}[c,1]) -> (y, dw, dz)\n  m = ReduceMean(x, axes=[2], keep_dims=true)\n"
        "  y = Subtract(x, m)\n  q = Multiply(y, y)\n  dw = SumTo(q, w)\n  dz = SumTo(x, w)",
        {"x": (20, 3, 30), "w": (3, 1)},
    ),
}
VIEWS = {
    "an odd address": lambda a: a[:, 1:65],
    "every other element": lambda a: a[:, :128:2],
    "every other row": lambda a: a[::2, :64],
    "columns as rows": lambda a: a[:, :64].T,
    "backwards": lambda a: a[:, 63::-1],
}


def bound(text: str, rows: int, length: int) -> tuple[Loop, Layout]:
    """The loop of a graph over [n,c] and [c], and its layout for dense arrays."""
    graph = og.parse(text)
    (partition,) = graph.get_partitions()
    lowered = lower(partition)
    sizes = {"n": rows, "c": length}
    shapes = [
        tuple(d if isinstance(d, int) else sizes[d] for d in (t.dims or ())) if t is not None else (1,)
        for t in lowered.loads
    ]
    return lowered.loop, bind(lowered.loop, shapes, [row_major(s) for s in shapes])


SOFTMAX = "graph(x: {t}[n,c], w: {t}[c], r: {t}[n,c]) -> (y)\n  s = SoftMax(x, axis=-1)\n  p = Multiply(s, w)\n"
SOFTMAX += "  y = Add(p, r)"
#: Graph, shapes, dtype, V, and whether rows are held.
ODD = {
    "between a scale and a residual": (SOFTMAX, {"x": (9, 1001), "w": (1001,), "r": (9, 1001)}, "f32", 4, True),
    "of 16 bits": (SOFTMAX, {"x": (17, 643), "w": (643,), "r": (17, 643)}, "bf16", 8, True),
    "longer than registers": (SOFTMAX, {"x": (5, 30_003), "w": (30_003,), "r": (5, 30_003)}, "f32", 4, False),
    "in pieces": ("graph(x: {t}[n,c]) -> (y)\n  y = SoftMax(x, axis=-1)", {"x": (3, 70_001)}, "f32", 4, False),
    "one row": ("graph(x: {t}[n,c]) -> (y)\n  y = ReduceMean(x, axes=[0,1])", {"x": (7, 301)}, "f32", 4, True),
    "an operand that some rows share": (
        "graph(x: {t}[n,k,c], m: {t}[n,1,c]) -> (y, t)\n  p = Multiply(x, m)\n  y = LogSoftmax(p, axis=-1)\n"
        "  t = ReduceMax(p, axes=[2])",
        {"x": (3, 5, 131), "m": (3, 1, 131)}, "f32", 4, True,
    ),
    "operands of two sizes": (
        "graph(x: {t}[n,c], b: boolean[n,c]) -> (y)\n  z = Select(b, x, 0.0)\n  y = SoftMax(z, axis=-1)",
        {"x": (19, 301), "b": (19, 301)}, "f32", 8, True,
    ),
    "one number for all rows": (
        "graph(x: {t}[n,c], k: {t}[]) -> (y, dk)\n  s = SoftMax(x, axis=-1)\n  y = Multiply(s, k)\n"
        "  p = Multiply(s, x)\n  dk = SumTo(p, k)",
        {"x": (90, 77), "k": ()}, "f32", 4, True,
    ),
}  # fmt: skip


def odd_feeds(graph: og.Graph, shapes: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """Random numbers; for conditions, a random half is true."""
    found = {}
    for i, t in enumerate(graph.inputs):
        shape = shapes[str(t.name)]
        is_flag = t.dtype == "boolean"
        found[str(t.name)] = np.random.default_rng(i).random(shape) < 0.5 if is_flag else samples(shape, t.dtype, i)
    return found
