"""Cleanup after nodes were replaced: drops unused nodes and values, and puts producers first again."""

from __future__ import annotations

import heapq
from collections import Counter

from onnx import GraphProto

from opgraph.onnx.draft import Draft
from opgraph.onnx.fused_functions import Numbered
from opgraph.onnx.nodes import reads


def without_unused(nodes: Numbered, graph: GraphProto, may_go: set[int]) -> Numbered:
    """Returns the nodes without those in `may_go` that are no longer read."""
    before = Counter(name for node in graph.node for name in reads(node))
    outputs = {o.name for o in graph.output}
    uses = Counter(name for _, node in nodes for name in reads(node))
    kept: Numbered = []
    for index, node in reversed(nodes):
        # A node with a result that was already unread before is kept.
        needed = any(uses[n] or n in outputs or not before[n] for n in node.output if n)
        if index in may_go and not needed:
            uses.subtract(reads(node))
        else:
            kept.append((index, node))
    return kept[::-1]


def sorted_nodes(nodes: Numbered) -> Numbered:
    """Sorts producers first, and otherwise keeps the given order."""
    maker = {name: place for place, (_, node) in enumerate(nodes) for name in node.output if name}
    before = [{maker[n] for n in reads(node) if n in maker} for _, node in nodes]
    after: dict[int, list[int]] = {}
    for place, needs in enumerate(before):
        for need in needs:
            after.setdefault(need, []).append(place)
    waiting = [len(needs) for needs in before]
    ready = [place for place, count in enumerate(waiting) if count == 0]
    heapq.heapify(ready)
    order: Numbered = []
    while ready:
        place = heapq.heappop(ready)
        order.append(nodes[place])
        for following in after.get(place, ()):
            waiting[following] -= 1
            if waiting[following] == 0:
                heapq.heappush(ready, following)
    assert len(order) == len(nodes), "partitions are convex"
    return order


def drop_initializers(draft: Draft, before: GraphProto) -> None:
    """Drops the initializers that only replaced nodes read; an input keeps its default."""
    graph = draft.skeleton.graph
    used = {name for node in graph.node for name in reads(node)} | {o.name for o in graph.output}
    read_before = {name for node in before.node for name in reads(node)}
    assert draft.origin is not None
    stay = used | {*draft.inputs}
    draft.kept = [n for n in draft.origin.tensors if n in stay or n not in read_before]
    kept = {*draft.kept, *draft.arrays}
    initializers = [t for t in graph.initializer if t.name in kept]
    inputs = [v for v in graph.input if v.name in kept or v.name in draft.inputs]
    for field, values in ((graph.initializer, initializers), (graph.input, inputs)):
        values = list(values)
        del field[:]
        field.extend(values)


def drop_value_info(graph: GraphProto) -> None:
    """Drops the declarations and quantization annotations of values that no longer exist."""
    made = {name for node in graph.node for name in node.output}
    made |= {v.name for v in graph.input} | {t.name for t in graph.initializer}
    declared = [v for v in graph.value_info if v.name in made]
    annotated = [a for a in graph.quantization_annotation if a.tensor_name in made]
    for field, kept in ((graph.value_info, declared), (graph.quantization_annotation, annotated)):
        if len(kept) != len(field):
            del field[:]
            field.extend(kept)
