"""Backward graphs of passes in which some results have no gradient.

AOTAutograd's backward takes a gradient of each result, and zeros if autograd has none. Zeros take as much time as
other gradients, and zero times an infinite derivative is NaN. For example, if a model returns `f(x)` and `sqrt(x)`, the
gradient of a pass that starts from `f(x)` alone would be NaN where x is 0. So such a pass has its own graph, which
omits all values that are computed from the undefined gradients alone.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch.fx import Graph, GraphModule, Node

from opgraph.torch.graph.aten import value_of

#: The attribute that marks zeros as an undefined gradient.
_MARK = "opgraph_undefined"


def undefined(shape: torch.Size, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Returns marked zeros for an undefined gradient, which autograd passes as None."""
    zeros = torch.zeros(shape, dtype=dtype, device=device)
    setattr(zeros, _MARK, True)
    return zeros


def is_undefined(value: object) -> bool:
    """True for a tensor that `undefined` returned. Its copy in another layout is an ordinary gradient of zeros."""
    return hasattr(value, _MARK)


def gradients_of_results(module: GraphModule) -> list[int]:
    """The places of the inputs of a backward graph that are gradients of the forward graph's results."""
    inputs = module.graph.find_nodes(op="placeholder")
    return [place for place, node in enumerate(inputs) if node.name.startswith("tangents")]


def without_gradients(module: GraphModule, missing: Collection[int]) -> GraphModule:
    """Returns a backward graph in which these inputs are undefined; gradients computed from them alone are None.

    A backward graph is linear in the gradients that it takes. So a value that is computed from undefined gradients
    alone is undefined too, and the sum of an undefined and a defined value is the defined value. Other calls with
    defined and undefined values compute with zeros.
    """
    graph = Graph()
    copies: dict[Node, Node] = {}
    returned = graph.graph_copy(module.graph, copies)
    graph.output(returned)
    inputs = graph.find_nodes(op="placeholder")
    lost = {inputs[place] for place in missing}
    defined = {inputs[place] for place in gradients_of_results(module)} - lost
    for node in graph.nodes:
        if node.op not in ("call_function", "call_method", "call_module"):
            continue
        given = node.all_input_nodes
        if not lost.isdisjoint(given):
            others = [n for n in given if n in defined]
            if not others:
                lost.add(node)
                continue
            if node.target is torch.ops.aten.add.Tensor and _is_alike(node, others[0]) and not node.kwargs:
                node.replace_all_uses_with(others[0])
                continue
        if not defined.isdisjoint(given):
            defined.add(node)
    output = graph.output_node()
    output.args = (torch.fx.map_arg(output.args[0], lambda n: None if n in lost else n),)
    graph.eliminate_dead_code()
    return GraphModule(module, graph)


def _is_alike(node: Node, other: Node) -> bool:
    """True if two values are tensors with the same shape and dtype."""
    value, peer = value_of(node), value_of(other)
    is_tensors = isinstance(value, torch.Tensor) and isinstance(peer, torch.Tensor)
    return is_tensors and value.dtype == peer.dtype and str(value.shape) == str(peer.shape)  # adds no guards on symbols
