"""Training: the tensors that a fused call saves for backward, and the fused call of its backward pass."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from opgraph.ir import dtypes
from opgraph.ir.graph import Graph
from opgraph.ir.logical_tensor import port_name
from opgraph.runtime.providers.torch_dtypes import TORCH_DTYPES
from opgraph.runtime.providers.torch_internals import has_storage, will_execute
from opgraph.runtime.providers.torch_prepared import Run
from opgraph.torch.fused.graph import numbered, reached
from opgraph.transforms.gradient import gradient
from opgraph.transforms.saved import Saved, TrainingPlan, training_plan

if TYPE_CHECKING:
    from opgraph.torch.fused.op import FusedOp


Flags = tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class Backward:
    """The backward pass for some of the inputs, given gradients of some of the results.

    Attributes:
        op: computes gradients of inputs from the saved tensors and gradients of results.
        order: the positions of its inputs in the sequence of saved tensors, shapes, and gradients of all results.
        places: for each input of the forward call, the result of `op` that is its gradient; None if there is none.
    """

    op: FusedOp
    order: tuple[int, ...]
    places: tuple[int | None, ...]


class Training:
    """A graph that is prepared for gradients with respect to some of its inputs.

    Args:
        graph: finalized; each result is a separate tensor.
        needs: for each input, True if its gradient is wanted.
        make: makes the op of a derived graph.
        units: True if named units are differentiated as single ops.

    Attributes:
        forward: the graph that a forward call runs; its further results are saved, not returned to the caller.
        saved: descriptions of the saved tensors.
        kept: the positions of the saved tensors, among inputs and then results.
        shapes: inputs for which at most the shape is needed.
        fixed: results without a gradient: integers, booleans, and those that depend on no input that needs one.

    Raises:
        Unimplemented: an op between inputs and results has no gradient.
    """

    def __init__(self, graph: Graph, needs: Flags, make: Callable[[Graph], FusedOp], *, units: bool) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._backwards: dict[tuple[Flags, Flags], Backward | None] = {}
        self._tangents: dict[Flags, tuple[Tangents, FusedOp] | None] = {}
        asked = {t.id for t, need in zip(graph.inputs, needs, strict=True) if need}
        floats = {t.id for t in graph.outputs if t.dtype in dtypes.FLOATS}
        active = reached(graph, asked) & floats
        # As in autograd, an input without a path of floats to a result has no gradient: None, not zeros.
        self._wrt = [port_name(t) if t.id in asked and reached(graph, {t.id}) & active else None for t in graph.inputs]
        names = [name for name in self._wrt if name is not None]
        #: For each input, True if its gradient may be computed.
        self.may: Flags = tuple([name is not None for name in self._wrt])
        #: True if the gradients that a backward pass needs must be queried.
        self.asks = len(names) > 1
        self._plan: TrainingPlan | None = training_plan(graph, names, units=units) if names and active else None
        self.forward = graph if self._plan is None else self._plan.forward
        self.saved: tuple[Saved, ...] = () if self._plan is None else self._plan.saved
        self._outputs = [port_name(t) for t in self.forward.outputs]
        self._reaches = [reached(self.forward, {t.id}) for t in self.forward.inputs]
        inputs = {port_name(t): i for i, t in enumerate(graph.inputs)}
        results = {name: len(inputs) + i for i, name in enumerate(self._outputs)}
        kept = [s.name for s in self.saved if s.role != "shape"]
        # Shapes that the plan lists, and shapes that only some choices of gradients need.
        shapes = [name for name in inputs if self._plan is not None and name not in kept]
        found = {**results, **inputs}
        self.kept = tuple(found[name] for name in kept)
        self.shapes = tuple(inputs[name] for name in shapes)
        self.shape_dtypes = tuple(graph.inputs[i].dtype for i in self.shapes)
        # Names that the backward graph reads: of saved tensors, then shapes, then gradients of results.
        self._pool = [*kept, *shapes, *(f"d_{name}" for name in self._outputs)]
        active = reached(self.forward, {t.id for t, name in zip(self.forward.inputs, self._wrt, strict=True) if name})
        is_float = [t.dtype in dtypes.FLOATS for t in self.forward.outputs]
        self.fixed = tuple(i for i, t in enumerate(self.forward.outputs) if t.id not in active or not is_float[i])

    def wanted(self, ctx: Any) -> tuple[Flags, bool]:
        """For each input, True if the running backward pass needs its gradient; then, True if torch's query raised.

        Args:
            ctx: the context of the autograd node.
        """
        return _wanted(ctx, self.may) if self.asks else (self.may, False)

    def backward(self, wanted: Flags, grads: Sequence[torch.Tensor | None]) -> Backward | None:
        """The backward pass for the inputs that are wanted, given gradients that may be None; None if it is empty."""
        key = (wanted, tuple([g is not None for g in grads]))
        try:
            return self._backwards[key]
        except KeyError:
            with self._lock:
                if key not in self._backwards:
                    self._backwards[key] = self._backward(*key)
                return self._backwards[key]

    def _backward(self, wanted: Flags, given: Flags) -> Backward | None:
        results = [
            t for i, (t, g) in enumerate(zip(self.forward.outputs, given, strict=True)) if g and i not in self.fixed
        ]
        outputs, ids = [port_name(t) for t in results], {t.id for t in results}
        inputs = zip(self._wrt, wanted, self._reaches, strict=True)
        names = [name for name, want, found in inputs if want and name is not None and found & ids]
        if self._plan is None or not outputs or not names:
            return None
        graph = self._plan.backward_of(names, outputs)
        where = {name: i for i, name in enumerate(self._pool)}
        made = {port_name(t): i for i, t in enumerate(graph.outputs)}
        return Backward(
            self._make(graph),
            tuple(where[port_name(t)] for t in graph.inputs),
            tuple(made.get(f"d_{name}") if name in names else None for name in self._wrt),
        )

    def gradients(
        self,
        wanted: Flags,
        saved: Sequence[torch.Tensor],
        shapes: Sequence[Any],
        grads: Sequence[Any],
    ) -> list[torch.Tensor | None]:
        """The gradients of the forward call's inputs: one fused call, itself differentiable.

        Args:
            wanted: for each input, True if its gradient is wanted.
            saved: the saved tensors.
            shapes: the shapes of the inputs for which only the shape was saved.
            grads: the gradients of all results of `forward`, None where there is none.
        """
        backward = self.backward(wanted, grads)
        if backward is None:
            return [None] * len(self._wrt)
        pool = [*saved, *self._stand_ins(backward.order, shapes, grads), *grads]
        run: Callable[..., tuple[torch.Tensor, ...]] = backward.op
        given = [pool[i] for i in backward.order]
        if not all(map(has_storage, given)):  # a batch (is_grads_batched), or of a transform that has ended
            run = backward.op.dispatched
        results = run(*given)
        return [None if place is None else results[place] for place in backward.places]

    def prepared(self, saved: Sequence[torch.Tensor], shapes: Sequence[Any], grads: Sequence[Any]) -> Run | None:
        """`gradients` of all inputs, for tensors of one signature: a function of the saved tensors and the gradients.

        None if torch's dispatcher is needed. Its results are not differentiable.
        """
        backward = self.backward(self.may, grads)
        if backward is None:
            return None
        stand_ins = self._stand_ins(backward.order, shapes, grads)
        kept, given = [f"k{i}" for i in range(len(saved))], [f"g{i}" for i in range(len(grads))]
        pool = [*saved, *stand_ins, *grads]
        names = [*kept, *(f"s{i}" for i in range(len(stand_ins))), *given]
        order = backward.order
        statements = backward.op.statements([pool[i] for i in order], [names[i] for i in order])
        if statements is None:
            return None
        values = {f"s{i}": tensor for i, tensor in enumerate(stand_ins)}
        results = ["None" if place is None else statements.results[place] for place in backward.places]
        return replace(statements, values={**statements.values, **values}).function([*kept, *given], results)

    def tangents(
        self, tensors: Sequence[torch.Tensor], given: Sequence[torch.Tensor | None], shapes: Sequence[Any]
    ) -> Any:
        """The tangents of the results of `forward`, a tuple if there are several; themselves differentiable.

        Args:
            tensors: the inputs.
            given: their tangents; None where there is none.
            shapes: the shapes of the results.
        """
        moving = tuple([t is not None for t in given])
        may = [t.dtype in dtypes.FLOATS for t in self.forward.outputs]
        with self._lock:
            if moving not in self._tangents:
                found = tangents(self.forward, moving, may)
                self._tangents[moving] = None if found is None else (found, self._make(found.graph))
        made = self._tangents[moving]
        like = next(t for t in given if t is not None)
        zeros = [
            like.new_zeros((), dtype=TORCH_DTYPES[t.dtype]).expand(shape)
            for t, shape in zip(self.forward.outputs, shapes, strict=True)
        ]
        # torch accepts no None for a result that may have a tangent.
        results: list[torch.Tensor | None] = [zero if able else None for zero, able in zip(zeros, may, strict=True)]
        if made is not None:
            pool: list[Any] = [*tensors, *given, *zeros]
            values = made[1](*[pool[i] for i in made[0].order])
            results = [
                kept if place is None else values[place] for kept, place in zip(results, made[0].places, strict=True)
            ]
        return results[0] if len(results) == 1 else tuple(results)

    def _stand_ins(self, order: tuple[int, ...], shapes: Sequence[Any], grads: Sequence[Any]) -> list[Any]:
        """Tensors of these shapes, one element each, whose data are never read; None for those not in `order`."""
        like = next(g for g in grads if g is not None)
        first = len(self.kept)
        return [
            like.new_zeros((), dtype=TORCH_DTYPES[dtype]).expand(shape) if first + i in order else None
            for i, (shape, dtype) in enumerate(zip(shapes, self.shape_dtypes, strict=True))
        ]


def runs_everything() -> bool:
    """True if the running backward pass runs every node: `backward()` without `inputs=`."""
    return bool(will_execute(_NO_ONES))


def _wanted(ctx: Any, may: Flags) -> tuple[Flags, bool]:
    """Of the inputs whose gradients this node may compute, those that the running backward pass needs.

    The node runs because one of them is needed, so the last candidate needs no query. For a leaf that was passed to
    autograd.grad, the engine raises instead, which takes 15 us; the other leaves are then not queried.

    Returns: the flags, and True if the engine raised.
    """
    nodes = ctx.next_functions[-len(may) :]
    wanted = list(may)
    left, raised, found = sum(may), False, False
    for i in reversed(range(len(may))):
        node = nodes[i][0]
        if not may[i] or node is None:
            continue
        if left == 1 and not found:
            break
        left -= 1
        if raised and not node.next_functions:
            continue
        try:
            wanted[i] = will_execute(node)
        except RuntimeError:
            raised = True
        found = found or wanted[i]
    return tuple(wanted), raised


# torch.compile may import this module where no gradients are recorded.
with torch.inference_mode(False), torch.enable_grad():
    #: The node of a leaf that is in no graph.
    _NO_ONES: Any = torch.empty(0, requires_grad=True).view(0).grad_fn.next_functions[0][0]  # type: ignore[union-attr]


@dataclass(frozen=True, slots=True)
class Tangents:
    """A graph of tangents.

    Attributes:
        graph: reads inputs of the function and tangents of some of them.
        order: for each of its inputs, the position among inputs of the function, then their tangents, then its results
            (only their shapes count).
        places: for each result of the function, the result of the graph that is its tangent; None: it has none.
    """

    graph: Graph
    order: tuple[int, ...]
    places: tuple[int | None, ...]


def tangents(graph: Graph, moving: Sequence[bool], results: Sequence[bool]) -> Tangents | None:
    """The graph of tangents; None if no result has one.

    Args:
        graph: finalized.
        moving: for each input, True if it has a tangent.
        results: for each output, True if it may have one.

    The gradient graph is linear in the gradients of the results, with the transposed Jacobian as its matrix; its own
    gradient with respect to these is therefore the Jacobian, applied to tangents. Source: Townsend, "A new trick for
    calculating Jacobian vector products", 2017.
    """
    ready = numbered(graph)
    inputs = [port_name(t) for t in ready.inputs]
    names = [port_name(t) for t in ready.outputs]
    wrt = [name for name, moves in zip(inputs, moving, strict=True) if moves]
    outputs = {f"d_{n}": i for i, (n, may) in enumerate(zip(names, results, strict=True)) if may}
    if not wrt or not outputs:
        return None
    back = gradient(ready, wrt)
    seeds = [n for n in map(port_name, back.inputs) if n in outputs]
    if not seeds:
        return None
    forward = gradient(back, seeds)
    where = {name: i for i, name in enumerate(inputs)}
    where.update((f"d_d_{name}", len(inputs) + i) for i, name in enumerate(inputs))
    where.update((f"d_{name}", 2 * len(inputs) + i) for i, name in enumerate(names))
    places: list[int | None] = [None] * len(names)
    for i, seed in enumerate(seeds):
        places[outputs[seed]] = i
    return Tangents(forward, tuple(where[port_name(t)] for t in forward.inputs), tuple(places))
