"""Slice, and its adjoint."""

from __future__ import annotations

from typing import Any

import numpy as np

from opgraph.ir import dtypes
from opgraph.ir.logical_tensor import Dims, LogicalTensor, dims_text
from opgraph.ir.opdef import Attr, Attrs, Onnx, Port
from opgraph.ir.shapes import ShapeMismatch, normalized_axes, unify
from opgraph.ops import joining_gradients as gradients
from opgraph.ops.families import ANY
from opgraph.ops.library import library

_ANY_SHAPE = (*dtypes.ARITHMETIC, dtypes.UNDEF)
_BOUNDS = (
    Attr(name="starts", type="s64[]"),
    Attr(name="ends", type="s64[]"),
    Attr(name="axes", type="s64[]"),
    Attr(name="steps", type="s64[]", optional=True),
)


def _range(size: int, start: int, end: int, step: int) -> range:
    """The indices that a slice takes along an axis, as in ONNX: bounds are clamped to the axis."""
    last = size - 1 if step < 0 else size
    start = min(max(start + size if start < 0 else start, 0), last)
    # A backward slice ends before its bound, so at -1 where it takes all elements; this is written far below 0.
    end = min(max(end + size if end < 0 else end, -1 if step < 0 else 0), last)
    return range(start, end, step)


def _sliced(inputs: tuple[LogicalTensor, ...], attrs: Attrs) -> tuple[Dims, ...]:
    """The shape of src, with the number of elements taken along each of the axes."""
    starts, ends, axes = attrs["starts"], attrs["ends"], attrs["axes"]
    steps = attrs.get("steps", (1,) * len(axes))
    if not len(starts) == len(ends) == len(axes) == len(steps) or 0 in steps:
        raise ShapeMismatch(
            f"starts {list(starts)}, ends {list(ends)}, axes {list(axes)} and steps {list(steps)} do not fit together",
            "give one of each for each axis, and no step of 0",
        )
    dims = inputs[0].dims
    if dims is None:
        return (None,)
    normalized_axes(axes, len(dims))
    made = list(dims)
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        size = dims[axis]
        made[axis] = len(_range(size, start, end, step)) if isinstance(size, int) else None
    return (tuple(made),)


def _cut(src: Any, attrs: Attrs) -> tuple[slice, ...]:
    cut = [slice(None)] * src.ndim
    for start, end, axis, step in zip(
        attrs["starts"], attrs["ends"], attrs["axes"], attrs.get("steps", (1,) * len(attrs["axes"])), strict=True
    ):
        taken = _range(src.shape[axis], start, end, step)
        # If a range ends before the first element, its bound is -1, which a slice would read as the last element.
        cut[axis] = slice(taken.start, taken.stop if taken.stop >= 0 else None, step) if len(taken) else slice(0, 0)
    return tuple(cut)


def _forwards(src: Any, attrs: Attrs) -> tuple[tuple[slice, ...], tuple[int, ...]]:
    """The same elements taken in ascending order, and the axes along which that reverses them."""
    cut, turned = [], []
    for axis, part in enumerate(_cut(src, attrs)):
        taken = range(*part.indices(src.shape[axis]))
        if taken.step < 0 and len(taken):
            turned.append(axis)
            part = slice(taken[-1], taken[0] + 1, -taken.step)
        cut.append(part)
    return tuple(cut), tuple(turned)


def _torch_slice(t: Any, src: Any, **attrs: Any) -> Any:
    cut, turned = _forwards(src, attrs)  # torch has no negative steps
    return src[cut].flip(turned) if turned else src[cut]


SLICE = library(
    "Slice",
    "src from starts to ends (exclusive) by steps, on each of the axes. Negative bounds count from the end; bounds "
    "beyond it are clamped; steps may be negative.",
    family="shape",
    types=ANY,
    attrs=_BOUNDS,
    infer=_sliced,
    reference=lambda src, **attrs: src[_cut(src, attrs)],
    torch=_torch_slice,
    gradient=gradients.of_slice,
    onnx=(Onnx(op_type="Slice", since=10, inputs=("src", "$starts", "$ends", "$axes", "$steps")),),
    source="ONNX Slice",
)


def _unsliced(inputs: tuple[LogicalTensor, ...], attrs: Attrs) -> tuple[Dims, ...]:
    """The shape of src."""
    diff, src = inputs[0].dims, inputs[1].dims
    if src is not None:
        try:
            unify(diff, _sliced(inputs[1:], attrs)[0], "")
        except ShapeMismatch:
            raise ShapeMismatch(
                f"{dims_text(diff)} is not the shape of that slice of {dims_text(src)}",
                "give the gradient of the slice",
            ) from None
    return (src,)


def _numpy_unslice(diff: Any, src: Any, **attrs: Any) -> Any:
    made = np.zeros(src.shape, diff.dtype)
    made[_cut(src, attrs)] = diff
    return made


def _torch_unslice(t: Any, diff: Any, src: Any, **attrs: Any) -> Any:
    made = diff.new_zeros(src.shape)
    cut, turned = _forwards(src, attrs)
    made[cut] = diff.flip(turned) if turned else diff
    return made


SLICE_BACKWARD = library(
    "SliceBackward",
    "Zeros in the shape of `src`, whose data is never read, with diff_dst in the place of the slice.",
    family="shape",
    inputs=(Port(name="diff_dst"), Port(name="src", type="T2", shape_only=True)),
    outputs=("diff_src",),
    types={"T": ANY, "T2": _ANY_SHAPE},
    attrs=_BOUNDS,
    infer=_unsliced,
    reference=_numpy_unslice,
    torch=_torch_unslice,
    gradient=gradients.of_slice_backward,
    onnx="none: ai.onnx Pad takes numbers where this takes a tensor",
    source="the adjoint of Slice",
)
