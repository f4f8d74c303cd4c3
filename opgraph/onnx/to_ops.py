"""Converts an ONNX node to an op: by the forms that the op records list, or to a Wildcard that carries the node."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from onnx import NodeProto

from opgraph.ir import dtypes
from opgraph.ir.logical_tensor import LogicalTensor
from opgraph.ir.op import AttrValue
from opgraph.ir.opdef import Attr, Onnx, OpDef
from opgraph.ir.schema import f32
from opgraph.onnx.forms import attribute_default, kinds_of, slots
from opgraph.onnx.sparse import Room, dense
from opgraph.runtime.providers.onnx_node import KIND_KEY, OPERANDS_KEY, encoded, plain_value

#: A native op, not yet in a graph: kind, inputs, attributes.
Native = tuple[str, list[LogicalTensor], dict[str, AttrValue]]


def native_candidates(
    node: NodeProto,
    opset: int,
    operands: Sequence[LogicalTensor | None],
    library: bool = False,
    shapes: Collection[int] = (),
) -> list[Native]:
    """The ops equivalent to a node. The graph may refuse one for its dtypes; the caller then tries the next one.

    Args:
        node: of domain "".
        opset: the opset that the node belongs to.
        operands: its inputs; None where an optional one is left out.
        library: if True, includes library ops. Those that opgraph wrote are always recognized, by their metadata.
        shapes: input positions where the node reads the shape of the tensor in `operands`.
    """
    said = {p.key: p.value for p in node.metadata_props}
    hint = said.get(OPERANDS_KEY, "")
    result: list[Native] = []
    if any(t is not None and t.dtype == dtypes.UNDEF for t in operands):
        return result
    for record, form in kinds_of(node.op_type, opset):
        if record.kind != said.get(KIND_KEY, record.kind) or not (record.is_pointwise or library or KIND_KEY in said):
            continue
        attrs = _attributes(record, form, node, opset)
        first = operands[0].dtype if operands and operands[0] is not None else None
        if attrs is None or (form.dtypes is not None and first not in form.dtypes):
            continue
        if [i for i, slot in enumerate(slots(record, form, len(operands))) if slot[0] == "@"] != [*shapes]:
            continue
        for keep in ({*hint.split(",")}, {p.name for p in record.inputs}):
            bound = _bound(record, form, operands, keep)
            if bound is not None and (not result or bound != (result[-1][1], {})):
                own = {**attrs, **bound[1]}
                ndims = {n: t.ndim for n, t in zip(record.input_names(len(bound[0])), bound[0])}
                if form.applies is None or form.applies(own, ndims):
                    result.append((record.kind, bound[0], own))
    return result


def _attributes(record: OpDef, form: Onnx, node: NodeProto, opset: int) -> dict[str, AttrValue] | None:
    """Converts the node's attributes to those of the record; None if the node means something else."""
    given = {a.name: plain_value(a) for a in node.attribute}
    for name, wanted in form.fixed.items():
        if given.pop(name, attribute_default(node.op_type, opset, name)) != wanted:
            return None
    result: dict[str, AttrValue] = dict(form.when)
    for ours, theirs in form.attrs.items():
        value = given.pop(theirs, attribute_default(node.op_type, opset, theirs))
        attr = record.attr(ours)
        assert attr is not None
        if value is not None:
            result[ours] = _converted(attr, value)
        elif attr.required:
            return None
    for theirs, names in form.joined.items():
        whole = given.pop(theirs, None)
        if not isinstance(whole, (list, tuple)) or len(whole) % len(names):
            return None
        size = len(whole) // len(names)
        result.update((name, tuple(whole[i * size : (i + 1) * size])) for i, name in enumerate(names))
    for name in form.implied:
        given.pop(name, None)
    if record.is_cast:
        given.pop("to", None)  # the dtype of the output determines it
    if any(result[name] != value for name, value in form.when.items()):
        return None
    if any(value != attribute_default(node.op_type, opset, name) for name, value in given.items()):
        return None
    return result


def _converted(attr: Attr, value: Any) -> AttrValue:
    if attr.type == "bool":
        return bool(value)
    if attr.type == "f32":
        return float(value)
    return tuple(value) if isinstance(value, (list, tuple)) else value


