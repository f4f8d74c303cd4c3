"""Random numbers that a captured graph draws and nobody reads: they are drawn all the same.

AOTAutograd leaves out what no result is computed from. Eager torch draws the numbers, and every later one depends on
how many were drawn before. So such calls become results of the graph, which the caller does not see.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch.fx import GraphModule, Node

from opgraph.torch.graph.branches import written_arguments
from opgraph.torch.graph.torch_internals import draws_random_numbers, memory_of


def with_unread_draws(graph: GraphModule, compile: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
    """What `compile` makes of a graph of Dynamo, which draws what the graph draws.

    Args:
        graph: gets more results, which what is returned here leaves out.
        compile: called afterwards.
    """
    nodes = list(graph.graph.nodes)
    (output,) = graph.graph.find_nodes(op="output")
    draws = [n for n in nodes if n.op in ("call_function", "call_method") and draws_random_numbers(n)]
    read = _read(nodes, output) if draws else set()
    unread = [n for n in draws if n not in read]
    if not unread:
        return compile()
    number = len(output.args[0])
    with graph.graph.inserting_before(output):
        output.args = ((*output.args[0], *(graph.graph.call_method("detach", (n,)) for n in unread)),)
    graph.recompile()
    call = compile()
    return lambda *args: tuple(call(*args)[:number])


def _read(nodes: Sequence[Node], output: Node) -> set[Node]:
    """The nodes that a graph's results, or the memory of its inputs, are computed from."""
    memory = {memory_of(n) for n in nodes if n.op in ("placeholder", "get_attr")}
    writes = [(n, found) for n in nodes if (found := {memory_of(w) for w in written_arguments(n)})]
    read: set[Node] = set()
    waiting: Iterable[Node] = [output]
    while waiting:
        new = list(waiting)
        while new:
            node = new.pop()
            if node not in read:
                read.add(node)
                memory.add(memory_of(node))
                new += node.all_input_nodes
        memory.discard(None)
        waiting = [n for n, found in writes if n not in read and found & memory]
    return read
