"""Exponentials, logarithms, the error function and the gamma family."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from opgraph.ir.opdef import Onnx, TorchCall
from opgraph.ops import reference_math
from opgraph.ops.families import pointwise

EXP = pointwise(
    "Exp",
    "y = e^x.",
    reference=np.exp,
    expression="og::exp({src})",
    torch=lambda t, x: t.exp(x),
    onnx=(Onnx(op_type="Exp", since=6),),
    cost=15,
    domain=((-8, 8),),
    torch_calls=(TorchCall("exp(input)"),),
    source="oneDNN Graph Exp",
    gradient={"src": "Multiply(d, dst)"},
    gradient_from_output="Multiply(d, dst)",
)

EXPM1 = pointwise(
    "Expm1",
    "y = e^x - 1, without cancellation near 0.",
    reference=np.expm1,
    expression="og::expm1({src})",
    torch=lambda t, x: t.expm1(x),
    # tanh(x/2) = (e^x - 1) / (e^x + 1), so e^x - 1 = 2 t / (1 - t): no cancellation where it matters.
    decomposition="Select(Less(Abs(src), 1), Divide(Multiply(Tanh(Multiply(src, 0.5)), 2), "
    "Subtract(1, Tanh(Multiply(src, 0.5)))), Subtract(Exp(src), 1))",
    cost=20,
    domain=((-4, 4),),
    torch_calls=(TorchCall("expm1(input)"),),
    source="C expm1",
    gradient={"src": "Multiply(d, Exp(src))"},
)

LOG = pointwise(
    "Log",
    "y = ln(x); -inf at 0, NaN for negative x.",
    reference=np.log,
    expression="og::log({src})",
    powers=True,
    torch=lambda t, x: t.log(x),
    onnx=(Onnx(op_type="Log", since=6),),
    cost=15,
    domain=((1e-3, 8),),
    torch_calls=(TorchCall("log(input)"),),
    source="oneDNN Graph Log",
    gradient={"src": "Divide(d, src)"},
)

LOG1P = pointwise(
    "Log1p",
    "y = ln(1 + x), without cancellation near 0; -inf at -1, NaN below.",
    reference=np.log1p,
    expression="og::log1p({src})",
    torch=lambda t, x: t.log1p(x),
    # atanh(x / (x + 2)) = ln(1 + x) / 2, which keeps the bits that 1 + x would drop.
    decomposition="Select(Less(Abs(src), 0.5), Multiply(Atanh(Divide(src, Add(src, 2))), 2), Log(Add(src, 1)))",
    cost=20,
    domain=((-0.9, 8),),
    torch_calls=(TorchCall("log1p(input)"),),
    source="C log1p",
    gradient={"src": "Divide(d, Add(src, 1))"},
)

ERF = pointwise(
    "Erf",
    "y = 2 / sqrt(pi) times the integral of exp(-t^2) from 0 to x.",
    reference=reference_math.erf,
    expression="og::erf({src})",
    torch=lambda t, x: t.erf(x),
    onnx=(Onnx(op_type="Erf", since=9),),
    cost=30,
    domain=((-4, 4),),
    torch_calls=(TorchCall("erf(input)"),),
    source="ONNX Erf",
    # 2 / sqrt(pi) e^(-x^2)
    gradient={"src": "Multiply(Multiply(d, 1.1283791670955126), Exp(Neg(Square(src))))"},
)

LGAMMA = pointwise(
    "Lgamma",
    "y = ln |gamma(x)|; inf at 0, -1, -2 and so on.",
    reference=reference_math.lgamma,
    expression="og::lgamma({src})",
    torch=lambda t, x: t.lgamma(x),
    onnx="none: ai.onnx has no function of the gamma family",
    cost=120,
    domain=((0.1, 8),),
    torch_calls=(TorchCall("lgamma|gammaln(input)"),),
    source="C lgamma",
    gradient={"src": "Multiply(d, Digamma(src))"},
)

DIGAMMA = pointwise(
    "Digamma",
    "The derivative of Lgamma. NaN at the poles -1, -2 and so on; -inf at 0 and inf at -0.0.",
    reference=reference_math.digamma,
    expression="og::digamma({src})",
    torch=lambda t, x: t.digamma(x),
    onnx="none: ai.onnx has no function of the gamma family",
    cost=120,
    domain=((0.1, 8),),
    torch_calls=(TorchCall("digamma|psi(input)"),),
    source="torch.digamma",
    gradient={"src": "Multiply(d, Trigamma(src))"},
)

TRIGAMMA = pointwise(
    "Trigamma",
    "The derivative of Digamma; inf at 0, -1, -2 and so on.",
    reference=reference_math.trigamma,
    expression="og::trigamma({src})",
    torch=lambda t, x: _torch_trigamma(t, x),
    onnx="none: ai.onnx has no function of the gamma family",
    cost=150,
    domain=((0.1, 8),),
    torch_calls=(
        TorchCall("polygamma(n, input)", lambda p: {0: "Digamma(input)", 1: "Trigamma(input)"}.get(p["n"], "")),
        TorchCall("Tensor.polygamma(input, n)", lambda p: {0: "Digamma(input)", 1: "Trigamma(input)"}.get(p["n"], "")),
    ),
    source="torch.polygamma(1, x)",
    gradient="its derivative, the polygamma function of order 2, is no op",
)


def _torch_trigamma(t: Any, x: Any) -> Any:
    # torch.polygamma(1, x) is accurate only to 1e-9, and wrong at the poles; zeta supports no f16 and no huge x.
    wide = x if x.dtype in (t.float32, t.float64) else x.float()
    left = wide < 0.5
    folded = t.where(left, 1 - wide, wide)
    direct = t.where(folded > 1e17, 1 / folded, t.special.zeta(2.0, folded))
    reflected = (math.pi / t.sin(math.pi * (wide - t.round(wide)))) ** 2 - direct
    return t.where(t.isneginf(wide), math.nan, t.where(left, reflected, direct)).to(x.dtype)
