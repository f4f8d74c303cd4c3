"""Smooth activations: the logistic family, and products of an input with one of its functions."""

from __future__ import annotations

from typing import Any

import numpy as np

from opgraph.ir.opdef import Attr, Onnx, Port, TorchCall
from opgraph.ops import reference_math
from opgraph.ops.families import pointwise

#: Compares by the sign of the difference, because f16 or bf16 may not hold the product exactly (`opgraph.loops.lower`).
_BEYOND = "Greater(Sign(Subtract(Multiply(input, $beta), $threshold)), 0)"

SIGMOID = pointwise(
    "Sigmoid",
    "y = 1 / (1 + exp(-alpha x)). alpha is the factor of oneDNN's Swish RFC, first extension route; oneDNN has no such "
    "attribute.",
    attrs=(Attr(name="alpha", type="f32", default=1.0),),
    reference=lambda x, alpha: reference_math.sigmoid(*reference_math.product(alpha, x)),
    expression=lambda attrs, given: "og::sigmoid({src})" if attrs["alpha"] == 1 else "og::sigmoid({src}, {alpha})",
    torch=lambda t, x, alpha: t.sigmoid(alpha * x if alpha != 1 else x),
    onnx=(Onnx(op_type="Sigmoid", since=6, when={"alpha": 1.0}),),
    decomposition="Sigmoid(Multiply(src, $alpha))",
    cost=20,
    domain=((-8, 8),),
    torch_calls=(TorchCall("sigmoid|expit(input)"),),
    source="oneDNN Graph Sigmoid",
    gradient={"src": "SigmoidBackward(src, d, alpha=$alpha, use_dst=false)"},
    gradient_from_output="SigmoidBackward(dst, d, alpha=$alpha)",
)

SWISH = pointwise(
    "Swish",
    "y = x sigmoid(alpha factor x), factor 1 where it is not given. swish(-inf) is -0 for alpha > 0, the limit, where "
    "the product of the two parts would be NaN. Where alpha factor is 0, y = x / 2, at infinity too.",
    inputs=("src", Port(name="factor", optional=True)),
    attrs=(Attr(name="alpha", type="f32", default=1.0),),
    reference=lambda x, factor=None, *, alpha: reference_math.swish(x, alpha, factor),
    expression=lambda attrs, given: (
        ("og::swish({src})" if attrs["alpha"] == 1 else "og::swish({src}, {alpha})")
        if "factor" not in given
        else "og::swish({src}, {factor})"
        if attrs["alpha"] == 1
        else "og::swish({src}, {factor}, {alpha})"
    ),
    torch=lambda t, x, factor=None, alpha=1.0: (
        t.nn.functional.silu(x) if factor is None and alpha == 1 else _torch_swish(t, x, factor, alpha)
    ),
    onnx=(Onnx(op_type="Swish", since=24, attrs={"alpha": "alpha"}, inputs=("src",), note="its Swish(-inf) is NaN"),),
    decomposition=lambda attrs, given: (
        "Multiply(src, Sigmoid(Multiply(Multiply(src, factor), $alpha)))"
        if "factor" in given and attrs["alpha"] != 1
        else "Multiply(src, Sigmoid(Multiply(src, factor)))"
        if "factor" in given
        else "Multiply(src, Sigmoid(Multiply(src, $alpha)))"
        if attrs["alpha"] != 1
        else "Multiply(src, Sigmoid(src))"
    ),
    cost=20,
    domain=((-8, 8), (0.5, 2)),
    torch_calls=(TorchCall("silu(input, inplace=False)", "Swish(input)"),),
    source="oneDNN RFC 20241008-graph-api-swish, option 2; ONNX Swish",
    gradient={
        "src": lambda attrs, given: f"SwishBackward(src, d{', factor' if 'factor' in given else ''}, alpha=$alpha)",
        # alpha x^2 s'(alpha factor x), and its limit at infinity.
        "factor": "Select(IsInf(src), 0, "
        "Multiply(Multiply(SigmoidBackward(Multiply(src, factor), d, alpha=$alpha, use_dst=false), src), src))",
    },
)


def _torch_swish(t: Any, x: Any, factor: Any, alpha: float) -> Any:
    scaled = x * alpha if factor is None else (x * factor if alpha == 1 else x * factor * alpha)
    return x * t.sigmoid(scaled)


