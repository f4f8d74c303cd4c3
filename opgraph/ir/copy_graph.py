"""Copies of a graph with some ops or tensors replaced, and the search for the ops that some values need."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from opgraph.ir.graph import Graph
from opgraph.ir.logical_tensor import LogicalTensor
from opgraph.ir.op import Op


def rebuilt(graph: Graph, ops: Iterable[Op] | None = None, changed: Mapping[int, LogicalTensor] | None = None) -> Graph:
    """An open graph with the same inputs, constants and ops; the caller has to set its outputs.

    Args:
        ops: replace the graph's own ops.
        changed: replacement tensors, by id. A constant replaced by a tensor without data becomes an input, after the
            others; an input replaced by a tensor with data becomes a constant.
    """
    instead = changed or {}
    result = Graph(graph.engine)
    for tensor in (*graph.inputs, *graph.constants):  # a constant may be an output that no op reads
        own = instead.get(tensor.id, tensor)
        if own.is_constant:
            result._tables.enter_tensor(own)
        else:
            result._add_input(own)
    for op in graph.ops if ops is None else ops:
        ins, outs = (tuple(instead.get(t.id, t) for t in side) for side in (op.inputs, op.outputs))
        result._add(op.id, op.kind, ins, outs, op.name, op.attrs)
    return result


def needed_ops(ops: Sequence[Op], ids: Iterable[int]) -> tuple[list[Op], set[int]]:
    """The ops that values need, in the order of `ops` (producers first), and the ids of all values they depend on."""
    wanted = set(ids)
    kept = []
    for op in reversed(ops):
        if any(t.id in wanted for t in op.outputs):
            wanted.update(t.id for t in op.inputs)
            kept.append(op)
    return kept[::-1], wanted
