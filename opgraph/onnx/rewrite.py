"""Writes back a graph that came from ONNX: its own model, with the units replaced and everything else unchanged."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from onnx import GraphProto, ModelProto, NodeProto

from opgraph.errors import Unimplemented
from opgraph.ir import dtypes
from opgraph.ir.graph import Graph
from opgraph.onnx.dead_nodes import drop_initializers, drop_value_info, sorted_nodes, without_unused
from opgraph.onnx.draft import Draft, Summary
from opgraph.onnx.emit import CHOSEN, Emitter
from opgraph.onnx.export import DEFAULT_OPSET, SWISH_SINCE, finish, value_info
from opgraph.onnx.function_table import FunctionTable
from opgraph.onnx.fused_functions import Folding, Numbered
from opgraph.onnx.library.rows import rows_pay
from opgraph.onnx.load import imported
from opgraph.onnx.norms import Norm, norms_of
from opgraph.onnx.opset_conversion import restamped
from opgraph.onnx.request import FUSED_UNIT, Request
from opgraph.onnx.rewrite_sites import Spot, count, nodes_of, spots_of
from opgraph.onnx.signature import DOMAIN
from opgraph.onnx.source import Source
from opgraph.onnx.target import Target
from opgraph.onnx.training_info import refuse_changes
from opgraph.onnx.validate import OLDEST_OPSET, opsets
from opgraph.runtime.providers.onnx_node import defined_inside

_WITH_NORMS = ("auto", "function", "standard")


def rewritten(graph: Graph, source: Source, request: Request, target: Target, summary: Summary) -> Draft:
    """Returns the model that a graph was loaded from, with its units in another form.

    Raises:
        Unimplemented: the form needs another opset, and the model cannot be moved there.
    """
    draft = _with_units(graph, source, request, target, summary)
    _check_placed(source.origin.skeleton.graph, draft.skeleton.graph)
    if not (request.functions or request.library) or FUSED_UNIT in request.keep:
        return draft
    # Partitions are folded after the units were replaced, so a node that became a norm is in no partition any more.
    again = imported(draft.as_origin())
    if request.library and request.rows:
        # Native ops can reduce rows, but graphs of native ops have fewer purely elementwise partitions.
        native = imported(draft.as_origin(), library=True)
        again = native if any(map(rows_pay, native.get_partitions())) else again
    assert isinstance(again.source, Source)
    result = _with_functions(again, again.source, request, target, draft)
    _check_placed(source.origin.skeleton.graph, result.skeleton.graph)
    return result


def _check_placed(before: GraphProto, after: GraphProto) -> None:
    """Raises Unimplemented if a node that is placed on a device became part of another node."""
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
    current = _opset_of(origin.skeleton, target)
    lowered = target.opset if current > target.opset else None
    spots = spots_of(graph, source, request, request.opset or lowered or current)
    swish = any(spot.kind == CHOSEN and len(spot.inputs) == 1 for spot in spots)
    newer = SWISH_SINCE if form == "standard" and swish and current < SWISH_SINCE else None
    wanted = request.opset or lowered or newer
    if wanted == newer and newer is not None:
        spots = spots_of(graph, source, request, newer)  # more units have an op there
    if wanted is not None and current < OLDEST_OPSET <= wanted:
        # At the old opset most ops are Wildcards; their units can be found in the newer opset only.
        moved = imported(replace(origin, skeleton=restamped(origin.skeleton, wanted, target), folded=None))
        assert isinstance(moved.source, Source)
        return _with_units(moved, moved.source, replace(request, opset=wanted), target, summary)
    if lowered and wanted == lowered:
        summary.notes.append(
            f"opset {current} was lowered to {lowered} for {target.name}; every node that stays means the same there"
        )
    skeleton = ModelProto()
    going = {source.node_of[spot.root.id] for spot in spots}
    moved = restamped(origin.skeleton, wanted, target, going) if wanted is not None else origin.skeleton
    skeleton.CopyFrom(moved)
    imports = opsets(skeleton)
    opset = _opset_of(skeleton, target)
    norms = norms_of(graph, source, opset) if form in _WITH_NORMS else []
    norms = [norm for norm in norms if norm.name not in request.keep]
    summary.nodes_before = len(skeleton.graph.node)
    names = _names(skeleton.graph, origin.tensors)
    emitter = Emitter(opset, "function" if form == "auto" else form, target, names, FunctionTable(opset))
    for function in skeleton.functions:
        emitter.functions.keep(function)
    made = nodes_of(source, spots, norms, emitter)
    count(source, spots, norms, made, summary)
    if not made and wanted is None and origin.folded is not None:
        # Nothing changes, so foreign functions stay functions.
        skeleton.CopyFrom(origin.folded)
        return Draft(skeleton, list(origin.inputs), summary, origin=origin, kept=list(origin.tensors))
    if made or wanted is not None:
        refuse_changes(skeleton)
    nodes = _replaced(skeleton.graph, made)
    nodes = sorted_nodes(without_unused(nodes, skeleton.graph, _may_go(source, spots, norms, skeleton.graph)))
    draft = Draft(skeleton, list(origin.inputs), summary, origin=origin)
    _finished(draft, nodes, emitter, imports)
    return draft


def _opset_of(model: ModelProto, target: Target) -> int:
    """The opset of ai.onnx; the one of new models if the model imports none, as it then has no node of it."""
    return opsets(model).get("", min(DEFAULT_OPSET, target.opset))


def _with_functions(graph: Graph, source: Source, request: Request, target: Target, before: Draft) -> Draft:
    """Returns the draft with its fused partitions as functions."""
    refuse_changes(source.origin.skeleton)
    skeleton = ModelProto()
    skeleton.CopyFrom(source.origin.skeleton)
    imports = opsets(skeleton)
    opset = _opset_of(skeleton, target)
    emitter = Emitter(opset, "function", target, _names(skeleton.graph, source.origin.tensors), FunctionTable(opset))
    folding = Folding(library=request.library, rows=request.rows, on_gpu=request.cuda)
    outputs = {o.name for o in skeleton.graph.output}
    for function in skeleton.functions:
        emitter.functions.keep(function)
    del skeleton.functions[:]  # they are ordered by their calls: fused ones are unfolded at each load
    nodes = folding.fold(graph, source, list(enumerate(skeleton.graph.node)), outputs, emitter, before.summary)
    constants = {i for i, n in enumerate(skeleton.graph.node) if n.op_type == "Constant" and n.domain == ""}
    nodes = sorted_nodes(without_unused(nodes, skeleton.graph, constants))
    emitter.functions.settle(node for _, node in nodes)
    draft = Draft(skeleton, list(source.origin.inputs), before.summary, origin=source.origin, library=folding.ops)
    _finished(draft, nodes, emitter, imports)
    _declare_results(graph, source, skeleton.graph)
    return draft


def _declare_results(graph: Graph, source: Source, made: GraphProto) -> None:
    """Declares the results of calls of opgraph's functions: onnx infers none through a body with a com.microsoft op."""
    known = {v.name for v in (*made.value_info, *made.output)}
    ours = {name for node in made.node if node.domain == DOMAIN for name in node.output} - known
    for tensor in (t for op in graph.ops for t in op.outputs):
        name = source.value_of.get(tensor.id)
        if name is not None and name in ours and tensor.dtype != dtypes.UNDEF:
            made.value_info.append(value_info(tensor, name, {}, port=False))