def _bound(
    record: OpDef, form: Onnx, operands: Sequence[LogicalTensor | None], keep: Collection[str]
) -> tuple[list[LogicalTensor], dict[str, AttrValue]] | None:
    """Binds operands to the record's inputs, or to attributes for scalar constants that an attribute can hold.

    Args:
        keep: names of the record's inputs that must not become attributes.
    """
    wanted = slots(record, form, len(operands))
    if len(operands) > len(wanted):
        return None
    given = [*operands, *[None] * (len(wanted) - len(operands))]
    attrs: dict[str, AttrValue] = {}
    inputs: dict[str, LogicalTensor] = {}
    for slot, tensor in reversed(list(zip(wanted, given, strict=True))):
        words = slot.lstrip("@").split("|")
        name = next((w for w in words if not w.startswith("$")), None)
        attr = next((w[1:] for w in words if w.startswith("$")), None)
        if tensor is None:
            continue
        value = None if attr is None else _held(record.attr(attr), tensor, operands[0])
        # Inputs are positional: if a later one is an operand, the earlier ones must be operands too.
        if attr is not None and value is not None and name not in keep and not inputs:
            attrs[attr] = value
        elif name is not None:
            inputs[name] = tensor
        else:
            return None
    names = record.input_names(max(len(operands), len(record.inputs)))
    if [n for n in names if n in inputs] != names[: len(inputs)]:
        return None
    if any(not p.optional and not p.variadic and p.name not in inputs for p in record.inputs):
        return None
    return [inputs[n] for n in names if n in inputs], attrs


def _held(attr: Attr | None, tensor: LogicalTensor, first: LogicalTensor | None) -> AttrValue | None:
    """The value of a constant for an attribute, if the attribute can hold it."""
    if attr is None or attr.type != "s64[]":
        return _scalar(tensor, first)
    if tensor.data is None or tensor.dtype != "s64" or tensor.ndim != 1:
        return None
    return tuple(int(i) for i in tensor.data)


def _scalar(tensor: LogicalTensor, first: LogicalTensor | None) -> float | None:
    """The value of a scalar constant of the first operand's dtype, if f32 holds it exactly."""
    if not tensor.is_scalar_constant or first is None or tensor.dtype != first.dtype:
        return None
    assert tensor.data is not None
    value = tensor.data.item()
    if isinstance(value, bool) or (isinstance(value, int) and abs(value) > 1 << 24):
        return None
    return float(value) if f32(float(value)) == value or value != value else None


def wildcard_attrs(
    node: NodeProto, opset: int, input_types: Sequence[str], output_types: Sequence[str], captured: Sequence[str]
) -> dict[str, AttrValue]:
    """The attributes of the Wildcard that carries a node.

    Args:
        input_types, output_types: of the values that are present, captured ones included; "" if a dtype suffices.
        captured: names of the outer values that its subgraphs read.
    """
    attrs: dict[str, AttrValue] = {"onnx_op": node.op_type, "onnx_domain": node.domain, "onnx_opset": opset}
    for key, names in (("onnx_absent_inputs", node.input), ("onnx_absent_outputs", node.output)):
        absent = tuple(i for i, name in enumerate(names) if not name)
        if absent:
            attrs[key] = absent
    if captured:
        attrs["onnx_captures"] = tuple(captured)
    for key, types in (("onnx_input_types", input_types), ("onnx_output_types", output_types)):
        if any(types):
            attrs[key] = tuple(types)
    return {**attrs, **encoded(node.attribute)}


def constant_value(node: NodeProto, room: Room | None = None) -> np.ndarray | None:
    """The array of a Constant node; None if opgraph lacks its dtype, or if its zeros would take too much memory."""
    import onnx_ir as ir

    attribute = node.attribute[0] if len(node.attribute) == 1 else None
    if attribute is None:
        return None
    if attribute.name == "value" and attribute.t.data_type in dtypes.BY_ONNX:
        array = np.asarray(ir.from_proto(attribute.t).numpy())
        return array.reshape(tuple(attribute.t.dims))
    if attribute.name == "sparse_value":
        return dense(attribute.sparse_tensor, room or Room())
    typed: Mapping[str, type] = {"value_float": np.float32, "value_floats": np.float32,
                                 "value_int": np.int64, "value_ints": np.int64}  # fmt: skip
    if attribute.name in typed:
        return np.asarray(plain_value(attribute), typed[attribute.name])
    return None
