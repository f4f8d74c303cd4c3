"""Binary arithmetic: the four operations, the remainder, and oneDNN's BiasAdd."""

from __future__ import annotations

from typing import Any

import numpy as np

from opgraph.ir.logical_tensor import Dims, LogicalTensor
from opgraph.ir.opdef import Attr, Attrs, Onnx, TorchCall
from opgraph.ir.shapes import ShapeMismatch
from opgraph.ops import integers
from opgraph.ops.families import (
    AUTO_BROADCAST,
    DATA_FORMAT,
    INTEGER,
    MIXED_INPUTS,
    MIXED_OUTPUT,
    NUMERIC,
    SAME_INPUTS,
    SIGNED,
    meets_in_f32,
    pointwise,
)

_MIXED = {"T1": NUMERIC, "T2": NUMERIC, "T3": NUMERIC}


def floor_divide(p: Attrs) -> str:
    """The decomposition of torch.floor_divide.

    For floats it is (a - mod(a, b)) / b as a whole number, which the floor of a rounded a / b may miss. A result of 0
    has the sign of a / b. The remainder is infinite only for a finite a and an infinite b of the other sign.
    For integers, a - mod(a, b) may not fit the dtype. A negative quotient with a remainder is reduced by 1 instead.
    """
    rest, quotient = "Mod(input, other)", "Divide(input, other)"
    if p["dtype"] in INTEGER:
        if p["dtype"] not in SIGNED:
            return quotient
        less = f"Select(Equal(Mod(input, other, fmod=1), 0), {quotient}, Subtract({quotient}, 1))"
        return f"Select(Equal(Less(input, 0), Less(other, 0)), {quotient}, {less})"
    whole = f"Divide(Subtract(input, {rest}), other)"
    rounded = f"Select(Equal(Round({whole}), 0), Multiply({quotient}, 0), Round({whole}))"
    return f"Select(Equal(other, 0), {quotient}, Select(IsInf({rest}), -1, {rounded}))"


def _truncated(p: Attrs) -> str:
    return "Divide(input, other)" if p["dtype"] in INTEGER else "Trunc(Divide(input, other))"


ADD = pointwise(
    "Add",
    "y = a + b. Integers wrap.",
    inputs=MIXED_INPUTS,
    outputs=MIXED_OUTPUT,
    types=_MIXED,
    attrs=(AUTO_BROADCAST,),
    reference=lambda a, b: a + b,
    expression="og::add({src_0}, {src_1})",
    torch=lambda t, a, b: a + b,
    onnx=(Onnx(op_type="Add", since=7),),
    commutative=True,
    torch_calls=(
        TorchCall(
            "add(input, other, alpha=1)",
            lambda p: "Add(input, other)" if p["alpha"] == 1 else "Add(input, Multiply(other, $alpha))",
            rounds_numbers=True,
        ),
    ),
    source="oneDNN Graph Add",
    check=meets_in_f32,
    gradient={"src_0": "d", "src_1": "d"},
)

SUBTRACT = pointwise(
    "Subtract",
    "y = a - b. Integers wrap.",
    inputs=MIXED_INPUTS,
    outputs=MIXED_OUTPUT,
    types=_MIXED,
    attrs=(AUTO_BROADCAST,),
    reference=lambda a, b: a - b,
    expression="og::sub({src_0}, {src_1})",
    torch=lambda t, a, b: a - b,
    onnx=(Onnx(op_type="Sub", since=7),),
    torch_calls=(
        TorchCall(
            "sub|subtract(input, other, alpha=1)",
            lambda p: "Subtract(input, other)" if p["alpha"] == 1 else "Subtract(input, Multiply(other, $alpha))",
            rounds_numbers=True,
        ),
        TorchCall(
            "rsub(input, other, alpha=1)",
            lambda p: "Subtract(other, input)" if p["alpha"] == 1 else "Subtract(other, Multiply(input, $alpha))",
            rounds_numbers=True,
        ),
    ),
    source="oneDNN Graph Subtract",
    check=meets_in_f32,
    gradient={"src_0": "d", "src_1": "Neg(d)"},
)

MULTIPLY = pointwise(
    "Multiply",
    "y = a b. Integers wrap.",
    inputs=MIXED_INPUTS,
    outputs=MIXED_OUTPUT,
    types=_MIXED,
    attrs=(AUTO_BROADCAST,),
    reference=lambda a, b: a * b,
    expression="og::mul({src_0}, {src_1})",
    torch=lambda t, a, b: a * b,
    onnx=(Onnx(op_type="Mul", since=7),),
    commutative=True,
    torch_calls=(TorchCall("mul|multiply(input, other)"),),
    source="oneDNN Graph Multiply",
    check=meets_in_f32,
    gradient={"src_0": "Multiply(d, src_1)", "src_1": "Multiply(d, src_0)"},
)

