"""Quantize, Dequantize and their dynamic forms: scales and zero points by tensor, channel or group.

f8, s4 and u4 are storage: they are converted to f32 and from it, and nothing else is done with them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from opgraph.errors import InvalidGraphOp, Unimplemented
from opgraph.ir import dtypes
from opgraph.ir.logical_tensor import Dim, Dims, LogicalTensor, dims_text
from opgraph.ir.op import Op
from opgraph.ir.opdef import Attr, Attrs, Builder, OpDef, Port
from opgraph.ir.shapes import ShapeMismatch, normalized_axes
from opgraph.ops.conversion import cast
from opgraph.ops.library import library
from opgraph.ops.spelling import as_declared, attr_of, in_dtype, rank_of, widened
from opgraph.ops.statistics import agree

_F8 = ("f8_e5m2", "f8_e4m3")
_AXIS = Attr(name="axis", type="s64", default=1)
_SCALES = Attr(name="scales", type="f32[]")
_ZPS = Attr(name="zps", type="s64[]", optional=True)
_GROUP_SHAPE = Attr(name="group_shape", type="s64[]", optional=True)


def _qtype(*choices: str) -> Attr:
    return Attr(name="qtype", type="string", default="per_tensor", choices=("per_tensor", *choices))


_STATIC = (_AXIS, _SCALES, _ZPS, _qtype("per_channel"))
_NONE = "none: rounding has no derivative but 0, and a straight-through estimate is for whoever trains to choose"


# -- which scales belong where ----------------------------------------------------------------------------------------


def _shape_of_src(inputs: tuple[LogicalTensor, ...], attrs: Attrs) -> tuple[Dims, ...]:
    """That of src."""
    dims = inputs[0].dims
    if dims is not None:
        expected = _scale_dims(dims, attrs)
        for tensor, name in zip(inputs[1:], ("scales", "zps"), strict=False):
            if tensor.dims is not None and not _belongs(tensor.dims, expected, alone=name == "zps"):
                raise ShapeMismatch(
                    f"{name} are {dims_text(tensor.dims)}, and qtype={attrs['qtype']} makes them {dims_text(expected)}",
                    "give one for the tensor, for each index along axis, or for each group",
                )
        if len(inputs) == 1 and attrs["qtype"] == "per_channel":
            count = expected[normalized_axes([attrs["axis"]], len(dims))[0]]
            if isinstance(count, int) and count != len(attrs["scales"]):
                raise ShapeMismatch(
                    f"{len(attrs['scales'])} scales for {count} indices along axis {attrs['axis']}", "give one for each"
                )
    return (dims,)


def _scale_dims(dims: Sequence[Dim], attrs: Attrs) -> tuple[Dim, ...]:
    """The shape of scales with all axes; 1 where several elements share one."""
    if attrs["qtype"] == "per_tensor":
        return (1,) * len(dims)
    if attrs["qtype"] == "per_channel":
        (axis,) = normalized_axes([attrs["axis"]], len(dims))
        return tuple(d if i == axis else 1 for i, d in enumerate(dims))
    groups = attrs.get("group_shape", ())
    if len(groups) != len(dims):
        raise ShapeMismatch(f"group_shape has {len(groups)} entries for {len(dims)} axes", "give one for each axis")
    for size, group in zip(dims, groups, strict=True):
        if isinstance(size, int) and (group < 1 or size % group):
            raise ShapeMismatch(f"groups of {group} do not divide {size}", "let group_shape divide the shape of src")
    return tuple(d // g if isinstance(d, int) else None for d, g in zip(dims, groups, strict=True))


def _belongs(dims: Sequence[Dim], expected: Sequence[Dim], *, alone: bool) -> bool:
    """Whether scales have all axes, or only those along which there is more than one; zps may also be one for all."""
    packed = [d for d in expected if d != 1]
    unknown = None in dims or None in expected
    return agree(dims, expected) or agree(dims, packed) or ((alone or not packed) and set(dims) <= {1}) or unknown


def _spread(values: Any, shape: Sequence[int], attrs: Attrs) -> Any:
    """Scales or zero points, so that they broadcast against an array of some shape."""
    values = np.asarray(values)
    if values.size == 1:
        return values.reshape(())
    expected = tuple(int(d or 0) for d in _scale_dims(shape, attrs))
    full = values.reshape(expected)
    for axis, (size, count) in enumerate(zip(shape, expected, strict=True)):
        if count not in (1, size):
            full = np.repeat(full, size // count, axis=axis)
    return full


def _constants_fit(op: Op) -> None:
    """One scale for the tensor, or any number for channels; as many zero points, if any; none next to f8.

    Raises:
        InvalidGraphOp: other numbers of them, or a scale that is not positive.
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


