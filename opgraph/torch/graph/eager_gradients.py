"""Gradients of a captured graph as in eager torch: undefined ones are None, and they can be differentiated.

AOTAutograd makes one autograd node of a graph with several results. If a backward pass starts from some of them, the
node returns zeros for the inputs on which these do not depend. An optimizer with weight decay or momentum changes a
parameter whose gradient is zeros, but not one whose gradient is None. So the inputs on which each result depends are
determined as autograd does it, and the node drops the gradients of all others. Autograd calls the hooks of a tensor
with None if its gradient is undefined, and eager torch does not call them at all. An input with hooks therefore keeps
its zeros.

AOTAutograd's backward has no derivative. So a backward pass that makes a graph (`create_graph=True`) runs Dynamo's
graph on the inputs of the call, as it was written, and autograd differentiates that. The inputs are weakly referenced;
nothing else is kept. If they are gone or were written to, or if the graph would compute something else when it runs
again, the gradients are those of the compiled backward. They raise an error when they are differentiated with respect
to values that AOTAutograd saved and, because it saves most values detached from the graph, with respect to the inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeGuard
from weakref import ref

import torch
from torch.autograd.graph import get_gradient_edge
from torch.fx import GraphModule, Node

from opgraph.errors import Unimplemented
from opgraph.ir.pause_gc import no_collector
from opgraph.runtime.providers.torch_internals import FakeTensor, without_autocast
from opgraph.torch.graph.graph_modes import as_written, records_gradients
from opgraph.torch.graph.parameter_branches import written_inputs
from opgraph.torch.graph.torch_internals import SET_GRAD_ENABLED, compiled_node, on_stand_ins, refuse_second_derivatives
from opgraph.torch.graph.undefined_gradients import undefined

#: For each result of a graph, and then for the final value of each of its inputs, the inputs on which it depends, as
#: bits; None for a result without a gradient and for an input that the graph does not write into.
Dependencies = Sequence[int | None]
#: The bits of a result that depends on every input.
ALL = -1


def dependencies(graph: GraphModule, example_inputs: Sequence[Any]) -> Dependencies | None:
    """The dependencies of each result of Dynamo's graph; None for a graph without gradients.

    Args:
        example_inputs: real or fake tensors, and sizes.
    """
    if not records_gradients(graph.graph):
        return None
    output: Any = graph.graph.output_node()
    made = [n.meta.get("example_value") if isinstance(n, Node) else n for n in output.args[0]]
    same = [ALL] * len(made)
    is_written = written_inputs(graph.graph)
    if sum(_is_tensor(v) and v.requires_grad for v in made) + sum(is_written) < 2:
        return same
    try:
        with on_stand_ins(graph, example_inputs) as fakes:
            inputs = [t.detach().requires_grad_(t.requires_grad) if _is_tensor(t) else t for t in fakes]
            # Autograd forbids writes into leaves. `as_written` calls `forward`: a GraphModule prints where it failed.
            given = [t.clone() if wrote else t for t, wrote in zip(inputs, is_written, strict=True)]
            results = as_written(graph)(*given)
    except Exception:  # AOTAutograd raises it again if it is an error of the program; no gradient is dropped
        return same
    places = {id(t): place for place, t in enumerate(inputs)}
    known: dict[Any, int] = {}
    after = [t if wrote else None for t, wrote in zip(given, is_written, strict=True)]
    return [_depends_on(t, places, known) for t in (*results, *after)]


def _is_tensor(value: Any) -> TypeGuard[torch.Tensor]:
    return isinstance(value, torch.Tensor)


def _hides_backward(graph: GraphModule) -> bool:
    """True if a graph calls a custom autograd function whose backward computes something. Torch's op for the function
    does not record its backward, and Dynamo's graph does not show which part of it is under `no_grad`."""
    for node in graph.graph.nodes:
        bodies = [getattr(graph, str(n.target)) for n in node.all_input_nodes if n.op == "get_attr"]
        bodies = [body for body in bodies if isinstance(body, GraphModule)]
        if getattr(node.target, "__name__", "") != "autograd_function_apply":
            if any(map(_hides_backward, bodies)):
                return True
        elif any(n.op.startswith("call") and n.target is not SET_GRAD_ENABLED for n in bodies[1].graph.nodes):
            return True
    return False


def _is_number(value: Any) -> bool:
    """True if an argument may be a Python number; a float arrives as a 0-d f64 tensor without other references."""
    return not _is_tensor(value) or (value.dtype is torch.float64 and not (value.dim() or value.requires_grad))