GELU = pointwise(
    "GELU",
    "y = x/2 (1 + erf(x / sqrt 2)), or with mode gelu_tanh: y = x/2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))). -0 at "
    "-inf, the limit.",
    attrs=(Attr(name="mode", type="string", default="gelu_erf", choices=("gelu_erf", "gelu_tanh")),),
    reference=lambda x, mode: reference_math.gelu_erf(x) if mode == "gelu_erf" else reference_math.gelu_tanh(x),
    expression=lambda attrs, given: f"og::{attrs['mode']}({{src}})",
    torch=lambda t, x, mode: t.nn.functional.gelu(x, approximate="none" if mode == "gelu_erf" else "tanh"),
    onnx=(
        Onnx(op_type="Gelu", since=20, fixed={"approximate": "none"}, when={"mode": "gelu_erf"}),
        Onnx(op_type="Gelu", since=20, fixed={"approximate": "tanh"}, when={"mode": "gelu_tanh"}),
    ),
    decomposition=lambda attrs, given: (
        "Multiply(Multiply(src, 0.5), Add(Erf(Multiply(src, 0.70710678118654752)), 1))"
        if attrs["mode"] == "gelu_erf"
        else "Multiply(src, Sigmoid(Multiply(Add(src, Multiply(Multiply(src, Multiply(src, src)), 0.044715)), "
        "1.5957691216057308)))"
    ),
    cost=35,
    domain=((-5, 5),),
    torch_calls=(
        TorchCall(
            "gelu(input, approximate='none')",
            lambda p: f"GELU(input, mode={'gelu_tanh' if p['approximate'] == 'tanh' else 'gelu_erf'})",
        ),
    ),
    source="oneDNN Graph GELU; Hendrycks and Gimpel, arXiv 1606.08415",
    gradient={"src": "GELUBackward(src, d, mode=$mode)"},
)

MISH = pointwise(
    "Mish",
    "y = x tanh(ln(1 + e^x)); -0 at -inf, the limit.",
    reference=reference_math.mish,
    expression="og::mish({src})",
    torch=lambda t, x: t.nn.functional.mish(x),
    onnx=(Onnx(op_type="Mish", since=18),),
    decomposition="Multiply(src, Tanh(SoftPlus(src)))",
    cost=25,
    domain=((-8, 8),),
    torch_calls=(TorchCall("mish(input, inplace=False)", "Mish(input)"),),
    source="oneDNN Graph Mish; Misra, arXiv 1908.08681",
    gradient={"src": "MishBackward(src, d)"},
)

SOFT_PLUS = pointwise(
    "SoftPlus",
    "y = ln(1 + e^(beta x)) / beta.",
    attrs=(Attr(name="beta", type="f32", default=1.0),),
    reference=lambda x, beta: reference_math.softplus(*reference_math.product(beta, x)) / beta,
    expression="og::softplus({src}, {beta})",
    # torch's default threshold of 20 would return x where e^-20 still matters; beyond these, the power overflows.
    torch=lambda t, x, beta: t.nn.functional.softplus(x, beta, threshold=700.0 if x.dtype == t.float64 else 80.0),
    onnx=(Onnx(op_type="Softplus", since=1, when={"beta": 1.0}),),
    decomposition="Divide(SoftPlus(Multiply(src, $beta)), $beta)",
    cost=30,
    domain=((-8, 8),),
    torch_calls=(
        TorchCall(
            "softplus(input, beta=1.0, threshold=20.0)",
            # Beyond a threshold of 20 the two differ by 2e-9, which is below the precision of f32.
            lambda p: (
                "SoftPlus(input, beta=$beta)"
                if p["threshold"] >= 20 and p["dtype"] != "f64"
                else f"Select({_BEYOND}, input, SoftPlus(input, beta=$beta))"
            ),
            f"Select({_BEYOND}, input, Divide(SoftPlus(Multiply(input, $beta)), $beta))",
            finite=("beta", "threshold"),
        ),
    ),
    source="oneDNN Graph SoftPlus",
    # Not computed from the output as 1 - e^-y: in f16 that is 0 for x < -17, where the gradient is not 0.
    gradient={"src": "SoftPlusBackward(src, d, beta=$beta)"},
)

SOFTSIGN = pointwise(
    "Softsign",
    "y = x / (1 + |x|).",
    reference=lambda x: np.where(np.isinf(x), np.sign(x), x / (1 + np.abs(x))),
    expression="og::softsign({src})",
    torch=lambda t, x: t.nn.functional.softsign(x),
    onnx=(Onnx(op_type="Softsign", since=1, note="it is NaN at infinity"),),
    cost=10,
    torch_calls=(TorchCall("softsign(input)"),),
    source="ONNX Softsign",
    gradient={"src": "Divide(Divide(d, Add(Abs(src), 1)), Add(Abs(src), 1))"},
)
