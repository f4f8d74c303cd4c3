"""Moving a model to another opset, where that changes no node of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable

import onnx
import onnx.inliner
from onnx import AttributeProto, ModelProto, NodeProto

from opgraph.errors import Unimplemented
from opgraph.onnx.forms import schema
from opgraph.onnx.nodes import since, with_inner
from opgraph.onnx.target import Target, reader_of
from opgraph.onnx.validate import opsets


def restamped(model: ModelProto, opset: int, target: Target, replaced: Container[int] = ()) -> ModelProto:
    """The model under another opset of ai.onnx.

    Args:
        replaced: indices of nodes that will be others, whatever they mean there.

    Where an op has a newer definition there, onnx's version converter is asked: if it would change nothing but the
    number, nothing is changed but the number.

    Raises:
        Unimplemented: an op means something else there, or the target does not read that opset.
    """
    current = opsets(model).get("", opset)
    where = f"opset {current} -> {opset}"
    if opset > target.opset:
        raise Unimplemented(
            f"{target.name} reads opsets up to {target.opset}", where=where, fix="name a newer target, or another form"
        )
    if opset == current:
        return model
    staying = ModelProto()
    staying.CopyFrom(model)
    del staying.graph.node[:]
    staying.graph.node.extend(node for index, node in enumerate(model.graph.node) if index not in replaced)
    nodes = with_inner(onnx.inliner.inline_local_functions(staying).graph.node)  # bodies are moved with the model
    moved = sorted({n.op_type for n in nodes if n.domain == "" and since(n, current) != since(n, opset)})
    if moved:
        changed = sorted({*_changed(model, opset, moved), *_unknown_there(nodes, opset)})
        if changed:
            newer = reader_of(current) if opset < current else None
            convert = f"convert it first: onnx.version_converter.convert_version(model, {opset})"
            raise Unimplemented(
                f"the model is of opset {current}, and {', '.join(changed[:6])} would change on the way to {opset}",
                where=where,
                fix=f'{convert}, or use form="function"' if newer is None else f"name {newer} as target, or {convert}",
            )
    result = ModelProto()
    result.CopyFrom(model)
    for entry in result.opset_import:
        if entry.domain == "":
            entry.version = opset
    for function in result.functions:
        for entry in function.opset_import:
            if entry.domain == "":
                entry.version = opset
    return result


def _changed(model: ModelProto, opset: int, moved: list[str]) -> list[str]:
    """Op types that the version converter rewrites; of those that have moved, all where it cannot carry one over."""
    plain = onnx.inliner.inline_local_functions(model)
    try:
        converted = onnx.version_converter.convert_version(plain, opset)
    except Exception:  # a plain RuntimeError, of assertions of its C++
        return moved
    before = Counter(_shape(n) for n in with_inner(plain.graph.node))
    after = Counter(_shape(n) for n in with_inner(converted.graph.node))
    return sorted({entry[0] for entry in (before - after) + (after - before)})


def _unknown_there(nodes: Iterable[NodeProto], opset: int) -> set[str]:
    """Op types with an attribute that the op does not have in an opset: on the way down, the converter leaves some."""
    found = set[str]()
    for node in nodes:
        definition = schema(node.op_type, opset) if node.domain == "" else None
        if definition is not None and any(a.name not in definition.attributes for a in node.attribute):
            found.add(node.op_type)
    return found


def _shape(node: NodeProto) -> tuple[str, int, int, tuple[bytes, ...]]:
    """What the converter may change of a node; the nodes of its subgraphs count by themselves."""
    plain = (a for a in node.attribute if a.type not in (AttributeProto.GRAPH, AttributeProto.GRAPHS))
    attributes = tuple(sorted(a.SerializeToString(deterministic=True) for a in plain))
    return node.op_type, len(node.input), len(node.output), attributes
