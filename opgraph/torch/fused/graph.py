"""Graphs in the form for torch's autograd: each result is a separate tensor, and gradients can be named after it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from opgraph.ir import dtypes, opdef
from opgraph.ir.copy_graph import rebuilt
from opgraph.ir.graph import Graph
from opgraph.ir.logical_tensor import LogicalTensor, port_name
from opgraph.ir.text import MAX_PRINTED_ELEMENTS
from opgraph.ops.conversion import STOP_GRADIENT


def prepared(graph: Graph) -> Graph:
    """An equivalent graph in which no result is an input or a constant, and no input has a name `d_<output>`."""
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
    """An equivalent graph with inputs in0, in1, ... and results out0, out1, ..., from which names can be derived."""
    graph = prepared(graph)
    changed = {t.id: t.with_(name=f"in{i}") for i, t in enumerate(graph.inputs)}
    changed.update((t.id, t.with_(name=f"out{i}")) for i, t in enumerate(graph.outputs))
    return _rebuilt(graph, changed, set())


def without_data(graph: Graph) -> tuple[Graph, list[np.ndarray]]:
    """The graph with inputs, after all others, instead of the constants that its text does not hold; and these."""
    read = {t.id for op in graph.ops for t in op.inputs}
    large = [t for t in graph.constants if t.id in read and opdef.array_of(t).size > MAX_PRINTED_ELEMENTS]
    if not large:
        return graph, []
    taken = {port_name(t) for t in (*graph.inputs, *graph.outputs)}
    free = {t.id: t.with_(name=_fresh("const", taken), data=None, property="variable") for t in large}
    return _rebuilt(graph, free, taken), [opdef.array_of(t) for t in large]


def with_data(graph: Graph, arrays: Sequence[np.ndarray]) -> Graph:
    """The inverse of `without_data`."""
    last = graph.inputs[len(graph.inputs) - len(arrays) :]
    bound = {t.id: t.with_(name=None, data=data, property="constant") for t, data in zip(last, arrays, strict=True)}
    return _rebuilt(graph, bound, set()) if bound else graph


def _rebuilt(graph: Graph, changed: Mapping[int, LogicalTensor], taken: set[str]) -> Graph:
    """The graph with some tensors replaced, and a copy of each result that no op made."""
    made = {t.id for op in graph.ops for t in op.outputs}
    result = rebuilt(graph, changed=changed)
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
    """Ids of the float values whose data depend on these values, only through floats and nothing detached."""
    found = set(sources)
    for op in graph.ops:
        read = () if op.kind in (STOP_GRADIENT.kind, "End") else opdef.get(op.kind, where=op.label).read_inputs(op)
        if any(t.id in found for t in read):
            found.update(t.id for t in op.outputs if t.dtype in dtypes.FLOATS)
    return found
