"""Chooses the tensors saved for backward. The choice is made before anything runs, as a contract, not by a heuristic.

The values that the backward graph reads from the forward graph are a cut through both: everything below it is
recomputed in registers, and nothing above it is needed any more. Pointwise ops may be recomputed, library ops may not.
The cut with the fewest bytes is chosen: inputs, or values in between where they are smaller (a 1-byte mask, a sum of
two inputs), or outputs, which count nothing because their next reader keeps them anyway.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from opgraph.ir import opdef
from opgraph.ir.copy_graph import rebuilt
from opgraph.ir.graph import Graph
from opgraph.ir.logical_tensor import LogicalTensor, port_name
from opgraph.ir.op import Op
from opgraph.transforms.conditions import Conditioned, with_conditions
from opgraph.transforms.cut import Cut, kept_name, read_inputs
from opgraph.transforms.gradient import differentiated, prepared
from opgraph.transforms.masks import Told, masks_of_outputs
from opgraph.transforms.selections import Comparison, comparisons
from opgraph.transforms.units import needed


@dataclass(frozen=True, slots=True)
class Saved:
    """One tensor that is saved for backward.

    Attributes:
        name: the name of an input or output of the graph, or kept_<id> for a value in between.
        role: "input", "output" or "value"; or "shape": only the shape of an input or of a library's result is saved.
        dtype, shape: as far as known before running.
        bytes: its size; None if the shape is not known yet, 0 if only the shape is saved.
    """

    name: str
    role: str
    dtype: str
    shape: tuple[int | str | None, ...] | None
    bytes: int | None


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """A graph prepared for training.

    Attributes:
        forward: the graph, with the values to save as further outputs, if there are any.
        backward: the gradient graph over the saved values and `d_<output>`.
        saved: the saved tensors, in the order of the backward graph's inputs.
        given, from_outputs, masks, by_choice: the choices, as arguments of `differentiated`.
    """

    forward: Graph
    backward: Graph
    saved: tuple[Saved, ...]
    given: frozenset[int] = frozenset()
    from_outputs: tuple[int, ...] = ()
    masks: Mapping[int, Told] = field(default_factory=dict)
    by_choice: frozenset[int] = frozenset()

    def backward_of(self, wrt: Sequence[str], outputs: Collection[str]) -> Graph:
        """The backward graph for some of the inputs, with gradients of only some outputs of the forward graph.

        Args:
            wrt: names among those that the plan was made for.
            outputs: names of outputs of `forward`, including saved values. Saved values have a gradient if the backward
                pass is itself differentiated. It then needs no more saved values.
        """
        return differentiated(
            self.forward,
            wrt,
            given=self.given,
            from_outputs=self.from_outputs,
            masks=self.masks,
            by_choice=self.by_choice,
            outputs=outputs,
        )


def training_plan(graph: Graph, wrt: Sequence[str], *, units: bool = True) -> TrainingPlan:
    """Chooses the tensors to save, and derives the graphs of both passes.

    Args:
        graph: finalized by this call if need be.
        wrt: names of the inputs (or constants, which become inputs) to differentiate by.
        units: true if named units are differentiated as single ops.

    Raises:
        The errors of `gradient`; Unimplemented if the choice needs networkx and it is missing.
    """
    ready = prepared(graph, wrt, units=units)
    told = masks_of_outputs(ready)
    by_output = _from_outputs(ready)
    asked = with_conditions(ready)
    choices = [_cheapest(asked, wrt, told, ops) for ops in ([(), by_output] if by_output else [()])]
    _, cut, from_outputs = min(choices, key=lambda c: c[0])
    inputs = {t.id for t in ready.inputs}
    masks = {i: told[i] for i in cut if i in told}
    given = {i for i in cut if i not in inputs and i not in masks}
    chosen = frozenset(op for op, read in asked.chosen.items() if read & given)
    if any(ready.producer(i) is None for i in given):
        ready = needed(asked.graph, given)
    backward = differentiated(ready, wrt, given=given, from_outputs=from_outputs, masks=masks, by_choice=chosen)
    shapes = _costly_shapes(backward, {t.id for op in ready.ops for t in op.outputs} - given)
    if shapes:
        given |= shapes
        backward = differentiated(ready, wrt, given=given, from_outputs=from_outputs, masks=masks, by_choice=chosen)
    made = [ready.tensor(i) for i in sorted(given | {m.output.id for m in masks.values()})]
    extra = [t for t in made if all(t.id != o.id for o in ready.outputs)]
    forward = _with_outputs(ready, extra) if extra else ready
    saved = _described(ready, backward, made)
    return TrainingPlan(forward, backward, saved, frozenset(given), tuple(from_outputs), masks, chosen)


def read_tensors(graph: Graph) -> set[int]:
    """Ids of the tensors whose data some op reads; only the shapes of the others count."""
    return {t.id for op in graph.ops for t in read_inputs(op)}


def _costly_shapes(backward: Graph, forward: set[int]) -> set[int]:
    """Forward values of which backward reads only the shape, and which would be recomputed only for that.

    This happens if a library computes or reads them: it takes tensors, where a kernel takes the shape.

    Args:
        forward: ids of the values that the forward graph computes and that are not saved.
    """
    costly: set[int] = set()
    for op in backward.ops:
        if _by_library(op) or any(t.id in costly for t in op.inputs):
            costly.update(t.id for t in op.outputs if t.id in forward)
    read = {t.id for t in backward.outputs}
    found: set[int] = set()
    for op in reversed(backward.ops):
        if any(t.id in read for t in op.outputs):  # else only the shapes of its results count
            read.update(t.id for t in read_inputs(op))
            found.update({t.id for t in op.inputs} & (forward if _by_library(op) else costly))
    return found - read


def _by_library(op: Op) -> bool:
    record = opdef.get(op.kind, where=op.label)
    return not record.is_pointwise and record.family != "sum"


def _from_outputs(graph: Graph) -> tuple[int, ...]:
    """Ops that compute an output of the graph and whose gradient follows from that output alone."""
    outputs = {t.id for t in graph.outputs}
    found = []
    for op in graph.ops:
        record = opdef.get(op.kind, where=op.label)
        if any(t.id in outputs for t in op.outputs) and record.gradient_from_output is not None:
            found.append(op.id)
    return tuple(found)


def _cheapest(
    asked: Conditioned, wrt: Sequence[str], told: Collection[int], from_outputs: Collection[int]
) -> tuple[int, set[int], Collection[int]]:
    """The cheapest values to save: their weight, their ids, and `from_outputs`."""
    joint = differentiated(asked.graph, wrt, from_outputs=from_outputs, by_choice=asked.chosen)
    found = comparisons(joint)
    held: list[Comparison] = []
    while True:
        cut = Cut(asked.graph, joint, told, held)
        weight, ids = cut.solved()
        wrong = [c for c in found if c not in held and cut.is_computed_twice(c, ids)]
        if not wrong:
            return weight, ids, from_outputs
        held += wrong


def _with_outputs(graph: Graph, extra: Sequence[LogicalTensor]) -> Graph:
    named = {t.id: t.with_(name=kept_name(graph, t)) for t in extra}
    result = rebuilt(graph, changed=named)
    result.set_outputs([*graph.outputs, *named.values()])
    return result.finalize()


def _described(graph: Graph, backward: Graph, made: Sequence[LogicalTensor]) -> tuple[Saved, ...]:
    read = read_tensors(backward) | {t.id for t in backward.outputs}
    inputs = {port_name(t) for t in graph.inputs}
    between = {kept_name(graph, t): t for t in made}
    outputs = {t.id for t in graph.outputs}
    saved = []
    for tensor in backward.inputs:
        name = port_name(tensor)
        if name not in inputs and name not in between:
            continue
        if tensor.id not in read:
            role = "shape"
        elif name in inputs:
            role = "input"
        else:
            role = "output" if between[name].id in outputs else "value"
        size = 0 if role == "shape" else tensor.mem_size if tensor.has_known_shape else None
        saved.append(Saved(name, role, tensor.dtype, tensor.dims, size))
    return tuple(saved)
