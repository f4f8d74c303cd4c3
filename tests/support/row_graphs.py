"""Graphs over rows, and arrays for them."""

from __future__ import annotations

from typing import Any

import numpy as np
from random_rows import sizes

import opgraph as og
from opgraph.ir import dtypes

RMS = """graph(x: {t}[n,c], w: {t}[c]) -> (y)
  p = Pow(x, 2.0)
  m = ReduceMean(p, axes=[-1], keep_dims=true)
  e = Add(m, 1e-5)
  s = Sqrt(e)
  r = Reciprocal(s)
  a = Multiply(x, r)
  y = Multiply(a, w)
"""
#: All reductions in one graph, so that it is one kernel for each dtype.
ALL = """graph(x: {t}[n,c]) -> (a, b, c, d, e, f, g)
  a = ReduceSum(x, axes=[1])
  b = ReduceMean(x, axes=[1], keep_dims=true)
  c = ReduceMax(x, axes=[-1])
  d = ReduceMin(x, axes=[-1], keep_dims=true)
  e = ReduceProd(x, axes=[-1])
  f = ReduceL1(x, axes=[1])
  g = ReduceL2(x, axes=[1])
"""


def samples(shape: tuple[int, ...], dtype: str = "f32", seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtypes.get(dtype).numpy)


def as_dict(result: Any) -> dict[str, np.ndarray]:
    return result if isinstance(result, dict) else {"y": result}


def feeds_of(graph: og.Graph, seed: int) -> dict[str, np.ndarray]:
    extents, random = sizes(seed, 4), np.random.default_rng(seed)
    feeds = {}
    for tensor in graph.inputs:
        shape = tuple(d if isinstance(d, int) else extents[int(str(d)[1:])] for d in tensor.dims or ())
        array = random.standard_normal(shape)
        if array.ndim > 1 and random.random() < 0.4:  # other strides
            array = np.ascontiguousarray(np.moveaxis(array, -1, 0))
            array = np.moveaxis(array, 0, -1)
        feeds[tensor.name or ""] = array
    return feeds


WHOLE = """graph(x: f32[n,12,h,w], g: f32[12], b: f32[12]) -> (y)
  t = Tanh(x)
  y = GroupNorm(t, g, b, groups=3, keep_stats=false, data_format="NCX")
"""
#: As exporters write it, with ops before and after.
SPELLED = """graph(x: f32[n,12,h,w], g: f32[12,1,1], b: f32[12,1,1]) -> (y)
  t = Tanh(x)
  r = StaticReshape(t, shape=[0,3,-1], special_zero=true)
  m = ReduceMean(r, axes=[2], keep_dims=true)
  d = Subtract(r, m)
  q = Square(d)
  v = ReduceMean(q, axes=[-1], keep_dims=true)
  e = Add(v, 1e-5)
  s = Sqrt(e)
  o = Divide(d, s)
  k = ReshapeTo(o, x)
  u = Multiply(k, g)
  a = Add(u, b)
  y = Add(a, x)
"""
