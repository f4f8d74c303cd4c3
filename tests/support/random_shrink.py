"""The smallest part of a graph that still shows a problem."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence

import numpy as np
from random_scenario import Scenario

import opgraph as og
from opgraph.errors import OpGraphError
from opgraph.ir import dtypes
from opgraph.ir.logical_tensor import LogicalTensor
from opgraph.runtime.reference import evaluate


def shrunk(found: Scenario, shows: Callable[[Scenario], bool], seconds: float = 60.0) -> Scenario:
    """A scenario with fewer ops and outputs for which `shows` is still true.

    Outputs are dropped one by one; then values become inputs, so that the ops that make them are dropped.
    """
    until = time.monotonic() + seconds
    best = found
    for number in range(len(found.feeds)):  # one call is enough
        alone = Scenario(found.graph, [found.feeds[number]], found.smooth)
        if shows(alone):
            best = alone
            break
    changed = True
    while changed and time.monotonic() < until:
        changed = False
        for smaller in (*_fewer_outputs(best), *_cuts(best)):
            if time.monotonic() > until:
                break
            if smaller is not None and shows(smaller):
                best, changed = smaller, True
                break
    return best


def _fewer_outputs(found: Scenario) -> list[Scenario | None]:
    outputs = found.graph.outputs
    halves = [outputs[: len(outputs) // 2], outputs[len(outputs) // 2 :]] if len(outputs) > 2 else []
    each = [[t for t in outputs if t.id != left.id] for left in outputs] if len(outputs) > 1 else []
    return [part_of(found, kept, ()) for kept in (*halves, *each)]


def _cuts(found: Scenario) -> list[Scenario | None]:
    graph = found.graph
    outputs = {t.id for t in graph.outputs}
    made = [t for op in reversed(graph.ops) for t in op.outputs if t.id not in outputs]
    further = [part_of(found, _moved(graph, t), ()) for op in graph.ops for t in op.outputs[:1] if t.id in outputs]
    return [*(part_of(found, graph.outputs, (t.id,)) for t in made), *further]


def _moved(graph: og.Graph, output: LogicalTensor) -> list[LogicalTensor]:
    """The outputs, with those of one op replaced by its operands."""
    producer = next(op for op in graph.ops if any(t.id == output.id for t in op.outputs))
    inputs = {t.id for t in graph.inputs}
    instead = [t for t in producer.inputs if t.id not in inputs and not t.is_constant]
    kept = [t for t in graph.outputs if t.id not in {o.id for o in producer.outputs}]
    return list({t.id: t for t in (*kept, *instead)}.values())


def part_of(
    found: Scenario, outputs: Sequence[LogicalTensor], cut: Collection[int], *, unknown: bool = False
) -> Scenario | None:
    """The graph that computes some values from its inputs and from values that become inputs; None if it is invalid.

    Args:
        unknown: no size of an input is declared.
    """
    needed, kept = {t.id for t in outputs}, []
    for op in reversed(found.graph.ops):
        if any(t.id in needed and t.id not in cut for t in op.outputs):
            kept.append(op)
            needed |= {t.id for t in op.inputs}
    if not kept or not outputs:
        return None
    constants = [t for t in found.graph.constants if t.id in needed]
    graph = og.Graph()
    made: dict[int, LogicalTensor] = {}
    values: list[dict[int, np.ndarray]] = [{} for _ in found.feeds]
    try:
        for number, feeds in enumerate(found.feeds):
            with np.errstate(all="ignore"):
                evaluate(found.graph, feeds, dtype=None, watch=lambda t, a, n=number: values[n].update({t.id: a}))
        names = {t.id: str(t.name) for t in found.graph.inputs if t.id in needed}
        names.update((i, f"v{i}") for i in cut if i in needed)
        given = [{} for _ in found.feeds]
        for tensor in [*found.graph.inputs, *(t for op in found.graph.ops for t in op.outputs)]:
            if tensor.id not in names or tensor.id in made:
                continue
            dims = tensor.dims if tensor.dims is None or not unknown else (None,) * len(tensor.dims)
            made[tensor.id] = graph.input(names[tensor.id], tensor.dtype, dims)
            for number, feeds in enumerate(found.feeds):
                array = feeds[str(tensor.name)] if tensor.id not in cut else values[number][tensor.id]
                given[number][names[tensor.id]] = np.array(array, dtypes.get(tensor.dtype).numpy)
        for tensor in constants:
            made[tensor.id] = graph.constant(str(tensor.name or f"c{tensor.id}"), tensor.data)
        for op in reversed(kept):
            asked = [t.dtype for t in op.outputs][:1]
            back = graph.add_op(
                op.kind, *(made[t.id] for t in op.inputs), dtype=asked[0], outputs=len(op.outputs), **op.attrs
            )
            for old, new in zip(op.outputs, back if isinstance(back, tuple) else (back,), strict=True):
                made.setdefault(old.id, new)
        graph.set_outputs([made[t.id] for t in outputs])
        return Scenario(graph.finalize(), given, found.smooth)
    except (OpGraphError, KeyError):
        return None
