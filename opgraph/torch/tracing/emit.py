"""Translates one torch call into ops: torch's type promotion becomes casts, numbers become constants.

torch itself determines the dtype and shape of a call, in the same call on tensors without elements (`outcome`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from ctypes import c_float
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from opgraph.ir import dtypes, opdef
from opgraph.ir.expression import Call, Expr, Num, Param, parse_expression
from opgraph.runtime.providers.torch_dtypes import NAMES, TORCH_DTYPES
from opgraph.runtime.providers.torch_internals import tensors_in, tree_map_only, without_autocast
from opgraph.torch.broadcast import broadcast_shapes
from opgraph.torch.tracing import trace_errors
from opgraph.torch.tracing.calls import Found
from opgraph.torch.tracing.proxy import Proxy
from opgraph.torch.tracing.session import Number, Session, Step

_parsed = lru_cache(maxsize=512)(parse_expression)


@dataclass(frozen=True, slots=True)
class Value:
    """An operand. `dtype` is None for a number; `single` marks a 0-d tensor, `host` one in host memory."""

    operand: Any  # a Ref, its counterpart in a subclass of Emitter, or a Number
    dtype: str | None
    single: bool = False
    host: bool = True


def name_of(dtype: torch.dtype, what: str) -> str:
    """opgraph's name of a dtype.

    Raises:
        Unimplemented: it has none.
    """
    if dtype not in NAMES:
        raise trace_errors.wrong_dtype(what, dtype)
    return NAMES[dtype]


def outcome(
    func: Callable[..., Any],
    args: Any,
    kwargs: Any = {},  # noqa: B006 - it is not changed
    *,
    on_host: bool = False,
) -> Any:
    """A tensor without data, of the dtype and shape of a pointwise call's result; raises torch's own errors.

    The meta device can compute that, but the first call there loads all of torch's compiler (1 to 2 s). So the call is
    made on the CPU, on tensors that have no elements, and on the meta device only where that fails.

    Args:
        on_host: True for a call on the CPU, whose kernels reject dtypes that the meta device accepts: the call is made
            on tensors of one element first.
    """
    if on_host:
        with without_autocast():
            _called(func, args, kwargs, _one)
    shapes = [t.shape for t in tensors_in((args, kwargs))]
    try:
        shape = broadcast_shapes(shapes)
        with without_autocast():
            found = _called(func, args, kwargs, _emptied)
        if _extents(found.shape) == _extents(shape):
            return torch.empty(shape, dtype=found.dtype, device="meta")
    except Exception:  # torch's message is better for tensors of the real shapes
        pass
    return _called(func, args, kwargs, _on_meta)


def _called(func: Callable[..., Any], args: Any, kwargs: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The result of a call on the same arguments, with `change` applied to every tensor."""
    args, kwargs = tree_map_only(torch.Tensor, change, (args, kwargs))
    return func(*args, **kwargs)


def _extents(shape: torch.Size) -> tuple[bool, ...]:
    return tuple([extent == 1 for extent in shape])


