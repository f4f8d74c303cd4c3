"""Writes a graph that was built by hand as a new ONNX model."""

from __future__ import annotations

from collections.abc import Iterable

from onnx import GraphProto, ModelProto, NodeProto, ValueInfoProto, helper

from opgraph.errors import InvalidArguments, InvalidGraph, Unimplemented
from opgraph.ir import dtypes, opdef
from opgraph.ir.graph import Graph
from opgraph.ir.logical_tensor import LogicalTensor
from opgraph.onnx.draft import Draft, Summary
from opgraph.onnx.emit import CHOSEN, Emitter
from opgraph.onnx.function_table import FunctionTable
from opgraph.onnx.nodes import reads
from opgraph.onnx.request import Request
from opgraph.onnx.signature import DOMAIN
from opgraph.onnx.target import Target
from opgraph.partition.rules import find_units
from opgraph.runtime.providers.onnx_node import defined_inside, is_onnx_node, node_of, opset_of
from opgraph.runtime.providers.onnx_region import type_texts
from opgraph.runtime.providers.onnx_types import type_proto

#: First opset that allows bf16 nearly everywhere.
DEFAULT_OPSET = 22
IR_VERSION = 10
#: First opset of ai.onnx with Swish.
SWISH_SINCE = 24


def composed(graph: Graph, request: Request, target: Target, summary: Summary) -> Draft:
    """Returns the model of a finalized graph.

    Raises:
        Unimplemented: an op has no ONNX form, or its nodes belong to different opsets.
        InvalidArguments: the opset is newer than the target reads, or older than 13.
    """
    # `rewritten` writes the forms of units later; until then a Swish op is one node.
    form = "decomposed" if request.form == "decomposed" else "function"
    imports = _imports(graph, request, target)
    inside = _names_inside(graph)
    names = _value_names(graph, inside)
    emitter = Emitter(imports[""], form, target, inside.union(names.values()), FunctionTable(imports[""]))
    skeleton = ModelProto(ir_version=IR_VERSION, producer_name="opgraph", graph=GraphProto(name="graph"))
    draft = Draft(skeleton, [names[t.id] for t in graph.inputs], summary)
    node_names: set[str] = set()
    for op in graph.ops:
        if op.kind == "End":
            continue
        summary.nodes_before += 1
        if is_onnx_node(op):
            made = [node_of(op, names)]
        elif op.kind == "Wildcard":
            raise Unimplemented("a Wildcard carries no ONNX node", where=op.label, fix="replace it by known ops")
        elif len(op.outputs) > 1:
            raise Unimplemented(
                f"{op.kind} with {len(op.outputs)} outputs cannot be written to ONNX",
                where=op.label,
                fix="ask for its first output alone (keep_stats=False, outputs=1), or compute it outside the graph",
            )
        else:
            inputs = [(t, names[t.id]) for t in op.inputs]
            output = op.outputs[0]
            record = opdef.get(op.kind, where=op.label)
            made = emitter.nodes(record, op.attrs, inputs, (output, names[output.id]), op)
            if op.kind == CHOSEN:
                summary.units[CHOSEN.lower()] = summary.units.get(CHOSEN.lower(), 0) + (len(made) == 1)
        _name_nodes(made, op.name, node_names)
        skeleton.graph.node.extend(made)
    _declare_values(graph, names, skeleton.graph)
    used = {name for node in skeleton.graph.node for name in reads(node)} | {o.name for o in skeleton.graph.output}
    for tensor in graph.constants:
        if names[tensor.id] in used and tensor.data is not None:
            draft.add_array(names[tensor.id], tensor.data)
    for name, data in emitter.arrays.items():
        draft.add_array(name, data)
    finish(skeleton, emitter, imports)
    return draft


def finish(skeleton: ModelProto, emitter: Emitter, imports: dict[str, int]) -> None:
    """Adds the functions that the nodes call and the opsets that they belong to."""
    skeleton.functions.extend(emitter.functions.functions.values())
    if skeleton.functions:
        imports.setdefault(DOMAIN, 1)
    nodes = [*skeleton.graph.node, *(node for function in skeleton.functions for node in function.node)]
    if any(not node.domain for node in nodes):
        imports.setdefault("", emitter.opset)
    for domain in emitter.domains:
        imports.setdefault(domain, 1)
    for entry in (e for function in skeleton.functions for e in function.opset_import if e.domain):
        entry.version = imports[entry.domain]  # onnx's inliner (1.23) refuses a version other than the model's
    stated = {entry.domain for entry in skeleton.opset_import}  # exactly as the source wrote them
    skeleton.opset_import.extend(helper.make_opsetid(d, v) for d, v in imports.items() if d not in stated)


