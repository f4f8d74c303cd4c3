"""Checking one op against its record: arity, attributes, dtypes, shapes."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from opgraph.errors import InvalidDataType, InvalidGraphOp, InvalidShape
from opgraph.ir import dtypes
from opgraph.ir.logical_tensor import Dims, LogicalTensor
from opgraph.ir.op import AttrValue
from opgraph.ir.opdef import Attr, OpDef, Port
from opgraph.ir.shapes import ShapeMismatch


def f32(value: float) -> float:
    """`value` rounded to f32, as oneDNN stores float attributes; too large becomes infinite."""
    try:
        return float(struct.unpack("f", struct.pack("f", value))[0])
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")


def checked_attrs(opdef: OpDef, attrs: Mapping[str, Any], where: str) -> dict[str, AttrValue]:
    """Attributes with defaults filled in and floats rounded to f32.

    Raises:
        InvalidGraphOp: an unknown attribute, a missing required one, a wrong type or choice.
    """
    if not attrs and not opdef.attrs:
        return {}
    if opdef.kind == "Wildcard":  # carries whatever the foreign op had
        return {name: _wildcard_value(name, value, where) for name, value in attrs.items()}
    known = {a.name: a for a in opdef.attrs}
    for name in attrs:
        if name not in known:
            raise InvalidGraphOp(
                f"{opdef.kind} has no attribute {name!r}",
                where=where,
                fix=f"its attributes are {', '.join(known)}" if known else "it takes no attributes",
            )
    result: dict[str, AttrValue] = {}
    for attr in opdef.attrs:
        if attr.name in attrs:
            result[attr.name] = _checked_value(attr, attrs[attr.name], where)
        elif attr.required:
            raise InvalidGraphOp(
                f"{opdef.kind} needs attribute {attr.name!r}", where=where, fix=f"set {attr.name} ({attr.type})"
            )
        elif attr.default is not None:
            result[attr.name] = f32(attr.default) if attr.type == "f32" else attr.default  # type: ignore[arg-type]
    return result


def _checked_value(attr: Attr, value: Any, where: str) -> AttrValue:
    scalar_type = attr.type.removesuffix("[]")
    if attr.type.endswith("[]"):
        if isinstance(value, (str, bytes)) or not isinstance(value, (Sequence, np.ndarray)):
            raise _wrong_type(attr, value, where)
        return tuple(_scalar(attr, scalar_type, v, where) for v in value)  # type: ignore[return-value]
    checked = _scalar(attr, scalar_type, value, where)
    if attr.choices and checked not in attr.choices:
        raise InvalidGraphOp(
            f"attribute {attr.name}={value!r} is not a choice", where=where, fix=f"use one of {', '.join(attr.choices)}"
        )
    return checked


def _scalar(attr: Attr, type_: str, value: Any, where: str) -> bool | int | float | str:
    if isinstance(value, np.generic):
        value = value.item()
    if type_ == "f32" and isinstance(value, (int, float)) and not isinstance(value, bool):
        return f32(value)
    if type_ == "s64" and isinstance(value, int) and not isinstance(value, bool):
        return value
    if type_ == "bool" and isinstance(value, bool):
        return value
    if type_ == "string" and isinstance(value, str):
        return value
    raise _wrong_type(attr, value, where)


def _wrong_type(attr: Attr, value: object, where: str) -> InvalidGraphOp:
    return InvalidGraphOp(
        f"attribute {attr.name}={value!r} is not {attr.type}", where=where, fix=f"give a value of type {attr.type}"
    )


def _wildcard_value(name: str, value: Any, where: str) -> AttrValue:
    if isinstance(value, list):
        value = tuple(value)
    if isinstance(value, float):
        return f32(value)
    if isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, tuple) and all(
        isinstance(v, type(value[0])) and isinstance(v, (int, float, str)) for v in value
    ):
        return tuple(f32(v) if isinstance(v, float) else v for v in value)
    raise InvalidGraphOp(
        f"attribute {name}={value!r} has no attribute type",
        where=where,
        fix="use bool, int, float, str or a list of one of them",
    )


def check_arity(opdef: OpDef, given: int, outputs: int, where: str) -> None:
    """Raises InvalidGraphOp where the number of inputs or outputs does not fit."""
    for ports, count, what in ((opdef.inputs, given, "inputs"), (opdef.outputs, outputs, "outputs")):
        low = sum(not (p.optional or p.variadic) for p in ports)
        high = None if ports and ports[-1].variadic else len(ports)
        if count < low or (high is not None and count > high):
            wanted = str(low) if low == high else f"{low} or more" if high is None else f"{low} to {high}"
            names = ", ".join(p.name for p in ports) or "none"
            raise InvalidGraphOp(
                f"{opdef.kind} takes {wanted} {what}, got {count}", where=where, fix=f"its {what} are: {names}"
            )


def bind_dtypes(
    opdef: OpDef, inputs: Sequence[LogicalTensor], declared: Sequence[str | None], where: str
) -> tuple[list[str], list[str]]:
    """dtypes of inputs and outputs; an untyped scalar constant takes the dtype of what it meets.

    Args:
        declared: the dtype stated for each output, or None.

    Raises:
        InvalidDataType: a dtype that the op does not take, or two dtypes for one symbol.
    """
    ports = opdef.with_optional(len(inputs))
    bound: dict[str, str] = {}
    for port, tensor in zip(ports, inputs, strict=True):
        if tensor.dtype != dtypes.UNDEF and not port.variadic:
            _bind(opdef, port, tensor.dtype, bound, where)
    # A port of one fixed dtype (Select's boolean condition) says nothing about what the others are.
    met = sorted({dtype for symbol, dtype in bound.items() if symbol in opdef.types})
    for port, dtype in zip(opdef.outputs, declared, strict=False):
        if dtype is not None and dtype != dtypes.UNDEF and not port.variadic:
            _bind(opdef, port, dtype, bound, where)
    ins = []
    for port, tensor in zip(ports, inputs, strict=True):
        dtype = tensor.dtype
        if dtype == dtypes.UNDEF and not port.variadic:
            fixed = port.type if port.type not in opdef.types else None
            dtype = fixed or bound.get(port.type) or (promote(met, where) if met else "f32")
            _bind(opdef, port, dtype, bound, where)
        ins.append(dtype)
    outs = []
    for index, dtype in enumerate(declared):
        port = opdef.outputs[min(index, len(opdef.outputs) - 1)]
        if dtype is not None and dtype != dtypes.UNDEF:
            outs.append(dtype)
        elif port.type in dtypes.BY_NAME:
            outs.append(port.type)
        elif port.type in bound:
            outs.append(bound[port.type])
        elif port.variadic:
            outs.append(dtypes.UNDEF)
        else:
            outs.append(_inferred_output(opdef, port, ins, where))
    return ins, outs


def _bind(opdef: OpDef, port: Port, dtype: str, bound: dict[str, str], where: str) -> None:
    allowed = opdef.types.get(port.type, (port.type,))
    if dtype not in allowed:
        raise InvalidDataType(
            f"{opdef.kind} does not take {dtype} as {port.name}",
            where=where,
            fix=f"use one of {', '.join(allowed)}, or insert a TypeCast",
        )
    if bound.setdefault(port.type, dtype) != dtype:
        raise InvalidDataType(
            f"{opdef.kind} needs one dtype, got {bound[port.type]} and {dtype} (as {port.name})",
            where=where,
            fix="insert a TypeCast",
        )


def _inferred_output(opdef: OpDef, port: Port, ins: list[str], where: str) -> str:
    if len({p.type for p in opdef.inputs}) < 2:  # TypeCast: nothing determines its output but the caller
        raise InvalidDataType(f"the dtype of output {port.name} is not stated", where=where, fix='give it: dtype="f32"')
    return promote(sorted(set(ins)), where)


def promote(names: Sequence[str], where: str) -> str:
    """The dtype in which operands of these dtypes meet: their own, or f32 for a mix of f32, bf16 and f16.

    Raises:
        InvalidDataType: any other mix.
    """
    if len(names) == 1:
        return names[0]
    if set(names) <= {"f32", "bf16", "f16"}:
        return "f32"
    raise InvalidDataType(f"dtypes {' and '.join(names)} do not mix", where=where, fix="insert a TypeCast")


def inferred_dims(
    opdef: OpDef, inputs: tuple[LogicalTensor, ...], attrs: Mapping[str, AttrValue], where: str
) -> tuple[Dims, ...]:
    """Output dimensions by the op's shape rule.

    Raises:
        InvalidShape: the inputs do not fit together.
    """
    try:
        return opdef.infer(inputs, attrs)
    except ShapeMismatch as error:
        raise InvalidShape(error.what, where=where, fix=error.fix) from None
