"""Moves slices up: a slice of a value that a kernel computes becomes the same arithmetic on slices of its operands.

A computed value must be stored in memory before it is sliced; a slice of memory costs nothing. So if only slices force
a kernel to store a value, they move through the value, and through the values that it is computed from.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Graph, Node

from opgraph.torch.graph.aten import is_elementwise, packet, value_of
from opgraph.torch.graph.axis_splits import join_of

aten = torch.ops.aten

_SLICES = (aten.slice, aten.select)


def move_slices_up(graph: Graph, computed: set[Node], levels: Mapping[Node, int]) -> None:
    """Moves slices through the computed values whose readers would then all be in one kernel with them.

    Args:
        graph: a graph of ATen ops with `val` in each node's meta; it is changed.
        computed: the nodes that kernels compute; new ones are added, those without readers are removed.
        levels: the levels of nodes, as `schedule` counts them.
    """
    levels = dict(levels)
    waiting = [n for n in graph.nodes if _is_slice(n)]
    while waiting:
        part = waiting.pop()
        whole = part.args[0] if part.users else None
        if not isinstance(whole, Node) or not _lives_in_kernels(whole, computed, levels):
            continue
        slices = [n for n in whole.users if _is_slice(n)]
        for part in slices:
            made, sliced = _moved(graph, part, whole)
            computed.add(made)
            levels[made] = levels[whole]
            part.replace_all_uses_with(made)
            graph.erase_node(part)
            waiting += sliced
        waiting = [n for n in waiting if n not in slices]
        if not whole.users:
            computed.discard(whole)
            graph.erase_node(whole)


def _is_slice(node: Node) -> bool:
    return node.op == "call_function" and packet(node) in _SLICES


def _lives_in_kernels(whole: Node, computed: set[Node], levels: Mapping[Node, int]) -> bool:
    """True if only slices force a kernel to store a value."""
    if whole not in computed or not is_elementwise(whole):
        return False
    for user in whole.users:
        if _is_slice(user):
            if not all(_reads_each_once(reader, user, computed) for reader in user.users):
                return False
        elif user not in computed or levels[user] != levels[whole]:
            return False
    return True


def _reads_each_once(reader: Node, part: Node, computed: set[Node]) -> bool:
    """True if a kernel reads each element of a slice only once: a slice that it broadcasts is better stored."""
    if reader not in computed:
        return False
    return join_of(reader) is not None or value_of(reader).numel() == value_of(part).numel()


def _moved(graph: Graph, part: Node, whole: Node) -> tuple[Node, list[Node]]:
    """The node that computes a slice from slices of operands, and these slices."""
    value = value_of(whole)
    given: Any = part.args[1] if len(part.args) > 1 else part.kwargs.get("dim", 0)
    axis = given % value.dim() - value.dim()
    sliced: dict[Node, Node] = {}

    def of(operand: Node) -> Node:
        own = value_of(operand)
        if not isinstance(own, torch.Tensor) or own.dim() < -axis:
            return operand
        arguments = (axis, *part.args[2:])
        if own.shape[axis] == 1 != value.shape[axis]:  # broadcast there
            if packet(part) is aten.slice:
                return operand
            arguments = (axis, 0)
        if operand not in sliced:
            made = graph.call_function(part.target, (operand, *arguments), part.kwargs)  # type: ignore[arg-type]
            made.meta = {**part.meta, "val": part.target(own, *arguments, **part.kwargs)}  # type: ignore[operator]
            sliced[operand] = made
        return sliced[operand]

    with graph.inserting_before(part):
        made = graph.node_copy(whole, of)
    made.meta = {**whole.meta, "val": value_of(part).new_empty(value_of(part).shape)}
    return made, list(sliced.values())