def _emptied(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same rank and dtype, in which every axis of another size than 1 has size 0."""
    return torch.empty([1 if extent == 1 else 0 for extent in tensor.shape], dtype=tensor.dtype)


def _one(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same rank and dtype with one element."""
    return torch.ones((1,) * tensor.dim(), dtype=tensor.dtype)


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


class Emitter:
    """Collects the ops of one call.

    Args:
        session: the run, which names the results.
        what: the function's name, for messages.
    """

    def __init__(self, session: Session, what: str) -> None:
        self.steps: list[Step] = []
        self.session = session
        self.as_eager = session.as_eager
        self.on_host = session.device.type == "cpu"
        self.what = what
        self._label = trace_errors.label()
        self._found: Found | None = None

    def step(self, kind: str, operands: tuple[Any, ...], dtype: str, attrs: dict[str, Any] | None = None) -> Any:
        """Adds one op; returns the ref of its result."""
        result = self.session.new_ref()
        self.steps.append(Step(kind, operands, result, dtype, tuple((attrs or {}).items()), self._label))
        return result

    def call(self, found: Found, bound: dict[str, Any], result: torch.dtype, compute: torch.dtype) -> Any:
        """Adds the ops of a function; returns the ref of its result.

        Args:
            bound: the values of its parameters.
            result: the dtype that torch gives the result.
            compute: the dtype in which torch computes it.
        """
        self._found = found
        dtype = name_of(compute, self.what)
        if dtype in ("f16", "bf16") and found.call.widens(bound):
            dtype = "f32"
        numbers = [v for v in bound.values() if type(v) is float]
        exact = dtype == "f64" and any(c_float(v).value != v and not math.isnan(v) for v in numbers)
        text = found.form(bound, dtype, exact)
        if not text:
            raise trace_errors.unknown(self.what, "opgraph has no op for these arguments", "call it outside")
        value = self._expr(_parsed(text), bound, dtype)
        return self._as(value, name_of(result, self.what))

    def _expr(self, tree: Expr, bound: dict[str, Any], compute: str) -> Value:
        if isinstance(tree, Call):
            return self._op(tree, bound, compute)
        if isinstance(tree, Num):
            return Value(Number(tree.value), None)
        return self.leaf(bound[tree.name], tree.name)

    def leaf(self, value: Any, name: str) -> Value:
        """An argument of the call: a value of the trace, a real tensor, or a number."""
        if isinstance(value, Proxy):
            return Value(value.ref, name_of(value.dtype, self.what))
        if isinstance(value, torch.Tensor):
            dtype = name_of(value.dtype, self.what)
            return Value(self.session.capture(value), dtype, value.dim() == 0, value.device.type == "cpu")
        return Value(Number(self._number(value, name)), None)

    def _number(self, value: Any, name: str) -> float:
        if not isinstance(value, (bool, int, float, np.number)):
            raise trace_errors.unknown(
                self.what, f"{name} is {type(value).__name__}", "give a tensor or a Python number for it"
            )
        return value  # type: ignore[return-value]

    def _op(self, tree: Call, bound: dict[str, Any], compute: str) -> Value:
        record = opdef.get(tree.kind, where=self.what)
        values = [self._expr(arg, bound, compute) for arg in tree.args]
        ports = record.with_optional(len(values))
        mixes = len(ports) == 2 and ports[0].type != ports[1].type and compute in ("f16", "bf16")
        operands, met = [], {}
        for port, value in zip(ports, values, strict=True):
            target = met[port.type] = self._port_dtype(port.type, record, compute)
            wide = mixes and (value.dtype is None or value.single) and self._stays_wide(value)
            operands.append(self._as(value, "f32" if wide and value.dtype != target else target))
        out = record.outputs[0].type
        dtype = met.get(out) or self._port_dtype(out, record, compute)
        attrs = {name: self._attribute(value, bound) for name, value in tree.attrs}
        for name, value in attrs.items():
            attr = record.attr(name)
            if attr is not None and attr.type == "f32":
                attrs[name] = float(value)
        return Value(self.step(tree.kind, tuple(operands), dtype, attrs), dtype)

    def _stays_wide(self, value: Value) -> bool:
        """True if f16 or bf16 arithmetic uses a number, or a 0-d tensor, as f32, which is closer to the intended value.

        In a session that computes like eager torch, torch's kernels on this device decide.
        """
        if not self.as_eager:
            return True
        return value.host and not (self.on_host and self._found is not None and self._found.call.rounds_numbers)

    def _attribute(self, value: Any, bound: dict[str, Any]) -> Any:
        if not isinstance(value, Param):
            return value
        given = bound[value.name]
        return given if isinstance(given, str) else self._number(given, value.name)

    def _port_dtype(self, symbol: str, record: opdef.OpDef, compute: str) -> str:
        allowed = record.types.get(symbol, (symbol,))
        # Booleans if the op has no other type. Arithmetic on booleans uses u8, on small integers wide types.
        others = {"boolean": ("u8",), "u8": ("s64", "f32"), "s8": ("s64", "f32")}.get(compute, ("f32",))
        for dtype in (compute, *(("boolean",) if allowed == ("boolean",) else others)):
            if dtype in allowed:
                return dtype
        raise trace_errors.wrong_dtype(self.what, TORCH_DTYPES[compute])

    def _as(self, value: Value, dtype: str) -> Any:
        if isinstance(value.operand, Number):
            return Number(_fitted(value.operand.value, dtype), dtype)
        return value.operand if value.dtype == dtype else self.cast(value.operand, dtype)

    def cast(self, ref: Any, dtype: str) -> Any:
        """A TypeCast; the same value is cast once per call."""
        for step in self.steps:
            if step.kind == "TypeCast" and step.operands == (ref,) and step.dtype == dtype:
                return step.result
        return self.step("TypeCast", (ref,), dtype)

    def convert(self, ref: Any, source: str, dtype: str) -> Any:
        """A conversion that the function requests.

        On the CPU, floats become integers as in torch's kernels there, whereas TypeCast saturates and converts NaN to
        0. They are converted to s32, or to s64 if the result or its low bits need it. Values that do not fit, and NaN,
        become the lowest integer (the "integer indefinite" of x86's cvttss2si). Small integers are its low bits
        (c10/util/TypeCast.h).
        """
        to_integer = dtypes.get(source).is_float and dtypes.get(dtype).category == "int"
        if not to_integer or not self.on_host:
            return self.cast(ref, dtype)
        wide = "s64" if dtype == "s64" or (dtype, source) == ("u8", "f64") else "s32"
        limit = math.inf if source == "f16" else 2.0 ** (63 if wide == "s64" else 31)
        fits = self.step("Less", (self.step("Abs", (ref,), source), Number(limit, source)), "boolean")
        inside = self.step("Select", (fits, ref, Number(-limit, source)), source)
        whole = self.cast(inside, wide)
        return whole if wide == dtype else self.cast(whole, dtype)


def _fitted(value: float, dtype: str) -> float:
    """A number as a value of a dtype: integers wrap, as in torch."""
    category = dtypes.get(dtype).category
    if category == "bool":
        return bool(value)
    if category == "int":
        info: Any = np.iinfo(dtypes.get(dtype).numpy)
        low, bits = int(info.min), int(info.bits)
        return (int(value) - low) % (1 << bits) + low
    return float(value)


def compute_dtype(result: torch.Tensor, bound: dict[str, Any]) -> torch.dtype:
    """The dtype in which torch computes: the result's, or for booleans the promoted dtype of the operands."""
    if result.dtype is not torch.bool:
        return result.dtype
    operands = [
        v for name, v in bound.items()
        if name not in ("condition", "mask") and isinstance(v, (torch.Tensor, bool, int, float))
    ]  # fmt: skip
    if len(operands) < 2:
        return operands[0].dtype if isinstance(operands[0], torch.Tensor) else torch.bool
    first, second = tree_map_only(torch.Tensor, _on_meta, operands[:2])
    return torch.result_type(first, second)
