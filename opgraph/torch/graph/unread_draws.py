"""Random numbers that no result of a graph is computed from: they are drawn all the same, as eager torch draws them.

Every later number depends on how many were drawn before.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from opgraph.runtime.providers.torch_internals import HigherOrderOperator
from opgraph.torch.graph.parameter_branches import draws_random_numbers, written_arguments
from opgraph.torch.graph.torch_internals import memory_of


def with_unread_draws(graph: GraphModule, compile: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
    """What `compile` makes of a graph of Dynamo, which draws what the graph draws, read or not.

    AOTAutograd leaves out what no result is computed from. Eager torch draws the numbers, and every later one depends
    on how many were drawn before. So such calls become results of the graph, which the caller does not see.

    Args:
        graph: gets more results, which what is returned here leaves out.
        compile: called afterwards.
    """
    nodes = list(graph.graph.nodes)
    (output,) = graph.graph.find_nodes(op="output")
    draws = [n for n in nodes if draws_numbers(n)]
    read = _read(nodes, output) if draws else set()
    unread = [n for n in draws if n not in read]
    if not unread:
        return compile()
    number = len(output.args[0])
    with graph.graph.inserting_before(output):
        made = [part for n in unread for part in _tensors(n)]
        output.args = ((*output.args[0], *(graph.graph.call_method("detach", (n,)) for n in made)),)
    graph.recompile()
    call = compile()
    return lambda *args: tuple(call(*args)[:number])


def draws_numbers(node: Node) -> bool:
    """Whether a node is a call that draws random numbers, itself or in a function that it runs, as checkpoints do."""
    if node.op not in ("call_function", "call_method"):
        return False
    arguments = [n for n in node.all_input_nodes if n.op == "get_attr"]
    bodies = [getattr(node.graph.owning_module, str(n.target), None) for n in arguments]
    return draws_random_numbers(node) or any(
        draws_numbers(n) for body in bodies if isinstance(body, GraphModule) for n in body.graph.nodes
    )


def _tensors(node: Node) -> list[Node]:
    """The tensors that a call gives back, alone or in a tuple."""
    values = node.meta.get("example_value")
    if not isinstance(values, tuple):
        return [node]
    places = [place for place, value in enumerate(values) if isinstance(value, torch.Tensor)]
    return [node.graph.call_function(operator.getitem, (node, place)) for place in places]


def _read(nodes: Sequence[Node], output: Node) -> set[Node]:
    """The nodes that a graph's results, or the memory of its inputs, are computed from; checkpoints may write, too."""
    memory = {memory_of(n) for n in nodes if n.op in ("placeholder", "get_attr")}
    calls = [n for n in nodes if not isinstance(n.target, HigherOrderOperator)]
    writes = [(n, found) for n in calls if (found := {memory_of(w) for w in written_arguments(n)})]
    read: set[Node] = set()
    waiting: Iterable[Node] = [output]
    while waiting:
        new = list(waiting)
        while new:
            node = new.pop()
            if node not in read:
                read.add(node)
                memory.add(memory_of(node))
                new += _read_by(node)
        memory.discard(None)
        waiting = [n for n, found in writes if n not in read and found & memory]
    return read


#: Calls that read of their first tensor, or of their second one, nothing but shape, dtype and device.
_READ_NO_FIRST = frozenset(
    (
        "empty_like", "full_like", "new_empty", "new_full", "new_ones", "new_zeros", "ones_like", "rand_like",
        "randint_like", "randn_like", "zeros_like",
    )
)  # fmt: skip
_READ_NO_SECOND = frozenset(("expand_as", "reshape_as", "to", "type_as", "view_as"))


def _read_by(node: Node) -> list[Node]:
    """The arguments of a call that its result depends on, where AOTAutograd leaves others out."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    if name in _READ_NO_FIRST or name in _READ_NO_SECOND:
        unread = node.args[:1] if name in _READ_NO_FIRST else node.args[1:2]
        return [n for n in node.all_input_nodes if n not in unread or node.args.count(n) > 1]
    if node.target is operator.getitem:
        parts, place = node.args
        if isinstance(parts, Node) and parts.target is torch.broadcast_tensors:
            given: Any = parts.args
            return [given[place]]
    return node.all_input_nodes
