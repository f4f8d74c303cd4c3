"""Maximum, Minimum and Clamp."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import numpy as np

from opgraph.errors import InvalidGraphOp
from opgraph.ir import dtypes
from opgraph.ir.op import Op
from opgraph.ir.opdef import Attr, Attrs, Onnx, Port, TorchCall
from opgraph.ops import integers
from opgraph.ops.families import AUTO_BROADCAST, INTEGER, NUMERIC, SAME_INPUTS, pointwise

#: The first version of torch that shares the gradient of clamp at a bound.
TIES_ARE_SHARED = (2, 14)


def _larger(a: np.ndarray, b: Any) -> np.ndarray:
    # Of two zeros, np.maximum returns either one, depending on the machine.
    return np.where((a > b) | (a != a), a, b)


def _smaller(a: np.ndarray, b: Any) -> np.ndarray:
    return np.where((a < b) | (a != a), a, b)


def _torch_bounds(p: Attrs, exact: bool = False) -> str:
    """torch.clamp: numbers are attributes, tensors are operands.

    At a bound its gradient was 1 up to torch 2.13, as for Clamp, but not for Maximum and Minimum. Since then it is 0
    where the bound is a number, and a tensor bound receives half of it.
    """
    low, high = p.get("min"), p.get("max")
    given = [(name, value) for name, value in (("min", low), ("max", high)) if value is not None]
    numbers = all(isinstance(value, (int, float)) for _, value in given)
    if numbers and p["torch"] >= TIES_ARE_SHARED and p["dtype"] not in INTEGER:
        return between("input", None if low is None else "$min", None if high is None else "$max", nan_counts=False)
    if numbers and not exact and (p["dtype"] not in INTEGER or abs(low or 0) + abs(high or 0) < 2**24):
        return f"Clamp({', '.join(['input', *(f'{name}=${name}' for name, _ in given)])})"
    if p["dtype"] in INTEGER:  # no gradient, and no sign to invert
        lower = "input" if low is None else "Maximum(input, min)"
        return lower if high is None else f"Minimum({lower}, max)"
    if p["torch"] >= TIES_ARE_SHARED:
        if low is None or high is None:
            return "Minimum(input, max)" if low is None else "Maximum(input, min)"
        # Equal bounds do not share a gradient: at and between them it goes to one value alone.
        return "Select(Equal(min, max), Clamp(input, min, max), Minimum(Maximum(input, min), max))"
    if low is None:
        return "Neg(Clamp(Neg(input), Neg(max)))"
    return f"Clamp({', '.join(['input', *(name for name, _ in given)])})"


def _exactly(p: Attrs) -> str:
    return _torch_bounds(p, exact=True)


def between(x: str, low: str | None, high: str | None, *, nan_counts: bool) -> str:
    """Clamps with a gradient of 0 at the bounds; one mask is saved for backward.

    Args:
        nan_counts: the gradient is 1 at NaN (hardtanh, relu6); else it is 0 (clamp, hardsigmoid).
    """
    bounded = x if low is None else f"Maximum({x}, {low})"
    bounded = f"StopGradient({bounded if high is None else f'Minimum({bounded}, {high})'})"
    signs = ("LessOrEqual", "GreaterEqual") if nan_counts else ("Greater", "Less")
    ends = [f"{sign}({x}, {end})" for sign, end in zip(signs, (low, high), strict=True) if end is not None]
    mask = ends[0] if len(ends) == 1 else f"{'Or' if nan_counts else 'And'}({', '.join(ends)})"
    return f"Select({mask}, {bounded}, {x})" if nan_counts else f"Select({mask}, {x}, {bounded})"


def _torch_hardtanh(p: Attrs) -> str:
    """torch.nn.functional.hardtanh: 16-bit values are compared with the bounds as they were given.

    A bound that the dtype cannot hold would be rounded. The comparison uses the next value of the dtype on the compared
    side instead. A NaN bound makes every result NaN; it has no form.
    """
    if math.isnan(p["min_val"]) or math.isnan(p["max_val"]):
        return ""
    form = between("input", "$min_val", "$max_val", nan_counts=True)
    if p["dtype"] not in ("bf16", "f16"):
        return form
    ends = (("LessOrEqual(input, {})", "min_val", -math.inf), ("GreaterEqual(input, {})", "max_val", math.inf))
    for comparison, name, side in ends:
        value = np.asarray(p[name]).astype(dtypes.get(p["dtype"]).numpy)
        if math.isfinite(value) and (float(value) - p[name]) * side < 0:
            value = np.nextafter(value, value.dtype.type(side))
        if math.isfinite(value):
            form = form.replace(comparison.format(f"${name}"), comparison.format(repr(float(value))))
    return form


MAXIMUM = pointwise(
    "Maximum",
    "y = max(a, b); NaN if either is NaN. Of two zeros b.",
    inputs=SAME_INPUTS,
    types=NUMERIC,
    attrs=(AUTO_BROADCAST,),
    reference=_larger,
    expression="og::max({src_0}, {src_1})",
    torch=lambda t, a, b: t.maximum(a, b),
    onnx=(Onnx(op_type="Max", since=8),),
    commutative=True,
    torch_calls=(TorchCall("maximum|max(input, other)"),),
    source="oneDNN Graph Maximum",
    # At a tie each operand receives half, as in torch.
    gradient={
        "src_0": "Select(Less(src_0, src_1), 0, Select(Equal(src_0, src_1), Multiply(d, 0.5), d))",
        "src_1": "Select(Greater(src_0, src_1), 0, Select(Equal(src_0, src_1), Multiply(d, 0.5), d))",
    },
)

MINIMUM = pointwise(
    "Minimum",
    "y = min(a, b); NaN if either is NaN. Of two zeros b.",
    inputs=SAME_INPUTS,
    types=NUMERIC,
    attrs=(AUTO_BROADCAST,),
    reference=_smaller,
    expression="og::min({src_0}, {src_1})",
    torch=lambda t, a, b: t.minimum(a, b),
    onnx=(Onnx(op_type="Min", since=8),),
    commutative=True,
    torch_calls=(TorchCall("minimum|min(input, other)"),),
    source="oneDNN Graph Minimum",
    # At a tie each operand receives half, as in torch.
    gradient={
        "src_0": "Select(Greater(src_0, src_1), 0, Select(Equal(src_0, src_1), Multiply(d, 0.5), d))",
        "src_1": "Select(Less(src_0, src_1), 0, Select(Equal(src_0, src_1), Multiply(d, 0.5), d))",
    },
)


def _bounds_once(op: Op) -> None:
    """At least one bound is given, and each at most once; for integers, attributes are values of the dtype."""
    dtype = op.inputs[0].dtype
    for index, (bound, attr) in enumerate((("low", "min"), ("high", "max")), start=1):
        if len(op.inputs) > index and attr in op.attrs:
            raise InvalidGraphOp(f"Clamp got {attr} twice", where=op.where, fix=f"give either {attr} or input {bound}")
        value = op.attrs.get(attr)
        if isinstance(value, float) and dtype in INTEGER and not _is_value_of(value, dtype):
            raise InvalidGraphOp(
                f"Clamp of {dtype} got {attr}={value}",
                where=op.where,
                fix=f"give a whole number in the range of {dtype}",
            )
    if len(op.inputs) == 1 and not op.attrs.keys() & {"min", "max"}:
        raise InvalidGraphOp("Clamp got no bound", where=op.where, fix="set min or max, or give them as inputs")


def _is_value_of(value: float, dtype: str) -> bool:
    target: np.dtype[Any] = dtypes.get(dtype).numpy
    info = np.iinfo(target)
    return value.is_integer() and info.min <= int(value) <= info.max


def _clamp(
    src: np.ndarray,
    low: np.ndarray | None = None,
    high: np.ndarray | None = None,
    *,
    min: float | None = None,
    max: float | None = None,
) -> np.ndarray:
    lower = _bound(src, min) if low is None else low
    upper = _bound(src, max) if high is None else high
    y = src if lower is None else _larger(src, lower)
    return y if upper is None else _smaller(y, upper)


def _bound(src: np.ndarray, value: float | None) -> Any:
    return value if value is None or not integers.is_integer(src) else src.dtype.type(int(value))


def _bound_names(attrs: Attrs, given: Collection[str]) -> tuple[str | None, str | None]:
    """The two bounds: names of inputs, names of attributes (with a leading $), or None."""
    low = "low" if "low" in given else "$min" if "min" in attrs else None
    high = "high" if "high" in given else "$max" if "max" in attrs else None
    return low, high


def _without_nan(attrs: Attrs, ndims: object) -> bool:
    """True if no bound is NaN: onnxruntime's Clip ignores it; Max and Min, which form the function, do not."""
    return not any(value != value for value in (attrs.get("min"), attrs.get("max")))


