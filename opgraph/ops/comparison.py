"""Comparisons, tests for NaN and infinity, and Select."""

from __future__ import annotations

import numpy as np

from opgraph.ir.opdef import Attr, Onnx, Port, TorchCall
from opgraph.ops.families import ANY, AUTO_BROADCAST, FLOAT, NUMERIC, pointwise

#: Two inputs of one dtype; the output is boolean.
_PAIR = (Port(name="src_0", type="T1"), Port(name="src_1", type="T1"))
_TRUTH = (Port(name="dst", type="boolean"),)

EQUAL = pointwise(
    "Equal",
    "y = (a == b); false if either is NaN.",
    inputs=_PAIR,
    outputs=_TRUTH,
    types={"T1": ANY},
    attrs=(AUTO_BROADCAST,),
    reference=np.equal,
    expression="og::eq({src_0}, {src_1})",
    torch=lambda t, a, b: a == b,
    onnx=(Onnx(op_type="Equal", since=7),),
    commutative=True,
    torch_calls=(TorchCall("eq(input, other)"),),
    source="ONNX Equal",
)

NOT_EQUAL = pointwise(
    "NotEqual",
    "y = (a != b); true if either is NaN.",
    inputs=_PAIR,
    outputs=_TRUTH,
    types={"T1": ANY},
    attrs=(AUTO_BROADCAST,),
    reference=np.not_equal,
    expression="og::ne({src_0}, {src_1})",
    torch=lambda t, a, b: a != b,
    decomposition="Not(Equal(src_0, src_1))",
    commutative=True,
    torch_calls=(TorchCall("ne|not_equal(input, other)"),),
    source="IEEE 754",
)

GREATER = pointwise(
    "Greater",
    "y = (a > b); false if either is NaN.",
    inputs=_PAIR,
    outputs=_TRUTH,
    types={"T1": NUMERIC},
    attrs=(AUTO_BROADCAST,),
    reference=np.greater,
    expression="og::gt({src_0}, {src_1})",
    torch=lambda t, a, b: a > b,
    onnx=(Onnx(op_type="Greater", since=7),),
    torch_calls=(TorchCall("gt|greater(input, other)"),),
    source="ONNX Greater",
)

GREATER_EQUAL = pointwise(
    "GreaterEqual",
    "y = (a >= b); false if either is NaN.",
    inputs=_PAIR,
    outputs=_TRUTH,
    types={"T1": NUMERIC},
    attrs=(AUTO_BROADCAST,),
    reference=np.greater_equal,
    expression="og::ge({src_0}, {src_1})",
    torch=lambda t, a, b: a >= b,
    onnx=(Onnx(op_type="GreaterOrEqual", since=12),),
    decomposition="Or(Greater(src_0, src_1), Equal(src_0, src_1))",
    torch_calls=(TorchCall("ge|greater_equal(input, other)"),),
    source="oneDNN Graph GreaterEqual",
)

LESS = pointwise(
    "Less",
    "y = (a < b); false if either is NaN.",
    inputs=_PAIR,
    outputs=_TRUTH,
    types={"T1": NUMERIC},
    attrs=(AUTO_BROADCAST,),
    reference=np.less,
    expression="og::lt({src_0}, {src_1})",
    torch=lambda t, a, b: a < b,
    onnx=(Onnx(op_type="Less", since=7),),
    torch_calls=(TorchCall("lt|less(input, other)"),),
    source="ONNX Less",
)

LESS_OR_EQUAL = pointwise(
    "LessOrEqual",
    "y = (a <= b); false if either is NaN.",
    inputs=_PAIR,
    outputs=_TRUTH,
    types={"T1": NUMERIC},
    attrs=(AUTO_BROADCAST,),
    reference=np.less_equal,
    expression="og::le({src_0}, {src_1})",
    torch=lambda t, a, b: a <= b,
    onnx=(Onnx(op_type="LessOrEqual", since=12),),
    decomposition="Or(Less(src_0, src_1), Equal(src_0, src_1))",
    torch_calls=(TorchCall("le|less_equal(input, other)"),),
    source="ONNX LessOrEqual",
)

IS_NAN = pointwise(
    "IsNaN",
    "Whether x is NaN.",
    inputs=(Port(name="src", type="T1"),),
    outputs=_TRUTH,
    types={"T1": FLOAT},
    reference=np.isnan,
    expression="og::isnan({src})",
    torch=lambda t, x: t.isnan(x),
    onnx=(Onnx(op_type="IsNaN", since=9),),
    torch_calls=(TorchCall("isnan(input)"),),
    source="ONNX IsNaN",
)

IS_INF = pointwise(
    "IsInf",
    "Whether x is -inf (if detect_negative) or inf (if detect_positive).",
    inputs=(Port(name="src", type="T1"),),
    outputs=_TRUTH,
    types={"T1": FLOAT},
    attrs=(
        Attr(name="detect_negative", type="bool", default=True),
        Attr(name="detect_positive", type="bool", default=True),
    ),
    reference=lambda x, detect_negative, detect_positive: (
        ((x == -np.inf) & detect_negative) | ((x == np.inf) & detect_positive)
    ),
    expression="og::isinf({src}, {detect_negative}, {detect_positive})",
    torch=lambda t, x, detect_negative, detect_positive: (
        (t.isneginf(x) & detect_negative) | (t.isposinf(x) & detect_positive)
    ),
    onnx=(
        Onnx(
            op_type="IsInf",
            since=10,
            attrs={"detect_negative": "detect_negative", "detect_positive": "detect_positive"},
        ),
    ),
    cost=3,
    torch_calls=(
        TorchCall("isinf(input)", "IsInf(input)"),
        TorchCall("isposinf(input)", "IsInf(input, detect_negative=false)"),
        TorchCall("isneginf(input)", "IsInf(input, detect_positive=false)"),
    ),
    source="ONNX IsInf",
)

SELECT = pointwise(
    "Select",
    "y = src_0 where cond, else src_1. The three broadcast together; a NaN that is not chosen does not count.",
    inputs=(Port(name="cond", type="boolean"), Port(name="src_0", type="T2"), Port(name="src_1", type="T2")),
    outputs=(Port(name="dst", type="T2"),),
    types={"T2": ANY},
    attrs=(AUTO_BROADCAST,),
    reference=np.where,
    expression="og::select({cond}, {src_0}, {src_1})",
    torch=lambda t, cond, a, b: t.where(cond, a, b),
    onnx=(Onnx(op_type="Where", since=9),),
    torch_calls=(
        TorchCall("where(condition, input, other)"),
        TorchCall("Tensor.where(input, condition, other)", "Select(condition, input, other)"),
        TorchCall("masked_fill(input, mask, value)", "Select(mask, value, input)"),
    ),
    source="oneDNN Graph Select",
    gradient={"src_0": "Select(cond, d, 0)", "src_1": "Select(cond, 0, d)"},
)
