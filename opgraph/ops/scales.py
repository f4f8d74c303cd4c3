"""Scales and zero points: their shapes, for a tensor, for channels or for groups, and how they are expanded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from opgraph.ir.logical_tensor import Dim, Dims, LogicalTensor, dims_text
from opgraph.ir.opdef import Attrs
from opgraph.ir.shapes import ShapeMismatch, dims_agree, normalized_axes


def shape_of_src(inputs: tuple[LogicalTensor, ...], attrs: Attrs) -> tuple[Dims, ...]:
    """The shape of src."""
    dims = inputs[0].dims
    if dims is not None:
        expected = scale_dims(dims, attrs)
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


def scale_dims(dims: Sequence[Dim], attrs: Attrs) -> tuple[Dim, ...]:
    """The shape of scales with all axes; 1 where the elements along an axis share a scale."""
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
    """True if scales have all axes, or only those along which there are several; zps may also be one for all."""
    packed = [d for d in expected if d != 1]
    unknown = not all(isinstance(d, int) for d in (*dims, *expected))  # a symbol may turn out to be 1
    return (
        dims_agree(dims, expected)
        or dims_agree(dims, packed)
        or ((alone or not packed) and set(dims) <= {1})
        or unknown
    )


def spread(values: Any, shape: Sequence[int], attrs: Attrs) -> Any:
    """Expands scales or zero points so that they broadcast against an array of shape `shape`."""
    values = np.asarray(values)
    if values.size == 1:
        return values.reshape(())
    expected = tuple(int(d or 0) for d in scale_dims(shape, attrs))
    full = values.reshape(expected)
    for axis, (size, count) in enumerate(zip(shape, expected, strict=True)):
        if count not in (1, size):
            full = np.repeat(full, size // count, axis=axis)
    return full
