"""What the body of a function computes: the decomposition of the record, or what onnxruntime runs faster, or at all."""

from __future__ import annotations

from opgraph.errors import Unimplemented
from opgraph.ir.expression import Call, Expr, Param, Var, parse_expression
from opgraph.ir.logical_tensor import LogicalTensor
from opgraph.ir.opdef import OpDef
from opgraph.onnx.other_bodies import OTHER_BODIES, WHOLE
from opgraph.onnx.signature import Signature
from opgraph.onnx.to_nodes import plain_form
from opgraph.ops.families import LAYOUT_ATTRS


def formula_of(record: OpDef, signature: Signature, work: str) -> Expr:
    """What a body computes.

    Args:
        work: the dtype that it computes in.

    Raises:
        Unimplemented: ai.onnx has nothing to compute the op with; the message gives the record's reason.
    """
    given = {name: ndim for name, _, ndim in signature.inputs}
    other = OTHER_BODIES.get((record.kind, work, len(given)))
    if other is not None:
        return parse_expression(other)
    # Attributes that stay open are no number while the formula is chosen, so that it holds for every value.
    types = {a.name: a.type for a in record.attrs}
    attrs = {n: float("nan") if types[n] == "f32" else v for n, v in signature.attrs.items()}
    narrow = any(d in ("f16", "bf16") for _, d, _ in signature.inputs)
    whole = record.kind in WHOLE and narrow and _is_in_onnx(record, signature, work)
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
    """Whether ai.onnx has the op itself for the type that the body computes in."""
    attrs = {n: v for n, v in signature.attrs.items() if n not in LAYOUT_ATTRS}
    inputs = {name: LogicalTensor(0, work, None) for name, _, _ in signature.inputs}
    return plain_form(record, attrs, inputs, work, signature.opset) is not None
