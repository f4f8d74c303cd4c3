"""Gradients of a captured graph that eager torch leaves undefined: None, where AOTAutograd gives zeros.

AOTAutograd makes one autograd node of a graph with several results. Where a backward pass starts from some of them, the
node gives zeros to the inputs that these do not depend on. An optimizer with weight decay or momentum moves a parameter
whose gradient is zeros, and leaves one alone whose gradient is None. So for each result the inputs that it depends on
are found out, as autograd sees it, and the node takes away the gradients of all others.

Autograd calls the hooks of a tensor with None where its gradient is undefined, and eager torch does not call them at
all. An input with hooks therefore keeps its zeros.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeGuard

import torch
from torch.autograd.graph import get_gradient_edge
from torch.fx import GraphModule, Node

from opgraph.ir.pause_gc import no_collector
from opgraph.torch.graph.parameter_branches import written_inputs
from opgraph.torch.graph.torch_internals import compiled_node, on_stand_ins

#: For each result of a graph, and then for each of its inputs as the graph leaves it, the inputs that it depends on, as
#: bits; None for a result without a gradient and for an input that the graph does not write into.
Dependencies = Sequence[int | None]
#: Depends on every input.
ALL = -1


def dependencies(graph: GraphModule, example_inputs: Sequence[Any]) -> Dependencies:
    """What each result of Dynamo's graph depends on; empty for a graph without gradients.

    Args:
        example_inputs: fake tensors, on which the graph is run, and sizes.
    """
    if not torch.is_grad_enabled():
        return ()
    (output,) = graph.graph.find_nodes(op="output")
    made = [n.meta.get("example_value") if isinstance(n, Node) else n for n in output.args[0]]
    same = [ALL] * len(made)
    is_written = written_inputs(graph.graph)
    if sum(_is_tensor(v) and v.requires_grad for v in made) + sum(is_written) < 2:
        return same
    try:
        with on_stand_ins(example_inputs):
            inputs = [t.detach().requires_grad_(t.requires_grad) if _is_tensor(t) else t for t in example_inputs]
            # Autograd lets nobody write into a leaf. `forward` alone: a call of a GraphModule prints where it failed.
            given = [t.clone() if wrote else t for t, wrote in zip(inputs, is_written, strict=True)]
            results = graph.forward(*given)
    except Exception:  # AOTAutograd raises it again where it is an error of the program's; no gradient is taken away
        return same
    places = {id(t): place for place, t in enumerate(inputs)}
    known: dict[Any, int] = {}
    after = [t if wrote else None for t, wrote in zip(given, is_written, strict=True)]
    return [_depends_on(t, places, known) for t in (*results, *after)]


def _is_tensor(value: Any) -> TypeGuard[torch.Tensor]:
    return isinstance(value, torch.Tensor)


def _depends_on(result: Any, places: dict[int, int], known: dict[Any, int]) -> int | None:
    """The inputs that a result depends on; `known` has what was found out about autograd nodes.

    A view made under `no_grad` requires a gradient as its base does, and depends on no input: 0, not None.
    """
    if not _is_tensor(result) or not result.requires_grad:
        return None
    if result.grad_fn is None:
        return _bit(result, places)
    waiting = [(result.grad_fn, False)]
    while waiting:
        node, ready = waiting.pop()
        sources = [source for source, _ in node.next_functions if source is not None]
        if ready:
            known[node] = _bit(getattr(node, "variable", None), places)
            for source in sources:
                known[node] |= known[source]
        elif node not in known:
            waiting.append((node, True))
            waiting += [(source, False) for source in sources]
    return known[result.grad_fn]


def _bit(leaf: Any, places: dict[int, int]) -> int:
    place = places.get(id(leaf))
    return 0 if place is None else 1 << place


def with_undefined_gradients(call: Callable[..., Any], depends: Dependencies) -> Callable[..., Any]:
    """A compiled graph whose backward gives None to the inputs that no result with a gradient depends on.

    Args:
        call: as AOTAutograd made it.
        depends: what `dependencies` found.
    """
    if not depends:
        return call
    backward: _PartialBackward | None = None
    shown = 0  # the place of a result, or of an argument after the results, that shows the node of this graph

    def run(*args: Any) -> Any:
        nonlocal backward, shown
        if backward is not None:
            results = call(*args)
            node = _made_by(results[shown] if shown < len(results) else args[shown - len(results)])
            if node is not None:
                backward.follow(node, args)
            return results
        edges = edges_of(args)  # a call that writes into an argument gives it another one
        before = {_made_by(t) for t in args} | {None}
        results = call(*args)
        # A result that is a view of an argument shows the node that made the argument.
        nodes = [_made_by(t) for t in (*results, *args)]
        shown = next((place for place, node in enumerate(nodes) if node not in before), -1)
        if shown >= 0:
            backward = _PartialBackward(nodes[shown], results, depends, args, edges)
            backward.follow(nodes[shown], args)
        return results

    return run


class _PartialBackward:
    """The backward of a compiled graph's node, with None for what is not reached.

    Args:
        node: of the first call, as are the results and the arguments.
        depends: what `dependencies` found.
        edges: of the arguments, before the call.
    """

    def __init__(
        self, node: Any, results: Sequence[Any], depends: Dependencies, args: Sequence[Any], edges: dict[Any, int]
    ) -> None:
        function = node._forward_cls
        self._backward: Callable[..., Any] = function.backward
        #: For each output of the node, the inputs that what is read from it depends on.
        self._outputs = _outputs(node, (*results, *args), depends)
        #: For each input of the node that has gradients, its place among the arguments; -1 where it is none of them.
        self._inputs = [edges.get(edge, -1) for edge in node.next_functions if edge[0] is not None]
        #: The arguments that need not be leaves.
        self._data = [
            i for i, t in enumerate(args) if _is_tensor(t) and t.requires_grad and not isinstance(t, torch.nn.Parameter)
        ]
        self._is_compiled = False
        disable: Any = torch.compiler.disable  # a captured function may call backward, and Dynamo would compile this
        function.backward = staticmethod(disable(self.__call__))

    def follow(self, node: Any, args: Sequence[Any]) -> None:
        """Lets autograd hand over undefined gradients of this call as None."""
        node.set_materialize_grads(False)
        node.opgraph_data = {i: weakref.ref(args[i]) for i in self._data}

    def __call__(self, ctx: Any, *given: Any) -> Any:
        """As `backward` of an autograd function; newer torch gives all gradients in one list."""
        if self._is_compiled:
            return self._run(ctx, *given)
        with no_collector():  # AOTAutograd copies the graph before it calls the backend
            results = self._run(ctx, *given)
        self._is_compiled = True
        return results

    def _run(self, ctx: Any, *given: Any) -> Any:
        gradients: Any = given[0] if len(given) == 1 and isinstance(given[0], list) else list(given)
        missing = [place for place, gradient in enumerate(gradients) if gradient is None]
        if not missing:
            return self._backward(ctx, *given)
        reached = 0
        for bits, gradient in zip(self._outputs, gradients, strict=True):
            reached |= 0 if gradient is None else bits
        edges = [source for source, _ in ctx.next_functions if source is not None]
        kept = iter(
            reached == ALL or place < 0 or reached >> place & 1 or _is_hooked(source, ctx.opgraph_data.get(place))
            for source, place in zip(edges, self._inputs, strict=True)
        )
        keep = [needed and bool(next(kept)) for needed in ctx.needs_input_grad]
        if not any(keep):
            return (None,) * len(keep)
        for place in missing:
            about = ctx._input_metadata[place]
            gradients[place] = torch.zeros(about.shape, dtype=about.dtype, device=about.device)
        results = self._backward(ctx, *(given if gradients is given[0] else gradients))
        return tuple(g if k else None for g, k in zip(results, keep, strict=False))


def _made_by(result: Any) -> Any:
    """The node of the compiled graph that made a result, or the base of it."""
    return next((source for source, _ in _read(result) if compiled_node(source) is not None), None)


#: Views that lie one on another between the output of a node and a result, at most.
MOST_VIEWS = 16


def _read(result: Any) -> Iterator[tuple[Any, int]]:
    """The autograd node of a value with the output that it is; of a view or a copy, those that it comes from, too."""
    if not _is_tensor(result) or result.grad_fn is None:
        return
    edge: tuple[Any, int] = result.grad_fn, result.output_nr
    for _ in range(MOST_VIEWS):
        yield edge
        sources = [] if compiled_node(edge[0]) is not None else [e for e in edge[0].next_functions if e[0] is not None]
        sources = [e for e in sources if compiled_node(e[0]) is not None] or sources
        if len(sources) != 1:
            return
        (edge,) = sources


def _outputs(node: Any, values: Sequence[Any], depends: Dependencies) -> list[int]:
    """The inputs that each output of the node depends on, as bits; ALL where no result shows it."""
    found: dict[int, int] = {}
    for value, bits in zip(values, depends, strict=False):
        for source, place in _read(value):
            if source is node and bits is not None:
                found[place] = found.get(place, 0) | bits
    return [found.get(place, ALL) for place in range(len(node._input_metadata))]


def edges_of(args: Sequence[Any]) -> dict[Any, int]:
    """The place of each argument that has a gradient, by the autograd node that takes it, and which of its outputs."""
    differentiable = ((i, t) for i, t in enumerate(args) if _is_tensor(t) and t.requires_grad and not t.is_inference())
    return {get_gradient_edge(t)[:2]: i for i, t in differentiable}


def _is_hooked(source: Any, data: Any) -> bool:
    """Whether a tensor has hooks: a leaf, by the node that adds to its gradient, or a reference to an argument."""
    tensor = getattr(source, "variable", None)
    if tensor is None and data is not None:
        tensor = data()
    return tensor is not None and bool(tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None))
