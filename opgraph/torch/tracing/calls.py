"""Maps each torch function to its op or composition of ops: the records' spellings by function object.

`COMPOSITIONS` are torch functions that need several ops: no single op computes them, so no record names them. The
notation is that of `opgraph.ir.signature.TorchCall`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from opgraph.ir import dtypes
from opgraph.ir.opdef import OpDef, TorchCall, all_ops
from opgraph.ops.minmax import TIES_ARE_SHARED
from opgraph.runtime.providers.torch_dtypes import TORCH_DTYPES
from opgraph.runtime.providers.torch_internals import nn_functions
from opgraph.torch.tracing import trace_errors
from opgraph.torch.tracing.proxy import OPERATORS

#: True for a negative value, -0.0 included.
_NEGATIVE = "Or(Less({0}, 0), Less(Reciprocal({0}), 0))"
#: torch writes pi with the same number of digits.
_PI = "3.141592653589793"
#: The angle whose tangent is input / other, for |input| <= |other|.
_ANGLE = (
    "Select(Equal(other, 0), StopGradient(input), Select(And(IsInf(input), IsInf(other)), "
    "Select(Equal(input, other), 0.7853981633974483, -0.7853981633974483), Atan(Divide(input, other))))"
)


def _lerp(p: Mapping[str, Any]) -> str:
    """Starts from the end nearer to the weight, so that this end is exact (aten/src/ATen/native/Lerp.h)."""
    low = "Add(input, Multiply(Subtract(end, input), weight))"
    high = "Subtract(end, Multiply(Subtract(end, input), Subtract(1, weight)))"
    if isinstance(p["weight"], (int, float)):
        return low if abs(p["weight"]) < 0.5 else high
    return f"Select(Less(Abs(weight), 0.5), {low}, {high})"


def _nan_to_num(p: Mapping[str, Any]) -> str:
    if p["dtype"] not in dtypes.FLOATS:
        return "Identity(input)"
    limits = torch.finfo(TORCH_DTYPES[p["dtype"]])
    nan, high, low = (
        repr(float(default)) if p[name] is None else f"${name}"
        for name, default in (("nan", 0.0), ("posinf", limits.max), ("neginf", limits.min))
    )
    finite = f"Select(IsInf(input), Select(Greater(input, 0), {high}, {low}), input)"
    return f"Select(IsNaN(input), {nan}, {finite})"


def _larger(p: Mapping[str, Any], sign: str, kind: str) -> str:
    """Selects `input` if the comparison `sign` holds, else `other`; of a number and NaN, the number.

    For equal numbers, `input` received the whole gradient up to torch 2.13. Since then each has half, as in `kind`.
    """
    if p["dtype"] not in dtypes.FLOATS:
        return f"Select({sign}(input, other), input, other)"
    first = f"Select(Or({sign}(input, other), IsNaN(other)), input, other)"
    if p["torch"] < TIES_ARE_SHARED:
        return first
    return f"Select(Or(IsNaN(input), IsNaN(other)), {first}, {kind}(input, other))"


def _logit(p: Mapping[str, Any]) -> str:
    quotient, inside = "Log(Divide(input, Subtract(1, input)))", "And(Greater(input, 0), Less(input, 1))"
    # At 0 and 1 the derivative is infinite: that of one logarithm.
    ends = "Select(LessOrEqual(input, 0), Log(input), Neg(Log(Subtract(1, input))))"
    if p["eps"] is not None and p["eps"] >= 0:
        low, high = p["eps"], 1 - p["eps"]
        # Inputs are compared with the rounded ends. An input equal to an end has its whole gradient, as in torch,
        # except where the end is rounded to 1.
        end = torch.tensor(high, dtype=TORCH_DTYPES[p["dtype"]])
        above = "GreaterEqual" if low and end == 1 else "Greater"
        inner = f"Select({inside}, {quotient}, {ends})" if low == 0 else quotient
        return f"Select(Less(input, $eps), {_at(low)}, Select({above}(input, {high!r}), {_at(high)}, {inner}))"
    outside = "Multiply(input, Log(-1))"  # NaN, without a derivative
    return f"Select({inside}, {quotient}, Select(Or(Equal(input, 0), Equal(input, 1)), {ends}, {outside}))"


def _at(x: float) -> str:
    """The logit of a number, before rounding: the logit of a number rounded to 16 bits would differ."""
    if 0 < x < 1:
        return repr(math.log(x / (1 - x)))
    return "-1e999" if x == 0 else "1e999" if x == 1 else "Log(-1)"


def _scaled(p: Mapping[str, Any], rest: str) -> str:
    """input + value tensor1 times, or by, tensor2, in torch's order, which determines the overflows."""
    return f"Add(input, {rest.format('tensor1' if p['value'] == 1 else 'Multiply(tensor1, $value)')})"


