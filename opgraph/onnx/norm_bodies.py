"""The body of `opgraph::RMSNorm`, in the only spelling that onnxruntime fuses into one kernel."""

from __future__ import annotations

from typing import Any

from onnx import AttributeProto, NodeProto, TensorProto, helper

from opgraph.errors import Unimplemented
from opgraph.ir import dtypes
from opgraph.onnx.signature import Signature

RMS_NORM = "RMSNorm"
#: First opset in which the axes are an input of ReduceMean.
_AXES_ARE_INPUTS = 18


def rms_norm_nodes(signature: Signature) -> list[NodeProto]:
    """x / sqrt(mean(x^2) + epsilon) * gamma over the last axis; f16 and bf16 in f32, rounded once.

    onnxruntime matches Pow, ReduceMean, Add, Sqrt, Div, Mul in this order, and only with a constant epsilon (1.31:
    three times as fast as the spelling with Reciprocal that torch exports).

    Raises:
        Unimplemented: there is no gamma, it has another dtype, or the norm covers more axes than the last.
    """
    dtypes_given = {dtype for _, dtype, _ in signature.inputs}
    narrow = dtypes_given <= {"f16", "bf16"}
    fits = len(signature.inputs) == 2 and len(dtypes_given) == 1 and (narrow or dtypes_given == {"f32"})
    if not fits or signature.attrs.get("begin_norm_axis", -1) != -1:
        raise Unimplemented(
            f"this {RMS_NORM} has no form at opset {signature.opset}",
            where=f"{RMS_NORM} of {', '.join(sorted(dtypes_given))}",
            fix="save with opset=23, which has RMSNormalization",
        )
    nodes: list[NodeProto] = []

    def node(op_type: str, *inputs: str, **attributes: Any) -> str:
        nodes.append(helper.make_node(op_type, list(inputs), [f"t{len(nodes)}"], **attributes))
        return str(nodes[-1].output[0])

    (x, dtype, _), (gamma, _, _) = signature.inputs
    if narrow:
        x = node("Cast", x, to=TensorProto.FLOAT)
        gamma = node("Cast", gamma, to=TensorProto.FLOAT)
    square = node("Pow", x, node("Constant", value_float=2.0))
    if signature.opset >= _AXES_ARE_INPUTS:
        mean = node("ReduceMean", square, node("Constant", value_ints=[-1]), keepdims=1)
    else:
        mean = node("ReduceMean", square, axes=[-1], keepdims=1)
    epsilon = NodeProto(op_type="Constant", output=[f"t{len(nodes)}"])
    epsilon.attribute.append(AttributeProto(name="value_float", ref_attr_name="epsilon", type=AttributeProto.FLOAT))
    nodes.append(epsilon)
    root = node("Sqrt", node("Add", mean, epsilon.output[0]))
    made = node("Mul", node("Div", x, root), gamma)
    if narrow:
        node("Cast", made, to=int(dtypes.get(dtype).onnx))
    return nodes
