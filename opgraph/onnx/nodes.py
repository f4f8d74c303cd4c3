"""The subgraphs of a node, and the outer values that they read."""

from __future__ import annotations

from collections.abc import Iterable

import onnx
from onnx import AttributeProto, GraphProto, NodeProto


def captures(node: NodeProto) -> list[str]:
    """The names that a node's subgraphs use and do not define, in order of first use."""
    found: dict[str, None] = {}
    waiting: list[tuple[GraphProto, frozenset[str]]] = [(g, frozenset()) for g in subgraphs(node)]
    while waiting:
        graph, outer = waiting.pop(0)
        defined = outer | {i.name for i in (*graph.input, *graph.initializer)}
        defined |= {name for n in graph.node for name in n.output}
        used = [name for n in graph.node for name in n.input] + [o.name for o in graph.output]
        found.update((name, None) for name in used if name and name not in defined)
        waiting += [(g, defined) for n in graph.node for g in subgraphs(n)]
    return list(found)


def subgraphs(node: NodeProto) -> list[GraphProto]:
    """The graphs among a node's attributes."""
    found = [a.g for a in node.attribute if a.type == AttributeProto.GRAPH]
    return found + [g for a in node.attribute if a.type == AttributeProto.GRAPHS for g in a.graphs]


def reads(node: NodeProto) -> list[str]:
    """Every value of its own graph that a node reads."""
    return [name for name in (*node.input, *captures(node)) if name]


def with_inner(nodes: Iterable[NodeProto]) -> list[NodeProto]:
    """The nodes, and those of their subgraphs at any depth."""
    found, waiting = list[NodeProto](), list(nodes)
    while waiting:
        found += waiting
        waiting = [inner for node in waiting for graph in subgraphs(node) for inner in graph.node]
    return found


def since(node: NodeProto, opset: int) -> int:
    """The opset that introduced the version of a node's op used in `opset` of ai.onnx; -1 if there is no such op."""
    try:
        return int(onnx.defs.get_schema(node.op_type, opset, "").since_version)
    except onnx.defs.SchemaError:
        return -1