def _imports(graph: Graph, request: Request, target: Target) -> dict[str, int]:
    """The opsets of the model: those of its ONNX nodes, else the requested one, else the one its ops require."""
    opset = request.opset
    imports: dict[str, int] = {}
    for op in graph.ops:
        if is_onnx_node(op):
            domain, version = opset_of(op)
            if imports.setdefault(domain, version) != version:
                raise Unimplemented(
                    f"its ONNX nodes are of opsets {imports[domain]} and {version} of domain {domain!r}",
                    where=op.label,
                    fix="convert the models to one opset before joining their graphs",
                )
    if opset is not None and imports.get("", opset) != opset:
        raise Unimplemented(
            f"its ONNX nodes are of opset {imports['']}", where=f"opset={opset}", fix=f"save with opset={imports['']}"
        )
    wanted = SWISH_SINCE if request.form == "standard" and _has_plain_swish(graph, request) else DEFAULT_OPSET
    version = imports.setdefault("", opset or min(wanted, target.opset))
    if not 13 <= version <= target.opset:
        raise InvalidArguments(
            f"{target.name} reads opsets up to {target.opset}, opgraph writes from 13 on",
            where=f"opset={version}",
            fix="give another opset or target",
        )
    return imports


def _has_plain_swish(graph: Graph, request: Request) -> bool:
    """True if the graph has a swish to write as ai.onnx Swish, which accepts no factor operand."""
    return any(u.kind == CHOSEN and len(u.inputs) == 1 and u.name not in request.keep for u in find_units(graph))


def _names_inside(graph: Graph) -> set[str]:
    """The names that subgraphs of the carried nodes define. No value outside may have such a name."""
    carried = [op for op in graph.ops if is_onnx_node(op)]
    ids = {t.id: str(t.id) for op in carried for t in (*op.inputs, *op.outputs)}
    return defined_inside(node_of(op, ids) for op in carried)


def _value_names(graph: Graph, inside: set[str]) -> dict[int, str]:
    """Returns a name for each tensor: its own if that is unique. Inputs and outputs are named first.

    Args:
        inside: names that only an input or an output may have.
    """
    ports = list({t.id: t for t in (*graph.inputs, *graph.outputs)}.values())
    inner = {t.id: t for op in graph.ops for t in (*op.inputs, *op.outputs)}
    names: dict[int, str] = {}
    taken: set[str] = set()
    for tensor in ports:
        if tensor.name is not None and tensor.name in taken:
            raise InvalidGraph(
                f"an input and an output are both called {tensor.name!r}; ONNX has one space of names",
                where="opgraph.onnx.save",
                fix="rename one of them",
            )
        if tensor.name == "":
            raise InvalidGraph('a value is called ""; ONNX reads that as absent', where="save", fix="rename it")
        if tensor.name is not None:
            names[tensor.id] = tensor.name
            taken.add(tensor.name)
    taken |= inside
    for tensor in (*ports, *graph.constants, *inner.values()):
        if tensor.id not in names:
            stem = tensor.name or f"value_{tensor.id}"
            name, number = stem, 1
            while name in taken:
                name, number = f"{stem}_{number}", number + 1
            names[tensor.id] = name
            taken.add(name)
    return names


def _declare_values(graph: Graph, names: dict[int, str], proto: GraphProto) -> None:
    texts = type_texts(graph.ops)
    outputs = {t.id for t in graph.outputs}
    for tensor in graph.inputs:
        proto.input.append(value_info(tensor, names[tensor.id], texts, port=True))
    for tensor in graph.outputs:
        proto.output.append(value_info(tensor, names[tensor.id], texts, port=True))
    ports = outputs | {t.id for t in graph.inputs}
    for op in graph.ops:
        for tensor in op.outputs:
            if tensor.id not in ports and (tensor.dtype != dtypes.UNDEF or tensor.id in texts):
                proto.value_info.append(value_info(tensor, names[tensor.id], texts, port=False))


def value_info(tensor: LogicalTensor, name: str, texts: dict[int, str], *, port: bool) -> ValueInfoProto:
    """The declaration of a value.

    Raises:
        Unimplemented: its type is unknown, or it is an input or output with an unknown number of dimensions.
    """
    value = ValueInfoProto(name=name)
    value.type.CopyFrom(type_proto(tensor, texts.get(tensor.id, ""), tensor.label))
    if port and value.type.HasField("tensor_type") and not value.type.tensor_type.HasField("shape"):
        raise Unimplemented(
            f"ONNX wants the number of dimensions of {tensor.label}",
            where="opgraph.onnx.save",
            fix="declare its shape, with None for unknown sizes",
        )
    return value


def _name_nodes(nodes: Iterable[NodeProto], name: str, taken: set[str]) -> None:
    """Names the nodes of one op. onnxruntime refuses two nodes with the same name."""
    for node in nodes:
        found, number = name, 1
        while found in taken:
            found, number = f"{name}_{number}", number + 1
        node.name = found
        taken.add(found)
