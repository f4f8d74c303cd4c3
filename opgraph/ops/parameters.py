"""Gradients of parameters as ops: oneDNN's BiasAddBackward and PReLUBackward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from opgraph.ir.logical_tensor import Dims, LogicalTensor
from opgraph.ir.op import Op
from opgraph.ir.opdef import Attrs, Builder
from opgraph.ir.shapes import ShapeMismatch, channel_axes, dims_agree
from opgraph.ops import reference_math
from opgraph.ops.batch_normalization import channel_axis, other_axes
from opgraph.ops.broadcasting import sum_to_shape
from opgraph.ops.families import DATA_FORMAT, FLOAT
from opgraph.ops.library import library, wide
from opgraph.ops.spelling import as_declared, rank_of, total, widened

_NO_ONNX = "none: ai.onnx has no gradients"


def _channels(inputs: tuple[LogicalTensor, ...], attrs: Attrs) -> tuple[Dims, ...]:
    """One element for each channel."""
    dims = inputs[0].dims
    if dims is None:
        return ((None,),)
    if len(dims) < 2:
        raise ShapeMismatch(f"diff_dst has {len(dims)} dimensions, no channel axis", "give it two dimensions or more")
    return ((dims[channel_axis(len(dims), attrs)],),)


def _bias_sum(diff_dst: Any, *, data_format: str) -> Any:
    return reference_math.sum_over(diff_dst, other_axes(diff_dst.ndim, {"data_format": data_format}))


def _spell_bias(build: Builder, op: Op) -> list[LogicalTensor]:
    axes = other_axes(rank_of(op, op.inputs[0]), op.attrs)
    kept = total(build, widened(build, op.inputs[0]), axes)
    return as_declared(build, op, [build("Squeeze", kept, axes=axes)])


BIAS_ADD_BACKWARD = library(
    "BiasAddBackward",
    "diff_bias = the sum of diff_dst over all axes but the channels'. f16 and bf16 are summed in f32.",
    family="parameter",
    inputs=("diff_dst",),
    outputs=("diff_bias",),
    attrs=(DATA_FORMAT,),
    infer=_channels,
    reference=_bias_sum,
    torch=lambda t, diff_dst, **attrs: _bias_sum(wide(diff_dst), **attrs),
    spelled=_spell_bias,
    onnx=_NO_ONNX,
    source="oneDNN Graph BiasAddBackward, which takes four dimensions or more",
)


# -- PReLU ------------------------------------------------------------------------------------------------------------


def _like_src_and_slope(inputs: tuple[LogicalTensor, ...], attrs: Attrs) -> tuple[Dims, ...]:
    """The shapes of src and of slope."""
    src, slope, diff = (t.dims for t in inputs)
    if src is not None and diff is not None and not dims_agree(src, diff):
        raise ShapeMismatch("src and diff_dst differ in shape", "give the gradient of what PReLU made of src")
    if src is not None and slope is not None:
        aligned = (*slope, *[1] * channel_axes(len(slope), len(src), attrs))
        tail = src[len(src) - len(aligned) :] if len(aligned) <= len(src) else None
        if tail is None or not all(a == 1 or dims_agree((a,), (b,)) for a, b in zip(aligned, tail, strict=True)):
            raise ShapeMismatch("slope does not broadcast to the shape of src", "give src the larger shape")
    return src, slope


def _both(
    where: Callable[..., Any], sum_to: Callable[..., Any], src: Any, slope: Any, diff: Any, attrs: Attrs
) -> Iterator[Any]:
    extra = channel_axes(slope.ndim, src.ndim, attrs)
    aligned = slope.reshape((-1, *[1] * extra)) if extra else slope
    yield where(src > 0, diff, diff * aligned)
    yield sum_to(where(src > 0, diff * 0, diff * src), aligned.shape).reshape(slope.shape)


def _numpy_both(src: Any, slope: Any, diff: Any, **attrs: Any) -> Iterator[Any]:
    return _both(np.where, lambda a, shape: sum_to_shape(a, shape, {}), src, slope, diff, attrs)


def _torch_both(t: Any, src: Any, slope: Any, diff: Any, **attrs: Any) -> Iterator[Any]:
    return _both(t.where, lambda a, shape: a.sum_to_size(shape), wide(src), wide(slope), wide(diff), attrs)


def _spell_both(build: Builder, op: Op) -> list[LogicalTensor]:
    src, slope, diff = (widened(build, t) for t in op.inputs)
    form = {"data_format": op.attrs["data_format"]}
    spread = build("BroadcastTo", slope, op.inputs[0], **form)
    positive = build("Greater", src, 0.0)
    of_slope = build("Select", positive, 0.0, build("Multiply", diff, src))
    made = [
        build("Select", positive, diff, build("Multiply", diff, spread)),
        build("SumTo", of_slope, op.inputs[1], **form),
    ]
    return as_declared(build, op, made)


PRELU_BACKWARD = library(
    "PReLUBackward",
    "diff_src = diff_dst where src > 0, else slope diff_dst; diff_slope = src diff_dst where src <= 0, else 0, summed "
    "over the axes along which slope was broadcast. A 1-d slope lies along the channel axis. f16 and bf16 are computed "
    "in f32.",
    family="parameter",
    inputs=("src", "slope", "diff_dst"),
    outputs=("diff_src", "diff_slope"),
    types=FLOAT,
    attrs=(DATA_FORMAT,),
    infer=_like_src_and_slope,
    reference=_numpy_both,
    torch=_torch_both,
    spelled=_spell_both,
    onnx=_NO_ONNX,
    source="oneDNN Graph PReLUBackward",
)
