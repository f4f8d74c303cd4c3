"""Rules that are shared by the ops of a family; a record adds only its differences.

`pointwise(...)` supplies broadcasting, dtype rules and the frame of the NumPy and torch forms, so that the record of a
new pointwise op contains none of them. `opgraph.ops.library` does the same for ops that a library runs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from opgraph.errors import InvalidDataType
from opgraph.ir import dtypes
from opgraph.ir.logical_tensor import Dims, LogicalTensor
from opgraph.ir.op import Op
from opgraph.ir.opdef import Attr, Attrs, GradientRule, Onnx, OpDef, Port, ShapeRule, Template, TorchCall, register
from opgraph.ir.schema import f32
from opgraph.ir.shapes import ShapeMismatch, broadcast, channel_axes

FLOAT = dtypes.FLOATS
NUMERIC = (*dtypes.FLOATS, *dtypes.INTS)
SIGNED = (*dtypes.FLOATS, "s64", "s32", "s8")
INTEGER = dtypes.INTS
ANY = dtypes.ARITHMETIC
BOOLEAN = ("boolean",)

#: oneDNN's attribute of every broadcasting op.
AUTO_BROADCAST = Attr(name="auto_broadcast", type="string", default="numpy", choices=("numpy", "none"))
#: oneDNN's attribute of ops with a channel axis.
DATA_FORMAT = Attr(name="data_format", type="string", default="NXC", choices=("NXC", "NCX"))
#: Attributes that describe the layout of operands, not the computation: the formulas never receive them.
LAYOUT_ATTRS = ("auto_broadcast", "data_format", "per_channel_broadcast")

#: Two inputs and an output, whose dtypes are equal or all among f32, bf16 and f16 (`meets_in_f32`).
MIXED_INPUTS = (Port(name="src_0", type="T1"), Port(name="src_1", type="T2"))
MIXED_OUTPUT = (Port(name="dst", type="T3"),)
#: Two inputs of one dtype.
SAME_INPUTS = ("src_0", "src_1")


def broadcast_rule(inputs: tuple[LogicalTensor, ...], attrs: Attrs) -> tuple[Dims, ...]:
    """NumPy broadcasting of all inputs; identical shapes where auto_broadcast is "none"."""
    shapes = [t.dims for t in inputs]
    if attrs.get("auto_broadcast") == "none" and any(s != shapes[0] for s in shapes):
        raise ShapeMismatch(
            "shapes differ and auto_broadcast is none", "give inputs of one shape, or auto_broadcast='numpy'"
        )
    return (broadcast(shapes),)


def meets_in_f32(op: Op) -> None:
    """All dtypes are equal, or all are among f32, bf16 and f16, which are then computed in f32.

    Raises:
        InvalidDataType: any other mix, which has no compute type.
    """
    names = {t.dtype for t in (*op.inputs, *op.outputs)} - {dtypes.UNDEF}
    if len(names) > 1 and not names <= {"f32", "bf16", "f16"}:
        raise InvalidDataType(
            f"dtypes {' and '.join(sorted(names))} do not mix", where=op.where, fix="insert a TypeCast"
        )


def pointwise(
    kind: str,
    doc: str,
    *,
    inputs: Sequence[str | Port] = ("src",),
    outputs: Sequence[str | Port] = ("dst",),
    types: Mapping[str, tuple[str, ...]] | tuple[str, ...] = FLOAT,
    attrs: Sequence[Attr] = (),
    reference: Callable[..., Any],
    expression: Template,
    torch: Callable[..., Any],
    onnx: tuple[Onnx, ...] | str = (),
    decomposition: Template | None = None,
    cost: int = 1,
    commutative: bool = False,
    domain: tuple[tuple[float, float], ...] = ((-4.0, 4.0),),
    infer: ShapeRule = broadcast_rule,
    source: str = "",
    check: Callable[[Op], None] | None = None,
    channel_inputs: tuple[int, ...] = (),
    is_cast: bool = False,
    powers: bool = False,
    index_of: str | None = None,
    by_position: bool = False,
    also: Mapping[str, str] | None = None,
    gradient: Mapping[str, Template] | GradientRule | str | None = None,
    gradient_from_output: Template | None = None,
    torch_calls: tuple[TorchCall, ...] = (),
) -> OpDef:
    """Registers one pointwise op; see OpDef for the arguments.

    `types` may be the dtypes of the one symbol T, which is the type of ports given by name alone. `reference` and
    `torch` are formulas. The functions registered for them fill in default attributes and align channel operands; the
    NumPy one also computes f16 and bf16 in f32, with one rounding and without warnings. With `by_position`, the
    formulas receive `position`.
    """
    ports = tuple(Port(name=p) if isinstance(p, str) else p for p in inputs)
    symbols = types if isinstance(types, Mapping) else {"T": types}
    typed = frozenset(i for i, p in enumerate(ports) if p.type not in symbols)
    return register(
        OpDef(
            kind=kind,
            doc=doc,
            family="pointwise",
            inputs=ports,
            outputs=tuple(Port(name=p) if isinstance(p, str) else p for p in outputs),
            types=symbols,
            attrs=tuple(attrs),
            infer=infer,
            reference=_numpy_form(reference, defaults_of(attrs), channel_inputs, typed, by_position),
            expression=expression,
            torch=_torch_form(torch, defaults_of(attrs), channel_inputs, by_position),
            onnx=onnx,
            decomposition=decomposition,
            cost=cost,
            commutative=commutative,
            domain=domain,
            source=source,
            check=check,
            channel_inputs=channel_inputs,
            is_cast=is_cast,
            powers=powers,
            index_of=index_of,
            by_position=by_position,
            also=also or {},
            gradient=gradient,
            gradient_from_output=gradient_from_output,
            torch_calls=torch_calls,
        )
    )


def defaults_of(attrs: Sequence[Attr]) -> dict[str, Any]:
    """Defaults as a graph stores them, floats rounded to f32."""
    values = {a.name: a.default for a in attrs if a.default is not None}
    return {name: f32(value) if isinstance(value, float) else value for name, value in values.items()}


def _numpy_form(
    formula: Callable[..., Any],
    defaults: Attrs,
    channel_inputs: tuple[int, ...],
    typed: Collection[int],
    by_position: bool,
) -> Callable[..., Any]:
    """The NumPy form; inputs at the indices `typed` have a fixed dtype, which has no effect on the result's."""

    def reference(*arrays: Any, **attrs: Any) -> np.ndarray:
        given = [np.asarray(a) for a in arrays]
        met = [a.dtype for i, a in enumerate(given) if i not in typed]
        narrow = {d for d in met if d.itemsize == 2}
        # The result is rounded to a narrow dtype if it is the only one; a mix of float dtypes gives f32.
        mixed = len(narrow) > 1 or any(d == np.float32 for d in met)
        values = {**defaults, **attrs}
        if by_position and "position" not in values:
            shape = np.broadcast_shapes(*[a.shape for a in given])
            values["position"] = np.arange(prod(shape)).reshape(shape)
        with np.errstate(all="ignore"):
            wide = [a.astype(np.float32) if a.dtype in narrow else a for a in given]
            result = np.asarray(formula(*_aligned(wide, channel_inputs, values), **_formula_attrs(values)))
            if result.dtype == np.float32 and narrow and not mixed:
                result = result.astype(narrow.pop())
        return result

    return reference


def _torch_form(
    formula: Callable[..., Any], defaults: Attrs, channel_inputs: tuple[int, ...], by_position: bool
) -> Callable[..., Any]:
    def torch_form(t: Any, *tensors: Any, **attrs: Any) -> Any:
        values = {**defaults, **attrs}
        if by_position and "position" not in values:
            shape = t.broadcast_shapes(*[x.shape for x in tensors])
            values["position"] = t.arange(prod(shape), device=tensors[0].device).reshape(shape)
        return formula(t, *_aligned(tensors, channel_inputs, values), **_formula_attrs(values))

    return torch_form


def _formula_attrs(values: Attrs) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in LAYOUT_ATTRS}


def _aligned(arrays: Sequence[Any], channel_inputs: tuple[int, ...], attrs: Attrs) -> list[Any]:
    """Arrays (NumPy or torch) with 1-d channel operands reshaped to lie along the channel axis."""
    result = list(arrays)
    for index in channel_inputs:
        extra = channel_axes(arrays[index].ndim, max(a.ndim for i, a in enumerate(arrays) if i != index), attrs)
        if extra:
            result[index] = arrays[index].reshape((-1, *[1] * extra))
    return result