def _depends_on(result: Any, places: dict[int, int], known: dict[Any, int]) -> int | None:
    """The inputs on which a result depends; `known` caches those of autograd nodes.

    A view made under `no_grad` requires a gradient if its base does, and depends on no input: 0, not None.
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


def with_gradients_of_eager(
    graph: GraphModule,
    call: Callable[..., Any],
    draws: bool,
    depends: Dependencies | None,
    may_depend_on_inputs: Callable[[], bool],
) -> Callable[..., Any]:
    """A compiled graph whose backward returns None for inputs on which no result with a gradient depends, and whose
    gradients can be differentiated.

    Args:
        graph: Dynamo's graph.
        call: the graph, as AOTAutograd compiled it.
        draws: True if it draws random numbers.
        depends: the result of `dependencies`.
        may_depend_on_inputs: True if gradients may depend on inputs; called when backward has been compiled.
    """
    if depends is None:
        return call
    backward: _Backward | None = None
    shown = 0  # the place of a result, or of an argument after the results, that leads to this graph's autograd node
    runs_again = not draws and not any(map(torch.is_autocast_enabled, ("cpu", "cuda"))) and not _hides_backward(graph)

    def run(*args: Any) -> Any:
        nonlocal backward, shown
        if backward is not None:
            results = call(*args)
            node = _made_by(results[shown] if shown < len(results) else args[shown - len(results)])
            if node is not None and node._forward_cls is backward.function:
                backward.follow(node, args)
            return results
        edges = _edges_of(args)  # before the call: one that writes into an argument changes its edge
        versions, before = _versions(args), {_made_by(t) for t in args} | {None}
        results = call(*args)
        # A result that is a view of an argument leads to the node that made the argument.
        nodes = [_made_by(t) for t in (*results, *args)]
        shown = next((place for place, node in enumerate(nodes) if node not in before), -1)
        if shown >= 0:
            is_same = runs_again and versions == _versions(args)
            backward = _Backward(graph, nodes[shown], results, depends, args, edges, is_same, may_depend_on_inputs)
            backward.follow(nodes[shown], args)
        return results

    return run


#: Tensors of other types may be several inputs of the node. Parts of a graph run on fake tensors first.
_PLAIN = (torch.Tensor, torch.nn.Parameter, FakeTensor)


class _Backward:
    """The backward of a compiled graph's node.

    Args:
        graph: Dynamo's graph.
        node: the autograd node of the first call; the results and the arguments are those of that call.
        depends: the result of `dependencies`.
        edges: the places of the arguments, by their gradient edges before the call.
        runs_again: True if the graph would compute the same when it runs again.
        may_depend_on_inputs: see `with_gradients_of_eager`.

    Attributes:
        function: the class of the node.
    """

    def __init__(
        self,
        graph: GraphModule,
        node: Any,
        results: Sequence[Any],
        depends: Dependencies,
        args: Sequence[Any],
        edges: dict[Any, int],
        runs_again: bool,
        may_depend_on_inputs: Callable[[], bool],
    ) -> None:
        self._may_depend_on_inputs = may_depend_on_inputs
        self.function = function = node._forward_cls
        self._again = as_written(graph)
        #: The backward of a custom autograd function may be nonlinear, and therefore receives real zeros.
        self._zeros = torch.zeros if _hides_backward(graph) else undefined
        self._backward: Callable[..., Any] = function.backward
        #: For each output of the node, the inputs on which the values read from it depend.
        self._outputs = _outputs(node, (*results, *args), depends)
        #: For each output of the node, the place of its result.
        found = {r.output_nr: place for place, r in enumerate(results) if getattr(r, "grad_fn", None) is node}
        self._results = [found.get(place) for place in range(len(node._input_metadata))]
        #: For each input of the node that has gradients, its place among the arguments; -1 if it is none of them.
        self._inputs = [edges.get(edge, -1) for edge in node.next_functions if edge[0] is not None]
        tensors = [i for i, a in enumerate(args) if _is_tensor(a)]
        runs_again = runs_again and all(type(args[i]) in _PLAIN for i in tensors)
        self._runs_again = runs_again and -1 not in self._inputs
        #: The arguments that are stored for each call: all of them, or only those that can be non-leaf tensors.
        self._followed = list(range(len(args)))
        if not self._runs_again:
            gradients = [i for i in tensors if args[i].requires_grad]
            self._followed = [i for i in gradients if not isinstance(args[i], torch.nn.Parameter)]
        self._is_compiled = False
        #: True if some inputs never get a gradient, because no result depends on them; set by the first backward pass.
        self._has_idle_inputs = False
        refuse_second_derivatives(node, _no_second_derivative)
        disable: Any = torch.compiler.disable  # a captured function may call backward, and Dynamo would compile this
        function.backward = staticmethod(disable(self.__call__))

    def follow(self, node: Any, args: Sequence[Any]) -> None:
        """Makes autograd pass undefined gradients of a call as None, and stores its arguments."""
        node.set_materialize_grads(False)
        node.opgraph_arguments = {i: args[i] if _is_number(args[i]) else ref(args[i]) for i in self._followed}
        node.opgraph_versions = _versions(args) if self._runs_again else 0

    def __call__(self, ctx: Any, *given: Any) -> Any:
        """Implements `backward` of an autograd function; newer torch passes all gradients in one list."""
        if self._is_compiled:
            results = self._run(ctx, *given)
        else:
            with no_collector():  # AOTAutograd copies the graph before it calls the backend
                results = self._run(ctx, *given)
            self._is_compiled = True
            self._has_idle_inputs = any(n and g is None for n, g in zip(ctx.needs_input_grad, results, strict=False))
        return self._with_zeros(ctx, results) if self._has_idle_inputs else results

    def _with_zeros(self, ctx: Any, results: Sequence[Any]) -> tuple[Any, ...]:
        """Gradients, with zeros for tensors that have hooks but on which no result depends."""
        arguments = getattr(ctx, "opgraph_arguments", {})  # none if no result led to the node
        edges = zip((source for source, _ in ctx.next_functions if source is not None), self._inputs, strict=True)
        found = list(results)
        for number, needed in enumerate(ctx.needs_input_grad):
            if needed:
                source, place = next(edges)
                if found[number] is None:
                    tensor = _hooked(source, arguments.get(place))
                    found[number] = None if tensor is None else torch.zeros_like(tensor)
        return tuple(found)

    def _run(self, ctx: Any, *given: Any) -> Any:
        gradients: Any = given[0] if len(given) == 1 and isinstance(given[0], list) else list(given)
        if torch.is_grad_enabled() and (args := self._arguments(ctx, gradients)) is not None:
            return self._with_zeros(ctx, self._differentiable(ctx, args, gradients))
        missing = [place for place, gradient in enumerate(gradients) if gradient is None]
        if not missing:
            return self._compiled(ctx, given)
        reached = 0
        for bits, gradient in zip(self._outputs, gradients, strict=True):
            reached |= 0 if gradient is None else bits
        edges = [source for source, _ in ctx.next_functions if source is not None]
        kept = iter(
            reached == ALL
            or place < 0
            or reached >> place & 1
            or _hooked(source, ctx.opgraph_arguments.get(place)) is not None
            for source, place in zip(edges, self._inputs, strict=True)
        )
        keep = [needed and bool(next(kept)) for needed in ctx.needs_input_grad]
        if not any(keep):
            return (None,) * len(keep)
        for place in missing:
            about = ctx._input_metadata[place]
            gradients[place] = self._zeros(about.shape, dtype=about.dtype, device=about.device)
        results = self._compiled(ctx, given if gradients is given[0] else gradients)
        return self._with_zeros(ctx, [g if k else None for g, k in zip(results, keep, strict=False)])

    def _compiled(self, ctx: Any, given: Sequence[Any]) -> Any:
        """The gradients of the compiled backward, which raise an error if they are differentiated.

        Args:
            given: the gradients of the results, in the form in which autograd passed them.
        """
        results = self._backward(ctx, *given)
        return self._refusing(ctx, results) if torch.is_grad_enabled() and self._may_depend_on_inputs() else results

    def _differentiable(self, ctx: Any, args: Sequence[Any], gradients: Sequence[Any]) -> Sequence[Any]:
        """Runs the graph again on these arguments, and returns its gradients."""
        wanted = {id(args[place]) for place in self._inputs}
        views = {id(a): a for a in args}
        for a in args:
            if _is_tensor(a) and id(a) in wanted:  # `requires_grad` may have changed since the call
                views[id(a)] = a.view_as(a) if a.requires_grad else a.detach().requires_grad_()
            elif _is_tensor(a) and a.requires_grad:
                views[id(a)] = a.detach()
        with without_autocast():
            results = self._again(*(views[id(a)] for a in args))
        pairs = [(results[r], g) for r, g in zip(self._results, gradients, strict=True) if r is not None]
        pairs = [(result, g) for result, g in pairs if g is not None and result.requires_grad]
        if not pairs:
            return (None,) * len(ctx.needs_input_grad)
        places = iter(self._inputs)
        inputs = [views[id(args[next(places)])] if needed else None for needed in ctx.needs_input_grad]
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

    def _refusing(self, ctx: Any, gradients: Sequence[Any]) -> Any:
        """Gradients that depend on the inputs, but raise an error when they are differentiated with respect to them.

        If an argument is gone, the leaves from which it was computed take its place.
        """
        sources = [source for source, _ in ctx.next_functions if source is not None]
        others = [a() for a in ctx.opgraph_arguments.values() if isinstance(a, ref)]
        inputs = {id(t): t for t in (*_leaves(sources), *others) if t is not None and t.requires_grad}
        refusing: Any = _Refusing.apply
        return tuple(refusing(g, *inputs.values()) if _is_tensor(g) and g.is_floating_point() else g for g in gradients)

    def _arguments(self, ctx: Any, gradients: Sequence[Any]) -> list[Any] | None:
        """The arguments of a call; None if the graph does not run again, if an argument is gone or was written to, or
        if one of these gradients belongs to no result of the graph."""
        if not self._runs_again or any(g is not None and r is None for g, r in zip(gradients, self._results)):
            return None
        references = list(ctx.opgraph_arguments.values())
        args = [a() if isinstance(a, ref) else a for a in references]
        gone = any(a is None and isinstance(r, ref) for a, r in zip(args, references, strict=True))
        return None if gone or _versions(args) != ctx.opgraph_versions else args


def _leaves(nodes: Sequence[Any]) -> Iterator[torch.Tensor]:
    """The leaves from which tensors with these autograd nodes are computed."""
    waiting, seen = list(nodes), set(nodes)
    while waiting:
        node = waiting.pop()
        if (leaf := getattr(node, "variable", None)) is not None:
            yield leaf
        new = {source for source, _ in node.next_functions if source is not None} - seen
        seen |= new
        waiting += new


def _versions(args: Sequence[Any]) -> int:
    """The number of writes to the tensors among the arguments."""
    return sum([a._version for a in args if _is_tensor(a) and not a.is_inference()])


def _no_second_derivative() -> Unimplemented:
    return Unimplemented(
        "a captured graph has first derivatives alone where it draws random numbers, writes to its inputs (running "
        "statistics), runs under autocast, calls a torch.autograd.Function, or where its inputs are gone or were "
        "written to",
        where="the gradient of a gradient that backward made with create_graph=True",
        fix="ogt.unfuse(model), or fuse functions (`@ogt.fuse`, `ogt.Activation`), which have all derivatives",
    )


class _Refusing(torch.autograd.Function):
    """Returns a gradient unchanged, and raises an error if it is differentiated by any of the inputs after it."""

    generate_vmap_rule = True

    @staticmethod
    def forward(gradient: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
        """Returns the gradient."""
        return gradient.view_as(gradient)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Saves nothing."""

    @staticmethod
    def backward(ctx: Any, *given: Any) -> Any:
        """Raises Unimplemented."""
        raise _no_second_derivative()


