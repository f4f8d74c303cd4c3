"""Powers: Pow, squares, roots and reciprocals."""

from __future__ import annotations

import numpy as np

from opgraph.errors import InvalidGraphOp
from opgraph.ir.op import Op
from opgraph.ir.opdef import Attr, Attrs, Onnx, Port, TorchCall
from opgraph.ops import integers
from opgraph.ops.families import INTEGER, NUMERIC, pointwise


def _one_exponent(op: Op) -> None:
    """Exactly one exponent is given, as attribute or input; for integers, as input."""
    if (len(op.inputs) == 2) == ("beta" in op.attrs):
        what = "two exponents" if len(op.inputs) == 2 else "no exponent"
        raise InvalidGraphOp(f"Pow got {what}", where=op.where, fix="give either beta or a second input")
    if "beta" in op.attrs and op.inputs[0].dtype in INTEGER:
        raise InvalidGraphOp(
            f"Pow takes no beta for {op.inputs[0].dtype}, it is a float", where=op.where, fix="give a second input"
        )


def _power(src: np.ndarray, exponent: np.ndarray | None = None, *, beta: float | None = None) -> np.ndarray:
    if exponent is None:
        return np.power(src, src.dtype.type(beta))  # type: ignore[no-any-return]
    return integers.power(src, exponent) if integers.is_integer(src) else np.power(src, exponent)


#: Exponents for which torch computes something simpler than a power (aten/src/ATen/native/cpu/PowKernel.cpp).
_SIMPLE = {
    2: "Square(input)",
    3: "Multiply(Square(input), input)",
    0.5: "Sqrt(input)",
    -0.5: "Rsqrt(input)",
    -1: "Reciprocal(input)",
    -2: "Square(Reciprocal(input))",  # in the other order, derivatives overflow where this is finite
}


def _torch_powers(p: Attrs, general: str) -> str:
    """torch.pow: `general` for exponents outside `_SIMPLE`; Pow for tensors, integers and a number as base."""
    exponent = p["exponent"]
    if (
        not isinstance(exponent, (int, float))
        or isinstance(p["input"], (int, float))
        or p["dtype"] in (*INTEGER, "boolean")
    ):
        return "Pow(input, exponent)"
    return _SIMPLE.get(exponent, general)


POW = pointwise(
    "Pow",
    "y = src^beta, or src^exponent; a negative base with a fractional exponent is NaN, x^0 and 1^x are 1. "
    "Integers wrap, and their negative powers are 0 but for base 1 and -1.",
    inputs=("src", Port(name="exponent", optional=True)),
    types=NUMERIC,
    attrs=(Attr(name="beta", type="f32", optional=True),),
    reference=_power,
    expression=lambda attrs, given: "og::pow({src}, {exponent})" if "exponent" in given else "og::pow({src}, {beta})",
    powers=True,
    torch=lambda t, src, exponent=None, beta=None: t.pow(src, beta if exponent is None else exponent),
    onnx=(Onnx(op_type="Pow", since=7, inputs=("src", "exponent|$beta"), note="int8 and uint8 bases are not allowed"),),
    cost=60,
    domain=((0.05, 4), (-3, 3)),
    torch_calls=(
        TorchCall(
            "pow|float_power(input, exponent)",
            lambda p: _torch_powers(p, "Pow(input, beta=$exponent)"),
            lambda p: _torch_powers(p, "Pow(input, exponent)"),
            widens=lambda p: isinstance(p["exponent"], (int, float)) and p["exponent"] in (0.5, -0.5, -1),
        ),
    ),
    source="oneDNN Graph Pow; ONNX Pow for a tensor exponent",
    check=_one_exponent,
    gradient={
        "src": lambda attrs, given: (
            "PowBackward(src, d, exponent)" if "exponent" in given else "PowBackward(src, d, beta=$beta)"
        ),
        # y ln x, and 0 at x = 0 for exponents of 0 or more, as in torch.
        "exponent": "Select(And(Equal(src, 0), GreaterEqual(exponent, 0)), 0, Multiply(d, Multiply(dst, Log(src))))",
    },
)

SQUARE = pointwise(
    "Square",
    "y = x^2. Integers wrap.",
    types=NUMERIC,
    reference=np.square,
    expression="og::square({src})",
    torch=lambda t, x: t.square(x),
    decomposition="Multiply(src, src)",
    torch_calls=(TorchCall("square(input)"),),
    source="oneDNN Graph Square",
    gradient={"src": "Multiply(d, Multiply(src, 2))"},
)

RECIPROCAL = pointwise(
    "Reciprocal",
    "y = 1 / x; 1 / 0 is inf.",
    reference=lambda x: 1 / x,
    expression="og::reciprocal({src})",
    torch=lambda t, x: t.reciprocal(x),
    onnx=(Onnx(op_type="Reciprocal", since=6),),
    cost=8,
    domain=((0.25, 4),),
    torch_calls=(TorchCall("reciprocal(input)"),),
    source="oneDNN Graph Reciprocal",
    gradient={"src": "Neg(Multiply(Multiply(d, dst), dst))"},
    gradient_from_output="Neg(Multiply(Multiply(d, dst), dst))",
)

SQRT = pointwise(
    "Sqrt",
    "y = sqrt(x); NaN for negative x.",
    reference=np.sqrt,
    expression="og::sqrt({src})",
    torch=lambda t, x: t.sqrt(x),
    onnx=(Onnx(op_type="Sqrt", since=6),),
    cost=8,
    domain=((0.01, 4),),
    torch_calls=(TorchCall("sqrt(input)"),),
    source="oneDNN Graph Sqrt",
    gradient={"src": "SqrtBackward(dst, d)"},
    gradient_from_output="SqrtBackward(dst, d)",
)

RSQRT = pointwise(
    "Rsqrt",
    "y = 1 / sqrt(x); NaN for negative x, inf at 0.",
    reference=lambda x: 1 / np.sqrt(x),
    expression="og::rsqrt({src})",
    torch=lambda t, x: t.rsqrt(x),
    decomposition="Reciprocal(Sqrt(src))",
    cost=10,
    domain=((0.05, 4),),
    torch_calls=(TorchCall("rsqrt(input)"),),
    source="1 / sqrt(x)",
    gradient={"src": "Multiply(Divide(Multiply(d, -0.5), src), dst)"},
    gradient_from_output="Multiply(Multiply(d, -0.5), Multiply(Multiply(dst, dst), dst))",
)
