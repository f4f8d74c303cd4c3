"""Encodes an ONNX node in the attributes of a Wildcard, and decodes it.

    Wildcard(x, w, onnx_op="Conv", onnx_domain="", onnx_opset=20, group=1, pads=[0, 0, 0, 0])

`onnx_op`, `onnx_domain` and `onnx_opset` identify the operator. The node's own attributes are stored next to them:
numbers, strings and lists unchanged, all others (tensors, graphs, types) as "proto:" and the base64 of the
AttributeProto. Optional inputs and outputs that the node omits are listed by position in `onnx_absent_inputs` and
`onnx_absent_outputs`. Outer values that its subgraphs capture are further inputs, named in `onnx_captures`. Types that
opgraph lacks (strings, sequences, uint16) are stored in `onnx_input_types` and `onnx_output_types`. So an op that was
read back from text runs like one that was just loaded.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import onnx
from google.protobuf.message import DecodeError
from onnx import AttributeProto, GraphProto, NodeProto, TensorProto

from opgraph.errors import ModelError
from opgraph.ir.attributes import f32
from opgraph.ir.op import AttrValue, Op

#: metadata_props key of a node: operands that stay operands, though an attribute could hold them.
OPERANDS_KEY = "opgraph.operands"

#: metadata_props key of a node that opgraph wrote for a library op: its kind. Other nodes of such op types stay
#: Wildcards, so that onnxruntime runs models of other exporters in regions that are as large as before.
KIND_KEY = "opgraph.kind"

_GRAPHS = (AttributeProto.GRAPH, AttributeProto.GRAPHS)
_PROTO = "proto:"
_RESERVED = "onnx_"
_PLAIN_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def is_onnx_node(op: Op) -> bool:
    """True if an op is a Wildcard that carries an ONNX node."""
    return op.kind == "Wildcard" and "onnx_op" in op.attrs


def encoded(attributes: Iterable[AttributeProto]) -> dict[str, AttrValue]:
    """Encodes a node's attributes as op attributes; `decoded` returns the same attributes, bit by bit."""
    result: dict[str, AttrValue] = {}
    for index, attribute in enumerate(attributes):
        plain = _PLAIN_NAME.fullmatch(attribute.name) and not attribute.name.startswith(_RESERVED)
        value = _readable(attribute) if plain else None
        if value is None:
            value = _PROTO + base64.b64encode(attribute.SerializeToString(deterministic=True)).decode()
        result[attribute.name if plain else f"{_RESERVED}attr_{index}"] = value
    return result


def _readable(attribute: AttributeProto) -> AttrValue | None:
    """The attribute's value if an op attribute can hold it exactly, else None."""
    if attribute.doc_string or attribute.ref_attr_name:
        return None
    if attribute.type == AttributeProto.INT:
        return int(attribute.i)
    if attribute.type == AttributeProto.FLOAT:
        return float(attribute.f)
    if attribute.type == AttributeProto.STRING:
        return _text(attribute.s)
    # An empty list would not show its element type.
    if attribute.type == AttributeProto.INTS and attribute.ints:
        return tuple(int(i) for i in attribute.ints)
    if attribute.type == AttributeProto.FLOATS and attribute.floats:
        return tuple(float(f) for f in attribute.floats)
    if attribute.type == AttributeProto.STRINGS and attribute.strings:
        texts = [_text(s) for s in attribute.strings]
        return None if None in texts else tuple(t for t in texts if t is not None)
    return None


def _text(raw: bytes) -> str | None:
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        return None
    return None if text.startswith(_PROTO) else text


def decoded(op: Op) -> list[AttributeProto]:
    """The attributes of the node that an op carries.

    Raises:
        ModelError: an attribute is no AttributeProto (a graph text that was written by hand).
    """
    result = []
    for name, value in op.attrs.items():
        if name.startswith(_RESERVED) and not name.startswith(f"{_RESERVED}attr_"):
            continue
        if isinstance(value, str) and value.startswith(_PROTO):
            result.append(_parsed(op, name, value))
        else:
            result.append(onnx.helper.make_attribute(name, list(value) if isinstance(value, tuple) else value))
    return result


def plain_value(attribute: AttributeProto) -> Any:
    """An attribute's value as a Python value; strings decoded, floats as f32 holds them."""
    value = onnx.helper.get_attribute_value(attribute)
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if isinstance(value, float):
        return f32(value)
    return value