def _made_by(result: Any) -> Any:
    """The autograd node of the compiled graph that made a result, or its base."""
    return next((source for source, _ in _read(result) if compiled_node(source) is not None), None)


#: The longest chain of views between the output of a node and a result.
MOST_VIEWS = 16


def _read(result: Any) -> Iterator[tuple[Any, int]]:
    """The autograd node of a value, and its output number; for a view or a copy, also those of its sources."""
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
    """The inputs on which each output of the node depends, as bits; ALL if no result leads to the output."""
    found: dict[int, int] = {}
    for value, bits in zip(values, depends, strict=False):
        for source, place in _read(value):
            if source is node and bits is not None:
                found[place] = found.get(place, 0) | bits
    return [found.get(place, ALL) for place in range(len(node._input_metadata))]


def _edges_of(args: Sequence[Any]) -> dict[Any, int]:
    """The place of each argument with a gradient, by the autograd node that receives it and its output number."""
    differentiable = ((i, t) for i, t in enumerate(args) if _is_tensor(t) and t.requires_grad and not t.is_inference())
    return {get_gradient_edge(t)[:2]: i for i, t in differentiable}


def _hooked(source: Any, data: Any) -> torch.Tensor | None:
    """A tensor, if it has hooks; else None. The tensor is a leaf, found by the node that accumulates its gradient, or
    the argument behind a reference."""
    tensor = getattr(source, "variable", None)
    if tensor is None and data is not None:
        tensor = data()
    has_hooks = tensor is not None and (tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None))
    return tensor if has_hooks else None
