"""Checks one op against its record: arity, dtypes, shapes. `opgraph.ir.attributes` checks the attributes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from opgraph.errors import InvalidDataType, InvalidGraphOp, InvalidShape
from opgraph.ir import dtypes
from opgraph.ir.attributes import checked_attrs, f32
from opgraph.ir.logical_tensor import Dims, LogicalTensor
from opgraph.ir.op import AttrValue, Op
from opgraph.ir.opdef import OpDef, Port
from opgraph.ir.shapes import ShapeMismatch

__all__ = ["bind_dtypes", "check_arity", "checked_attrs", "f32", "inferred_dims", "promote"]

#: The place in an error message: a text, or an op, whose text is only made for an error.
Place: TypeAlias = str | Op


def _text(place: Place) -> str:
    return place if isinstance(place, str) else place.where


def check_arity(opdef: OpDef, given: int, outputs: int, where: str) -> None:
    """Raises InvalidGraphOp if the number of inputs or outputs does not fit."""
    if given == len(opdef.inputs) and outputs == len(opdef.outputs):
        return  # one for each port
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
    opdef: OpDef, inputs: Sequence[LogicalTensor], declared: Sequence[str | None], where: Place
) -> tuple[list[str], list[str]]:
    """dtypes of inputs and outputs; an untyped scalar constant takes the dtype of the other operands.

    Args:
        declared: the dtype stated for each output, or None.

    Raises:
        InvalidDataType: a dtype that the op does not take, or two dtypes for one symbol.
    """
    ports = opdef.with_optional(len(inputs))
    bound: dict[str, str] = {}
    for port, tensor in zip(ports, inputs, strict=True):
        if tensor.dtype != dtypes.UNDEF:
            # Operands of a variadic port may have different dtypes; Concat, which requires one dtype, checks it itself.
            (_take if port.variadic else _bind)(opdef, port, tensor.dtype, bound, where)
    # A port of one fixed dtype (Select's boolean condition) does not determine the dtypes of the others.
    met = sorted({dtype for symbol, dtype in bound.items() if symbol in opdef.types})
    for port, dtype in zip(opdef.outputs, declared, strict=False):
        if dtype is not None and dtype != dtypes.UNDEF and not port.variadic:
            _bind(opdef, port, dtype, bound, where)
    ins = []
    for port, tensor in zip(ports, inputs, strict=True):
        if tensor.dtype != dtypes.UNDEF:
            ins.append(tensor.dtype)
        elif not tensor.is_constant:
            if dtypes.UNDEF not in opdef.types.get(port.type, ()):
                raise InvalidDataType(
                    f"the dtype of {tensor.label} is not known", where=_text(where), fix="declare it with its dtype"
                )
            ins.append(dtypes.UNDEF)
        elif port.variadic:
            ins.append(_met_by_any(inputs))
        else:
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
        elif port.wide:
            outs.append("f64" if "f64" in ins else "f32")
        else:
            outs.append(_inferred_output(opdef, port, ins, where))
    return ins, outs


def _met_by_any(inputs: Sequence[LogicalTensor]) -> str:
    """The dtype of an untyped constant next to opaque operands: their common arithmetic dtype, else f32."""
    met = {t.dtype for t in inputs} - {dtypes.UNDEF}
    return met.pop() if len(met) == 1 and met <= set(dtypes.ARITHMETIC) else "f32"


def _take(opdef: OpDef, port: Port, dtype: str, bound: dict[str, str], where: Place) -> None:
    allowed = opdef.types.get(port.type, (port.type,))
    if dtype not in allowed:
        raise InvalidDataType(
            f"{opdef.kind} does not take {dtype} as {port.name}",
            where=_text(where),
            fix=f"use one of {', '.join(allowed)}, or insert a TypeCast",
        )


def _bind(opdef: OpDef, port: Port, dtype: str, bound: dict[str, str], where: Place) -> None:
    _take(opdef, port, dtype, bound, where)
    if bound.setdefault(port.type, dtype) != dtype:
        raise InvalidDataType(
            f"{opdef.kind} needs one dtype, got {bound[port.type]} and {dtype} (as {port.name})",
            where=_text(where),
            fix="insert a TypeCast",
        )


def _inferred_output(opdef: OpDef, port: Port, ins: list[str], where: Place) -> str:
    if opdef.is_cast or opdef.by_dtype:  # only the caller determines the dtype of its output
        raise InvalidDataType(
            f"the dtype of output {port.name} is not stated", where=_text(where), fix='give it: dtype="f32"'
        )
    return promote(sorted(set(ins)), where)


def promote(names: Sequence[str], where: Place) -> str:
    """The common dtype of operands of these dtypes: their own, or f32 for a mix of f32, bf16 and f16.

    Raises:
        InvalidDataType: any other mix.
    """
    if len(names) == 1:
        return names[0]
    if set(names) <= {"f32", "bf16", "f16"}:
        return "f32"
    raise InvalidDataType(f"dtypes {' and '.join(names)} do not mix", where=_text(where), fix="insert a TypeCast")


def inferred_dims(
    opdef: OpDef, inputs: tuple[LogicalTensor, ...], attrs: Mapping[str, AttrValue], where: Place
) -> tuple[Dims, ...]:
    """Output dimensions by the op's shape rule. All outputs of a pointwise op, optional ones included, have the same.

    Raises:
        InvalidShape: the input shapes do not fit together.
    """
    try:
        found = opdef.infer(inputs, attrs)
    except ShapeMismatch as error:
        raise InvalidShape(error.what, where=_text(where), fix=error.fix) from None
    return found[:1] * len(opdef.outputs) if opdef.is_pointwise else found
