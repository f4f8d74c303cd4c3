"""Activations with two pieces: rectifiers and exponential units."""

from __future__ import annotations

from collections.abc import Collection
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
            finite=("negative_slope",),
        ),
    ),
    source="oneDNN Graph LeakyReLU",
    # At 0 the slope is alpha, as in torch.
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
    # At 0 the same as below 0, as in torch and oneDNN.
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
            finite=("alpha",),
        ),
    ),
    source="oneDNN Graph Elu",
    # Not computed from the output: where y is rounded to -alpha, y + alpha is 0 and the gradient is not 0.
    gradient={"src": "EluBackward(src, d, alpha=$alpha, use_dst=false)"},
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


def _celu_backward(attrs: Attrs, given: Collection[str]) -> str:
    """d e^(x / alpha) where x <= 0.

    The exponent is at most 0 for alpha > 0, and at least 0 for alpha < 0. In the latter case the power is computed as
    1 + y / alpha, which avoids the rounding error of a large exponent.
    """
    if attrs["alpha"] < 0:
        below = "Multiply(Add(Divide(Celu(src, alpha=$alpha), $alpha), 1), d)"
    else:
        below = "EluBackward(Neg(Abs(Divide(src, $alpha))), d, alpha=1, use_dst=false)"
    return f"Select(Greater(src, 0), d, {below})"


def _celu_in_parts(attrs: Attrs, given: Collection[str]) -> str:
    """alpha elu(x / alpha) for alpha > 0; only there x / alpha has the sign of x."""
    if attrs["alpha"] > 0:
        return "Multiply(Elu(Divide(src, $alpha), alpha=1), $alpha)"
    return "Select(Greater(src, 0), src, Multiply(Expm1(Divide(src, $alpha)), $alpha))"


CELU = pointwise(
    "Celu",
    "y = x for x > 0, alpha (e^(x / alpha) - 1) otherwise.",
    attrs=(Attr(name="alpha", type="f32", default=1.0),),
    reference=lambda x, alpha: np.where(x > 0, x, alpha * np.expm1(x / alpha)),
    expression="og::celu({src}, {alpha})",
    torch=lambda t, x, alpha: t.where(x > 0, x, alpha * t.expm1(x / alpha)),
    # For alpha < 0 onnxruntime computes another function in f16.
    onnx=(Onnx(op_type="Celu", since=12, attrs={"alpha": "alpha"}, applies=lambda attrs, ndims: attrs["alpha"] > 0),),
    decomposition=_celu_in_parts,
    cost=25,
    torch_calls=(
        TorchCall(
            "celu(input, alpha=1.0, inplace=False)",
            "Celu(input, alpha=$alpha)",
            "Select(Greater(input, 0), input, Multiply(Expm1(Divide(input, $alpha)), $alpha))",
            finite=("alpha",),
        ),
    ),
    source="ONNX Celu",
    gradient={"src": _celu_backward},
)
