"""oneDNN's Backward kinds of norms: LayerNormBackward and BatchNormTrainingBackward."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from opgraph.ir.logical_tensor import Dims, LogicalTensor
from opgraph.ir.op import Op
from opgraph.ir.opdef import Attrs, Builder, Port
from opgraph.ops import reference_math, statistics
from opgraph.ops.batch_normalization import along_channel, channel_shapes, other_axes, spread
from opgraph.ops.families import DATA_FORMAT
from opgraph.ops.library import in_numpy, in_torch, library, mean_of
from opgraph.ops.normalization import BEGIN, axes_of, check_operands, first_axis, last_axes
from opgraph.ops.spelling import as_declared, inverse_deviation, mean, rank_of, widened
from opgraph.ops.statistics import AFFINE, EPSILON, GRADIENTS, NEEDED_EPSILON, TYPES, USE_AFFINE


def _layer_shapes(inputs: tuple[LogicalTensor, ...], attrs: Attrs) -> tuple[Dims, ...]:
    """The shape of src; diff_gamma and diff_beta have its axes from begin_norm_axis on."""
    dims = inputs[0].dims
    if dims is None:
        return (None, None, None)
    first = first_axis(attrs, len(dims))
    check_operands(inputs[1:2], ("diff_dst",), dims)
    check_operands(inputs[2:4], ("mean", "variance"), dims[:first])
    check_operands(inputs[4:], ("gamma", "beta"), dims[first:])
    return dims, dims[first:], dims[first:]


def _layer_norm_backward(
    xp: Any,
    src: Any,
    diff_dst: Any,
    center: Any,
    variance: Any,
    gamma: Any = None,
    beta: Any = None,
    *,
    begin_norm_axis: int,
    epsilon: float,
    use_affine: bool,
) -> Iterator[Any]:
    axes = last_axes(src.ndim, begin_norm_axis)
    kept = src.shape[: axes[0]] + (1,) * len(axes)
    inverse = 1 / xp.sqrt(variance + epsilon).reshape(kept)
    normal = (src - center.reshape(kept)) * inverse
    scaled = diff_dst if gamma is None else diff_dst * gamma
    yield inverse * (scaled - mean_of(scaled, axes) - normal * mean_of(scaled * normal, axes))
    lead = tuple(range(axes[0]))
    yield reference_math.sum_over(diff_dst * normal, lead) if lead else diff_dst * normal
    yield reference_math.sum_over(diff_dst, lead) if lead else diff_dst


def _spell_layer_norm_backward(build: Builder, op: Op) -> list[LogicalTensor]:
    axes = axes_of(op)
    src, grad, center, variance, *affine = (widened(build, t) for t in op.inputs)
    center, variance = (build("Unsqueeze", t, axes=axes) for t in (center, variance))
    inverse = inverse_deviation(build, op, variance)
    normal = build("Multiply", build("Subtract", src, center), inverse)
    scaled = build("Multiply", grad, affine[0]) if affine else grad
    made = [statistics.backward(build, scaled, normal, inverse, lambda t: mean(build, t, axes))]
    if len(op.outputs) > 1:
        made += [build("SumTo", build("Multiply", grad, normal), op.inputs[4]), build("SumTo", grad, op.inputs[4])]
    return as_declared(build, op, made)


LAYER_NORM_BACKWARD = library(
    "LayerNormBackward",
    "With n = (src - mean) / sqrt(variance + epsilon) and g = diff_dst gamma: diff_src = (g - mean(g) - n mean(g n)) / "
    "sqrt(variance + epsilon), means over the axes from begin_norm_axis on; diff_gamma and diff_beta are the sums of "
    "diff_dst n and diff_dst over the axes before. f16 and bf16 are computed in f32. The data of beta is never read.",
    family="norm",
    inputs=(
        Port(name="src", type="T1"),
        Port(name="diff_dst", type="T1"),
        Port(name="mean", type="T2"),
        Port(name="variance", type="T2"),
        AFFINE[0],
        replace(AFFINE[1], shape_only=True),
    ),
    outputs=(Port(name="diff_src", type="T1"), *GRADIENTS),
    types=TYPES,
    attrs=(BEGIN, USE_AFFINE, EPSILON),
    infer=_layer_shapes,
    reference=in_numpy(_layer_norm_backward),
    torch=in_torch(_layer_norm_backward),
    spelled=_spell_layer_norm_backward,
    onnx="none: ai.onnx has no gradients",
    domain=((-4.0, 4.0), (-4.0, 4.0), (-1.0, 1.0), (0.5, 4.0), (-4.0, 4.0), (-4.0, 4.0)),
    source="oneDNN Graph LayerNormBackward",
    check=statistics.fits_backward,
)


def _batch_norm_backward(
    xp: Any,
    src: Any,
    diff_dst: Any,
    center: Any,
    variance: Any,
    gamma: Any = None,
    *,
    epsilon: float,
    data_format: str,
) -> Iterator[Any]:
    axes = other_axes(src.ndim, {"data_format": data_format})
    inverse = 1 / xp.sqrt(along_channel(variance, src, data_format) + epsilon)
    normal = (src - along_channel(center, src, data_format)) * inverse
    scaled = diff_dst if gamma is None else diff_dst * along_channel(gamma, src, data_format)
    yield inverse * (scaled - mean_of(scaled, axes) - normal * mean_of(scaled * normal, axes))
    yield reference_math.sum_over(diff_dst * normal, axes)
    yield reference_math.sum_over(diff_dst, axes)


def _spell_batch_norm_backward(build: Builder, op: Op) -> list[LogicalTensor]:
    axes = other_axes(rank_of(op, op.inputs[0]), op.attrs)
    src, grad, center, variance, *affine = (widened(build, t) for t in op.inputs)
    if op.attrs["data_format"] == "NCX":
        # One value per row, as from reductions: those of the forward op may be in the same loop. (NXC: 5% slower.)
        center, variance = (build("Unsqueeze", t, axes=axes) for t in (center, variance))
    inverse = inverse_deviation(build, op, variance)
    normal = build("Multiply", build("Subtract", src, center), inverse)
    scaled = build("Multiply", grad, spread(build, affine[0], op)) if affine else grad
    made = [statistics.backward(build, scaled, normal, inverse, lambda t: mean(build, t, axes))]
    for value in (build("Multiply", grad, normal), grad)[: len(op.outputs) - 1]:
        made.append(build("SumTo", value, op.inputs[-1 if affine else 2], data_format=op.attrs["data_format"]))
    return as_declared(build, op, made)


BATCH_NORM_BACKWARD = library(
    "BatchNormTrainingBackward",
    "With n = (src - mean) / sqrt(variance + epsilon) and g = diff_dst gamma: diff_src = (g - mean(g) - n mean(g n)) / "
    "sqrt(variance + epsilon); diff_gamma and diff_beta are the sums of diff_dst n and of diff_dst; means and sums "
    "over all axes but the channels'. mean and variance are the batch's. f16 and bf16 are computed in f32.",
    family="norm",
    inputs=(
        Port(name="src", type="T1"),
        Port(name="diff_dst", type="T1"),
        Port(name="mean", type="T2"),
        Port(name="variance", type="T2"),
        AFFINE[0],
    ),
    outputs=(Port(name="diff_src", type="T1"), *GRADIENTS),
    types=TYPES,
    attrs=(NEEDED_EPSILON, DATA_FORMAT),
    infer=channel_shapes(2, 2),
    reference=in_numpy(_batch_norm_backward),
    torch=in_torch(_batch_norm_backward),
    spelled=_spell_batch_norm_backward,
    onnx="none: ai.onnx has no gradients",
    domain=((-4.0, 4.0), (-4.0, 4.0), (-1.0, 1.0), (0.5, 4.0), (-4.0, 4.0)),
    source="oneDNN Graph BatchNormTrainingBackward",
    check=statistics.parameters_fit,
)
