"""Bodies of the functions in domain `opgraph`: each op in terms of ai.onnx ops, for runtimes without that op.

The node keeps the op's name and attributes; the body computes the op. f16 and bf16 are computed in f32 and rounded
once, as everywhere in opgraph. onnxruntime runs this form fastest, and for bf16 it runs no other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from onnx import AttributeProto, FunctionProto, NodeProto, TensorProto, helper

from opgraph.errors import Unimplemented
from opgraph.ir import dtypes, opdef
from opgraph.ir.attributes import typed_literal
from opgraph.ir.expression import Call, Expr, Num, Param, Var
from opgraph.ir.logical_tensor import LogicalTensor
from opgraph.ir.op import AttrValue
from opgraph.ir.opdef import OpDef
from opgraph.ir.schema import f32
from opgraph.onnx.formulas import formula_of
from opgraph.onnx.norm_bodies import RMS_NORM, rms_norm_nodes
from opgraph.onnx.signature import DOMAIN, Signature, onnx_value, substituted
from opgraph.onnx.to_nodes import plain_form, plain_node
from opgraph.ops.families import LAYOUT_ATTRS

#: First opset in which a constant may be an attribute of the function.
BODIES_SINCE = 12
#: First opset with CastLike; in older opsets, each body is for one dtype.
_CASTLIKE_SINCE = 15


def function_of(record: OpDef, signature: Signature) -> FunctionProto:
    """The function that computes an op.

    Raises:
        Unimplemented: ai.onnx cannot compute the op; the message gives the record's reason.
    """
    if record.kind == RMS_NORM:
        nodes = rms_norm_nodes(signature)
        result = nodes[-1].output[0]
    else:
        writer = _Body(record, signature)
        result, nodes = writer.run(), writer.nodes
    function = FunctionProto(domain=DOMAIN, name=record.kind, doc_string=record.doc)
    function.input.extend(name for name, _, _ in signature.inputs)
    function.output.append(result)
    function.node.extend(nodes)
    function.opset_import.append(helper.make_opsetid("", signature.opset))
    for attr in record.attrs:
        if attr.name in signature.attrs:
            default = attr.default
            if default is None:
                function.attribute.append(attr.name)
            else:
                function.attribute_proto.append(helper.make_attribute(attr.name, onnx_value(attr, default)))
    return function


@dataclass(slots=True)
class _Body:
    """Writes one body. Each expression is written once."""

    record: OpDef
    signature: Signature
    nodes: list[NodeProto] = field(default_factory=list)
    done: dict[Expr, tuple[str, str]] = field(default_factory=dict)
    work: str = ""
    like: str = ""

    def run(self) -> str:
        """Writes the nodes; returns the name of the output."""
        given = {name: dtype for name, dtype, _ in self.signature.inputs}
        working = [d for d in given.values() if d != "boolean"]
        narrow = {"bf16", "f16"} & {*working, self.signature.output}
        mixed = len({*working}) > 1 or (self.signature.output in dtypes.FLOATS and self.signature.output not in working)
        casts = bool(working) and not self.record.is_cast and bool(narrow or mixed)
        self.work = "f32" if casts else working[0] if working else "boolean"
        if not casts and working:
            self.like = next(name for name, dtype in given.items() if dtype == self.work)
        for index, (name, dtype, _) in enumerate(self.signature.inputs):
            value = self._cast(name, "f32") if casts and dtype not in ("f32", "boolean") else name
            self.done[Var(name)] = (self._aligned(index, value), "boolean" if dtype == "boolean" else self.work)
        result, dtype = self.write(formula_of(self.record, self.signature, self.work))
        if result in given:
            result = self._node("Identity", [result])
        if casts and self.signature.output not in ("f32", dtype):
            result = self._rounded(result)
        return result

    def write(self, tree: Expr) -> tuple[str, str]:
        """The name and dtype of an expression's value. Records are written by hand, so the recursion is bounded."""
        if tree not in self.done:
            if isinstance(tree, Num):
                self.done[tree] = (self._number(tree.value), self.work)
            elif isinstance(tree, Param):
                self.done[tree] = (self._scalar_attribute(tree.name), self.work)
            else:
                assert isinstance(tree, Call)
                self.done[tree] = self._call(tree)
        return self.done[tree]

    def _call(self, call: Call) -> tuple[str, str]:
        for arg in call.args:
            self.write(arg)
        record, attrs, inputs = self._parts(call)
        output = self._output_dtype(record, inputs)
        form = plain_form(record, attrs, inputs, output, self.signature.opset)
        if form is None:
            tree = record.decompose(attrs, list(inputs))
            if tree is None or tree == call:
                if not record.is_pointwise:
                    raise Unimplemented(
                        f"ai.onnx has no such {record.kind} at opset {self.signature.opset}",
                        where=f"{record.kind} of {', '.join(t.type_text for t in inputs.values())}",
                        fix="give axes as an attribute, declare the ranks of its inputs, or save with a newer opset",
                    )
                raise Unimplemented(
                    f"ai.onnx has no {record.kind} of {self.work} at opset {self.signature.opset}",
                    where=f"body of {self.record.kind}",
                    fix="save with a newer opset, or cast to f32 in the graph",
                )
            return self.write(substituted(tree, dict(zip(inputs, call.args)), {**attrs, **dict(call.attrs)}))
        operands = {port: self.done[arg][0] for port, arg in zip(inputs, call.args)}
        open_attrs = {ours: value for ours, value in call.attrs if isinstance(value, Param)}

        def scalar(attr: str) -> str:
            value = open_attrs.get(attr)
            if isinstance(attrs[attr], tuple):
                return self._node("Constant", [], value_ints=attrs[attr])
            return self._scalar_attribute(value.name) if value is not None else self._number(float(attrs[attr]))  # type: ignore[arg-type]

        def attribute(ours: str, theirs: str, value: AttrValue) -> AttributeProto:
            reference = open_attrs.get(ours)
            if reference is None:
                return helper.make_attribute(theirs, value)
            # A constant whose value is an attribute of the function.
            kinds = {float: AttributeProto.FLOAT, int: AttributeProto.INT, str: AttributeProto.STRING}
            return AttributeProto(name=theirs, ref_attr_name=reference.name, type=kinds[type(value)])

        def shape(value: str) -> str:
            return self._node("Shape", [value])

        made = plain_node(record, form, attrs, operands, ("", output), self.signature.opset, scalar, attribute, shape)
        name = f"t{len(self.nodes)}"  # numbered here, because the scalars above are nodes too
        made.output[0] = name
        self.nodes.append(made)
        return name, output

    def _parts(self, call: Call) -> tuple[OpDef, dict[str, AttrValue], dict[str, LogicalTensor]]:
        record = opdef.get(call.kind, where=f"body of {self.record.kind}")
        attrs = {n: v for n, v in record.default_attrs().items() if record.attr(n).default is not None}  # type: ignore[union-attr]
        for name, value in call.attrs:
            if name in LAYOUT_ATTRS and isinstance(value, Param):
                continue  # operands were aligned on entry, and shapes that must be equal are equal
            attr = record.attr(name)
            attrs[name] = self.signature.attrs[value.name] if isinstance(value, Param) else typed_literal(attr, value)
        inputs = {}
        for port, arg in zip(record.inputs, call.args):
            dtype = self.done[arg][1] if arg in self.done else self.work
            # Operands were aligned on entry; a scalar fits wherever ONNX expects one.
            ndim = () if isinstance(arg, (Num, Param)) else self._dims(arg)
            inputs[port.name] = LogicalTensor(0, dtype, ndim)
        return record, attrs, inputs

    def _dims(self, arg: Expr) -> tuple[None, ...] | None:
        if not isinstance(arg, Var):
            return None
        ndim = next(n for name, _, n in self.signature.inputs if name == arg.name)
        return None if ndim is None else (None,) * ndim

    def _output_dtype(self, record: OpDef, inputs: Mapping[str, LogicalTensor]) -> str:
        if record.is_cast:
            return self.signature.output
        declared = record.outputs[0].type
        same = (inputs[p.name].dtype for p in record.inputs if p.type == declared and p.name in inputs)
        return declared if declared in dtypes.BY_NAME else next(same, self.work)

    # -- single nodes -------------------------------------------------------------------------------------------

    def _node(self, op_type: str, inputs: Sequence[str], **attributes: Any) -> str:
        name = f"t{len(self.nodes)}"
        self.nodes.append(helper.make_node(op_type, list(inputs), [name], **attributes))
        return name

    def _cast(self, name: str, dtype: str) -> str:
        return self._node("Cast", [name], to=dtypes.BY_NAME[dtype].onnx)

    def _rounded(self, name: str) -> str:
        """Casts from f32 to the output's dtype."""
        like = next((n for n, d, _ in self.signature.inputs if d == self.signature.output), None)
        if like is not None and self.signature.opset >= _CASTLIKE_SINCE:
            return self._node("CastLike", [name, like])
        return self._cast(name, self.signature.output)

    def _aligned(self, index: int, name: str) -> str:
        """Appends axes to a channel operand so that it broadcasts."""
        ndims = [n for _, _, n in self.signature.inputs]
        axes = self.record.appended_axes(index, ndims, self.signature.attrs)
        if not axes:
            return name
        tensor = helper.make_tensor("axes", TensorProto.INT64, (axes,), list(range(1, 1 + axes)))
        return self._node("Unsqueeze", [name, self._node("Constant", [], value=tensor)])

    def _number(self, value: float) -> str:
        exact = self.work != "f64" or f32(value) == value
        if self.work in ("f32", "f64") and exact:
            return self._in_work(self._node("Constant", [], value_float=value), "f32")
        target = dtypes.BY_NAME["f64" if self.work == "f64" else self.work]
        array = np.asarray(value).astype(target.numpy)
        tensor = helper.make_tensor("number", target.onnx, (), array.tobytes(), raw=True)
        return self._in_work(self._node("Constant", [], value=tensor), target.name)

    def _scalar_attribute(self, attr: str) -> str:
        node = NodeProto(op_type="Constant", output=[f"t{len(self.nodes)}"])
        node.attribute.append(AttributeProto(name="value_float", ref_attr_name=attr, type=AttributeProto.FLOAT))
        self.nodes.append(node)
        return self._in_work(node.output[0], "f32")

    def _in_work(self, name: str, dtype: str) -> str:
        """Casts a constant to the dtype of the computation; with CastLike, if possible, one body fits every dtype."""
        if not self.like or self.work not in dtypes.FLOATS:
            return name if dtype == self.work else self._cast(name, self.work)
        if self.signature.opset >= _CASTLIKE_SINCE:
            return self._node("CastLike", [name, self.like])
        return name if dtype == self.work else self._cast(name, self.work)
