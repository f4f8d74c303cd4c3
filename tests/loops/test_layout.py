"""The order in which a loop walks its elements: memory order, for any order of the axes."""

from __future__ import annotations

from typing import Any

import numpy as np

import opgraph as og
from opgraph.loops.layout import bind
from opgraph.loops.lower import lower
from opgraph.loops.text import parse_loop

SCALED = """
loop(parallel *)
  x0 = load f32
  x1 = load f32
  t0: f32 = Multiply(x0, x1)  # 0
  store f32 t0
"""
LAST = (192, 1, 64, 16)  # [2, 16, 3, 4], channels last


def channels_last(array: Any) -> Any:
    return np.ascontiguousarray(array.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)


def test_loop_axes_follow_memory_order() -> None:
    loop, shape = parse_loop(SCALED), (2, 16, 3, 4)
    layout = bind(loop, [shape, (16, 1, 1)], [LAST, (1, 1, 1)], [LAST])
    assert (layout.dims, layout.strides) == ((24, 16), ((16, 1), (0, 1), (16, 1)))
    # A result in the order of its axes is written in that order.
    layout = bind(loop, [shape, (16, 1, 1)], [LAST, (1, 1, 1)])
    assert (layout.dims, layout.strides[-1]) == ((2, 16, 12), (192, 12, 1))


def test_position_dependent_ops_ignore_loop_order() -> None:
    g = og.Graph()
    x = g.input("x", "f32", (None, None, None, None))
    numbered = g.add_op("Add", g.add_op("TypeCast", g.add_op("GenIndex", x, dtype="s32", axis=1), dtype="f32"), x)
    dropped, mask = g.add_op("Dropout", x, 1234, 7, 0.5, outputs=2)
    g.output(numbered, dropped, mask)
    run = og.compile(g)
    x0 = np.random.default_rng(0).standard_normal((2, 16, 3, 4)).astype(np.float32)
    wanted = run(x=x0)
    for given in (x0, channels_last(x0)):
        out = {name: channels_last(np.zeros_like(value)) for name, value in wanted.items()}
        run(x=given, out=out)
        for name, value in wanted.items():
            np.testing.assert_array_equal(out[name], value)


def test_sum_to_a_reshaped_operand_has_the_reshaped_shape() -> None:
    graph = og.parse(
        "graph(a: f32[1,1,1,2], b: f32[1,1,1], v: f32[1]) -> (y, z)\n"
        "  z = GreaterEqual(b, a)\n  r = StaticReshape(b, shape=[1], special_zero=false)\n  y = SumTo(v, r)"
    ).finalize()
    loop = next(lower(p).loop for p in graph.get_partitions() if p.ops[-1].kind == "SumTo")
    assert bind(loop, [(1,), (1, 1, 1)], [(1,), (1, 1, 1)]).results == ((1,),)
