"""A graph again with other ops or tensors, and which ops some values need."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from opgraph.ir.graph import Graph
from opgraph.ir.logical_tensor import LogicalTensor
from opgraph.ir.op import Op


def rebuilt(graph: Graph, ops: Iterable[Op] | None = None, changed: Mapping[int, LogicalTensor] | None = None) -> Graph:
    """An open graph of the same inputs, constants and ops; its outputs are still to be set.

    Args:
        ops: to take instead of the graph's own.
        changed: tensors to take instead, by id. A constant that has no data any more is an input, after the others; an
            input that has some is a constant.
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
    """The ops that values need, producers first as they come; and the ids of all values that these depend on."""
    wanted = set(ids)
    kept = []
    for op in reversed(ops):
        if any(t.id in wanted for t in op.outputs):
            wanted.update(t.id for t in op.inputs)
            kept.append(op)
    return kept[::-1], wanted
