"""Piecewise activations: the hard forms of smooth ones, and thresholds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from opgraph.ir.opdef import Attr, Onnx, TorchCall
from opgraph.ops.families import pointwise
from opgraph.ops.minmax import between

HARD_SIGMOID = pointwise(
    "HardSigmoid",
    "y = max(0, min(1, alpha x + beta)).",
    attrs=(Attr(name="alpha", type="f32"), Attr(name="beta", type="f32")),
    reference=lambda x, alpha, beta: np.maximum(0, np.minimum(1, alpha * x + beta)),
    expression="og::hard_sigmoid({src}, {alpha}, {beta})",
    torch=lambda t, x, alpha, beta: t.clamp(alpha * x + beta, 0, 1),
    onnx=(Onnx(op_type="HardSigmoid", since=6, attrs={"alpha": "alpha", "beta": "beta"}),),
    cost=4,
    torch_calls=(
        TorchCall(
            "hardsigmoid(input, inplace=False)",
            lambda p: (
                "HardSigmoid(input, alpha=0.16666667, beta=0.5)"
                if p["dtype"] in ("f16", "bf16")  # 1/6 in f32 is not accurate enough for f32 results near 0
                else f"Divide({between('Add(input, 3)', '0', '6', nan_counts=False)}, 6)"
            ),
        ),
    ),
    source="oneDNN Graph HardSigmoid",
    gradient={"src": "HardSigmoidBackward(src, d, alpha=$alpha, beta=$beta)"},
)

HARD_SWISH = pointwise(
    "HardSwish",
    "y = x min(max(x + 3, 0), 6) / 6; -0 at -inf, the limit.",
    reference=lambda x: np.where(x < 3, np.maximum(x, -3) * np.minimum(np.maximum(x + 3, 0), 6) / 6, x),
    expression="og::hard_swish({src})",
    torch=lambda t, x: t.nn.functional.hardswish(x),
    onnx=(Onnx(op_type="HardSwish", since=14),),
    decomposition="Divide(Multiply(src, Minimum(Maximum(Add(src, 3), 0), 6)), 6)",
    cost=6,
    domain=((-5, 5),),
    torch_calls=(TorchCall("hardswish(input, inplace=False)", "HardSwish(input)"),),
    source="oneDNN Graph HardSwish",
    gradient={"src": "HardSwishBackward(src, d)"},
)


def _at_most(x: str, end: str, value: float) -> str:
    """x <= end, by the sign of the difference: the dtype need not hold the end or the difference exactly.

    An infinite end is compared directly: every dtype holds it, and its difference from itself is NaN.
    """
    return f"LessOrEqual({x}, {end})" if math.isinf(value) else f"LessOrEqual(Sign(Subtract({x}, {end})), 0)"


def _threshold(p: Mapping[str, Any]) -> str:
    """torch.threshold; a 16-bit dtype need not hold the threshold exactly."""
    narrow = p["dtype"] in ("bf16", "f16")
    below = _at_most("input", "$threshold", p["threshold"]) if narrow else "LessOrEqual(input, $threshold)"
    return f"Select({below}, $value, input)"


THRESHOLDED_RELU = pointwise(
    "ThresholdedRelu",
    "y = x for x > alpha, 0 otherwise; NaN stays NaN.",
    attrs=(Attr(name="alpha", type="f32", default=1.0),),
    reference=lambda x, alpha: np.where(x <= alpha, x.dtype.type(0), x),
    expression="og::thresholded_relu({src}, {alpha})",
    torch=lambda t, x, alpha: t.where(x <= alpha, t.zeros_like(x), x),
    onnx=(Onnx(op_type="ThresholdedRelu", since=10, attrs={"alpha": "alpha"}, note="its NaN becomes 0"),),
    cost=2,
    torch_calls=(
        TorchCall(
            "threshold(input, threshold, value, inplace=False)",
            lambda p: (
                ""
                if math.isnan(p["threshold"])
                else "ThresholdedRelu(input, alpha=$threshold)"
                if p["value"] == 0
                else _threshold(p)
            ),
            _threshold,
        ),
    ),
    source="ONNX ThresholdedRelu",
    gradient={"src": lambda attrs, given: f"Select({_at_most('src', '$alpha', attrs['alpha'])}, 0, d)"},
)

SHRINK = pointwise(
    "Shrink",
    "y = x + bias for x < -lambd, x - bias for x > lambd, 0 in between; NaN stays NaN.",
    attrs=(Attr(name="bias", type="f32", default=0.0), Attr(name="lambd", type="f32", default=0.5)),
    reference=lambda x, bias, lambd: np.where(
        x < -lambd, x + bias, np.where(np.abs(x) <= lambd, x.dtype.type(0), x - bias)
    ),
    expression="og::shrink({src}, {bias}, {lambd})",
    torch=lambda t, x, bias, lambd: t.where(
        x < -lambd, x + bias, t.where(t.abs(x) <= lambd, t.zeros_like(x), x - bias)
    ),
    onnx=(Onnx(op_type="Shrink", since=9, attrs={"bias": "bias", "lambd": "lambd"}, note="its NaN becomes 0"),),
    cost=4,
    torch_calls=(
        TorchCall(
            "softshrink(input, lambd=0.5)",
            "Shrink(input, bias=$lambd, lambd=$lambd)",
            "Select(Greater(input, $lambd), Subtract(input, $lambd), "
            "Select(LessOrEqual(Neg(input), $lambd), Multiply(input, 0), Add(input, $lambd)))",
        ),
        TorchCall(
            "hardshrink(input, lambd=0.5)",
            lambda p: "" if math.isnan(p["lambd"]) else "Shrink(input, lambd=$lambd)",
            "Select(LessOrEqual(Abs(input), $lambd), 0, input)",
        ),
    ),
    source="ONNX Shrink",
    gradient={"src": lambda attrs, given: f"Select({_at_most('Abs(src)', '$lambd', attrs['lambd'])}, 0, d)"},
)
