"""Special functions in double precision: the normal distribution's tail and quantiles, modified Bessel functions."""

from __future__ import annotations

from typing import Any

from opgraph.ir.opdef import TorchCall
from opgraph.ops import reference_math
from opgraph.ops.families import pointwise

_NO_ONNX = "none: ai.onnx has no such function"


def _wide(t: Any, x: Any) -> Any:
    """Converts x to a dtype for which torch has kernels of these functions."""
    return x.float() if x.dtype in (t.float16, t.bfloat16) else x


ERFC = pointwise(
    "Erfc",
    "y = 1 - erf(x), without cancellation for positive x.",
    reference=reference_math.erfc,
    expression="og::erfc({src})",
    torch=lambda t, x: t.erfc(x),
    # x/2 erfc(-x / sqrt 2) is GELU, which keeps the tail that 1 - erf(x) loses.
    decomposition="Select(Greater(src, 0.5), Divide(Multiply(GELU(Multiply(src, -1.4142135623730951)), "
    "-1.4142135623730951), src), Subtract(1, Erf(src)))",
    cost=60,
    domain=((-4, 10),),
    torch_calls=(
        TorchCall("erfc(input)"),
        TorchCall("ndtr(input)", "Multiply(Erfc(Multiply(input, -0.7071067811865476)), 0.5)"),
    ),
    source="C erfc",
    # -2 / sqrt(pi) e^(-x^2)
    gradient={"src": "Multiply(Multiply(d, -1.1283791670955126), Exp(Neg(Square(src))))"},
)

ERFCX = pointwise(
    "Erfcx",
    "y = e^(x^2) erfc(x): neither factor overflows or vanishes by itself.",
    reference=reference_math.erfcx,
    expression="og::erfcx({src})",
    torch=lambda t, x: t.special.erfcx(_wide(t, x)).to(x.dtype),
    onnx=_NO_ONNX,
    cost=80,
    domain=((-2, 10),),
    source="torch.special.erfcx",
    gradient="its derivative, 2 x y - 2 / sqrt(pi), is 0 for large x in rounded numbers, and no op",
)

LOG_NDTR = pointwise(
    "LogNdtr",
    "y = ln Phi(x), the logarithm of the normal distribution function; finite where Phi(x) underflows.",
    reference=reference_math.log_ndtr,
    expression="og::log_ndtr({src})",
    torch=lambda t, x: t.special.log_ndtr(_wide(t, x)).to(x.dtype),
    onnx=_NO_ONNX,
    cost=120,
    domain=((-10, 4),),
    torch_calls=(TorchCall("log_ndtr(input)"),),
    source="torch.special.log_ndtr",
    # phi(x) / Phi(x) = sqrt(2 / pi) / erfcx(-x / sqrt 2), which is -x where erfcx may be subnormal.
    gradient={
        "src": "Select(Less(src, -1e10), Neg(Multiply(d, src)), "
        "Divide(Multiply(d, 0.7978845608028654), Erfcx(Multiply(src, -0.7071067811865476))))",
    },
)

ERFINV = pointwise(
    "Erfinv",
    "The x with erf(x) = src; infinite at 1 and -1, NaN beyond.",
    reference=reference_math.erfinv,
    expression="og::erfinv({src})",
    torch=lambda t, x: t.erfinv(x),
    onnx=_NO_ONNX,
    cost=300,
    domain=((-0.99, 0.99),),
    torch_calls=(TorchCall("erfinv(input)"),),
    source="torch.erfinv; Abramowitz and Stegun 26.2.23, with Halley's steps",
    # sqrt(pi) / 2 e^(y^2), y the result. The rounding error of y would grow with y^2. From 1/2 on it is therefore
    # computed as erfcx(y) / erfc(y), where erfc(y) follows from the argument.
    gradient={
        "src": "Multiply(Multiply(d, 0.886226925452758), Select(And(Less(Abs(src), 1), GreaterEqual(Abs(src), 0.5)), "
        "Divide(Erfcx(Abs(dst)), Subtract(1, Abs(src))), Exp(Square(dst))))",
    },
)

