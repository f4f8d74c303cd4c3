"""Finds the units of a model to be written as one node, and makes the nodes that replace them."""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass

from onnx import NodeProto

from opgraph.ir import opdef
from opgraph.ir.graph import Graph
from opgraph.ir.logical_tensor import LogicalTensor
from opgraph.ir.op import AttrValue, Op
from opgraph.onnx.bodies import BODIES_SINCE
from opgraph.onnx.draft import Summary
from opgraph.onnx.emit import CHOSEN, CONTRIB, Emitter, Value
from opgraph.onnx.export_forms import FUNCTION, PLAIN, Way, way_out
from opgraph.onnx.fused_functions import is_onnxruntimes_own
from opgraph.onnx.norms import Norm
from opgraph.onnx.request import Request
from opgraph.onnx.signature import DOMAIN
from opgraph.onnx.source import Source
from opgraph.partition.rules import Unit, find_units


@dataclass(frozen=True, slots=True)
class Spot:
    """A unit to be written as one node: its meaning, and the ops that may be dropped.

    Attributes:
        way: the row of the table of export forms; None for swish, whose form the caller chooses.
        form: of swish.
        value: for a SwiGLU, the other factor of the product with the swish.
    """

    name: str
    kind: str
    root: Op
    ops: tuple[Op, ...]
    inputs: tuple[LogicalTensor, ...]
    attrs: dict[str, AttrValue]
    way: Way | None
    form: str
    value: LogicalTensor | None = None


#: ai.onnx's gated unit of opset 28. onnxruntime 1.32 reads that opset but refuses the node: it unfolds the node to a
#: Swish, which it supports in opset 24 only.
_GATED = "SwiGLU"


def spots_of(graph: Graph, source: Source, request: Request, opset: int) -> list[Spot]:
    """The units to write: those composed of several ops, and those that already are a single op."""
    form, nodes = request.form, source.origin.skeleton.graph.node
    found: dict[int, Spot] = {}
    values = {name for node in nodes for name in node.output} | {*source.origin.inputs, *source.origin.tensors}
    units = find_units(graph)
    for unit in units:
        gated = _gated(unit, request, source)
        if gated is not None:
            found[unit.root.id] = gated
    if form != "decomposed":
        alone = _alone(graph) if request.library else set()
        for unit in units:
            if not unit.kind or unit.name in request.keep or not _has_names(unit, source, values):
                continue
            if any(nodes[source.node_of[op.id]].device_configurations for op in unit.ops if op.id in source.node_of):
                continue  # a device placement must not move to another node
            node = nodes[source.node_of[unit.root.id]]
            composed = unit.root.kind != unit.kind
            if unit.kind == CHOSEN:
                # If the form has no factor operand, a composed swish with a factor stays composed.
                sayable = len(unit.inputs) == 1 or form in ("auto", "function")
                own = unit.root.id in alone and is_onnxruntimes_own(unit)
                if (composed and sayable and not own) or (not composed and not _is_best(node, unit.root, opset, form)):
                    written = "decomposed" if own else "function" if form == "auto" else form
                    found[unit.root.id] = _spot(unit, None, written)
                continue
            way = way_out(unit.kind, unit.root.outputs[0].dtype, unit.attrs, opset, form)
            if way is not None and (composed or not _is_written_so(node, way)):
                found[unit.root.id] = _spot(unit, way, form)
    elif any(op.kind == CHOSEN for op in graph.ops):
        for op in graph.ops:
            if op.kind == CHOSEN and op.id in source.node_of and source.value_of.get(op.outputs[0].id) in values:
                found[op.id] = Spot(CHOSEN.lower(), op.kind, op, (op,), op.inputs, op.attrs, None, form)
    return list(found.values())


def _has_names(unit: Unit, source: Source, values: Container[str]) -> bool:
    """True if the values around a unit are values of the model, not those inside a node that is read as several ops."""
    outside = (*unit.inputs, unit.root.outputs[0])
    named = all(source.value_of.get(t.id) in values or t.data is not None for t in outside)
    return unit.root.id in source.node_of and named


