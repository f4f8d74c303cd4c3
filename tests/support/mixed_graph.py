"""A graph with operands and results of every kind."""

from __future__ import annotations

import numpy as np

import opgraph as og
from opgraph.ir import dtypes
from opgraph.ir.logical_tensor import row_major
from opgraph.loops.layout import Layout, bind
from opgraph.loops.loop import Loop
from opgraph.loops.lower import lower

#: A kernel of every kind of operand and result: 16-bit storage, booleans, a column, one number for all, an operand that
#: the loop only passes on, and a number as a result.
MIXED = """graph(x: f32[n,m], h: f16[n,m], b: bf16[n,m], c: f32[n,1], a: f32[]) -> (y, z, w, up, same, all)
  up = Greater(x, 0.0)
  %0 = Select(up, x, 1.0)
  %1 = Tanh(%0)
  %2 = Multiply(%1, a)
  %3 = Clamp(%2, min=-0.5, max=0.75)
  %4: f32[n,m] = TypeCast(h)
  %5: f32[n,m] = TypeCast(b)
  %6 = Multiply(%3, %4)
  %7 = Add(%6, c)
  y = Select(up, %7, %5)
  z: f16[n,m] = TypeCast(%7)
  w: bf16[n,m] = TypeCast(%7)
  same = Identity(x)
  all = BroadcastTo(a, x)"""


def feeds(g: og.Graph, shape: tuple[int, int], seed: int = 0) -> dict[str, np.ndarray]:
    made = {}
    for k, t in enumerate(g.inputs):
        own = tuple(1 if d == 1 else size for d, size in zip(t.dims or (), shape, strict=False))
        values = np.random.default_rng(seed + k).normal(0, 2, own)
        made[t.name] = np.asarray(values).astype(dtypes.get(t.dtype).numpy)
    return made


def bound(g: og.Graph) -> tuple[Loop, Layout]:
    (part,) = g.get_partitions()
    loop = lower(part).loop
    shapes = [(8, 256)] * len(loop.loads)
    return loop, bind(loop, shapes, [row_major(s) for s in shapes])
