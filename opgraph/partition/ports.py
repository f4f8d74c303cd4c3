"""Ports: the tensors that a group of ops reads from outside, and its results that are needed outside."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from opgraph.ir.graph import Graph
from opgraph.ir.logical_tensor import LogicalTensor
from opgraph.ir.op import Op


def read_from_outside(ops: Iterable[Op]) -> tuple[tuple[LogicalTensor, ...], tuple[LogicalTensor, ...]]:
    """The tensors that ops (in topological order) read but do not make, in order of first use; and their constants."""
    made: set[int] = set()
    inputs: dict[int, LogicalTensor] = {}
    constants: dict[int, LogicalTensor] = {}
    for op in ops:
        for tensor in op.inputs:
            if tensor.is_constant:
                constants.setdefault(tensor.id, tensor)
            elif tensor.id not in made:
                inputs.setdefault(tensor.id, tensor)
        made.update(t.id for t in op.outputs)
    return tuple(inputs.values()), tuple(constants.values())


def needed_outside(graph: Graph, outputs: set[int], ops: Sequence[Op]) -> tuple[LogicalTensor, ...]:
    """The results of ops that other ops read or that are outputs of the graph, in order of creation.

    Args:
        outputs: ids of the graph's outputs.
    """
    inside = {op.id for op in ops}
    made = [t for op in ops for t in op.outputs]
    needed = [t for t in made if t.id in outputs or any(c.id not in inside for c in graph.consumers(t.id))]
    # If no result is needed (an importer dropped the values), the partition still makes its last values.
    return tuple(needed or [t for t in made if not graph.consumers(t.id)])
