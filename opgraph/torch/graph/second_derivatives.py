"""Second derivatives of a captured graph: its calls are made once more, as they were written, and differentiated.

AOTAutograd's backward has no derivative of its own. So a backward pass that makes a graph (`create_graph=True`) runs
Dynamo's graph on the inputs of the call, and autograd differentiates that. The inputs are weakly referenced: nothing
more is kept. Where they are gone or were written to, or where the graph would compute something else when it runs
again, the gradients are those of the compiled backward, and raise an error where they are differentiated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import ref

import torch
from torch.fx import GraphModule

from opgraph.errors import Unimplemented
from opgraph.runtime.providers.torch_internals import FakeTensor
from opgraph.torch.graph.torch_internals import compiled_node, refuse_second_derivatives
from opgraph.torch.graph.undefined_gradients import edges_of


def with_second_derivatives(graph: GraphModule, call: Callable[..., Any], draws: bool) -> Callable[..., Any]:
    """A compiled graph whose gradients can be differentiated.

    Args:
        graph: of Dynamo.
        call: the graph, as AOTAutograd compiled it.
        draws: whether it draws random numbers.
    """
    backward: _DoubleBackward | None = None
    runs_again = not draws and not any(map(torch.is_autocast_enabled, ("cpu", "cuda")))

    def run(*args: Any) -> Any:
        nonlocal backward
        if backward is not None:
            results = call(*args)
            backward.follow(results, args)
            return results
        if not torch.is_grad_enabled():
            return call(*args)
        edges = edges_of(args)  # a call that writes into an argument gives it another one
        before, made = _versions(args), {compiled_node(a) for a in args}
        results = call(*args)
        nodes = [compiled_node(r) for r in results]
        shown = next((place for place, node in enumerate(nodes) if node is not None and node not in made), None)
        if shown is not None:
            backward = _DoubleBackward(graph, nodes[shown], shown, results, args, edges)
            backward.runs_again &= runs_again and before == _versions(args)
            backward.follow(results, args)
        return results

    return run


#: Other tensors may stand for several inputs of the node. Parts of a graph run on fake tensors first.
_PLAIN = (torch.Tensor, torch.nn.Parameter, FakeTensor)


class _DoubleBackward:
    """The backward of a compiled graph's node.

    Args:
        graph: of Dynamo.
        node: of the first call, as are the results and the arguments.
        shown: the place of a result that shows the node.
        edges: the places of the arguments, by where their gradients go.

    Attributes:
        runs_again: whether the graph may run again for second derivatives.
    """

    def __init__(
        self,
        graph: GraphModule,
        node: Any,
        shown: int,
        results: Sequence[Any],
        args: Sequence[Any],
        edges: dict[Any, int],
    ) -> None:
        self._graph, self._shown = graph, shown
        function = node._forward_cls
        self._backward: Callable[..., Any] = function.backward
        #: For each output of the node, the result that it is.
        found = {r.output_nr: place for place, r in enumerate(results) if getattr(r, "grad_fn", None) is node}
        outputs = [place for place, about in enumerate(node._input_metadata) if about.dtype.is_floating_point]
        self._results = [found.get(place) for place in range(len(node._input_metadata))]
        #: For each input of the node that has gradients, its place among the arguments.
        self._inputs = [edges.get(edge) for edge in node.next_functions if edge[0] is not None]
        plain = all(type(a) in _PLAIN for a in args if isinstance(a, torch.Tensor))
        self.runs_again = plain and None not in self._inputs and all(place in found for place in outputs)
        refuse_second_derivatives(results[shown : shown + 1], _no_second_derivative)
        function.backward = staticmethod(self)

    def follow(self, results: Sequence[Any], args: Sequence[Any]) -> None:
        """Notes the arguments of a call."""
        if self.runs_again and (node := compiled_node(results[self._shown])) is not None:
            node.opgraph_arguments = [ref(a) if isinstance(a, torch.Tensor) else a for a in args], _versions(args)

    def __call__(self, ctx: Any, *given: Any) -> Any:
        """As `backward` of an autograd function; newer torch gives all gradients in one list."""
        args = self._arguments(ctx) if torch.is_grad_enabled() and self.runs_again else None
        if args is None:
            return self._backward(ctx, *given)
        gradients: Sequence[Any] = given[0] if len(given) == 1 and isinstance(given[0], list) else given
        views = {id(a): a.view_as(a) for a in args if isinstance(a, torch.Tensor) and a.requires_grad}
        results = self._graph.forward(*(views.get(id(a), a) for a in args))
        pairs = [(results[r], g) for r, g in zip(self._results, gradients, strict=True) if r is not None]
        pairs = [(result, g) for result, g in pairs if g is not None and result.requires_grad]
        wanted = iter([views[id(args[place])] for place in self._inputs if place is not None])
        inputs = [next(wanted) if needed else None for needed in ctx.needs_input_grad]
        found = iter(
            torch.autograd.grad(
                [result for result, _ in pairs],
                [view for view in inputs if view is not None],
                [g for _, g in pairs],
                create_graph=True,
                allow_unused=True,
            )
        )
        return tuple(None if view is None else next(found) for view in inputs)

    def _arguments(self, ctx: Any) -> list[Any] | None:
        """The arguments of a call; None where they are not what they were."""
        references, versions = ctx.opgraph_arguments
        args = [a() if isinstance(a, ref) else a for a in references]
        gone = any(a is None and isinstance(r, ref) for a, r in zip(args, references, strict=True))
        return None if gone or _versions(args) != versions else args


def _versions(args: Sequence[Any]) -> int:
    """How often the tensors among arguments have been written to."""
    return sum([a._version for a in args if isinstance(a, torch.Tensor) and not a.is_inference()])


def _no_second_derivative() -> Unimplemented:
    return Unimplemented(
        "a captured graph has first derivatives alone where it draws random numbers, writes to its inputs (running "
        "statistics), runs under autocast, or where its inputs are gone or were written to",
        where="the gradient of a gradient that backward made with create_graph=True",
        fix="ogt.unfuse(model), or fuse functions (`@ogt.fuse`, `ogt.Activation`), which have all derivatives",
    )
