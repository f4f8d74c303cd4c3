"""Trigonometric and hyperbolic functions and their inverses."""

from __future__ import annotations

import numpy as np

from opgraph.ir.opdef import Onnx, TorchCall
from opgraph.ops.families import pointwise

#: 1 - x^2. Near 1 the two factors lose no digits; near 0 the derivative of their product, 1 - x - (1 + x), would.
_ONE_LESS_SQUARE = "Select(Less(Abs(src), 0.5), Subtract(1, Square(src)), Multiply(Subtract(1, src), Add(1, src)))"

SIN = pointwise(
    "Sin",
    "y = sin(x), x in radians; NaN at infinity.",
    reference=np.sin,
    expression="og::sin({src})",
    torch=lambda t, x: t.sin(x),
    onnx=(Onnx(op_type="Sin", since=7),),
    cost=20,
    domain=((-8, 8),),
    torch_calls=(TorchCall("sin(input)"),),
    source="ONNX Sin",
    gradient={"src": "Multiply(d, Cos(src))"},
)

COS = pointwise(
    "Cos",
    "y = cos(x), x in radians; NaN at infinity.",
    reference=np.cos,
    expression="og::cos({src})",
    torch=lambda t, x: t.cos(x),
    onnx=(Onnx(op_type="Cos", since=7),),
    cost=20,
    domain=((-8, 8),),
    torch_calls=(TorchCall("cos(input)"),),
    source="ONNX Cos",
    gradient={"src": "Neg(Multiply(d, Sin(src)))"},
)

TAN = pointwise(
    "Tan",
    "y = tan(x), x in radians; NaN at infinity.",
    reference=np.tan,
    expression="og::tan({src})",
    torch=lambda t, x: t.tan(x),
    onnx=(Onnx(op_type="Tan", since=7),),
    cost=30,
    domain=((-1.5, 1.5),),
    torch_calls=(TorchCall("tan(input)"),),
    source="ONNX Tan",
    gradient={"src": "Multiply(d, Add(Square(dst), 1))"},
    gradient_from_output="Multiply(d, Add(Square(dst), 1))",
)

ASIN = pointwise(
    "Asin",
    "The angle in [-pi/2, pi/2] whose sine is x; NaN beyond [-1, 1].",
    reference=np.arcsin,
    expression="og::asin({src})",
    torch=lambda t, x: t.asin(x),
    onnx=(Onnx(op_type="Asin", since=7),),
    cost=25,
    domain=((-1, 1),),
    torch_calls=(TorchCall("asin|arcsin(input)"),),
    source="ONNX Asin",
    gradient={"src": f"Divide(d, Sqrt({_ONE_LESS_SQUARE}))"},
)

ACOS = pointwise(
    "Acos",
    "The angle in [0, pi] whose cosine is x; NaN beyond [-1, 1].",
    reference=np.arccos,
    expression="og::acos({src})",
    torch=lambda t, x: t.acos(x),
    onnx=(Onnx(op_type="Acos", since=7),),
    cost=25,
    domain=((-1, 1),),
    torch_calls=(TorchCall("acos|arccos(input)"),),
    source="ONNX Acos",
    gradient={"src": f"Neg(Divide(d, Sqrt({_ONE_LESS_SQUARE})))"},
)

ATAN = pointwise(
    "Atan",
    "The angle in [-pi/2, pi/2] whose tangent is x.",
    reference=np.arctan,
    expression="og::atan({src})",
    torch=lambda t, x: t.atan(x),
    onnx=(Onnx(op_type="Atan", since=7),),
    cost=25,
    domain=((-8, 8),),
    torch_calls=(TorchCall("atan|arctan(input)"),),
    source="ONNX Atan",
    gradient={"src": "Divide(d, Add(Square(src), 1))"},
)

SINH = pointwise(
    "Sinh",
    "y = (exp(x) - exp(-x)) / 2.",
    reference=np.sinh,
    expression="og::sinh({src})",
    torch=lambda t, x: t.sinh(x),
    onnx=(Onnx(op_type="Sinh", since=9),),
    cost=20,
    domain=((-5, 5),),
    torch_calls=(TorchCall("sinh(input)"),),
    source="ONNX Sinh",
    gradient={"src": "Multiply(d, Cosh(src))"},
)

COSH = pointwise(
    "Cosh",
    "y = (exp(x) + exp(-x)) / 2.",
    reference=np.cosh,
    expression="og::cosh({src})",
    torch=lambda t, x: t.cosh(x),
    onnx=(Onnx(op_type="Cosh", since=9),),
    cost=20,
    domain=((-5, 5),),
    torch_calls=(TorchCall("cosh(input)"),),
    source="ONNX Cosh",
    gradient={"src": "Multiply(d, Sinh(src))"},
)

TANH = pointwise(
    "Tanh",
    "y = (exp(x) - exp(-x)) / (exp(x) + exp(-x)).",
    reference=np.tanh,
    expression="og::tanh({src})",
    torch=lambda t, x: t.tanh(x),
    onnx=(Onnx(op_type="Tanh", since=6),),
    cost=20,
    domain=((-5, 5),),
    torch_calls=(TorchCall("tanh(input)"),),
    source="oneDNN Graph Tanh",
    gradient={"src": "TanhBackward(src, d, use_dst=false)"},
    gradient_from_output="TanhBackward(dst, d)",
)

ASINH = pointwise(
    "Asinh",
    "The x whose sinh is given: log(x + sqrt(x^2 + 1)).",
    reference=np.arcsinh,
    expression="og::asinh({src})",
    torch=lambda t, x: t.asinh(x),
    onnx=(Onnx(op_type="Asinh", since=9),),
    cost=30,
    domain=((-8, 8),),
    torch_calls=(TorchCall("asinh|arcsinh(input)"),),
    source="ONNX Asinh",
    # 1 / sqrt(x^2 + 1), and 1 / |x| where the two are the same number in f64 and x^2 may overflow.
    gradient={"src": "Divide(d, Select(Greater(Abs(src), 1e9), Abs(src), Sqrt(Add(Square(src), 1))))"},
)

ACOSH = pointwise(
    "Acosh",
    "The x >= 0 whose cosh is given: log(x + sqrt(x^2 - 1)); NaN below 1.",
    reference=np.arccosh,
    expression="og::acosh({src})",
    torch=lambda t, x: t.acosh(x),
    onnx=(Onnx(op_type="Acosh", since=9),),
    cost=30,
    domain=((1.01, 8),),
    torch_calls=(TorchCall("acosh|arccosh(input)"),),
    source="ONNX Acosh",
    gradient={"src": "Divide(d, Multiply(Sqrt(Subtract(src, 1)), Sqrt(Add(src, 1))))"},
)

ATANH = pointwise(
    "Atanh",
    "The x whose tanh is given: log((1 + x) / (1 - x)) / 2; NaN beyond [-1, 1].",
    reference=np.arctanh,
    expression="og::atanh({src})",
    torch=lambda t, x: t.atanh(x),
    onnx=(Onnx(op_type="Atanh", since=9),),
    cost=30,
    domain=((-0.99, 0.99),),
    torch_calls=(TorchCall("atanh|arctanh(input)"),),
    source="ONNX Atanh",
    gradient={"src": f"Divide(d, {_ONE_LESS_SQUARE})"},
)
