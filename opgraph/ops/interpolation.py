"""Interpolate and its gradient: one matrix for each spatial axis; the gradient uses its transpose."""

from __future__ import annotations

from collections.abc import Sequence
from math import floor
from typing import Any

import numpy as np

from opgraph.errors import InvalidGraphOp
from opgraph.ir.logical_tensor import Dim, Dims, LogicalTensor, dims_text
from opgraph.ir.op import Op
from opgraph.ir.opdef import Attr, Attrs, Builder, Port, array_of
from opgraph.ir.shapes import ShapeMismatch, dims_agree
from opgraph.ops import windows
from opgraph.ops.families import DATA_FORMAT, FLOAT
from opgraph.ops.library import library, wide
from opgraph.ops.spelling import attr_of
from opgraph.ops.windows import moved, moved_back, ordered, restored

_MODE = Attr(name="mode", type="string", choices=("nearest", "linear", "bilinear", "trilinear"))
_SIZES = Attr(name="sizes", type="s64[]", optional=True)
_SCALES = Attr(name="scales", type="f32[]", optional=True)
_COORDINATES = Attr(
    name="coordinate_transformation_mode",
    type="string",
    default="half_pixel",
    choices=("half_pixel", "align_corners"),
)
_SIZES_PORT = Port(name="sizes", type="T2", optional=True, says_shape=True)
_AXES_OF = {"bilinear": 2, "trilinear": 3}


def _one_size(op: Op) -> None:
    """Exactly one of sizes, as attribute or input, and scales is given; each size is 1 or more.

    Raises:
        InvalidGraphOp: none of them is given, or several are.
    """
    is_back = op.kind.endswith("Backward")
    given = [bool(op.attrs.get("sizes")), bool(op.attrs.get("scales")), len(op.inputs) > 1 + is_back]
    if sum(given) != 1:
        raise InvalidGraphOp(
            f"{op.kind} got {sum(given)} of the attributes sizes and scales and the input sizes",
            where=op.where,
            fix="give exactly one of them",
        )
    if any(not v > 0 for n in ("sizes", "scales") for v in op.attrs.get(n, ())):  # type: ignore[union-attr, operator]
        raise InvalidGraphOp(f"{op.kind} got a size or scale below 1 element", where=op.where, fix="give positive ones")


def _resized(data: Sequence[Dim], attrs: Attrs, sizes: Sequence[int] | None) -> tuple[Dim, ...]:
    """Spatial sizes of the result: sizes, or those of the data times scales, rounded down, in f32 as oneDNN does."""
    wanted = attrs.get("sizes") or sizes
    factors = attrs.get("scales") or (1.0,) * len(data)
    entries = wanted or factors
    if len(entries) != len(data):
        raise ShapeMismatch(
            f"sizes or scales have {len(entries)} entries for {len(data)} spatial axes", "give one for each of them"
        )
    if not all(0 < v < 2**53 for v in entries):
        raise ShapeMismatch(f"sizes or scales are {list(entries)}", "give positive ones")
    if _AXES_OF.get(attrs["mode"], len(data)) != len(data):
        raise ShapeMismatch(f"{attrs['mode']} for {len(data)} spatial axes", "use linear, which takes any number")
    if wanted:
        if 0 in data:
            raise ShapeMismatch(
                f"src has no elements along a spatial axis of {list(data)}", "give it some, or scales in place of sizes"
            )
        return tuple(int(n) for n in wanted)
    return tuple(
        floor(np.float32(n) * np.float32(f)) if isinstance(n, int) else n if f == 1 else None
        for n, f in zip(data, factors, strict=True)
    )


def _forward_shape(inputs: tuple[LogicalTensor, ...], attrs: Attrs) -> tuple[Dims, ...]:
    """Batch and channels of src; spatial sizes as given, or those of src times scales, rounded down."""
    dims = inputs[0].dims
    if dims is None:
        return (None,)
    order = windows.data_order(len(dims), attrs)
    batch, channels, *spatial = ordered(dims, order)
    if len(inputs) > 1 and not inputs[1].is_constant:
        return (restored((batch, channels, *[None] * len(spatial)), order),)
    told = array_of(inputs[1]).reshape(-1).tolist() if len(inputs) > 1 else None
    return (restored((batch, channels, *_resized(spatial, attrs, told)), order),)


def _backward_shape(inputs: tuple[LogicalTensor, ...], attrs: Attrs) -> tuple[Dims, ...]:
    """The shape of src."""
    src, diff = inputs[0].dims, inputs[1].dims
    (made,) = _forward_shape((inputs[0], *inputs[2:]), attrs)
    if made is not None and diff is not None and not dims_agree(made, diff):
        raise ShapeMismatch(
            f"Interpolate makes {dims_text(made)} of src, and diff_dst is {dims_text(diff)}",
            "give the gradient of what Interpolate made of src",
        )
    return (src,)


# -- numbers ----------------------------------------------------------------------------------------------------------


