"""A graph that came from ONNX, written back: its own model with the units replaced and everything else as it was."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from onnx import GraphProto, ModelProto, NodeProto

from opgraph.ir import opdef
from opgraph.ir.graph import Graph
from opgraph.ir.logical_tensor import LogicalTensor
from opgraph.ir.op import AttrValue, Op
from opgraph.onnx.compose import finish
from opgraph.onnx.draft import Draft, Summary
from opgraph.onnx.emit import CHOSEN, CONTRIB, Emitter, Value
from opgraph.onnx.functions import FunctionTable
from opgraph.onnx.fused_functions import fold_partitions
from opgraph.onnx.nodes import reads
from opgraph.onnx.restamp import restamped
from opgraph.onnx.signature import DOMAIN
from opgraph.onnx.source import Source
from opgraph.onnx.target import Target
from opgraph.onnx.validate import opsets
from opgraph.partition.rules import find_units


@dataclass(frozen=True, slots=True)
class _Spot:
    """A unit to be written as one node: what it means, and the ops that may go."""

    root: Op
    ops: tuple[Op, ...]
    inputs: tuple[LogicalTensor, ...]
    attrs: dict[str, AttrValue]


def rewritten(
    graph: Graph, source: Source, form: str, target: Target, opset: int | None, functions: bool, summary: Summary
) -> Draft:
    """The model that a graph was loaded from, with its units in another form.

    Args:
        form: "decomposed", "function", "standard", "contrib" or "auto".
        functions: whether further fused partitions become functions.

    Raises:
        Unimplemented: the form needs another opset, and the model cannot be moved there.
    """
    origin = source.origin
    spots = _spots(graph, source, form, origin.skeleton.graph)
    wanted = opset or (24 if form == "standard" and spots else None)
    skeleton = ModelProto()
    skeleton.CopyFrom(restamped(origin.skeleton, wanted, target) if wanted is not None else origin.skeleton)
    imports = opsets(skeleton)
    summary.nodes_before = len(skeleton.graph.node)
    emitter = Emitter(
        imports.get("", 1),
        "function" if form == "auto" else form,
        target,
        _names(skeleton.graph, origin.tensors),
        FunctionTable(imports.get("", 1)),
    )
    nodes = _replaced(skeleton.graph, source, spots, emitter)
    summary.units[CHOSEN.lower()] = len(spots)
    nodes = _without_unused(nodes, skeleton.graph, _may_go(source, spots, skeleton.graph))
    draft = Draft(skeleton, list(origin.inputs), summary, origin=origin)
    for function in skeleton.functions:
        if any((n.domain, n.op_type, n.overload) == (DOMAIN, function.name, function.overload) for _, n in nodes):
            emitter.functions.keep(function)
    if functions:
        nodes = fold_partitions(graph, source, nodes, skeleton, emitter, summary)
    del skeleton.graph.node[:]
    skeleton.graph.node.extend(node for _, node in sorted_nodes(nodes))
    for name, data in emitter.scalars.items():
        draft.add_array(name, data)
    _drop_initializers(draft, origin.skeleton.graph)
    _drop_value_info(skeleton.graph)
    del skeleton.functions[:]
    finish(skeleton, emitter, imports)
    return draft


#: Nodes with the index that they had, or that the node had which they replace.
Numbered = list[tuple[int, NodeProto]]


def _names(graph: GraphProto, tensors: Iterable[str]) -> set[str]:
    names = {v.name for v in (*graph.input, *graph.output, *graph.value_info)} | set(tensors)
    return names | {name for node in graph.node for name in node.output}


def _spots(graph: Graph, source: Source, form: str, proto: GraphProto) -> list[_Spot]:
    """The units to write: those composed of several ops, and the ops that are one already."""
    found: dict[int, _Spot] = {}
    if form != "decomposed":
        for unit in find_units(graph):
            # Where the form has no operand for a factor, a composed swish with one stays composed.
            sayable = len(unit.inputs) == 1 or form in ("auto", "function")
            composed = unit.kind == CHOSEN and unit.root.kind != CHOSEN
            if composed and sayable and unit.root.id in source.node_of:
                found[unit.root.id] = _Spot(unit.root, unit.ops, unit.inputs, unit.attrs)
    for op in graph.ops:
        if op.kind == CHOSEN and op.id in source.node_of:
            node = proto.node[source.node_of[op.id]]
            # For f32 onnxruntime has nothing faster than its own contributed op.
            fastest = form == "auto" and (node.domain, node.op_type) == CONTRIB and op.inputs[0].dtype == "f32"
            if not fastest:
                found[op.id] = _Spot(op, (op,), op.inputs, op.attrs)
    return list(found.values())


def _replaced(graph: GraphProto, source: Source, spots: list[_Spot], emitter: Emitter) -> Numbered:
    new: dict[int, list[NodeProto]] = {}
    for spot in spots:
        index = source.node_of[spot.root.id]
        old = graph.node[index]
        output = spot.root.outputs[0]
        inputs = [_value(t, source, emitter) for t in spot.inputs]
        record = opdef.get(CHOSEN, where=spot.root.label)
        made = emitter.nodes(record, spot.attrs, inputs, (output, source.value_of[output.id]))
        for number, node in enumerate(made):
            last = number == len(made) - 1
            node.name = old.name if last or not old.name else f"{old.name}_{number}"
            if last:
                node.doc_string = old.doc_string
                node.metadata_props.extend(old.metadata_props)
        new[index] = made
    return [(index, made) for index, node in enumerate(graph.node) for made in new.get(index, [node])]


def _value(tensor: LogicalTensor, source: Source, emitter: Emitter) -> Value:
    name = source.value_of.get(tensor.id)
    if name is None:  # a number that a spelling stands for
        assert tensor.data is not None
        name = emitter.scalar(tensor.data.item(), tensor.dtype, "number")
    return tensor, name


def _may_go(source: Source, spots: list[_Spot], graph: GraphProto) -> set[int]:
    """Indices of nodes that only existed for what was replaced: inner ops of units, and constants."""
    indices = {source.node_of[op.id] for s in spots for op in s.ops if op is not s.root and op.id in source.node_of}
    return indices | ({i for i, n in enumerate(graph.node) if n.op_type == "Constant"} if spots else set())


def _without_unused(nodes: Numbered, graph: GraphProto, may_go: set[int]) -> Numbered:
    """The nodes without those among `may_go` that nothing reads any more."""
    before = Counter(name for node in graph.node for name in reads(node))
    outputs = {o.name for o in graph.output}
    uses = Counter(name for _, node in nodes for name in reads(node))
    kept: Numbered = []
    for index, node in reversed(nodes):
        # What nobody read before either is not ours to drop.
        needed = any(uses[n] or n in outputs or not before[n] for n in node.output if n)
        if index in may_go and not needed:
            uses.subtract(reads(node))
        else:
            kept.append((index, node))
    return kept[::-1]


def sorted_nodes(nodes: Numbered) -> Numbered:
    """Producers first, otherwise in the order given."""
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


def _drop_initializers(draft: Draft, before: GraphProto) -> None:
    """Keeps the initializers, except those that only a replaced node read."""
    graph = draft.skeleton.graph
    used = {name for node in graph.node for name in reads(node)} | {o.name for o in graph.output}
    read_before = {name for node in before.node for name in reads(node)}
    assert draft.origin is not None
    draft.kept = [n for n in draft.origin.tensors if n in used or n not in read_before]
    kept = {*draft.kept, *draft.arrays}
    initializers = [t for t in graph.initializer if t.name in kept]
    inputs = [v for v in graph.input if v.name in kept or v.name in draft.inputs]
    for field, values in ((graph.initializer, initializers), (graph.input, inputs)):
        values = list(values)
        del field[:]
        field.extend(values)


def _drop_value_info(graph: GraphProto) -> None:
    made = {name for node in graph.node for name in node.output}
    made |= {v.name for v in graph.input} | {t.name for t in graph.initializer}
    kept = [v for v in graph.value_info if v.name in made]
    if len(kept) != len(graph.value_info):
        del graph.value_info[:]
        graph.value_info.extend(kept)