NDTRI = pointwise(
    "Ndtri",
    "The x with Phi(x) = src, the quantile of the normal distribution; -inf at 0, inf at 1, NaN beyond.",
    reference=reference_math.ndtri,
    expression="og::ndtri({src})",
    torch=lambda t, x: t.special.ndtri(_wide(t, x)).to(x.dtype),
    onnx=_NO_ONNX,
    cost=300,
    domain=((0.01, 0.99),),
    torch_calls=(TorchCall("ndtri(input)"),),
    source="torch.special.ndtri; Abramowitz and Stegun 26.2.23, with Halley's steps",
    # sqrt(2 pi) e^(y^2 / 2), as for Erfinv.
    gradient={
        "src": "Multiply(d, Select(And(Greater(src, 0), Less(src, 1)), "
        "Divide(Multiply(Erfcx(Abs(Multiply(dst, 0.7071067811865476))), 1.2533141373155001), "
        "Minimum(src, Subtract(1, src))), Exp(Square(dst))))",
    },
)

I0 = pointwise(
    "I0",
    "y = I0(x), the modified Bessel function of the first kind of order 0.",
    reference=reference_math.i0,
    expression="og::i0({src})",
    torch=lambda t, x: t.special.i0(_wide(t, x)).to(x.dtype),
    onnx=_NO_ONNX,
    cost=150,
    domain=((-10, 10),),
    torch_calls=(TorchCall("i0(input)"),),
    source="torch.special.i0; Abramowitz and Stegun 9.6.12, Cephes i0",
    gradient={"src": "Multiply(d, I1(src))"},
)

I0E = pointwise(
    "I0e",
    "y = e^-|x| I0(x).",
    reference=reference_math.i0e,
    expression="og::i0e({src})",
    torch=lambda t, x: t.special.i0e(_wide(t, x)).to(x.dtype),
    onnx=_NO_ONNX,
    cost=150,
    domain=((-10, 10),),
    torch_calls=(TorchCall("i0e(input)"),),
    source="torch.special.i0e; Abramowitz and Stegun 9.6.12, Cephes i0e",
    gradient={"src": "Multiply(d, I0eSlope(src))"},
)

I0E_SLOPE = pointwise(
    "I0eSlope",
    "The derivative of I0e: y = I1e(x) - sign(x) I0e(x), without the cancellation of the two.",
    reference=reference_math.i0e_slope,
    expression="og::i0e_slope({src})",
    torch=lambda t, x: (t.special.i1e(_wide(t, x)) - t.sign(_wide(t, x)) * t.special.i0e(_wide(t, x))).to(x.dtype),
    decomposition="Subtract(I1e(src), Multiply(Sign(src), I0e(src)))",
    onnx=_NO_ONNX,
    cost=150,
    domain=((-10, 10),),
    source="Abramowitz and Stegun 9.6.27",
    gradient="its derivative, the second one of I0e, is no op",
)

I1 = pointwise(
    "I1",
    "y = I1(x), the modified Bessel function of the first kind of order 1.",
    reference=reference_math.i1,
    expression="og::i1({src})",
    torch=lambda t, x: t.special.i1(_wide(t, x)).to(x.dtype),
    onnx=_NO_ONNX,
    cost=150,
    domain=((-10, 10),),
    torch_calls=(TorchCall("i1(input)"),),
    source="torch.special.i1; Abramowitz and Stegun 9.6.10, Cephes i1",
    # I0(x) - I1(x) / x as one product: no infinite terms cancel. 1/2 at 0, and where I1e(x) is too small to be exact.
    gradient={
        "src": "Multiply(d, Select(LessOrEqual(Abs(src), 1e-9), 0.5, "
        "Multiply(I0(src), Subtract(1, Divide(Divide(I1e(src), I0e(src)), src)))))",
    },
)

I1E = pointwise(
    "I1e",
    "y = e^-|x| I1(x).",
    reference=reference_math.i1e,
    expression="og::i1e({src})",
    torch=lambda t, x: t.special.i1e(_wide(t, x)).to(x.dtype),
    onnx=_NO_ONNX,
    cost=150,
    domain=((-10, 10),),
    source="torch.special.i1e; Abramowitz and Stegun 9.6.10, Cephes i1e",
    gradient="its derivative, I0e(x) - |I1e(x)| - I1e(x) / x, cancels, and is no op",
)
