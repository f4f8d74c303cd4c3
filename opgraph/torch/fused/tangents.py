"""Forward-mode derivatives: the graph that takes tangents of inputs to tangents of results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from opgraph.ir.graph import Graph
from opgraph.ir.logical_tensor import port_name
from opgraph.torch.fused.graph import numbered
from opgraph.transforms.gradient import gradient


@dataclass(frozen=True, slots=True)
class Tangents:
    """A graph of tangents.

    Attributes:
        graph: reads inputs of the function and tangents of some of them.
        order: for each of its inputs, where it comes from: inputs of the function, then their tangents, then its
            results, of which only the shape counts.
        places: for each result of the function, which result of the graph is its tangent; None: it has none.
    """

    graph: Graph
    order: tuple[int, ...]
    places: tuple[int | None, ...]


def tangents(graph: Graph, moving: Sequence[bool], results: Sequence[bool]) -> Tangents | None:
    """The graph of tangents; None where no result has one.

    Args:
        graph: finalized.
        moving: for each input, whether it has a tangent.
        results: for each output, whether it may have one.

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
