"""The formula of a function's body: the record's decomposition, or a form that onnxruntime runs faster, or at all."""

from __future__ import annotations

from opgraph.errors import Unimplemented
from opgraph.ir.expression import Call, Expr, Param, Var, parse_expression
from opgraph.ir.logical_tensor import LogicalTensor
from opgraph.ir.opdef import OpDef
from opgraph.onnx.signature import Signature
from opgraph.onnx.to_nodes import plain_form
from opgraph.ops.families import LAYOUT_ATTRS

_E = "Exp(Minimum(src, 20))"
_N = f"Multiply({_E}, Add({_E}, 2))"
#: Kinds whose f16 and bf16 bodies use the op itself in f32 where ai.onnx has it: only the f32 op has a kernel.
_WHOLE = ("GELU",)

#: Keys: kind, dtype of the computation, and number of inputs.
_OTHER_BODIES = {
    # onnxruntime up to 1.30 fuses x*Sigmoid(x) in f64 into an op without an f64 kernel, and then refuses the model.
    # This form is also 1.7 times as fast there.
    ("Swish", "f64", 1): "Divide(src, Add(Exp(Neg(Multiply(src, $alpha))), 1))",
    ("Swish", "f64", 2): "Divide(src, Add(Exp(Neg(Multiply(Multiply(src, factor), $alpha))), 1))",
    # Two nodes, which have f32 kernels, instead of five.
    ("HardSwish", "f32", 1): "Multiply(src, HardSigmoid(src, alpha=0.16666666666666666, beta=0.5))",
    # ONNX has Relu for signed types only.
    ("ReLU", "u8", 1): "Maximum(src, 0)",
    # tanh(softplus(x)) = n / (n + 2), n = e^x (e^x + 2), which is 1 in f64 from x = 20 on. onnxruntime 1.31 takes 9
    # times as long for Softplus and Tanh.
    **{("Mish", work, 1): f"Multiply(src, Divide({_N}, Add({_N}, 2)))" for work in ("f32", "f64")},
}


def formula_of(record: OpDef, signature: Signature, work: str) -> Expr:
    """Returns the formula of a body.

    Args:
        work: the dtype that it computes in.

    Raises:
        Unimplemented: ai.onnx cannot compute the op; the message gives the record's reason.
    """
    given = {name: ndim for name, _, ndim in signature.inputs}
    other = _OTHER_BODIES.get((record.kind, work, len(given)))
    if other is not None:
        return parse_expression(other)
    # Attributes that stay open are NaN while the formula is chosen, so that it is valid for every value.
    types = {a.name: a.type for a in record.attrs}
    attrs = {n: float("nan") if types[n] == "f32" else v for n, v in signature.attrs.items()}
    narrow = any(d in ("f16", "bf16") for _, d, _ in signature.inputs)
    whole = record.kind in _WHOLE and narrow and _is_in_onnx(record, signature, work)
    tree = None if whole else record.decompose(attrs, given)
    if tree is not None:
        return tree
    if isinstance(record.onnx, tuple):
        return Call(record.kind, tuple(Var(n) for n in given), tuple((n, Param(n)) for n in attrs))
    raise Unimplemented(
        f"{record.kind} cannot be written to ONNX: {record.onnx.removeprefix('none: ')}",
        where=f"{record.kind} of {', '.join(d for _, d, _ in signature.inputs)}",
        fix="compute it outside the exported graph",
    )


def _is_in_onnx(record: OpDef, signature: Signature, work: str) -> bool:
    """True if ai.onnx has the op itself for the dtype that the body computes in."""
    attrs = {n: v for n, v in signature.attrs.items() if n not in LAYOUT_ATTRS}
    inputs = {name: LogicalTensor(0, work, None) for name, _, _ in signature.inputs}
    return plain_form(record, attrs, inputs, work, signature.opset) is not None
