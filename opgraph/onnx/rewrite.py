"""A graph that came from ONNX, written back: its own model with the units replaced and everything else as it was."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from onnx import FunctionProto, GraphProto, ModelProto, NodeProto

from opgraph.errors import Unimplemented
from opgraph.ir import opdef
from opgraph.ir.graph import Graph
from opgraph.ir.logical_tensor import LogicalTensor
from opgraph.ir.op import AttrValue, Op
from opgraph.onnx.compose import finish
from opgraph.onnx.draft import Draft, Summary
from opgraph.onnx.emit import CHOSEN, CONTRIB, Emitter, Value
from opgraph.onnx.functions import FunctionTable
from opgraph.onnx.fused_functions import FUSED_UNIT, Folding, Numbered, is_onnxruntimes_own
from opgraph.onnx.load import imported
from opgraph.onnx.nodes import reads
from opgraph.onnx.norms import Norm, norms_of
from opgraph.onnx.request import Request
from opgraph.onnx.restamp import restamped
from opgraph.onnx.signature import DOMAIN
from opgraph.onnx.source import Source
from opgraph.onnx.target import Target
from opgraph.onnx.validate import opsets
from opgraph.onnx.ways import FUNCTION, PLAIN, Way, way_out
from opgraph.partition.rules import Unit, find_units

#: ai.onnx has Swish from here on.
_SWISH_SINCE = 24
_WITH_NORMS = ("auto", "function", "standard")


@dataclass(frozen=True, slots=True)
class _Spot:
    """A unit to be written as one node: what it means, and the ops that may go.

    Attributes:
        way: the row of the table of ways; None for swish, whose form the caller chooses.
        form: of swish.
    """

    name: str
    kind: str
    root: Op
    ops: tuple[Op, ...]
    inputs: tuple[LogicalTensor, ...]
    attrs: dict[str, AttrValue]
    way: Way | None
    form: str


def rewritten(graph: Graph, source: Source, request: Request, target: Target, summary: Summary) -> Draft:
    """The model that a graph was loaded from, with its units in another form.

    Raises:
        Unimplemented: the form needs another opset, and the model cannot be moved there.
    """
    draft = _with_units(graph, source, request, target, summary)
    _check_placed(source.origin.skeleton.graph, draft.skeleton.graph)
    if not (request.functions or request.library) or FUSED_UNIT in request.keep:
        return draft
    # Partitions are folded in the model as it is with its units: what became a norm is none of their business any more.
    again = imported(draft.as_origin())
    assert isinstance(again.source, Source)
    result = _with_functions(again, again.source, request, target, draft)
    _check_placed(source.origin.skeleton.graph, result.skeleton.graph)
    return result


def _check_placed(before: GraphProto, after: GraphProto) -> None:
    """Raises Unimplemented where a node that is placed on a device became part of another."""
    kept = {name for node in after.node if node.device_configurations for name in node.output}
    for node in before.node:
        if node.device_configurations and not kept & set(node.output):
            raise Unimplemented(
                "it is placed on a device (device_configurations), and would become part of another node",
                where=f'{node.op_type} "{node.name}"',
                fix='use form="decomposed" without functions and library, or take the placement off',
            )


def _with_units(graph: Graph, source: Source, request: Request, target: Target, summary: Summary) -> Draft:
    origin, form = source.origin, request.form
    current = opsets(origin.skeleton).get("", 1)
    spots = _spots(graph, source, request, request.opset or current)
    swish = any(spot.kind == CHOSEN for spot in spots)
    wanted = request.opset or (_SWISH_SINCE if form == "standard" and swish and current < _SWISH_SINCE else None)
    skeleton = ModelProto()
    skeleton.CopyFrom(restamped(origin.skeleton, wanted, target) if wanted is not None else origin.skeleton)
    imports = opsets(skeleton)
    opset = imports.get("", 1)
    norms = norms_of(graph, source, opset) if form in _WITH_NORMS else []
    norms = [norm for norm in norms if norm.name not in request.keep]
    summary.nodes_before = len(skeleton.graph.node)
    names = _names(skeleton.graph, origin.tensors)
    emitter = Emitter(opset, "function" if form == "auto" else form, target, names, FunctionTable(opset))
    made = _made(source, spots, norms, emitter)
    _count(spots, norms, summary)
    if not made and wanted is None and origin.folded is not None:
        # Nothing changes, so functions of others stay functions.
        skeleton.CopyFrom(origin.folded)
        return Draft(skeleton, list(origin.inputs), summary, origin=origin, kept=list(origin.tensors))
    nodes = _replaced(skeleton.graph, made)
    nodes = _without_unused(nodes, skeleton.graph, _may_go(source, spots, norms, skeleton.graph))
    draft = Draft(skeleton, list(origin.inputs), summary, origin=origin)
    _finished(draft, nodes, emitter, imports)
    return draft


def _with_functions(graph: Graph, source: Source, request: Request, target: Target, before: Draft) -> Draft:
    """A draft with its fused partitions as functions."""
    skeleton = ModelProto()
    skeleton.CopyFrom(source.origin.skeleton)
    imports = opsets(skeleton)
    opset = imports.get("", 1)
    emitter = Emitter(opset, "function", target, _names(skeleton.graph, source.origin.tensors), FunctionTable(opset))
    folding = Folding(library=request.library)
    outputs = {o.name for o in skeleton.graph.output}
    for function in skeleton.functions:
        emitter.functions.keep(function)
    nodes = folding.fold(graph, source, list(enumerate(skeleton.graph.node)), outputs, emitter, before.summary)
    constants = {i for i, n in enumerate(skeleton.graph.node) if n.op_type == "Constant" and n.domain == ""}
    nodes = _without_unused(nodes, skeleton.graph, constants)
    draft = Draft(skeleton, list(source.origin.inputs), before.summary, origin=source.origin, library=folding.ops)
    _finished(draft, nodes, emitter, imports)
    return draft


def _finished(draft: Draft, nodes: Numbered, emitter: Emitter, imports: dict[str, int]) -> None:
    """Puts the nodes into the draft, and with them what they use: functions, constants, opsets."""
    skeleton = draft.skeleton
    assert draft.origin is not None
    before = draft.origin.skeleton.graph
    kept = FunctionTable(emitter.opset)
    called = _called((n for _, n in nodes), [*skeleton.functions, *emitter.functions.functions.values()])
    for function in (*skeleton.functions, *emitter.functions.functions.values()):
        if (function.domain, function.name, function.overload) in called:
            kept.keep(function)
    emitter.functions = kept
    del skeleton.graph.node[:]
    skeleton.graph.node.extend(node for _, node in sorted_nodes(nodes))
    for name, data in emitter.scalars.items():
        draft.add_array(name, data)
    _drop_initializers(draft, before)
    _drop_value_info(skeleton.graph)
    del skeleton.functions[:]
    finish(skeleton, emitter, imports)


def _called(nodes: Iterable[NodeProto], functions: Iterable[FunctionProto]) -> set[tuple[str, str, str]]:
    """The functions that nodes call, and those that these call."""
    known = {(f.domain, f.name, f.overload): f for f in functions}
    found: set[tuple[str, str, str]] = set()
    waiting = [(n.domain, n.op_type, n.overload) for n in nodes]
    while waiting:
        key = waiting.pop()
        if key in known and key not in found:
            found.add(key)
            waiting += [(n.domain, n.op_type, n.overload) for n in known[key].node]
    return found


def _names(graph: GraphProto, tensors: Iterable[str]) -> set[str]:
    names = {v.name for v in (*graph.input, *graph.output, *graph.value_info)} | set(tensors)
    return names | {name for node in graph.node for name in node.output}


def _spots(graph: Graph, source: Source, request: Request, opset: int) -> list[_Spot]:
    """The units to write: those composed of several ops, and the ops that are one already."""
    form, nodes = request.form, source.origin.skeleton.graph.node
    found: dict[int, _Spot] = {}
    if form != "decomposed":
        alone = _alone(graph) if request.library else set()
        for unit in find_units(graph):
            if not unit.kind or unit.name in request.keep or unit.root.id not in source.node_of:
                continue
            if any(nodes[source.node_of[op.id]].device_configurations for op in unit.ops if op.id in source.node_of):
                continue  # who says where a node runs does not mean another node
            node = nodes[source.node_of[unit.root.id]]
            composed = unit.root.kind != unit.kind
            if unit.kind == CHOSEN:
                # Where the form has no operand for a factor, a composed swish with one stays composed.
                sayable = len(unit.inputs) == 1 or form in ("auto", "function")
                own = unit.root.id in alone and is_onnxruntimes_own(unit)
                if (composed and sayable and not own) or (not composed and not _is_fastest(node, unit.root, form)):
                    written = "decomposed" if own else "function" if form == "auto" else form
                    found[unit.root.id] = _spot(unit, None, written)
                continue
            way = way_out(unit.kind, unit.root.outputs[0].dtype, unit.attrs, opset, form)
            if way is not None and (composed or not _is_written_so(node, way)):
                found[unit.root.id] = _spot(unit, way, form)
    elif any(op.kind == CHOSEN for op in graph.ops):
        for op in graph.ops:
            if op.kind == CHOSEN and op.id in source.node_of:
                found[op.id] = _Spot(CHOSEN.lower(), op.kind, op, (op,), op.inputs, op.attrs, None, form)
    return list(found.values())


def _spot(unit: Unit, way: Way | None, form: str) -> _Spot:
    return _Spot(unit.name, unit.kind, unit.root, unit.ops, unit.inputs, unit.attrs, way, form)


def _is_fastest(node: NodeProto, op: Op, form: str) -> bool:
    """For f32 onnxruntime has nothing faster than its own contributed op."""
    return form == "auto" and (node.domain, node.op_type) == CONTRIB and op.inputs[0].dtype == "f32"


def _is_written_so(node: NodeProto, way: Way) -> bool:
    """Whether a single op already is the node that it would become."""
    domain = {PLAIN: "", FUNCTION: DOMAIN}.get(way.write, CONTRIB[0])
    return node.domain == domain or (way.write == PLAIN and node.domain == CONTRIB[0])


def _alone(graph: Graph) -> set[int]:
    """Roots of units that are all of their partition."""
    return {
        part.unit_matches[-1].root.id
        for part in graph.get_partitions()
        if part.unit_matches and len(part.unit_matches[-1].ops) == len(part.ops)
    }


def _made(
    source: Source, spots: Iterable[_Spot], norms: Iterable[Norm], emitter: Emitter
) -> dict[int, list[NodeProto]]:
    """The new nodes, by the index of the node that they replace."""
    new: dict[int, list[NodeProto]] = {norm.root: norm.written(emitter) for norm in norms}
    form = emitter.form
    for spot in spots:
        result = spot.root.outputs[0]
        output = (result, source.value_of[result.id])
        inputs = [_value(t, source, emitter) for t in spot.inputs]
        record = opdef.get(spot.kind, where=spot.root.label)
        emitter.form = spot.form if spot.way is None else form
        if spot.way is None or spot.way.write == PLAIN:
            new[source.node_of[spot.root.id]] = emitter.nodes(record, spot.attrs, inputs, output)
        elif spot.way.write == FUNCTION:
            new[source.node_of[spot.root.id]] = [emitter.called(record, spot.attrs, inputs, output)]
        else:
            new[source.node_of[spot.root.id]] = [emitter.contributed(spot.way.op_type, inputs, output)]
        emitter.form = form
    return new


def _replaced(graph: GraphProto, new: dict[int, list[NodeProto]]) -> Numbered:
    """The nodes with some replaced; the last of the new ones has name, doc string and metadata of the old one."""
    for index, made in new.items():
        old = graph.node[index]
        for number, node in enumerate(made):
            last = number == len(made) - 1
            if old.name:
                node.name = old.name if last else f"{old.name}_{number}"
            if last:
                if old.doc_string:  # set to nothing it would be there, and differ
                    node.doc_string = old.doc_string
                node.metadata_props.extend(old.metadata_props)
    return [(index, made) for index, node in enumerate(graph.node) for made in new.get(index, [node])]


def _count(spots: Iterable[_Spot], norms: Iterable[Norm], summary: Summary) -> None:
    summary.units[CHOSEN.lower()] = 0
    for name in (*(s.name for s in spots), *(n.name for n in norms)):
        summary.units[name] = summary.units.get(name, 0) + 1


def _value(tensor: LogicalTensor, source: Source, emitter: Emitter) -> Value:
    name = source.value_of.get(tensor.id)
    if name is None:  # a number that a spelling stands for
        assert tensor.data is not None
        name = emitter.scalar(tensor.data.item(), tensor.dtype, "number")
    return tensor, name


def _may_go(source: Source, spots: list[_Spot], norms: list[Norm], graph: GraphProto) -> set[int]:
    """Indices of nodes that only existed for what was replaced: inner ops of units, and constants."""
    indices = {source.node_of[op.id] for s in spots for op in s.ops if op is not s.root and op.id in source.node_of}
    indices |= {index for norm in norms for index in norm.nodes if index != norm.root}
    constants = {i for i, n in enumerate(graph.node) if n.op_type == "Constant"}
    return indices | (constants if spots or norms else set())


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
