"""Comparisons of a value with its own largest or smallest elements: backward takes what forward found.

Kernels round as they please within an op's bounds, so a value that backward computes again may differ in its last bit.
Then no element of it equals its maximum, and the gradient of ReduceMax, in equal parts to all that are largest, is
0 / 0. Either such a value is kept, or the comparison, a byte for each element.
"""

from __future__ import annotations

from collections.abc import Mapping

from opgraph.ir import opdef
from opgraph.ir.graph import Graph
from opgraph.ir.op import Op
from opgraph.ops.shape import VIEWS

_COMPARISONS = ("Equal", "NotEqual", "Greater", "GreaterEqual", "Less", "LessOrEqual")
#: They have the bits of their argument, or tell them, whichever kernel computes them.
_EXACT = (*VIEWS, "StaticTranspose", "BroadcastTo", "TypeCast", "StopGradient", "Abs", "Neg")


def selects(op: Op) -> bool:
    """Whether an op finds the largest or smallest elements of its first input."""
    row = opdef.get(op.kind, where=op.label).row
    return row is not None and row.how in ("largest", "smallest")


def compared_values(graph: Graph) -> Mapping[int, int]:
    """The comparisons of values with their own largest or smallest elements: of each result's id that of the value."""
    found: dict[int, int] = {}
    for op in graph.ops:
        if op.kind in _COMPARISONS:
            first, second = (_source(graph, t.id) for t in op.inputs)
            for value, other in ((first, second), (second, first)):
                producer = graph.producer(other)
                if producer is not None and selects(producer) and _source(graph, producer.inputs[0].id) == value:
                    found[op.outputs[0].id] = value
    return found


def _source(graph: Graph, id: int) -> int:
    """The id of what a chain of views, casts and changes of sign begins with."""
    op = graph.producer(id)
    while op is not None and op.kind in _EXACT:
        id = op.inputs[0].id
        op = graph.producer(id)
    return id
