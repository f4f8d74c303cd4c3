"""Graphs as torch's autograd needs them: every result a tensor of its own, names that gradients can build on."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from opgraph.ir import dtypes
from opgraph.ir.graph import Graph
from opgraph.ir.logical_tensor import LogicalTensor, port_name


def prepared(graph: Graph) -> Graph:
    """The same function, where no result is an input or a constant, and `d_<output>` names no input."""
    graph.finalize()
    made = {t.id for op in graph.ops for t in op.outputs}
    names = [port_name(t) for t in graph.outputs]
    inputs = [port_name(t) for t in graph.inputs]
    taken = {*inputs, *names}
    clash = {n for n in inputs if n in names or n.removeprefix("d_") in names or n.startswith("kept_")}
    if not clash and all(t.id in made for t in graph.outputs):
        return graph
    changed = {t.id: t.with_(name=_fresh("in", taken)) for t in graph.inputs if port_name(t) in clash}
    return _rebuilt(graph, changed, taken)


def numbered(graph: Graph) -> Graph:
    """The same function of inputs in0, in1, ... with results out0, out1, ..., from which names can be derived."""
    graph = prepared(graph)
    changed = {t.id: t.with_(name=f"in{i}") for i, t in enumerate(graph.inputs)}
    changed.update((t.id, t.with_(name=f"out{i}")) for i, t in enumerate(graph.outputs))
    return _rebuilt(graph, changed, set())


def _rebuilt(graph: Graph, changed: Mapping[int, LogicalTensor], taken: set[str]) -> Graph:
    """The graph with some tensors renamed, and a copy for each result that no op made."""
    made = {t.id for op in graph.ops for t in op.outputs}
    result = Graph(graph.engine)
    for tensor in graph.inputs:
        result._add_input(changed.get(tensor.id, tensor))
    for tensor in graph.constants:
        result._tables.enter_tensor(tensor)
    for op in graph.ops:
        ins, outs = (tuple(changed.get(t.id, t) for t in side) for side in (op.inputs, op.outputs))
        result._add(op.id, op.kind, ins, outs, op.name, op.attrs)
    outputs: list[LogicalTensor] = []
    for tensor in graph.outputs:
        own = changed.get(tensor.id, tensor)
        if tensor.id not in made:
            own = result.add_op("Identity", own, name=_fresh("out", taken))
        outputs.append(own)
    result.set_outputs(outputs)
    return result.finalize()


def _fresh(stem: str, taken: set[str]) -> str:
    number = len(taken)
    while f"{stem}{number}" in taken:
        number += 1
    taken.add(f"{stem}{number}")
    return f"{stem}{number}"


def reached(graph: Graph, sources: Collection[int]) -> set[int]:
    """Ids of the float values that depend on these values, by way of floats."""
    found = set(sources)
    for op in graph.ops:
        if any(t.id in found for t in op.inputs):
            found.update(t.id for t in op.outputs if t.dtype in dtypes.FLOATS)
    return found


def reaching(graph: Graph, targets: Collection[int]) -> set[int]:
    """Ids of the values that these values depend on, themselves included."""
    found = set(targets)
    for op in reversed(graph.ops):
        if any(t.id in found for t in op.outputs):
            found.update(t.id for t in op.inputs)
    return found
