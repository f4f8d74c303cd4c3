"""Sign, absolute value, and rounding to whole numbers."""

from __future__ import annotations

import numpy as np

from opgraph.ir import dtypes
from opgraph.ir.opdef import Onnx, TorchCall
from opgraph.ops.families import NUMERIC, SIGNED, pointwise


def _torch_decimals(decimals: int) -> str:
    """torch.round(x, decimals=n): scales x by a power of ten, rounds, and scales back, as torch does."""
    scale = 10 ** abs(decimals)
    there, back = ("Multiply", "Divide") if decimals > 0 else ("Divide", "Multiply")
    return f"{back}(Round({there}(input, {scale})), {scale})"


ABS = pointwise(
    "Abs",
    "y = |x|. The lowest integer stays as it is.",
    types=NUMERIC,
    reference=np.abs,
    expression="og::abs({src})",
    torch=lambda t, x: t.abs(x),
    onnx=(Onnx(op_type="Abs", since=6),),
    torch_calls=(TorchCall("abs|absolute(input)"),),
    source="oneDNN Graph Abs",
    gradient={"src": "AbsBackward(src, d)"},
)

NEG = pointwise(
    "Neg",
    "y = -x. Integers wrap.",
    types=SIGNED,
    reference=np.negative,
    expression="og::neg({src})",
    torch=lambda t, x: t.neg(x),
    onnx=(Onnx(op_type="Neg", since=6),),
    torch_calls=(TorchCall("neg|negative(input)"),),
    source="ONNX Neg",
    gradient={"src": "Neg(d)"},
)

SIGN = pointwise(
    "Sign",
    "y = -1, 0 or 1; NaN stays NaN.",
    types=NUMERIC,
    reference=np.sign,
    expression="og::sign({src})",
    torch=lambda t, x: t.where(t.isnan(x), x, t.sign(x)) if x.dtype.is_floating_point else t.sign(x),
    onnx=(Onnx(op_type="Sign", since=9),),
    cost=3,
    torch_calls=(
        TorchCall(
            "sign|sgn(input)",  # torch's is 0 at NaN
            lambda p: "Select(IsNaN(input), 0, Sign(input))" if p["dtype"] in dtypes.FLOATS else "Sign(input)",
        ),
    ),
    source="ONNX Sign",
    gradient={"src": "0"},
)

FLOOR = pointwise(
    "Floor",
    "The largest whole number not above x.",
    reference=np.floor,
    expression="og::floor({src})",
    torch=lambda t, x: t.floor(x),
    onnx=(Onnx(op_type="Floor", since=6),),
    torch_calls=(TorchCall("floor(input)", keeps_integers=True),),
    source="ONNX Floor",
    gradient={"src": "0"},
)

CEIL = pointwise(
    "Ceil",
    "The smallest whole number not below x.",
    reference=np.ceil,
    expression="og::ceil({src})",
    torch=lambda t, x: t.ceil(x),
    onnx=(Onnx(op_type="Ceil", since=6),),
    torch_calls=(TorchCall("ceil(input)", keeps_integers=True),),
    source="ONNX Ceil",
    gradient={"src": "0"},
)

ROUND = pointwise(
    "Round",
    "The nearest whole number, halves to even.",
    reference=np.rint,
    expression="og::round({src})",
    torch=lambda t, x: t.round(x),
    onnx=(Onnx(op_type="Round", since=11),),
    torch_calls=(
        TorchCall(
            "round(input, decimals=0)",
            lambda p: "Round(input)" if p["decimals"] == 0 else _torch_decimals(p["decimals"]),
            keeps_integers=True,
        ),
    ),
    source="oneDNN Graph Round",
    gradient={"src": "0"},
)

TRUNC = pointwise(
    "Trunc",
    "x without its fraction: the nearest whole number toward zero.",
    reference=np.trunc,
    expression="og::trunc({src})",
    torch=lambda t, x: t.trunc(x),
    decomposition="Multiply(Sign(src), Floor(Abs(src)))",
    torch_calls=(TorchCall("trunc|fix(input)", keeps_integers=True),),
    source="C trunc",
    gradient={"src": "0"},
)
