"""Moves a model to another opset if that changes none of its nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping

import onnx
import onnx.inliner
from onnx import AttributeProto, ModelProto, NodeProto

from opgraph.errors import Unimplemented
from opgraph.onnx.forms import schema
from opgraph.onnx.nodes import since, with_inner
from opgraph.onnx.target import Target, reader_of
from opgraph.onnx.validate import opsets
from opgraph.runtime.providers.onnx_node import plain_value


def _attribute(node: NodeProto, name: str) -> object:
    return next((plain_value(a) for a in node.attribute if a.name == name), None)


#: Nodes whose meaning changes at an opset although onnx's version converter (1.23) keeps them unchanged: op type and
#: opset -> predicate for such a node.
_MEANS_OTHERWISE: Mapping[tuple[str, int], Callable[[NodeProto], bool]] = {
    # A slope for each channel was for axis 1 before; now it is for the last axis.
    ("PRelu", 7): lambda node: True,
    # The mask had the dtype of the data before; now it is boolean.
    ("Dropout", 10): lambda node: len(node.output) > 1 and node.output[1] != "",
    # One element was marked in all axes from `axis` on; now it is in `axis` alone. The default was 1; now it is -1.
    ("Hardmax", 13): lambda node: _attribute(node, "axis") != -1,
    # This mode was removed.
    ("Resize", 13): lambda node: _attribute(node, "coordinate_transformation_mode") == "tf_half_pixel_for_nn",
}
#: First opset in which negative axes count from the end.
_NEGATIVE_AXES = 11


def restamped(model: ModelProto, opset: int, target: Target, replaced: Container[int] = ()) -> ModelProto:
    """Returns the model with another opset of ai.onnx, also if it imports none.

    Args:
        replaced: indices of nodes that will be replaced, so their meaning in that opset is irrelevant.

    If an op has another definition in that opset, onnx's version converter is run. If the converter would change only
    the opset number, only that number is changed.

    Raises:
        Unimplemented: an op means something else in that opset, or the target does not read the opset.
    """
    current = opsets(model).get("", opset)
    where = f"opset {current} -> {opset}"
    if opset > target.opset:
        raise Unimplemented(
            f"{target.name} reads opsets up to {target.opset}", where=where, fix="name a newer target, or another form"
        )
    if opset == opsets(model).get(""):
        return model
    staying = ModelProto()
    staying.CopyFrom(model)
    del staying.graph.node[:]
    staying.graph.node.extend(node for index, node in enumerate(model.graph.node) if index not in replaced)
    nodes = with_inner(onnx.inliner.inline_local_functions(staying).graph.node)  # function bodies move with the model
    moved = sorted({n.op_type for n in nodes if n.domain == "" and since(n, current) != since(n, opset)})
    if moved:
        otherwise = sorted(_otherwise(nodes, current, opset))
        if otherwise:
            raise Unimplemented(
                f"the model is of opset {current}, and {', '.join(otherwise[:6])} means something else in {opset}",
                where=where,
                fix=f"export the model for opset {opset}: onnx's version converter leaves such a node as it is",
            )
        changed = sorted({*_changed(model, opset, moved), *_unknown_there(nodes, opset)})
        if changed:
            newer = reader_of(current) if current > target.opset else None
            convert = f"convert it first: onnx.version_converter.convert_version(model, {opset})"
            raise Unimplemented(
                f"the model is of opset {current}, and {', '.join(changed[:6])} would change on the way to {opset}",
                where=where,
                fix=f'{convert}, or use form="function"' if newer is None else f"name {newer} as target, or {convert}",
            )
    result = ModelProto()
    result.CopyFrom(model)
    if "" not in opsets(model):
        result.opset_import.add(domain="")
    for entry in result.opset_import:
        if entry.domain == "":
            entry.version = opset
    for function in result.functions:
        for entry in function.opset_import:
            if entry.domain == "":
                entry.version = opset
    return result


def _changed(model: ModelProto, opset: int, moved: list[str]) -> list[str]:
    """Op types that the version converter rewrites; all of `moved` if the converter fails."""
    plain = onnx.inliner.inline_local_functions(model)
    try:
        converted = onnx.version_converter.convert_version(plain, opset)
    except Exception:  # assertions of its C++ code raise a plain RuntimeError
        return moved
    before = Counter(_shape(n) for n in with_inner(plain.graph.node))
    after = Counter(_shape(n) for n in with_inner(converted.graph.node))
    return sorted({entry[0] for entry in (before - after) + (after - before)})


def _unknown_there(nodes: Iterable[NodeProto], opset: int) -> set[str]:
    """Op types with an attribute that the op lacks in an opset. The converter leaves some when it lowers an opset."""
    found = set[str]()
    for node in nodes:
        definition = schema(node.op_type, opset) if node.domain == "" else None
        if definition is not None and any(a.name not in definition.attributes for a in node.attribute):
            found.add(node.op_type)
    return found


def _otherwise(nodes: Iterable[NodeProto], current: int, opset: int) -> set[str]:
    """Op types of nodes that mean something else in an opset although the converter leaves them unchanged."""
    found = set[str]()
    for node in nodes:
        if node.domain != "" or since(node, current) == since(node, opset):
            continue
        first, last = sorted((current, opset))
        for (op_type, start), is_other in _MEANS_OTHERWISE.items():
            if op_type == node.op_type and first < start <= last and is_other(node):
                found.add(op_type)
        axes = [_attribute(node, "axis"), *(_attribute(node, "axes") or ())]  # type: ignore[misc]  # a list of ints
        if opset < _NEGATIVE_AXES <= current and any(isinstance(axis, int) and axis < 0 for axis in axes):
            found.add(node.op_type)
    return found


def _shape(node: NodeProto) -> tuple[str, int, int, tuple[bytes, ...]]:
    """The parts of a node that the converter may change; nodes of its subgraphs are compared separately."""
    plain = (a for a in node.attribute if a.type not in (AttributeProto.GRAPH, AttributeProto.GRAPHS))
    attributes = tuple(sorted(a.SerializeToString(deterministic=True) for a in plain))
    return node.op_type, len(node.input), len(node.output), attributes