def _matrix(size: int, count: int, attrs: Attrs) -> np.ndarray:
    """[count, size]: the weights of the elements of the data in each element of the result, along one axis."""
    if 0 in (size, count):
        return np.zeros((count, size))
    places = np.arange(count, dtype=np.float64)
    if attrs["coordinate_transformation_mode"] == "align_corners":
        at = places * ((size - 1) / (count - 1)) if count > 1 else places * 0
    else:
        at = (places + 0.5) * (size / count) - 0.5
    if attrs["mode"] == "nearest":
        at = np.floor(at + 0.5)
    at = np.clip(at, 0, size - 1)
    low = np.floor(at).astype(np.int64)
    made = np.zeros((count, size))
    rows = np.arange(count)
    np.add.at(made, (rows, low), 1 - (at - low))
    np.add.at(made, (rows, np.minimum(low + 1, size - 1)), at - low)
    return made


def _applied(t: Any, data: Any, matrices: Sequence[np.ndarray]) -> Any:
    """Data [N, C, X...] with each spatial axis multiplied by its matrix; `t` is torch, or None for NumPy."""
    for axis, matrix in enumerate(matrices, start=2):
        if t is None:
            data = np.moveaxis(np.tensordot(data, matrix.astype(data.dtype), ([axis], [1])), -1, axis)
        else:
            factor = t.as_tensor(matrix, dtype=data.dtype, device=data.device)
            data = t.movedim(t.tensordot(data, factor, ([axis], [1])), -1, axis)
    return data


def _interpolated(t: Any, src: Any, *shape: Any, **attrs: Any) -> Any:
    order = windows.data_order(src.ndim, attrs)
    data = moved(src, order)
    told = shape[0].reshape(-1).tolist() if shape else None
    made = _resized(tuple(int(n) for n in data.shape[2:]), attrs, told)
    matrices = [_matrix(int(n), int(m or 0), attrs) for n, m in zip(data.shape[2:], made, strict=True)]
    return moved_back(_applied(t, data, matrices), order)


def _collected(t: Any, src: Any, diff_dst: Any, *_: Any, **attrs: Any) -> Any:
    order = windows.data_order(src.ndim, attrs)
    data = moved(diff_dst, order)
    pairs = zip(moved(src, order).shape[2:], data.shape[2:], strict=True)
    return moved_back(_applied(t, data, [_matrix(int(n), int(m), attrs).T for n, m in pairs]), order)


def _attrs(op: Op) -> dict[str, Any]:
    return {n: attr_of(op, n) for n in op.attrs}


def _gradient(build: Builder, op: Op, d: Sequence[LogicalTensor | None]) -> Sequence[LogicalTensor | None]:
    """InterpolateBackward of d."""
    src, *sizes = op.inputs
    made = None if d[0] is None else build("InterpolateBackward", src, d[0], *sizes, **_attrs(op))
    return [made, *[None] * len(sizes)]


def _back_gradient(build: Builder, op: Op, d: Sequence[LogicalTensor | None]) -> Sequence[LogicalTensor | None]:
    """Interpolate of d."""
    _, _, *sizes = op.inputs
    return [None, None if d[0] is None else build("Interpolate", d[0], *sizes, **_attrs(op)), *[None] * len(sizes)]


_DOC = (
    "An element at index y lies at x = (y + 1/2) size/count - 1/2 (half_pixel) or y (size - 1)/(count - 1) "
    "(align_corners), held to the data; nearest takes the element at floor(x + 1/2), the others weigh the two next to "
    "x along each axis (linear for any number of axes). f16 and bf16 are computed in f32."
)

INTERPOLATE = library(
    "Interpolate",
    f"src resampled along its spatial axes to sizes, or to its own times scales. {_DOC}",
    family="resampling",
    inputs=(Port(name="src", type="T1"), _SIZES_PORT),
    outputs=(Port(name="dst", type="T1"),),
    types={"T1": FLOAT, "T2": ("s32",)},
    attrs=(_MODE, _SIZES, _SCALES, _COORDINATES, DATA_FORMAT),
    infer=_forward_shape,
    reference=lambda *arrays, **attrs: _interpolated(None, *arrays, **attrs),
    torch=lambda t, *tensors, **attrs: _interpolated(t, wide(tensors[0]), *tensors[1:], **attrs),
    gradient=_gradient,
    onnx="none: Resize takes sizes and scales of all axes, as inputs",
    source="oneDNN Graph Interpolate; its resampling primitive for the places",
    check=_one_size,
)

INTERPOLATE_BACKWARD = library(
    "InterpolateBackward",
    f"The gradient of Interpolate: each element of diff_dst to those that it was made of. {_DOC} The data of src is "
    "never read.",
    family="resampling",
    inputs=(Port(name="src", type="T1", shape_only=True), Port(name="diff_dst", type="T1"), _SIZES_PORT),
    outputs=(Port(name="diff_src", type="T1"),),
    types={"T1": FLOAT, "T2": ("s32",)},
    attrs=(_MODE, _COORDINATES, _SIZES, _SCALES, DATA_FORMAT),
    infer=_backward_shape,
    reference=lambda *arrays, **attrs: _collected(None, *arrays, **attrs),
    torch=lambda t, src, diff_dst, *rest, **attrs: _collected(t, src, wide(diff_dst), **attrs),
    gradient=_back_gradient,
    onnx="none: ai.onnx has no gradients",
    source="oneDNN Graph InterpolateBackward",
    check=_one_size,
)
