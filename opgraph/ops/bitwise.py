"""Logical and bitwise ops."""

from __future__ import annotations

from typing import Any

import numpy as np

from opgraph.ir.opdef import Attr, Onnx, TorchCall
from opgraph.ops.families import AUTO_BROADCAST, BOOLEAN, INTEGER, SAME_INPUTS, pointwise

AND = pointwise(
    "And",
    "y = a and b.",
    inputs=SAME_INPUTS,
    types=BOOLEAN,
    attrs=(AUTO_BROADCAST,),
    reference=np.logical_and,
    expression="og::logical_and({src_0}, {src_1})",
    torch=lambda t, a, b: t.logical_and(a, b),
    onnx=(Onnx(op_type="And", since=7),),
    commutative=True,
    domain=((0, 1),),
    torch_calls=(TorchCall("logical_and(input, other)"),),
    source="ONNX And",
)

OR = pointwise(
    "Or",
    "y = a or b.",
    inputs=SAME_INPUTS,
    types=BOOLEAN,
    attrs=(AUTO_BROADCAST,),
    reference=np.logical_or,
    expression="og::logical_or({src_0}, {src_1})",
    torch=lambda t, a, b: t.logical_or(a, b),
    onnx=(Onnx(op_type="Or", since=7),),
    commutative=True,
    domain=((0, 1),),
    torch_calls=(TorchCall("logical_or(input, other)"),),
    source="ONNX Or",
)

XOR = pointwise(
    "Xor",
    "y = either a or b, not both.",
    inputs=SAME_INPUTS,
    types=BOOLEAN,
    attrs=(AUTO_BROADCAST,),
    reference=np.logical_xor,
    expression="og::logical_xor({src_0}, {src_1})",
    torch=lambda t, a, b: t.logical_xor(a, b),
    onnx=(Onnx(op_type="Xor", since=7),),
    commutative=True,
    domain=((0, 1),),
    torch_calls=(TorchCall("logical_xor(input, other)"),),
    source="ONNX Xor",
)

NOT = pointwise(
    "Not",
    "y = not x.",
    types=BOOLEAN,
    reference=np.logical_not,
    expression="og::logical_not({src})",
    torch=lambda t, x: t.logical_not(x),
    onnx=(Onnx(op_type="Not", since=1),),
    domain=((0, 1),),
    torch_calls=(TorchCall("logical_not(input)"),),
    source="ONNX Not",
)

BITWISE_AND = pointwise(
    "BitwiseAnd",
    "The bits set in both a and b.",
    inputs=SAME_INPUTS,
    types=INTEGER,
    attrs=(AUTO_BROADCAST,),
    reference=np.bitwise_and,
    expression="og::bit_and({src_0}, {src_1})",
    torch=lambda t, a, b: t.bitwise_and(a, b),
    onnx=(Onnx(op_type="BitwiseAnd", since=18),),
    commutative=True,
    domain=((-100, 100),),
    torch_calls=(
        TorchCall(
            "bitwise_and(input, other)",
            lambda p: "And(input, other)" if p["dtype"] == "boolean" else "BitwiseAnd(input, other)",
        ),
    ),
    source="ONNX BitwiseAnd",
)

BITWISE_OR = pointwise(
    "BitwiseOr",
    "The bits set in a or b.",
    inputs=SAME_INPUTS,
    types=INTEGER,
    attrs=(AUTO_BROADCAST,),
    reference=np.bitwise_or,
    expression="og::bit_or({src_0}, {src_1})",
    torch=lambda t, a, b: t.bitwise_or(a, b),
    onnx=(Onnx(op_type="BitwiseOr", since=18),),
    commutative=True,
    domain=((-100, 100),),
    torch_calls=(
        TorchCall(
            "bitwise_or(input, other)",
            lambda p: "Or(input, other)" if p["dtype"] == "boolean" else "BitwiseOr(input, other)",
        ),
    ),
    source="ONNX BitwiseOr",
)

BITWISE_XOR = pointwise(
    "BitwiseXor",
    "The bits in which a and b differ.",
    inputs=SAME_INPUTS,
    types=INTEGER,
    attrs=(AUTO_BROADCAST,),
    reference=np.bitwise_xor,
    expression="og::bit_xor({src_0}, {src_1})",
    torch=lambda t, a, b: t.bitwise_xor(a, b),
    onnx=(Onnx(op_type="BitwiseXor", since=18),),
    commutative=True,
    domain=((-100, 100),),
    torch_calls=(
        TorchCall(
            "bitwise_xor(input, other)",
            lambda p: "Xor(input, other)" if p["dtype"] == "boolean" else "BitwiseXor(input, other)",
        ),
    ),
    source="ONNX BitwiseXor",
)

BITWISE_NOT = pointwise(
    "BitwiseNot",
    "Every bit of x inverted.",
    types=INTEGER,
    reference=np.bitwise_not,
    expression="og::bit_not({src})",
    torch=lambda t, x: t.bitwise_not(x),
    onnx=(Onnx(op_type="BitwiseNot", since=18),),
    domain=((-100, 100),),
    torch_calls=(
        TorchCall("bitwise_not(input)", lambda p: "Not(input)" if p["dtype"] == "boolean" else "BitwiseNot(input)"),
    ),
    source="ONNX BitwiseNot",
)

BIT_SHIFT = pointwise(
    "BitShift",
    "The bits of a moved by b places, to the LEFT or to the RIGHT. A right shift keeps the sign. A b that is negative, "
    "or the width of the type or more, leaves nothing: 0, or -1 for a negative a shifted right.",
    inputs=SAME_INPUTS,
    types=INTEGER,
    attrs=(Attr(name="direction", type="string", choices=("LEFT", "RIGHT")), AUTO_BROADCAST),
    reference=lambda a, b, direction: np.left_shift(a, b) if direction == "LEFT" else np.right_shift(a, b),
    expression=lambda attrs, given: f"og::shift_{attrs['direction'].lower()}({{src_0}}, {{src_1}})",
    torch=lambda t, a, b, direction: _torch_shift(t, a, b, direction),
    onnx=(Onnx(op_type="BitShift", since=11, attrs={"direction": "direction"}, note="unsigned only before opset 28"),),
    domain=((-100, 100), (0, 9)),
    torch_calls=(
        TorchCall("bitwise_left_shift(input, other)", "BitShift(input, other, direction=LEFT)"),
        TorchCall("bitwise_right_shift(input, other)", "BitShift(input, other, direction=RIGHT)"),
    ),
    source="ONNX BitShift, opset 28",
)


def _torch_shift(t: Any, a: Any, b: Any, direction: str) -> Any:
    a, b = t.broadcast_tensors(a, b)
    outside = (b < 0) | (b >= 8 * a.element_size())
    count = t.where(outside, t.zeros_like(b), b)
    if direction == "LEFT":
        return t.where(outside, t.zeros_like(a), t.bitwise_left_shift(a, count))
    return t.where(outside, t.where(a < 0, -t.ones_like(a), t.zeros_like(a)), t.bitwise_right_shift(a, count))