def _finished(draft: Draft, nodes: Numbered, emitter: Emitter, imports: dict[str, int]) -> None:
    """Puts the nodes, in order, into the draft, together with the functions, constants and opsets that they use."""
    skeleton = draft.skeleton
    assert draft.origin is not None
    before = draft.origin.skeleton.graph
    functions, kept = emitter.functions, FunctionTable(emitter.opset)
    functions.unfold_nested()
    called = functions.called(node for _, node in nodes)
    stated = [key for f in skeleton.functions if (key := (f.name, f.overload)) in called]
    for key in (*stated, *called):
        kept.keep(functions.functions[key])
    emitter.functions = kept
    del skeleton.graph.node[:]
    skeleton.graph.node.extend(node for _, node in nodes)
    for name, data in emitter.arrays.items():
        draft.add_array(name, data)
    drop_initializers(draft, before)
    drop_value_info(skeleton.graph)
    del skeleton.functions[:]
    finish(skeleton, emitter, imports)


def _names(graph: GraphProto, tensors: Iterable[str]) -> set[str]:
    """All value names in use, in subgraphs too: a subgraph must not define a name that exists outside it."""
    names = {v.name for v in (*graph.input, *graph.output, *graph.value_info)} | set(tensors)
    names |= defined_inside(graph.node)
    return names | {name for node in graph.node for name in node.output}


def _replaced(graph: GraphProto, new: dict[int, list[NodeProto]]) -> Numbered:
    """Replaces some nodes. The last new node gets the name, doc string and metadata of the old one.

    The other new nodes get numbered variants of that name that are free: onnxruntime refuses two nodes of one name.
    """
    taken = {node.name for node in graph.node}
    for index, made in new.items():
        old, number = graph.node[index], 0
        for node in made[:-1] if old.name else ():
            while f"{old.name}_{number}" in taken:
                number += 1
            node.name = f"{old.name}_{number}"
            taken.add(node.name)
        if old.name:
            made[-1].name = old.name
        if old.doc_string:  # an empty field would be present, and compare unequal
            made[-1].doc_string = old.doc_string
        made[-1].metadata_props.extend(old.metadata_props)
    return [(index, made) for index, node in enumerate(graph.node) for made in new.get(index, [node])]


def _may_go(source: Source, spots: list[Spot], norms: list[Norm], graph: GraphProto) -> set[int]:
    """Indices of nodes that may serve only replaced nodes: inner ops of units, and constants."""
    indices = {source.node_of[op.id] for s in spots for op in s.ops if op is not s.root and op.id in source.node_of}
    indices |= {index for norm in norms for index in norm.nodes if index != norm.root}
    constants = {i for i, n in enumerate(graph.node) if n.op_type == "Constant"}
    return indices | (constants if spots or norms else set())
