"""Quantize, Dequantize and their dynamic forms: scales and zero points by tensor, channel or group.

f8, s4 and u4 are storage dtypes: the only operations on them are conversions from and to f32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from opgraph.errors import InvalidGraphOp, Unimplemented
from opgraph.ir import dtypes
from opgraph.ir.logical_tensor import LogicalTensor
from opgraph.ir.op import Op
from opgraph.ir.opdef import Attr, Builder, OpDef, Port
from opgraph.ir.shapes import normalized_axes
from opgraph.ops.library import library
from opgraph.ops.quantization_arrays import (
    numpy_dequantize,
    numpy_quantize,
    of_attributes,
    torch_dequantize,
    torch_quantize,
    with_spread_scales,
)
from opgraph.ops.scales import shape_of_src
from opgraph.ops.spelling import as_declared, attr_of, in_dtype, rank_of, widened

_F8 = ("f8_e5m2", "f8_e4m3")
_AXIS = Attr(name="axis", type="s64", default=1)
_SCALES = Attr(name="scales", type="f32[]")
_ZPS = Attr(name="zps", type="s64[]", optional=True)
_GROUP_SHAPE = Attr(name="group_shape", type="s64[]", optional=True)


def _qtype(*choices: str) -> Attr:
    return Attr(name="qtype", type="string", default="per_tensor", choices=("per_tensor", *choices))


_STATIC = (_AXIS, _SCALES, _ZPS, _qtype("per_channel"))
_NONE = "none: rounding has no derivative but 0, and a straight-through estimate is for whoever trains to choose"


# -- checks -----------------------------------------------------------------------------------------------------------


def _constants_fit(op: Op) -> None:
    """One scale for the tensor, or any number for channels. Zero points, if given, are as many; there are none for f8.

    Raises:
        InvalidGraphOp: other numbers of them. The values of scales are not checked.
    """
    scales, zps = attr_of(op, "scales"), attr_of(op, "zps") if "zps" in op.attrs else ()
    wrong = ""
    if not scales or (op.attrs["qtype"] == "per_tensor" and len(scales) != 1):
        wrong = f"{len(scales)} scales for qtype={op.attrs['qtype']}"
    elif zps and len(zps) != len(scales):
        wrong = f"{len(zps)} zps for {len(scales)} scales"
    elif any(zps) and {op.inputs[0].dtype, *(t.dtype for t in op.outputs)} & set(_F8):
        wrong = "zero points next to f8"
    if wrong:
        raise InvalidGraphOp(f"{op.kind} got {wrong}", where=op.where, fix="give a scale, and a zero point, for each")


def _groups_fit(op: Op) -> None:
    """group_shape is given with qtype per_group, and only there.

    Raises:
        InvalidGraphOp: it is not.
    """
    grouped = bool(op.attrs.get("group_shape"))
    if grouped != (op.attrs["qtype"] == "per_group"):
        raise InvalidGraphOp(
            f"{op.kind} with qtype={op.attrs['qtype']} got {'a' if grouped else 'no'} group_shape",
            where=op.where,
            fix="give qtype='per_group' and group_shape together",
        )


# -- in small ops -----------------------------------------------------------------------------------------------------


def _operands(build: Builder, op: Op) -> tuple[LogicalTensor, Any, Any]:
    """src, scales and zero points (or None) in the compute type, in shapes that broadcast.

    Raises:
        Unimplemented: they do not broadcast: a list for channels, or groups; or a storage dtype without arithmetic.
    """
    stored = {t.dtype for t in (*op.inputs, *op.outputs)} - set(dtypes.ARITHMETIC)
    listed = len(attr_of(op, "scales")) > 1 if "scales" in op.attrs else op.attrs["qtype"] == "per_group"
    if stored or listed:
        raise Unimplemented(
            f"{op.kind} of {', '.join(sorted(stored))} cannot be made of smaller ops"
            if stored
            else f"{op.kind} cannot be made of smaller ops where several elements share each of many scales",
            where=op.where,
            fix="leave it to the library",
        )
    src = in_dtype(build, op.inputs[0], "f32") if op.inputs[0].dtype != "f64" else op.inputs[0]
    if "scales" in op.attrs:
        zps = attr_of(op, "zps") if "zps" in op.attrs else ()
        return src, attr_of(op, "scales")[0], float(zps[0]) if zps else None
    return src, *[_beside(build, op, t) for t in op.inputs[1:]], *[None] * (3 - len(op.inputs))  # type: ignore[return-value]


def _beside(build: Builder, op: Op, values: LogicalTensor) -> LogicalTensor:
    """Scales or zero points in the compute type, with axes that broadcast against src."""
    wide = widened(build, values) if values.dtype in dtypes.FLOATS else build("TypeCast", values, dtype="f32")
    ndim = rank_of(op, op.inputs[0])
    if rank_of(op, values) == ndim or rank_of(op, values) == 0:
        return wide
    if op.attrs["qtype"] == "per_tensor":
        result: LogicalTensor = build("Squeeze", wide, axes=tuple(range(rank_of(op, values))))
        return result
    (axis,) = normalized_axes([attr_of(op, "axis")], ndim)
    result = build("Unsqueeze", wide, axes=tuple(range(1, ndim - axis)))
    return result


def _spell_quantize(build: Builder, op: Op) -> list[LogicalTensor]:
    src, scales, zps = _operands(build, op)
    steps = build("Divide", src, scales)
    whole = build("Round", steps if zps is None else build("Add", steps, zps))
    return as_declared(build, op, [whole])


def _spell_dequantize(build: Builder, op: Op) -> list[LogicalTensor]:
    src, scales, zps = _operands(build, op)
    steps = src if zps is None else build("Subtract", src, zps)
    return as_declared(build, op, [build("Multiply", steps, scales)])


# -- records ----------------------------------------------------------------------------------------------------------

_TO_STEPS = (
    "dst = src / scale + zero point in f32, to the nearest integer, halves to even, held to the range of dst; NaN is "
    "0. To f8 it is src / scale, rounded as a conversion does."
)
_FROM_STEPS = "dst = (src - zero point) scale, computed in f32."
_WHICH = " One scale, and one zero point, is for the whole tensor (per_tensor), each index along axis (per_channel)"


def _quantization(
    kind: str,
    doc: str,
    *,
    inputs: Sequence[Port],
    output: Port,
    types: dict[str, tuple[str, ...]],
    attrs: Sequence[Attr],
    gradient: Any,
    check: Callable[[Op], None],
) -> OpDef:
    static, to_steps = "scales" in {a.name for a in attrs}, kind.endswith("Quantize")
    formula = numpy_quantize if to_steps else numpy_dequantize
    torch_formula = with_spread_scales(torch_quantize if to_steps else torch_dequantize)
    return library(
        kind,
        doc,
        family="quantization",
        inputs=inputs,
        outputs=(output,),
        types=types,
        attrs=attrs,
        infer=shape_of_src,
        reference=of_attributes(formula) if static else formula,
        torch=(lambda t, *given, **said: of_attributes(lambda *a, **k: torch_formula(t, *a, **k))(*given, **said))
        if static
        else torch_formula,
        spelled=_spell_quantize if to_steps else _spell_dequantize,
        gradient=gradient,
        onnx="none: QuantizeLinear takes its scales as inputs, of other shapes",
        source=f"oneDNN Graph {kind}",
        check=check,
        by_dtype=to_steps,
        keeps_dtypes=True,
    )


QUANTIZE = _quantization(
    "Quantize",
    f"{_TO_STEPS}{_WHICH}.",
    inputs=(Port(name="src", type="T1"),),
    output=Port(name="dst", type="T2"),
    types={"T1": ("f32",), "T2": ("u8", "s8", *_F8)},
    attrs=_STATIC,
    gradient=_NONE,
    check=_constants_fit,
)

DEQUANTIZE = _quantization(
    "Dequantize",
    f"{_FROM_STEPS}{_WHICH}.",
    inputs=(Port(name="src", type="T1"),),
    output=Port(name="dst", type="f32"),
    types={"T1": ("u8", "s8", *_F8)},
    attrs=_STATIC,
    gradient="integers and f8 have no gradient to take",
    check=_constants_fit,
)

DYNAMIC_QUANTIZE = _quantization(
    "DynamicQuantize",
    f"{_TO_STEPS}{_WHICH}. Scales have all axes of src, or those alone along which there are several.",
    inputs=(
        Port(name="src", type="T1"),
        Port(name="scales", type="T1"),
        Port(name="zps", type="T2", optional=True),
    ),
    output=Port(name="dst", type="T3"),
    types={"T1": ("f32",), "T2": ("u8", "s8", "s32"), "T3": ("u8", "s8")},
    attrs=(_AXIS, _qtype("per_channel")),
    gradient=_NONE,
    check=lambda op: None,
)

DYNAMIC_DEQUANTIZE = _quantization(
    "DynamicDequantize",
    f"{_FROM_STEPS}{_WHICH}, or each block of group_shape (per_group). Scales have all axes of src, or those alone "
    "along which there are several. dst has the dtype of scales.",
    inputs=(
        Port(name="src", type="T1"),
        Port(name="scales", type="T2"),
        Port(name="zps", type="T3", optional=True),
    ),
    output=Port(name="dst", type="T2"),
    types={
        "T1": ("u8", "s8", "s4", "u4"),
        "T2": ("bf16", "f16", "f32"),
        "T3": ("u4", "s4", "u8", "s8", "s32"),
    },
    attrs=(_AXIS, _GROUP_SHAPE, _qtype("per_channel", "per_group")),
    gradient=None,  # that of scales comes from the smaller ops
    check=_groups_fit,
)
