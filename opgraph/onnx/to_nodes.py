"""Converts an op to an ONNX node: to a form of the record, if dtypes, opset and ONNX's own limits allow it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from onnx import AttributeProto, NodeProto, helper

from opgraph.ir import dtypes
from opgraph.ir.logical_tensor import LogicalTensor
from opgraph.ir.op import AttrValue, Op
from opgraph.ir.opdef import Onnx, OpDef
from opgraph.onnx.forms import allowed, attribute_default, forms_of, slots
from opgraph.ops.families import LAYOUT_ATTRS
from opgraph.runtime.providers.onnx_node import KIND_KEY, OPERANDS_KEY

#: Makes a node's attribute: by value in a graph, by reference in a function's body.
WriteAttribute = Callable[[str, str, AttrValue], AttributeProto]


def plain_form(
    record: OpDef,
    attrs: Mapping[str, AttrValue],
    inputs: Mapping[str, LogicalTensor],
    output: str,
    opset: int,
) -> Onnx | None:
    """Returns the form of the single ONNX node that means exactly this op, or None.

    Args:
        attrs: the op's attributes.
        inputs: its inputs by the names of the record; only dtype, number of dimensions and data are used.
        output: the dtype of its output.
    """
    if not _operands_as_onnx_wants(record, attrs, inputs, output):
        return None
    for form in forms_of(record, opset):
        if _says_all(record, form, attrs, inputs) and _allowed_here(record, form, attrs, inputs, output, opset):
            return form
    return None


def _operands_as_onnx_wants(
    record: OpDef, attrs: Mapping[str, AttrValue], inputs: Mapping[str, LogicalTensor], output: str
) -> bool:
    """True if there is one dtype for each symbol family (ONNX does not mix), and no operand along a channel axis."""
    ndims = [t.ndim for t in inputs.values()]
    if any(record.appended_axes(i, ndims, attrs) for i in record.channel_inputs):
        return False
    floats = {t.dtype for t in inputs.values() if t.dtype in dtypes.FLOATS}
    if not record.is_cast and output in dtypes.FLOATS:
        floats.add(output)
    return len(floats) <= 1


def _says_all(record: OpDef, form: Onnx, attrs: Mapping[str, AttrValue], inputs: Mapping[str, LogicalTensor]) -> bool:
    """True if the form can express every input and attribute of the op."""
    words = [w.lstrip("@") for slot in slots(record, form, len(inputs)) for w in slot.split("|")]
    if not set(inputs) <= set(words) or any(attrs.get(k) != v for k, v in form.when.items()):
        return False
    known = {*form.attrs, *form.when, *(w[1:] for w in words if w.startswith("$"))}
    known.update(name for names in form.joined.values() for name in names)
    defaults = {a.name: a.default for a in record.attrs}
    return all(name in known or (name in LAYOUT_ATTRS and value == defaults[name]) for name, value in attrs.items())


def _allowed_here(
    record: OpDef,
    form: Onnx,
    attrs: Mapping[str, AttrValue],
    inputs: Mapping[str, LogicalTensor],
    output: str,
    opset: int,
) -> bool:
    if form.applies is not None and not form.applies(attrs, {n: t.ndim for n, t in inputs.items()}):
        return False
    first = next(iter(inputs.values())).dtype if inputs else output
    for index, slot in enumerate(slots(record, form, len(inputs))):
        words = slot.split("|")
        number = any(w[0] == "$" and isinstance(attrs.get(w[1:]), (int, float)) for w in words)
        dtype = inputs[words[0]].dtype if words[0] in inputs else first if number else None
        if dtype is not None and dtype not in allowed(form.op_type, opset, index):
            return False
    if output not in allowed(form.op_type, opset, -1):
        return False
    if form.dtypes is not None and first not in form.dtypes:
        return False
    return all(inputs[name].ndim == 0 for name in form.scalars if name in inputs)


def plain_node(
    record: OpDef,
    form: Onnx,
    attrs: Mapping[str, AttrValue],
    operands: Mapping[str, str],
    output: tuple[str, str],
    opset: int,
    scalar: Callable[[str], str],
    attribute: WriteAttribute | None = None,
    shape: Callable[[str], str] | None = None,
) -> NodeProto:
    """Makes the node of a form.

    Args:
        operands: value names of the given inputs, by the record's names.
        output: the name of the output and its dtype.
        scalar: returns the constant that holds an attribute: a scalar of the first input's dtype, or a list in s64.
        attribute: makes an attribute (opgraph's name, ONNX's name, value). Default: by value.
        shape: returns the value that holds the shape of another value.
    """
    inputs = []
    for slot in slots(record, form, len(operands)):
        words = slot.split("|")
        if slot.startswith("@"):
            assert shape is not None
            inputs.append(shape(operands[slot[1:]]))
            continue
        name = next((w for w in words if w in operands), None)
        attr = next((w[1:] for w in words if w.startswith("$") and w[1:] in attrs), None)
        inputs.append(operands[name] if name is not None else scalar(attr) if attr is not None else "")
    while inputs and not inputs[-1]:
        inputs.pop()
    node = NodeProto(op_type=form.op_type, input=inputs, output=[output[0]])
    for ours, theirs in form.attrs.items():
        if ours in attrs:
            value = int(v) if isinstance(v := attrs[ours], bool) else v
            if attribute is not None:
                node.attribute.append(attribute(ours, theirs, value))
            elif value != attribute_default(form.op_type, opset, theirs):
                kind = AttributeProto.INTS if value == () else None  # an empty list has no element type
                node.attribute.append(helper.make_attribute(theirs, value, attr_type=kind))
    for theirs, names in form.joined.items():
        node.attribute.append(helper.make_attribute(theirs, [n for name in names for n in attrs[name]]))  # type: ignore[union-attr]
    for name, value in form.fixed.items():
        if value != attribute_default(form.op_type, opset, name):
            node.attribute.append(helper.make_attribute(name, value))
    if not record.is_pointwise:
        node.metadata_props.add(key=KIND_KEY, value=record.kind)
    if record.is_cast:
        node.attribute.append(helper.make_attribute("to", dtypes.BY_NAME[output[1]].onnx))
    return node


def mark_operands(node: NodeProto, op: Op, record: OpDef, form: Onnx) -> None:
    """Records in metadata which scalar constants are operands, if they could also be read as attributes."""
    either = [slot.split("|")[0] for slot in slots(record, form, len(op.inputs)) if "|$" in slot]
    names = [p.name for p, t in zip(record.inputs, op.inputs) if p.name in either and t.is_scalar_constant]
    if names:
        node.metadata_props.add(key=OPERANDS_KEY, value=",".join(names))