COMPOSITIONS = (
    TorchCall("tanhshrink(input)", "Subtract(input, Tanh(input))"),
    TorchCall("logsigmoid|log_sigmoid(input)", "Neg(SoftPlus(Neg(input)))"),
    TorchCall("addcmul(input, tensor1, tensor2, value=1)", lambda p: _scaled(p, "Multiply({0}, tensor2)")),
    TorchCall("addcdiv(input, tensor1, tensor2, value=1)", lambda p: _scaled(p, "Divide({0}, tensor2)")),
    TorchCall("lerp(input, end, weight)", _lerp),
    TorchCall("frac(input)", "Subtract(input, Trunc(input))"),
    TorchCall("nan_to_num(input, nan=0.0, posinf=None, neginf=None)", _nan_to_num),
    TorchCall(
        "signbit(input)", lambda p: (_NEGATIVE if p["dtype"] in dtypes.FLOATS else "Less({0}, 0)").format("input")
    ),
    # `other` is also a branch of a Select that is never taken, so that its gradient is 0 instead of None.
    TorchCall(
        "copysign(input, other)",
        f"Select({_NEGATIVE.format('other')}, Neg(Abs(input)), Select({_NEGATIVE.format('other')}, other, Abs(input)))",
    ),
    TorchCall("heaviside(input, values)", "Select(Equal(input, 0), values, Select(Greater(input, 0), 1, 0))"),
    TorchCall("fmax(input, other)", lambda p: _larger(p, "GreaterEqual", "Maximum")),
    TorchCall("fmin(input, other)", lambda p: _larger(p, "LessOrEqual", "Minimum")),
    TorchCall("isfinite(input)", "Not(Or(IsNaN(input), IsInf(input)))"),
    TorchCall("deg2rad(input)", f"Multiply(input, {3.141592653589793 / 180!r})"),
    TorchCall("rad2deg(input)", f"Multiply(input, {180 / 3.141592653589793!r})"),
    # Pow computes powers of 2: exp(x ln 2) would multiply the rounding error of x ln 2 by the size of x ln 2.
    TorchCall("exp2(input)", "Pow(2, input)"),
    TorchCall("log2(input)", "Multiply(Log(input), 1.4426950408889634)"),
    TorchCall("log10(input)", "Multiply(Log(input), 0.4342944819032518)"),
    TorchCall(
        # In every dtype the result next to 0 is also 1, with a derivative of 0; the quotient's would be inf - inf.
        "sinc(input)",
        f"Select(LessOrEqual(Abs(input), 1e-20), 1, Divide(Sin(Multiply(input, {_PI})), Multiply(input, {_PI})))",
    ),
    # -x log x. At 0 the derivative is infinite. Below 0 the result is -inf, written as a number that no double holds.
    TorchCall(
        "entr(input)",
        "Select(Less(input, 0), -1e999, Select(Equal(input, 0), Sqrt(Subtract(input, StopGradient(input))), "
        "Select(Equal(input, 1e999), Neg(Square(input)), Neg(Multiply(input, Log(input))))))",
    ),
    TorchCall("logit(input, eps=None)", _logit, finite=("eps",)),
    # 0 only where the logarithm is infinite or undefined. Elsewhere the derivative with respect to x is the logarithm,
    # at x = 0 too.
    TorchCall(
        "xlogy(input, other)",
        "Select(And(Equal(input, 0), Or(LessOrEqual(other, 0), IsInf(other))), 0, Multiply(input, Log(other)))",
    ),
    TorchCall(
        "xlog1py(input, other)",
        "Select(And(Equal(input, 0), Or(LessOrEqual(other, -1), IsInf(other))), 0, Multiply(input, Log1p(other)))",
    ),
    TorchCall(
        "logaddexp(input, other)",
        "Select(And(Equal(input, other), IsInf(input)), input, "
        "Add(Maximum(input, other), Log1p(Exp(Neg(Abs(Subtract(input, other)))))))",
    ),
    TorchCall(
        "logaddexp2(input, other)",
        "Select(And(Equal(input, other), IsInf(input)), input, Add(Maximum(input, other), "
        "Multiply(Log1p(Pow(2, Neg(Abs(Subtract(input, other))))), 1.4426950408889634)))",
    ),
    # The larger side is outside the root, so that no square overflows. An infinite side takes precedence over NaN (C99
    # hypot).
    TorchCall(
        "hypot(input, other)",
        "Select(IsInf(input), Abs(input), Select(IsInf(other), Abs(other), "
        "Select(Equal(Maximum(Abs(input), Abs(other)), 0), Maximum(Abs(input), Abs(other)), "
        "Multiply(Maximum(Abs(input), Abs(other)), "
        "Sqrt(Add(Square(Divide(Minimum(Abs(input), Abs(other)), Maximum(Abs(input), Abs(other)))), 1))))))",
    ),
    # Uses the ratio of magnitude at most 1, whose derivative is finite on both axes. At the origin there is no ratio;
    # the derivative there is 0, as in torch.
    TorchCall(
        "atan2|arctan2(input, other)",
        "Select(Greater(Abs(input), Abs(other)), "
        "Select(Less(input, 0), Subtract(-1.5707963267948966, Atan(Divide(other, input))), "
        "Subtract(1.5707963267948966, Atan(Divide(other, input)))), "
        f"Select({_NEGATIVE.format('other')}, "
        f"Select({_NEGATIVE.format('input')}, Subtract({_ANGLE}, {_PI}), Add({_ANGLE}, {_PI})), {_ANGLE}))",
    ),
)


