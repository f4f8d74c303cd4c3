"""Activations in pieces: rectifiers, exponential units, and the hard forms of the smooth ones."""

from __future__ import annotations

from typing import Any

import numpy as np

from opgraph.ir.logical_tensor import Dims, LogicalTensor
from opgraph.ir.opdef import Attr, Attrs, Onnx, TorchCall
from opgraph.ir.shapes import ShapeMismatch, broadcast, channel_axes
from opgraph.ops.families import DATA_FORMAT, FLOAT, NUMERIC, pointwise


def _zero(x: np.ndarray) -> Any:
    return x.dtype.type(0)


RELU = pointwise(
    "ReLU",
    "y = max(x, 0); NaN stays NaN, and -0.0 too.",
    types=NUMERIC,
    reference=lambda x: np.where(x < 0, _zero(x), x),
    expression="og::relu({src})",
    torch=lambda t, x: t.relu(x),
    onnx=(Onnx(op_type="Relu", since=6),),
    torch_calls=(TorchCall("relu(input, inplace=False)", "ReLU(input)"),),
    source="oneDNN Graph ReLU",
    gradient={"src": "ReLUBackward(src, d, use_dst=false)"},
    gradient_from_output="ReLUBackward(dst, d)",
)

LEAKY_RELU = pointwise(
    "LeakyReLU",
    "y = x for x >= 0, alpha x below.",
    attrs=(Attr(name="alpha", type="f32"),),
    reference=lambda x, alpha: np.where(x < 0, alpha * x, x),
    expression="og::leaky_relu({src}, {alpha})",
    torch=lambda t, x, alpha: t.nn.functional.leaky_relu(x, alpha),
    onnx=(Onnx(op_type="LeakyRelu", since=6, attrs={"alpha": "alpha"}),),
    cost=2,
    torch_calls=(
        TorchCall(
            "leaky_relu(input, negative_slope=0.01, inplace=False)",
            "LeakyReLU(input, alpha=$negative_slope)",
            "Select(Greater(input, 0), input, Multiply(input, $negative_slope))",
        ),
    ),
    source="oneDNN Graph LeakyReLU",
    # At 0 alpha, as in torch.
    gradient={"src": "Select(Greater(src, 0), d, Multiply(d, $alpha))"},
    gradient_from_output=lambda attrs, given: (
        "Select(Greater(dst, 0), d, Multiply(d, $alpha))" if attrs["alpha"] > 0 else ""
    ),
)


def _slope_rule(inputs: tuple[LogicalTensor, ...], attrs: Attrs) -> tuple[Dims, ...]:
    """The shape of src, to which slope must broadcast."""
    src, slope = inputs[0].dims, inputs[1].dims
    if src is not None and slope is not None:
        aligned = (*slope, *[1] * channel_axes(len(slope), len(src), attrs))
        spread = broadcast((src, aligned))
        grown = spread is None or len(spread) != len(src) or any(a == 1 and b != 1 for a, b in zip(src, spread))
        if grown:
            raise ShapeMismatch("slope does not broadcast to the shape of src", "give src the larger shape")
    return (src,)


PRELU = pointwise(
    "PReLU",
    "y = x for x >= 0, slope x below. A 1-d slope lies along the channel axis: axis 1 (data_format NCX) or the last "
    "(NXC); with per_channel_broadcast=false it broadcasts to src as in NumPy, which is ONNX's rule.",
    inputs=("src", "slope"),
    types=FLOAT,
    attrs=(DATA_FORMAT, Attr(name="per_channel_broadcast", type="bool", default=True)),
    infer=_slope_rule,
    reference=lambda x, slope: np.where(x < 0, slope * x, x),
    expression="og::prelu({src}, {slope})",
    torch=lambda t, x, slope: t.where(x < 0, slope * x, x),
    onnx=(Onnx(op_type="PRelu", since=7, when={"per_channel_broadcast": False}),),
    decomposition="Select(Less(src, 0), Multiply(slope, src), src)",
    cost=2,
    torch_calls=(TorchCall("prelu(input, weight)", "PReLU(input, weight, per_channel_broadcast=false)"),),
    source="oneDNN Graph PReLU",
    channel_inputs=(1,),
    # At 0 as below it, as in torch and oneDNN.
    gradient={
        "src": "Select(Greater(src, 0), d, Multiply(d, slope))",
        "slope": "Select(Greater(src, 0), 0, Multiply(d, src))",
    },
)

ELU = pointwise(
    "Elu",
    "y = x for x > 0, alpha (e^x - 1) otherwise.",
    attrs=(Attr(name="alpha", type="f32"),),
    reference=lambda x, alpha: np.where(x > 0, x, alpha * np.expm1(x)),
    expression="og::elu({src}, {alpha})",
    torch=lambda t, x, alpha: t.where(x > 0, x, alpha * t.expm1(x)),
    onnx=(Onnx(op_type="Elu", since=6, attrs={"alpha": "alpha"}),),
    cost=20,
    torch_calls=(
        TorchCall(
            "elu(input, alpha=1.0, inplace=False)",
            "Elu(input, alpha=$alpha)",
            "Select(Greater(input, 0), input, Multiply(Expm1(input), $alpha))",
        ),
    ),
    source="oneDNN Graph Elu",
    gradient={"src": "EluBackward(src, d, alpha=$alpha, use_dst=false)"},
    gradient_from_output=lambda attrs, given: "EluBackward(dst, d, alpha=$alpha)" if attrs["alpha"] >= 0 else "",
)