def _gated(unit: Unit, request: Request, source: Source) -> Spot | None:
    """The spot of a SwiGLU node, which becomes a swish and a product."""
    root, gate = unit.root, unit.ops[0]
    if unit.name != _GATED.lower() or unit.name in request.keep or root.id not in source.node_of:
        return None
    node = source.origin.skeleton.graph.node[source.node_of[root.id]]
    if (node.domain, node.op_type) != ("", _GATED) or node.device_configurations:
        return None
    form = "function" if request.form == "auto" else request.form
    return Spot(unit.name, gate.kind, root, unit.ops, gate.inputs, gate.attrs, None, form, unit.captured["u"])


def _spot(unit: Unit, way: Way | None, form: str) -> Spot:
    return Spot(unit.name, unit.kind, unit.root, unit.ops, unit.inputs, unit.attrs, way, form)


def _is_best(node: NodeProto, op: Op, opset: int, form: str) -> bool:
    """True for onnxruntime's contributed op if it is the fastest form (f32), or if the opset is too old for bodies."""
    contributed = form == "auto" and (node.domain, node.op_type) == CONTRIB
    return contributed and (op.inputs[0].dtype == "f32" or opset < BODIES_SINCE)


def _is_written_so(node: NodeProto, way: Way) -> bool:
    """True if a single op already is the node that would replace it."""
    domain = {PLAIN: "", FUNCTION: DOMAIN}.get(way.write, CONTRIB[0])
    return node.domain == domain or (way.write == PLAIN and node.domain == CONTRIB[0])


def _alone(graph: Graph) -> set[int]:
    """Roots of units that make up their whole partition."""
    return {
        part.unit_matches[-1].root.id
        for part in graph.get_partitions()
        if part.unit_matches and len(part.unit_matches[-1].ops) == len(part.ops)
    }


def nodes_of(
    source: Source, spots: Iterable[Spot], norms: Iterable[Norm], emitter: Emitter
) -> dict[int, list[NodeProto]]:
    """The new nodes, by the index of the replaced node."""
    new: dict[int, list[NodeProto]] = {norm.root: norm.written(emitter) for norm in norms}
    form = emitter.form
    for spot in spots:
        result = spot.root.outputs[0]
        output = (result, source.value_of[result.id])
        inputs = [_value(t, source, emitter) for t in spot.inputs]
        record = opdef.get(spot.kind, where=spot.root.label)
        emitter.form = spot.form if spot.way is None else form
        if spot.value is not None:
            gate = (result, emitter.fresh(f"{output[1]}.gate"))
            made = emitter.nodes(record, spot.attrs, inputs, gate)
            factors = [gate[1], source.value_of[spot.value.id]]
            new[source.node_of[spot.root.id]] = [*made, NodeProto(op_type="Mul", input=factors, output=[output[1]])]
            emitter.form = form
            continue
        if spot.way is None or spot.way.write == PLAIN:
            new[source.node_of[spot.root.id]] = emitter.nodes(record, spot.attrs, inputs, output)
        elif spot.way.write == FUNCTION:
            new[source.node_of[spot.root.id]] = [emitter.called(record, spot.attrs, inputs, output)]
        else:
            new[source.node_of[spot.root.id]] = [emitter.contributed(spot.way.op_type, inputs, output)]
        emitter.form = form
    return new


def count(
    source: Source, spots: Iterable[Spot], norms: Iterable[Norm], made: dict[int, list[NodeProto]], summary: Summary
) -> None:
    """Counts in a summary the units that were written as one node."""
    summary.units[CHOSEN.lower()] = 0
    written = [(s.name, source.node_of[s.root.id]) for s in spots] + [(n.name, n.root) for n in norms]
    for name, index in written:
        if len(made[index]) == 1:
            summary.units[name] = summary.units.get(name, 0) + 1


def _value(tensor: LogicalTensor, source: Source, emitter: Emitter) -> Value:
    name = source.value_of.get(tensor.id)
    if name is None:  # a number implied by a spelling
        assert tensor.data is not None
        name = emitter.scalar(tensor.data.item(), tensor.dtype, "number")
    return tensor, name