def _parsed(op: Op, name: str, value: str) -> AttributeProto:
    try:
        attribute = AttributeProto()
        attribute.ParseFromString(base64.b64decode(value[len(_PROTO) :], validate=True))
    except (binascii.Error, DecodeError, ValueError) as error:
        raise ModelError(
            f"attribute {name} is no serialized AttributeProto: {error}",
            where=op.label,
            fix="leave attributes that start with proto: as they were printed",
        ) from None
    if any(t.data_location == TensorProto.EXTERNAL for t in _tensors(attribute)):
        raise ModelError(
            f"attribute {name} refers to a file", where=op.label, fix="give the tensor's data in the attribute"
        )
    return attribute


def _tensors(attribute: AttributeProto) -> Iterable[TensorProto]:
    """Every tensor of an attribute, including those inside its graphs."""
    waiting = [attribute]
    while waiting:
        one = waiting.pop()
        yield from (one.t, *one.tensors)
        for graph in (one.g, *one.graphs):
            yield from graph.initializer
            waiting += [inner for node in graph.node for inner in node.attribute]


def node_of(op: Op, names: Mapping[int, str]) -> NodeProto:
    """Returns the node that an op carries, on values of these names.

    Args:
        names: tensor id -> value name, for all inputs and outputs of the op.

    Raises:
        ModelError: the attributes do not describe a node.
    """
    attrs = op.attrs
    captures = _strings(op, "onnx_captures")
    inputs = [names[t.id] for t in op.inputs]
    own = inputs[: len(inputs) - len(captures)]
    node = NodeProto(op_type=str(attrs["onnx_op"]), domain=str(attrs.get("onnx_domain", "")), name=op.name)
    node.input.extend(_with_gaps(own, _positions(op, "onnx_absent_inputs")))
    node.output.extend(_with_gaps([names[t.id] for t in op.outputs], _positions(op, "onnx_absent_outputs")))
    node.attribute.extend(decoded(op))
    if captures:
        rename_captures(node, dict(zip(captures, inputs[len(own) :], strict=True)))
    return node


def opset_of(op: Op) -> tuple[str, int]:
    """The domain and version that the op's node belongs to."""
    version = op.attrs.get("onnx_opset", 1)
    return str(op.attrs.get("onnx_domain", "")), version if isinstance(version, int) else 1


def _with_gaps(names: Sequence[str], absent: Sequence[int]) -> list[str]:
    result = list(names)
    for position in sorted(absent):
        result.insert(position, "")
    return result


def _strings(op: Op, name: str) -> tuple[str, ...]:
    value = op.attrs.get(name, ())
    if not isinstance(value, tuple) or not all(isinstance(v, str) for v in value) or len(value) > len(op.inputs):
        raise ModelError(f"attribute {name} does not fit", where=op.label, fix="list one name for each last input")
    return tuple(str(v) for v in value)


def _positions(op: Op, name: str) -> tuple[int, ...]:
    value = op.attrs.get(name, ())
    if not isinstance(value, tuple) or not all(isinstance(v, int) and 0 <= v < 1 << 16 for v in value):
        raise ModelError(f"attribute {name} does not fit", where=op.label, fix="list positions")
    return tuple(int(v) for v in value)


def rename_captures(node: NodeProto, names: Mapping[str, str]) -> None:
    """Renames the outer values that the node's subgraphs capture, but no name that a subgraph defines itself."""
    waiting = [(graph, names) for graph in _graphs(node)]
    while waiting:
        graph, outer = waiting.pop()
        own = _defined(graph)
        renamed = {name: new for name, new in outer.items() if name not in own}
        for inner in graph.node:
            for index, name in enumerate(inner.input):
                inner.input[index] = renamed.get(name, name)
            waiting += [(g, renamed) for g in _graphs(inner)]
        for output in graph.output:
            output.name = renamed.get(output.name, output.name)


def defined_inside(nodes: Iterable[NodeProto]) -> set[str]:
    """The names of all values that the subgraphs of some nodes define: inputs, initializers, results."""
    found: set[str] = set()
    waiting = list(nodes)
    while waiting:
        for graph in _graphs(waiting.pop()):
            found |= _defined(graph)
            waiting += graph.node
    return found - {""}


def _graphs(node: NodeProto) -> list[GraphProto]:
    return [g for a in node.attribute if a.type in _GRAPHS for g in (a.g, *a.graphs) if g.ByteSize()]


def _defined(graph: GraphProto) -> set[str]:
    return {v.name for v in (*graph.input, *graph.initializer)} | {n for inner in graph.node for n in inner.output}