# -- numbers ----------------------------------------------------------------------------------------------------------


def _of_attributes(formula: Callable[..., Any]) -> Callable[..., Any]:
    """A formula over inputs as one over attributes."""

    def form(src: Any, *, scales: Sequence[float], zps: Sequence[int] = (), **attrs: Any) -> Any:
        factors = np.asarray(scales, np.float32)
        return formula(src, factors, *([np.asarray(zps, np.int64)] if zps else []), **attrs)

    return form


def _quantize(src: Any, scales: Any, zps: Any = None, *, to: str, **attrs: Any) -> np.ndarray:
    steps = src / _spread(scales, src.shape, attrs).astype(src.dtype)
    if zps is not None:
        steps = steps + _spread(zps, src.shape, attrs).astype(src.dtype)
    return cast(np.asarray(np.rint(steps) if dtypes.get(to).category == "int" else steps), to)


def _dequantize(src: Any, scales: Any, zps: Any = None, **attrs: Any) -> Any:
    work = scales.dtype if scales.dtype.itemsize == 8 else np.float32
    steps = src.astype(work)
    if zps is not None:
        steps = steps - _spread(zps, src.shape, attrs).astype(work)
    return steps * _spread(scales, src.shape, attrs).astype(work)


def _in_torch(formula: Callable[..., Any]) -> Callable[..., Any]:
    """The same formula in torch: scales spread by NumPy's rules."""

    def torch_form(t: Any, src: Any, *operands: Any, **attrs: Any) -> Any:
        return formula(t, src, *[_torch_spread(t, o, src, attrs) for o in operands], **attrs)

    return torch_form


def _torch_spread(t: Any, values: Any, src: Any, attrs: Attrs) -> Any:
    values = t.as_tensor(values, device=src.device).to(t.float64 if src.dtype == t.float64 else t.float32)
    if values.numel() == 1:
        return values.reshape(())
    expected = tuple(int(d or 0) for d in _scale_dims(tuple(src.shape), attrs))
    full = values.reshape(expected)
    for axis, (size, count) in enumerate(zip(src.shape, expected, strict=True)):
        if count not in (1, size):
            full = full.repeat_interleave(size // count, axis)
    return full


def _torch_quantize(t: Any, src: Any, scales: Any, zps: Any = None, *, to: str, **_: Any) -> Any:
    steps = src / scales if zps is None else src / scales + zps
    whole = t.nan_to_num(t.round(steps), nan=0.0)
    limits = np.iinfo({"s8": np.int8, "u8": np.uint8}[to])
    return whole.clamp(limits.min, limits.max).to({"s8": t.int8, "u8": t.uint8}[to])


def _torch_dequantize(t: Any, src: Any, scales: Any, zps: Any = None, **_: Any) -> Any:
    steps = src.to(scales.dtype)
    return (steps if zps is None else steps - zps) * scales


# -- in small ops -----------------------------------------------------------------------------------------------------


def _operands(build: Builder, op: Op) -> tuple[LogicalTensor, Any, Any]:
    """src, scales and zero points (or None) in the compute type, so that they broadcast.

    Raises:
        Unimplemented: they do not, as they are: a list for channels, groups, or storage without arithmetic.
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
    """Scales or zero points, with axes so that they broadcast against src."""
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
    formula = _quantize if to_steps else _dequantize
    torch_formula = _in_torch(_torch_quantize if to_steps else _torch_dequantize)
    return library(
        kind,
        doc,
        family="quantization",
        inputs=inputs,
        outputs=(output,),
        types=types,
        attrs=attrs,
        infer=_shape_of_src,
        reference=_of_attributes(formula) if static else formula,
        torch=(lambda t, *given, **said: _of_attributes(lambda *a, **k: torch_formula(t, *a, **k))(*given, **said))
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
    gradient=None,  # of scales, by the smaller ops
    check=_groups_fit,
)
