"""Ops that change the shape of a tensor: reshape, new and dropped axes, transpose."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from opgraph.ir import dtypes
from opgraph.ir.logical_tensor import Dim, Dims, LogicalTensor, dims_text
from opgraph.ir.opdef import Attr, Attrs, Onnx, Port
from opgraph.ir.shapes import ShapeMismatch, normalized_axes
from opgraph.ops import shape_gradients as gradients
from opgraph.ops.families import ANY
from opgraph.ops.library import library

_LIKE = Port(name="like", type="T2", shape_only=True)
_ANY_SHAPE = (*dtypes.ARITHMETIC, dtypes.UNDEF)


# -- reshape ----------------------------------------------------------------------------------------------------------


def _reshaped(inputs: tuple[LogicalTensor, ...], attrs: Attrs) -> tuple[Dims, ...]:
    """`shape`, with sizes of src for 0 where special_zero is true, and the remaining size for -1."""
    wanted, dims = attrs["shape"], inputs[0].dims
    if any(size < -1 for size in wanted) or sum(size == -1 for size in wanted) > 1:
        raise ShapeMismatch(f"shape {list(wanted)} is none", "use sizes, and -1 at most once")
    copies = [i for i, size in enumerate(wanted) if size == 0] if attrs["special_zero"] else []
    if -1 in wanted and 0 in wanted and not attrs["special_zero"]:
        raise ShapeMismatch(f"nothing says what -1 is in shape {list(wanted)}", "give the size instead of -1")
    if dims is None:
        return (tuple(None if size == -1 or i in copies else size for i, size in enumerate(wanted)),)
    if copies and copies[-1] >= len(dims):
        raise ShapeMismatch(
            f"shape {list(wanted)} copies axis {copies[-1]}, which {dims_text(dims)} does not have",
            "give sizes for the axes after the last of src",
        )
    made: list[Dim] = [dims[i] if i in copies else size for i, size in enumerate(wanted)]
    rest_before = [d for i, d in enumerate(dims) if i not in copies]
    rest_after = [size for i, size in enumerate(wanted) if i not in copies and size != -1]
    if all(isinstance(d, int) for d in rest_before):
        # Copied sizes are the same before and after, so the size for -1 does not depend on them: they may be 0.
        before, after = prod(d for d in rest_before if isinstance(d, int)), prod(rest_after)
        if -1 in wanted and after == 0:
            raise ShapeMismatch(f"nothing says what -1 is in shape {list(wanted)}", "give the size instead of -1")
        if -1 in wanted and before % after == 0:
            made[wanted.index(-1)] = before // after
        elif -1 in wanted or (before != after and all(dims[i] != 0 for i in copies)):
            raise ShapeMismatch(
                f"{dims_text(dims)} does not have the elements of shape {list(wanted)}", "give sizes of equal product"
            )
    elif -1 in wanted:
        made[wanted.index(-1)] = None
    return (tuple(made),)


def _target(shape: Sequence[int], src: Sequence[int], special_zero: bool) -> tuple[int, ...]:
    copies = [i for i, size in enumerate(shape) if size == 0 and special_zero]
    given = prod(size for i, size in enumerate(shape) if i not in copies and size != -1)
    left = prod(d for i, d in enumerate(src) if i not in copies) // given if given else -1
    return tuple(src[i] if i in copies else left if size == -1 else size for i, size in enumerate(shape))


STATIC_RESHAPE = library(
    "StaticReshape",
    "The elements of src in row-major order, in another shape. A -1 in `shape` stands for what is left; a 0 for the "
    "size of src on that axis if special_zero is true, else for 0.",
    family="shape",
    types=ANY,
    attrs=(Attr(name="shape", type="s64[]"), Attr(name="special_zero", type="bool")),
    infer=_reshaped,
    reference=lambda src, shape, special_zero: src.reshape(_target(shape, src.shape, special_zero)),
    torch=lambda t, src, shape, special_zero: src.reshape(_target(shape, src.shape, special_zero)),
    gradient=gradients.of_reshape,
    onnx=(
        Onnx(
            op_type="Reshape", since=14, inputs=("src", "$shape"), when={"special_zero": True}, fixed={"allowzero": 0}
        ),
        Onnx(
            op_type="Reshape", since=14, inputs=("src", "$shape"), when={"special_zero": False}, fixed={"allowzero": 1}
        ),
        Onnx(op_type="Reshape", since=5, until=13, inputs=("src", "$shape"), when={"special_zero": True}),
    ),
    source="oneDNN Graph StaticReshape",
)


def _as_like(inputs: tuple[LogicalTensor, ...], attrs: Attrs) -> tuple[Dims, ...]:
    """The shape of like, which must have as many elements as src."""
    src, like = inputs[0].dims, inputs[1].dims
    counts = {_count(src), _count(like)} - {None}
    if len(counts) > 1:
        raise ShapeMismatch(
            f"{dims_text(src)} and {dims_text(like)} differ in their number of elements", "give tensors of equal size"
        )
    return (like,)


def _count(dims: Dims) -> int | None:
    sizes = [d for d in dims or () if isinstance(d, int)]
    return prod(sizes) if dims is not None and len(sizes) == len(dims) else None


RESHAPE_TO = library(
    "ReshapeTo",
    "The elements of src in row-major order, in the shape of `like`, whose data is never read.",
    family="shape",
    inputs=(Port(name="src"), _LIKE),
    types={"T": ANY, "T2": _ANY_SHAPE},
    infer=_as_like,
    reference=lambda src, like: src.reshape(like.shape),
    torch=lambda t, src, like: src.reshape(like.shape),
    gradient=gradients.of_reshape_to,
    onnx=(
        Onnx(op_type="Reshape", since=14, inputs=("src", "@like"), fixed={"allowzero": 1}),
        Onnx(
            op_type="Reshape",
            since=14,
            inputs=("src", "@like"),
            fixed={"allowzero": 0},
            note="of empty tensors it copies sizes of src for those of `like` that are 0",
        ),
        Onnx(op_type="Reshape", since=5, until=13, inputs=("src", "@like")),
    ),
    source="torch.Tensor.view_as",
)


def _unsqueezed(inputs: tuple[LogicalTensor, ...], attrs: Attrs) -> tuple[Dims, ...]:
    """The shape of src with a 1 at each of the axes, which are indices in the result."""
    dims, axes = inputs[0].dims, attrs["axes"]
    if dims is None:
        return (None,)
    rest = iter(dims)
    places = normalized_axes(axes, len(dims) + len(axes))
    return (tuple(1 if i in places else next(rest) for i in range(len(dims) + len(axes))),)


def _squeezed(inputs: tuple[LogicalTensor, ...], attrs: Attrs) -> tuple[Dims, ...]:
    """The shape of src without the axes, which must have size 1."""
    dims = inputs[0].dims
    if dims is None:
        return (None,)
    places = normalized_axes(attrs["axes"], len(dims))
    for place in places:
        if isinstance(dims[place], int) and dims[place] != 1:
            raise ShapeMismatch(f"axis {place} of {dims_text(dims)} is not of size 1", "name axes of size 1")
    return (tuple(d for i, d in enumerate(dims) if i not in places),)


def _squeezed_shape(src: Any, axes: tuple[int, ...]) -> tuple[int, ...]:
    gone = normalized_axes(axes, src.ndim)
    return tuple(size for i, size in enumerate(src.shape) if i not in gone)


def _unsqueezed_shape(src: Any, axes: tuple[int, ...]) -> tuple[int, ...]:
    new, rest = normalized_axes(axes, src.ndim + len(axes)), iter(src.shape)
    return tuple(1 if i in new else next(rest) for i in range(src.ndim + len(axes)))


_SOME_AXES = Attr(name="axes", type="s64[]")
#: From opset 13 on the axes are an input.
_AXES_INPUT = ("src", "$axes")

UNSQUEEZE = library(
    "Unsqueeze",
    "src with new axes of size 1; `axes` are their places in the result.",
    family="shape",
    types=ANY,
    attrs=(_SOME_AXES,),
    infer=_unsqueezed,
    reference=lambda src, axes: src.reshape(_unsqueezed_shape(src, axes)),
    torch=lambda t, src, axes: src.reshape(_unsqueezed_shape(src, axes)),
    gradient=gradients.of_unsqueeze,
    onnx=(Onnx(op_type="Unsqueeze", since=13, inputs=_AXES_INPUT),),
    source="ONNX Unsqueeze",
)

SQUEEZE = library(
    "Squeeze",
    "src without these axes, which have size 1.",
    family="shape",
    types=ANY,
    attrs=(_SOME_AXES,),
    infer=_squeezed,
    reference=lambda src, axes: src.reshape(_squeezed_shape(src, axes)),
    torch=lambda t, src, axes: src.reshape(_squeezed_shape(src, axes)),
    gradient=gradients.of_squeeze,
    onnx=(
        Onnx(op_type="Identity", since=1, inputs=("src",), when={"axes": ()}),  # onnxruntime treats none as all axes
        Onnx(op_type="Squeeze", since=13, inputs=_AXES_INPUT),
    ),
    source="ONNX Squeeze",
)


# -- transpose --------------------------------------------------------------------------------------------------------


def _transposed(inputs: tuple[LogicalTensor, ...], attrs: Attrs) -> tuple[Dims, ...]:
    """The shape of src, permuted: axis i of the result is axis order[i] of src."""
    dims, order = inputs[0].dims, attrs["order"]
    places = gradients.permutation(order)
    if places is None or (dims is not None and len(dims) != len(order)):
        raise ShapeMismatch(
            f"order {list(order)} is no permutation of the axes of {dims_text(dims)}", "name each axis of src once"
        )
    return (tuple(None if dims is None else dims[place] for place in places),)


STATIC_TRANSPOSE = library(
    "StaticTranspose",
    "src with its axes in another order: axis i of the result is axis order[i] of src. Negative entries count from the "
    "end.",
    family="shape",
    types=ANY,
    attrs=(Attr(name="order", type="s64[]"),),
    infer=_transposed,
    reference=lambda src, order: np.transpose(src, order),
    torch=lambda t, src, order: src.permute(order),
    gradient=gradients.of_transpose,
    onnx=(
        Onnx(
            op_type="Transpose",
            since=1,
            attrs={"order": "perm"},
            applies=lambda attrs, ndims: min(attrs["order"], default=0) >= 0,
        ),
    ),
    decomposition=lambda attrs, given: (
        f"StaticTranspose(src, order={list(gradients.permutation(attrs['order']) or ())})"
        if min(attrs["order"], default=0) < 0
        else ""
    ),
    source="oneDNN Graph StaticTranspose",
)

#: The kinds that keep the row-major order of all elements: those that add or remove axes of size 1, those that change
#: the whole shape, and both.
UNIT_AXES = (SQUEEZE.kind, UNSQUEEZE.kind)
RESHAPES = (STATIC_RESHAPE.kind, RESHAPE_TO.kind)
VIEWS = (*UNIT_AXES, *RESHAPES)