_SIGNATURE = re.compile(r"(?P<space>Tensor\.)?(?P<names>[\w|]+)\((?P<parameters>.*)\)")
_SPACES = (torch, torch.Tensor, torch.nn.functional, torch.special, nn_functions)
#: Marks a parameter without a default.
REQUIRED = object()
_VERSION = tuple(int(number) for number in torch.__version__.split(".")[:2])


@dataclass(frozen=True, slots=True)
class Found:
    """The meaning of a torch function.

    Attributes:
        call: its spelling.
        record: the record that contains the spelling; None for compositions.
        parameters: names and defaults.
        functional: the same function without the trailing underscore.
        inplace: True if it writes into its first argument.
    """

    call: TorchCall
    record: OpDef | None
    parameters: tuple[tuple[str, Any], ...]
    functional: Callable[..., Any]
    inplace: bool

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The values of the parameters.

        Raises:
            Unimplemented: the arguments are those of another overload.
        """
        names = [name for name, _ in self.parameters]
        bound = dict(zip(names, args, strict=False))
        if len(args) > len(names) or not kwargs.keys() <= set(names) - bound.keys():
            raise self.other_overload()
        bound.update(kwargs)
        for name, default in self.parameters:
            if name not in bound:
                if default is REQUIRED:
                    raise self.other_overload()
                bound[name] = default
        return bound

    def other_overload(self) -> Exception:
        """The error for a call of another overload than the pointwise one."""
        name = self.functional.__name__
        return trace_errors.unknown(
            name, f"only {self.call.signature} is pointwise", "call it so, or outside of the fused function"
        )

    def takes(self, values: Mapping[str, Any]) -> bool:
        """True if opgraph supports these numbers: some must be finite."""
        return all(values[name] is None or math.isfinite(values[name]) for name in self.call.finite)

    def form(self, values: dict[str, Any], dtype: str, exact: bool) -> str:
        """The expression of ops for these values; "" if opgraph has none."""
        if not self.takes(values):
            return ""
        if self.call.keeps_integers and dtype not in ("f64", "f32", "bf16", "f16"):
            return f"Identity({self.parameters[0][0]})"
        form = self.call.exact if exact and self.call.exact is not None else self.call.form
        if callable(form):
            return form({**values, "dtype": dtype, "torch": _VERSION})
        if form is not None:
            return form
        assert self.record is not None
        inputs = sum(not p.optional for p in self.record.inputs)
        return f"{self.record.kind}({', '.join(name for name, _ in self.parameters[:inputs])})"


@lru_cache(maxsize=1)
def table() -> dict[Any, Found]:
    """All torch functions that opgraph supports, with their meanings."""
    found: dict[Any, Found] = {}
    # The spelling of a method alone takes precedence over one for both the function and the method.
    for record, call in sorted(_spellings(), key=lambda s: not s[1].signature.startswith("Tensor.")):
        for func, inplace, functional, parameters in _functions(call):
            found.setdefault(func, Found(call, record, parameters, functional, inplace))
    for name, func in OPERATORS.items():
        found[getattr(torch.Tensor, name)] = found[func]
    return found


def _spellings() -> Iterator[tuple[OpDef | None, TorchCall]]:
    for record in all_ops():
        yield from ((record, call) for call in record.torch_calls)
    yield from ((None, call) for call in COMPOSITIONS)


def _functions(call: TorchCall) -> Iterator[tuple[Any, bool, Any, tuple[tuple[str, Any], ...]]]:
    match = _SIGNATURE.fullmatch(call.signature)
    if match is None:
        raise ValueError(f"{call.signature!r} is no signature")
    parameters = tuple(_parameter(text) for text in match["parameters"].split(", "))
    for name in match["names"].split("|"):
        spaces = (torch.Tensor,) if match["space"] else _SPACES
        plain = [getattr(space, name) for space in spaces if hasattr(space, name)]
        if not plain:
            continue  # an older torch
        yield from ((func, False, plain[0], parameters) for func in plain)
        changing = [getattr(space, name + "_") for space in spaces if hasattr(space, name + "_")]
        yield from ((func, True, plain[0], parameters) for func in changing)


def _parameter(text: str) -> tuple[str, Any]:
    name, _, default = text.partition("=")
    return name, _literal(default) if default else REQUIRED


def _literal(text: str) -> Any:
    known = {"None": None, "True": True, "False": False}
    if text in known:
        return known[text]
    if text.startswith("'"):
        return text.strip("'")
    return int(text) if text.lstrip("-").isdigit() else float(text)


table()  # at import, before torch's functions can be monkey-patched
