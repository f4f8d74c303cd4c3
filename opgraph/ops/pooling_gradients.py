"""Gradients of pools. They are pools again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from opgraph.errors import Unimplemented
from opgraph.ir.logical_tensor import LogicalTensor
from opgraph.ir.op import Op
from opgraph.ir.opdef import Builder
from opgraph.ops import windows
from opgraph.ops.spelling import attr_of
from opgraph.ops.windows import Window, ordered

_Gradients: TypeAlias = Sequence[LogicalTensor | None]
_COMMON = ("strides", "pads_begin", "pads_end", "kernel", "data_format", "auto_pad")


def of_average(build: Builder, op: Op, d: _Gradients) -> _Gradients:
    """AvgPoolBackward to the shape of src."""
    if d[0] is None:
        return [None]
    shape = _known_shape(op, op.inputs[0])
    return [build("AvgPoolBackward", d[0], src_shape=shape, **_attrs(op, "exclude_pad"))]


def of_average_back(build: Builder, op: Op, d: _Gradients) -> _Gradients:
    """AvgPool of the incoming gradient."""
    diff_dst, *shape = op.inputs
    if d[0] is None:
        return [None] * len(op.inputs)
    rounding = _rounding(op, d[0], diff_dst)
    return [build("AvgPool", d[0], rounding_type=rounding, **_attrs(op, "exclude_pad")), *[None] * len(shape)]


def of_largest(build: Builder, op: Op, d: _Gradients) -> _Gradients:
    """MaxPoolBackward."""
    return [None if d[0] is None else build("MaxPoolBackward", op.inputs[0], d[0], **_attrs(op, "dilations"))]


def of_largest_back(build: Builder, op: Op, d: _Gradients) -> _Gradients:
    """The incoming gradient at the places that were taken; none for src, which only determines these places."""
    src, diff_dst = op.inputs
    if d[0] is None:
        return [None, None]
    rounding = _rounding(op, src, diff_dst)
    return [None, build("MaxPoolTake", src, d[0], rounding_type=rounding, **_attrs(op, "dilations"))]


def of_taken(build: Builder, op: Op, d: _Gradients) -> _Gradients:
    """MaxPoolBackward for the values; no gradient for src."""
    return [None, None if d[0] is None else build("MaxPoolBackward", op.inputs[0], d[0], **_attrs(op, "dilations"))]


def _attrs(op: Op, *more: str) -> dict[str, Any]:
    return {name: op.attrs[name] for name in (*_COMMON, *more)}


def _known_shape(op: Op, src: LogicalTensor) -> tuple[int, ...]:
    """The shape of src, with 0 for an unknown batch or unknown channels.

    Raises:
        Unimplemented: a spatial size is unknown.
    """
    dims = src.dims
    spatial = (None,) if dims is None else ordered(dims, windows.data_order(len(dims), op.attrs))[2:]
    if dims is None or not all(isinstance(n, int) for n in spatial):
        raise Unimplemented(
            f"{op.kind} has no gradient where the spatial sizes of {src.label} are unknown",
            where=op.where,
            fix="declare them; batch and channels may stay unknown",
        )
    return tuple(n if isinstance(n, int) else 0 for n in dims)


def _rounding(op: Op, big: LogicalTensor, small: LogicalTensor) -> str:
    """The rounding with which a pool of `big` has the positions of `small`."""
    if big.dims is None or small.dims is None:
        return "floor"
    order = windows.data_order(len(big.dims), op.attrs)
    sizes, counts = ordered(big.dims, order)[2:], ordered(small.dims, order)[2:]
    positions = Window.of(op.attrs, attr_of(op, "kernel"), sizes).positions(sizes)
    known = all(isinstance(n, int) for n in (*positions, *counts))
    return "ceil" if known and positions != counts else "floor"
