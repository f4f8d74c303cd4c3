"""Comparisons of a value with elements that were selected from it, as `v == v.amax(0)`: both are of one computation.

Kernels round as they please within an op's bounds: what a row is divided by may become a factor, and a norm in small
ops is one unit. So a value that is computed a second time, in another kernel, may differ in its last bit. Then no
element of it equals its own maximum, and the gradient of `amax`, in equal parts to all that are largest, is 0 / 0. Such
a value is computed once.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from opgraph.torch.graph.aten import packet
from opgraph.torch.graph.views import is_view

aten, prims = torch.ops.aten, torch.ops.prims

_COMPARISONS = frozenset((aten.eq, aten.ne, aten.lt, aten.le, aten.gt, aten.ge))
#: Their results are elements of the first argument, or sizes of elements.
_SELECTIONS = frozenset(
    (
        aten.amax, aten.amin, aten.aminmax, aten.max, aten.min, aten.cummax, aten.cummin, aten.kthvalue, aten.median,
        aten.nanmedian, aten.mode, aten.sort, aten.topk, aten.gather, aten.index, aten.index_select,
        aten.linalg_vector_norm,
    )
)  # fmt: skip
#: They have the bits of their argument, or tell them, whichever kernel computes them.
_EXACT = frozenset((aten.abs, aten.neg, aten.clone, aten._to_copy, prims.convert_element_type))


@dataclass(frozen=True, slots=True)
class Comparison:
    """A comparison of a value with elements that were selected from it.

    Attributes:
        value: the value.
        readers: the nodes that read it for this: the comparison or a view of the value, and the selection or a view.
    """

    value: Node
    readers: tuple[Node, Node]


def comparisons_with_selections(graph: Graph) -> Iterator[Comparison]:
    """Those of a graph of ATen ops, in which calls of equal meaning are one."""
    for node in graph.nodes:
        if node.op != "call_function" or packet(node) not in _COMPARISONS or len(node.all_input_nodes) != 2:
            continue
        first, second = (_source(node, operand) for operand in node.all_input_nodes)
        for (reader, value), (_, other) in ((first, second), (second, first)):
            selection = other.args[0] if other.target is operator.getitem else other
            if isinstance(selection, Node) and selection.op == "call_function" and packet(selection) in _SELECTIONS:
                selecting, source = _source(selection, selection.all_input_nodes[0])
                if source is value:
                    yield Comparison(value, (reader, selecting))


def compared_values(graph: Graph) -> set[Node]:
    """The values of a graph that are compared with elements of their own: no second kernel may compute them."""
    return {comparison.value for comparison in comparisons_with_selections(graph)}


def _source(reader: Node, node: Node) -> tuple[Node, Node]:
    """What a chain of views, casts and changes of sign begins with, and what reads that."""
    while is_view(node) or (node.op == "call_function" and packet(node) in _EXACT):
        reader, node = node, node.all_input_nodes[0]
    return reader, node