DIVIDE = pointwise(
    "Divide",
    "y = a / b. Integers truncate toward zero as in ONNX; an integer x / 0 is 0.",
    inputs=MIXED_INPUTS,
    outputs=MIXED_OUTPUT,
    types=_MIXED,
    attrs=(AUTO_BROADCAST,),
    reference=lambda a, b: integers.divide(a, b) if integers.is_integer(a) else a / b,
    expression="og::div({src_0}, {src_1})",
    torch=lambda t, a, b: a / b if a.dtype.is_floating_point else integers.torch_divide(t, a, b),
    onnx=(Onnx(op_type="Div", since=7, note="an integer x / 0 is undefined"),),
    cost=8,
    domain=((-4, 4), (0.25, 4)),
    torch_calls=(
        TorchCall(
            "div|divide|true_divide(input, other, rounding_mode=None)",
            lambda p: {None: "Divide(input, other)", "floor": floor_divide(p), "trunc": _truncated(p)}[
                p["rounding_mode"]
            ],
            widens=lambda p: p["rounding_mode"] == "floor",  # Mod would round a Python number to 16 bits
        ),
        TorchCall("floor_divide(input, other)", lambda p: floor_divide(p), widens=lambda p: True),
    ),
    source="oneDNN Graph Divide",
    check=meets_in_f32,
    gradient={"src_0": "Divide(d, src_1)", "src_1": "Neg(Multiply(Divide(d, src_1), dst))"},
)

SQUARED_DIFFERENCE = pointwise(
    "SquaredDifference",
    "y = (a - b)^2. Integers wrap.",
    inputs=SAME_INPUTS,
    types=NUMERIC,
    attrs=(AUTO_BROADCAST,),
    reference=lambda a, b: np.square(a - b),
    expression="og::squared_difference({src_0}, {src_1})",
    torch=lambda t, a, b: t.square(a - b),
    decomposition="Multiply(Subtract(src_0, src_1), Subtract(src_0, src_1))",
    cost=2,
    source="oneDNN Graph SquaredDifference",
    gradient={
        "src_0": "Multiply(Multiply(d, 2), Subtract(src_0, src_1))",
        "src_1": "Multiply(Multiply(d, -2), Subtract(src_0, src_1))",
    },
)

MOD = pointwise(
    "Mod",
    "The remainder of a / b: with the sign of b (fmod=0, Python's %), or with the sign of a (fmod=1, C's fmod). An "
    "integer x mod 0 is 0.",
    inputs=SAME_INPUTS,
    types=NUMERIC,
    attrs=(Attr(name="fmod", type="s64", default=0), AUTO_BROADCAST),
    reference=lambda a, b, fmod: np.fmod(a, b) if fmod else np.mod(a, b),
    expression=lambda attrs, given: f"og::{'fmod' if attrs['fmod'] else 'mod'}({{src_0}}, {{src_1}})",
    torch=lambda t, a, b, fmod: _torch_mod(t, t.fmod if fmod else t.remainder, a, b),
    onnx=(
        Onnx(op_type="Mod", since=10, attrs={"fmod": "fmod"}, when={"fmod": 0}, dtypes=INTEGER),
        Onnx(op_type="Mod", since=10, attrs={"fmod": "fmod"}, when={"fmod": 1}, note="the sign of a zero is open"),
        Onnx(op_type="Mod", since=28, attrs={"fmod": "fmod"}, note="the sign of a zero is open"),
    ),
    decomposition=lambda attrs, given: (
        "Mod(src_0, src_1, fmod=1)" if attrs["fmod"] else "Mod(Add(Mod(src_0, src_1, fmod=1), src_1), src_1, fmod=1)"
    ),
    cost=20,
    domain=((-8, 8), (0.25, 3)),
    torch_calls=(
        TorchCall("remainder(input, other)", "Mod(input, other)"),
        TorchCall("fmod(input, other)", "Mod(input, other, fmod=1)"),
    ),
    source="ONNX Mod",
    gradient={
        "src_0": "d",
        # y = a - b n with a whole number n; a / b alone may give an n that is off by one.
        "src_1": "Neg(Multiply(d, Round(Divide(Subtract(src_0, dst), src_1))))",
    },
)


def _torch_mod(t: Any, operation: Any, a: Any, b: Any) -> Any:
    if a.dtype.is_floating_point:
        return operation(a, b)
    return integers.torch_quotient(t, operation, a, b, t.zeros_like)


def _bias_rule(inputs: tuple[LogicalTensor, ...], attrs: Attrs) -> tuple[Dims, ...]:
    """The shape of src; bias is 1-d, with as many elements as src has channels."""
    src, bias = inputs[0].dims, inputs[1].dims
    if bias is not None and len(bias) != 1:
        raise ShapeMismatch(f"bias has {len(bias)} dimensions", "give a bias of one dimension, or use Add")
    if src is None or bias is None:
        return (src,)
    if len(src) < 2:
        raise ShapeMismatch(f"src has {len(src)} dimensions, no channel axis", "give src two dimensions or more")
    channels = src[1] if attrs["data_format"] == "NCX" else src[-1]
    if isinstance(channels, int) and isinstance(bias[0], int) and channels != bias[0]:
        raise ShapeMismatch(
            f"src has {channels} channels and bias {bias[0]} elements", "set data_format to where the channels are"
        )
    return (src,)


BIAS_ADD = pointwise(
    "BiasAdd",
    "y = src + bias, one bias for each channel: along axis 1 (data_format NCX) or the last (NXC).",
    inputs=("src", "bias"),
    attrs=(DATA_FORMAT,),
    infer=_bias_rule,
    reference=lambda src, bias: src + bias,
    expression="og::add({src}, {bias})",
    torch=lambda t, src, bias: src + bias,
    decomposition="Add(src, bias)",
    source="oneDNN Graph BiasAdd",
    channel_inputs=(1,),
    gradient={"src": "d", "bias": "d"},
)
