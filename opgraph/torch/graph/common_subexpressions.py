"""Merges calls of a graph that compute the same.

This is the pass of torch's partitioner (`torch._functorch.config.cse`), but it does not load Inductor. Torch's own pass
imports a helper from there, which takes a tenth of the time of a first step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, Node

from opgraph.torch.graph.aten import is_random, packet, value_of
from opgraph.torch.graph.torch_internals import storage_key


def share_common_subexpressions(graph: Graph) -> None:
    """Replaces a call by an earlier one of the same op and arguments.

    Results that the graph returns, and values that share their memory, stay separate tensors. Calls before and after a
    write are not merged, nor are random ones.

    Args:
        graph: a graph of ATen ops with `val` in each node's meta; it is changed.
    """
    returned = {storage_key(value_of(n)) for n in graph.output_node().all_input_nodes} - {None}
    known: dict[Any, Node] = {}
    for node in graph.nodes:
        if node.op != "call_function" or is_random(node) or packet(node) is torch.ops.aten.empty:
            continue
        if getattr(getattr(node.target, "_schema", None), "is_mutable", False):
            known.clear()
        elif storage_key(value_of(node)) not in returned:
            first = known.setdefault((node.target, key_of(node.args), key_of(node.kwargs)), node)
            if first is not node:
                node.replace_all_uses_with(first)
                graph.erase_node(node)


def key_of(value: Any, of: Callable[[Node], Any] = lambda node: node) -> Any:
    """A key that is equal for equal arguments; 1 differs from 1.0, and 0.0 from -0.0.

    Args:
        value: an argument of a call, or several in a tuple, list or dict.
        of: returns the key of a node.
    """
    if isinstance(value, Node):
        return of(value)
    if isinstance(value, (tuple, list)):
        return (list if isinstance(value, list) else tuple, *(key_of(v, of) for v in value))
    if isinstance(value, dict):
        return (dict, *((name, key_of(v, of)) for name, v in value.items()))
    if isinstance(value, slice):
        return slice, key_of(value.start, of), key_of(value.stop, of), key_of(value.step, of)
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return value.node
    return type(value), repr(value) if isinstance(value, (float, complex)) else value