def _clamp_expression(attrs: Attrs, given: Collection[str]) -> str:
    low, high = (name and f"{{{name.removeprefix('$')}}}" for name in _bound_names(attrs, given))
    if low and high:
        return f"og::clamp({{src}}, {low}, {high})"
    return f"og::max({{src}}, {low})" if low else f"og::min({{src}}, {high})" if high else "{src}"


def _clamp_decomposition(attrs: Attrs, given: Collection[str]) -> str:
    low, high = _bound_names(attrs, given)
    bounded = f"Maximum(src, {low})" if low else "src"
    return f"Minimum({bounded}, {high})" if high else bounded


CLAMP = pointwise(
    "Clamp",
    "y = min(max(x, min), max): max wins where min > max, and NaN stays NaN. Each bound is an attribute or an input "
    "(low, high), and one may be absent.",
    inputs=("src", Port(name="low", optional=True), Port(name="high", optional=True)),
    types=NUMERIC,
    attrs=(Attr(name="min", type="f32", optional=True), Attr(name="max", type="f32", optional=True)),
    reference=_clamp,
    expression=_clamp_expression,
    torch=lambda t, src, low=None, high=None, min=None, max=None: _torch_clamp(
        t, src, min if low is None else low, max if high is None else high
    ),
    onnx=(
        Onnx(
            op_type="Clip",
            since=11,
            inputs=("src", "low|$min", "high|$max"),
            scalars=("low", "high"),
            applies=_without_nan,
        ),
        Onnx(
            op_type="Clip",
            since=6,
            until=10,
            attrs={"min": "min", "max": "max"},
            inputs=("src",),
            note="min > max is refused by onnxruntime",
        ),
    ),
    decomposition=_clamp_decomposition,
    cost=2,
    domain=((-4, 4), (-2, -1), (1, 2)),
    torch_calls=(
        TorchCall("clamp|clip(input, min=None, max=None)", _torch_bounds, _exactly),
        TorchCall("clamp_min(input, min)", _torch_bounds, _exactly),
        TorchCall("clamp_max(input, max)", _torch_bounds, _exactly),
        TorchCall("hardtanh(input, min_val=-1.0, max_val=1.0, inplace=False)", _torch_hardtanh),
        TorchCall("relu6(input, inplace=False)", between("input", "0", "6", nan_counts=True)),
    ),
    source="oneDNN Graph Clamp; ONNX Clip for tensor bounds",
    check=_bounds_once,
    gradient={
        # 1 where the value was not changed, at the bounds too, as in torch; 0 where the bounds are out of order.
        "src": lambda attrs, given: (
            "Select(And(GreaterEqual(src, low), LessOrEqual(src, high)), d, 0)"
            if {"low", "high"} <= set(given)
            else "Select(And(GreaterEqual(src, low), LessOrEqual(src, $max)), d, 0)"
            if "low" in given and "max" in attrs
            else "Select(Equal(dst, src), d, 0)"
            if attrs.get("min", -math.inf) <= attrs.get("max", math.inf)
            else "0"
        ),
        # Where the bounds are equal or out of order, all values are high, as in torch: low has no gradient.
        "low": lambda attrs, given: (
            "Select(And(Less(src, low), Less(low, high)), d, 0)"
            if "high" in given
            else "Select(And(Less(src, low), Less(low, $max)), d, 0)"
            if "max" in attrs
            else "Select(Less(src, low), d, 0)"
        ),
        "high": lambda attrs, given: (
            "Select(Or(Greater(src, high), Less(high, low)), d, 0)"
            if "low" in given
            else "Select(Greater(src, high), d, 0)"
        ),
    },
)


def _torch_clamp(t: Any, src: Any, low: Any, high: Any) -> Any:
    y = src if low is None else t.maximum(src, t.as_tensor(low, dtype=src.dtype, device=src.device))
    return y if high is None else t.minimum(y, t.as_tensor(high, dtype=src.dtype, device=src.device))
