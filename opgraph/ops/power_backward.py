"""The derivatives of powers as an op, which oneDNN lacks. Composed of smaller ops they would round b - 1, an error that
ln(src) multiplies."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

from opgraph.errors import InvalidGraphOp
from opgraph.ir.op import Op
from opgraph.ir.opdef import Attr, Attrs, Port
from opgraph.ops import derivative_references
from opgraph.ops.backward import BOTH, backward


def _one_exponent(op: Op) -> None:
    """Exactly one exponent is given, as attribute or input; the order is 1 or more."""
    if (len(op.inputs) == 3) == ("beta" in op.attrs):
        what = "two exponents" if len(op.inputs) == 3 else "no exponent"
        raise InvalidGraphOp(f"PowBackward got {what}", where=op.where, fix="give either beta or a third input")
    if not 1 <= int(op.attrs.get("order", 1)) <= 16:  # type: ignore[arg-type]
        raise InvalidGraphOp(
            f"PowBackward got order {op.attrs['order']}", where=op.where, fix="give an order from 1 to 16"
        )


def _power_decomposition(attrs: Attrs, given: Collection[str]) -> str:
    # beta as a tensor: the difference of two numbers would be f32.
    b = "exponent" if "exponent" in given else "Clamp(src, min=$beta, max=$beta)"
    coefficient = _product([b, *(f"Subtract({b}, {k})" for k in range(1, attrs["order"]))])
    value = f"Multiply(diff_dst, Multiply({coefficient}, Pow(src, Subtract({b}, {attrs['order']}))))"
    return f"Select(Equal({coefficient}, 0), 0, {value})"


def _product(terms: Sequence[str]) -> str:
    text = terms[0]
    for term in terms[1:]:
        text = f"Multiply({text}, {term})"
    return text


def _power_by_exponent(attrs: Attrs, given: Collection[str]) -> str:
    # (c x^(b - n))' = (c' + c ln x) x^(b - n) for c = b (b - 1) ... (b - n + 1)
    n = attrs["order"]
    terms = ["exponent", *(f"Subtract(exponent, {k})" for k in range(1, n))]
    slope = "1" if n == 1 else _product([t for i, t in enumerate(terms) if i])
    for left_out in range(1, n):
        slope = f"Add({slope}, {_product([t for i, t in enumerate(terms) if i != left_out])})"
    sum_ = f"Add(Multiply({_product(terms)}, Log(src)), {slope})"
    value = f"Multiply({BOTH}, Multiply({sum_}, Pow(src, Subtract(exponent, {n}))))"
    return f"Select(And(Equal(src, 0), Greater(exponent, {n})), 0, {value})"


def _torch_power(t: Any, x: Any, d: Any, exponent: Any = None, *, order: int, beta: float | None = None) -> Any:
    b = t.as_tensor(beta, dtype=x.dtype, device=x.device) if exponent is None else exponent
    coefficient = math.prod((b - k for k in range(1, order)), start=b)
    return t.where(coefficient == 0, 0.0, d * (coefficient * t.pow(x, b - order)))


POW_BACKWARD = backward(
    "PowBackward",
    "diff_src = b src^(b - 1) diff_dst, b the attribute beta or the input exponent; of order n the n-th derivative, "
    "b (b - 1) ... (b - n + 1) src^(b - n). 0 where the product is 0, at src = 0 too. b - n is not rounded.",
    others=(Port(name="exponent", optional=True),),
    attrs=(Attr(name="beta", type="f32", optional=True), Attr(name="order", type="s64", default=1)),
    reference=lambda x, d, exponent=None, *, order, beta=None: derivative_references.power(
        x, d, beta if exponent is None else exponent, order
    ),
    expression=lambda attrs, given: (
        "og::pow_backward({src}, {diff_dst}, "
        + ("{exponent}, " if "exponent" in given else "{beta}, ")
        + f"{attrs['order']})"
    ),
    powers=True,
    torch=_torch_power,
    decomposition=_power_decomposition,
    second=lambda attrs, given: (
        f"PowBackward(src, {BOTH}, exponent, order={attrs['order'] + 1})"
        if "exponent" in given
        else f"PowBackward(src, {BOTH}, beta=$beta, order={attrs['order'] + 1})"
    ),
    further={"exponent": _power_by_exponent},
    cost=70,
    domain=((0.05, 4), (-4, 4), (-3, 3)),
    source="the derivatives of x^b; torch for 0 where b is",
    check=_one_exponent,
)