SELU = pointwise(
    "Selu",
    "y = gamma x for x > 0, gamma alpha (e^x - 1) otherwise.",
    attrs=(
        Attr(name="alpha", type="f32", default=1.67326319217681884765625),
        Attr(name="gamma", type="f32", default=1.05070102214813232421875),
    ),
    reference=lambda x, alpha, gamma: gamma * np.where(x > 0, x, alpha * np.expm1(x)),
    expression="og::selu({src}, {alpha}, {gamma})",
    torch=lambda t, x, alpha, gamma: gamma * t.where(x > 0, x, alpha * t.expm1(x)),
    onnx=(Onnx(op_type="Selu", since=6, attrs={"alpha": "alpha", "gamma": "gamma"}),),
    cost=20,
    torch_calls=(
        TorchCall(
            "selu(input, inplace=False)",
            lambda p: (
                "Selu(input)"
                if p["dtype"] != "f64"
                else "Multiply(Select(Greater(input, 0), input, Multiply(Expm1(input), 1.6732632423543772)), "
                "1.0507009873554805)"
            ),
        ),
    ),
    source="ONNX Selu",
    gradient={"src": "Multiply(EluBackward(src, d, alpha=$alpha, use_dst=false), $gamma)"},
)

CELU = pointwise(
    "Celu",
    "y = x for x > 0, alpha (e^(x / alpha) - 1) otherwise.",
    attrs=(Attr(name="alpha", type="f32", default=1.0),),
    reference=lambda x, alpha: np.where(x > 0, x, alpha * np.expm1(x / alpha)),
    expression="og::celu({src}, {alpha})",
    torch=lambda t, x, alpha: t.where(x > 0, x, alpha * t.expm1(x / alpha)),
    onnx=(Onnx(op_type="Celu", since=12, attrs={"alpha": "alpha"}),),
    decomposition="Multiply(Elu(Divide(src, $alpha), alpha=1), $alpha)",
    cost=25,
    torch_calls=(
        TorchCall(
            "celu(input, alpha=1.0, inplace=False)",
            "Celu(input, alpha=$alpha)",
            "Select(Greater(input, 0), input, Multiply(Expm1(Divide(input, $alpha)), $alpha))",
        ),
    ),
    source="ONNX Celu",
    gradient={
        "src": "Select(Greater(src, 0), d, EluBackward(Neg(Abs(Divide(src, $alpha))), d, alpha=1, use_dst=false))"
    },
)

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
                if p["dtype"] != "f64"
                else "Divide(Clamp(Add(input, 3), min=0.0, max=6.0), 6)"
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

THRESHOLDED_RELU = pointwise(
    "ThresholdedRelu",
    "y = x for x > alpha, 0 otherwise; NaN stays NaN.",
    attrs=(Attr(name="alpha", type="f32", default=1.0),),
    reference=lambda x, alpha: np.where(x <= alpha, _zero(x), x),
    expression="og::thresholded_relu({src}, {alpha})",
    torch=lambda t, x, alpha: t.where(x <= alpha, t.zeros_like(x), x),
    onnx=(Onnx(op_type="ThresholdedRelu", since=10, attrs={"alpha": "alpha"}, note="its NaN becomes 0"),),
    cost=2,
    torch_calls=(
        TorchCall(
            "threshold(input, threshold, value, inplace=False)",
            lambda p: (
                "ThresholdedRelu(input, alpha=$threshold)"
                if p["value"] == 0
                else "Select(LessOrEqual(input, $threshold), $value, input)"
            ),
            "Select(LessOrEqual(input, $threshold), $value, input)",
        ),
    ),
    source="ONNX ThresholdedRelu",
    # The difference, not alpha itself, is compared: alpha need not be a number of the dtype.
    gradient={"src": "Select(LessOrEqual(Subtract(src, $alpha), 0), 0, d)"},
)

SHRINK = pointwise(
    "Shrink",
    "y = x + bias for x < -lambd, x - bias for x > lambd, 0 in between; NaN stays NaN.",
    attrs=(Attr(name="bias", type="f32", default=0.0), Attr(name="lambd", type="f32", default=0.5)),
    reference=lambda x, bias, lambd: np.where(x < -lambd, x + bias, np.where(np.abs(x) <= lambd, _zero(x), x - bias)),
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
            "Select(Less(Neg(input), $lambd), Multiply(input, 0), Add(input, $lambd)))",
        ),
        TorchCall(
            "hardshrink(input, lambd=0.5)",
            "Shrink(input, lambd=$lambd)",
            "Select(LessOrEqual(Abs(input), $lambd), 0, input)",
        ),
    ),
    source="ONNX Shrink",
    # The difference, not lambd itself, is compared: lambd need not be a number of the dtype.
    gradient={"src": "Select(LessOrEqual(Subtract(Abs(src), $lambd), 0), 0, d)"},
)
