"""Broadcasting a tensor to the shape of another, and its adjoint, the sum back to the original shape."""

from __future__ import annotations

from typing import Any

import numpy as np

from opgraph.ir import dtypes
from opgraph.ir.logical_tensor import Dims, LogicalTensor
from opgraph.ir.opdef import Attr, Attrs, OpDef, Port, register
from opgraph.ir.shapes import ShapeMismatch, broadcast, channel_axes
from opgraph.ops import reference_math
from opgraph.ops.families import ANY, DATA_FORMAT, FLOAT, pointwise

_LIKE = Port(name="like", type="T2", shape_only=True)
_ANY_SHAPE = (*dtypes.ARITHMETIC, dtypes.UNDEF)


def _sum_to(src: Any, like: Any, **attrs: Any) -> np.ndarray:
    return sum_to_shape(np.asarray(src), np.shape(like), attrs)


def sum_to_shape(src: np.ndarray, shape: tuple[int, ...], attrs: Attrs) -> np.ndarray:
    """Sums `src` over the axes along which `shape` was broadcast to its shape; f16 and bf16 are summed in f32."""
    aligned = (*shape, *[1] * channel_axes(len(shape), src.ndim, attrs))
    wide = src.astype(np.float32) if src.dtype.itemsize == 2 else src  # a sum in f16 would lose its small addends
    lead = src.ndim - len(aligned)
    axes = tuple(i for i in range(src.ndim) if i < lead or (aligned[i - lead] == 1 and src.shape[i] != 1))
    return np.asarray(reference_math.sum_over(wide, axes, dtype=wide.dtype)).astype(src.dtype).reshape(shape)


def _torch_sum_to(t: Any, src: Any, like: Any, **attrs: Any) -> Any:
    aligned = (*like.shape, *[1] * channel_axes(like.ndim, src.ndim, attrs))
    return src.sum_to_size(aligned).reshape(like.shape)


def _shape_of_like(inputs: tuple[LogicalTensor, ...], attrs: Attrs) -> tuple[Dims, ...]:
    src, like = inputs[0].dims, inputs[1].dims
    if src is not None and like is not None:
        aligned = (*like, *[1] * channel_axes(len(like), len(src), attrs))
        whole = broadcast([src, aligned])
        # A 1 in src next to an unknown size is accepted: that size has to be 1, too.
        grows = whole is not None and any(
            isinstance(b, int) and isinstance(a, int) and a != b for a, b in zip(src, whole)
        )
        if whole is None or len(whole) != len(src) or grows:
            raise ShapeMismatch(
                "the shape to sum to does not broadcast to that of the values", "give the tensor that was broadcast"
            )
    return (like,)


SUM_TO = register(
    OpDef(
        kind="SumTo",
        doc=(
            "y = src summed over every axis along which `like` was broadcast to the shape of src: the adjoint of "
            "broadcasting. A 1-d `like` with data_format NCX lies along axis 1. Sums are deterministic: chunks of a "
            "fixed size, then a fixed tree; f16 and bf16 accumulate in f32. The data of `like` is never read."
        ),
        family="sum",
        inputs=(Port(name="src"), _LIKE),
        outputs=(Port(name="dst"),),
        attrs=(DATA_FORMAT, Attr(name="per_channel_broadcast", type="bool", default=True)),
        types={"T": FLOAT, "T2": _ANY_SHAPE},
        infer=_shape_of_like,
        reference=_sum_to,
        torch=_torch_sum_to,
        onnx="none: its axes depend on a shape; written as ReduceSum where ranks are known",
        channel_inputs=(1,),
        gradient={
            "src": "BroadcastTo(d, src, data_format=$data_format, per_channel_broadcast=$per_channel_broadcast)",
            "like": "0",
        },
        source="torch.Tensor.sum_to_size",
    )
)


def _shape_of_target(inputs: tuple[LogicalTensor, ...], attrs: Attrs) -> tuple[Dims, ...]:
    src, like = inputs[0].dims, inputs[1].dims
    if src is not None and like is not None:
        src = (*src, *[1] * channel_axes(len(src), len(like), attrs))
    return (broadcast([src, like]),)


BROADCAST_TO = pointwise(
    "BroadcastTo",
    "y = src, broadcast to the shape of `like`, whose data is never read. A 1-d src with data_format NCX lies along "
    "axis 1.",
    inputs=(Port(name="src"), _LIKE),
    types={"T": ANY, "T2": _ANY_SHAPE},
    attrs=(DATA_FORMAT, Attr(name="per_channel_broadcast", type="bool", default=True)),
    infer=_shape_of_target,
    reference=lambda src, like: np.broadcast_to(src, np.broadcast_shapes(np.shape(src), np.shape(like))),
    expression="{src}",
    torch=lambda t, src, like: t.broadcast_to(src, t.broadcast_shapes(src.shape, like.shape)),
    channel_inputs=(0,),
    onnx="none: Expand takes a shape where this takes a tensor",
    gradient={"src": "d", "like": "0"},
    source="numpy.broadcast_to",
)
