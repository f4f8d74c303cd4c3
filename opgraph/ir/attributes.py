"""Attributes of an op: checked against its record, completed with defaults, floats rounded to f32 as in oneDNN."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from opgraph.errors import InvalidGraphOp
from opgraph.ir.expression import Literal
from opgraph.ir.op import AttrValue
from opgraph.ir.opdef import Attr, OpDef


def f32(value: float) -> float:
    """`value` rounded to f32, as oneDNN stores float attributes; too large becomes infinite."""
    try:
        return float(struct.unpack("f", struct.pack("f", value))[0])
    except (OverflowError, struct.error):  # struct.error: an integer beyond the range of f64
        return float("inf") if value > 0 else float("-inf")


def typed_literal(attr: Attr | None, value: Literal) -> AttrValue:
    """A literal of the one-line notation, converted to the type of its attribute."""
    if attr is None or isinstance(value, (bool, str, tuple)):
        return value  # a list holds numbers of one type
    return int(value) if attr.type == "s64" else float(value)


def checked_attrs(opdef: OpDef, attrs: Mapping[str, Any], where: str) -> dict[str, AttrValue]:
    """Attributes with defaults filled in and floats rounded to f32.

    Raises:
        InvalidGraphOp: an unknown attribute, a missing required one, a wrong type or choice.
    """
    if not attrs and not opdef.attrs:
        return {}
    if opdef.foreign:  # holds the attributes of the foreign op, of any name
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
        is_list = isinstance(value, (Sequence, np.ndarray)) and getattr(value, "ndim", 1) > 0
        if isinstance(value, (str, bytes)) or not is_list:
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
    if type_ == "s64" and isinstance(value, int) and not isinstance(value, bool) and _is_s64(value):
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


def _is_s64(value: int) -> bool:
    return -(2**63) <= value < 2**63


def _wildcard_value(name: object, value: Any, where: str) -> AttrValue:
    if isinstance(value, (np.generic, np.ndarray)) and getattr(value, "ndim", 0) < 2:
        value = value.tolist()
    values = value if isinstance(value, (list, tuple)) else (value,)
    kinds = {type(v.item() if isinstance(v, np.generic) else v) for v in values}
    if not isinstance(name, str) or len(kinds) > 1 or not kinds <= {bool, int, float, str}:
        raise InvalidGraphOp(
            f"attribute {name}={value!r} has no attribute type",
            where=where,
            fix="use bool, int, float, str or a list of one of them",
        )
    checked = tuple(_plain(name, v.item() if isinstance(v, np.generic) else v, where) for v in values)
    return checked if values is value else checked[0]  # type: ignore[return-value]  # all of one type


def _plain(name: str, value: bool | int | float | str, where: str) -> bool | int | float | str:
    if isinstance(value, float):
        return f32(value)
    if isinstance(value, int) and not _is_s64(value):
        raise InvalidGraphOp(
            f"attribute {name}={value} is no s64", where=where, fix="give a number in the range of 64 bits"
        )
    return value
