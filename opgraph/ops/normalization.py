"""Normalization over the last axes: LayerNorm and RMSNorm."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from opgraph.ir.logical_tensor import Dim, Dims, LogicalTensor, dims_text
from opgraph.ir.op import Op
from opgraph.ir.opdef import Attr, Attrs, Builder, Onnx, Port
from opgraph.ir.shapes import ShapeMismatch, dims_agree, normalized_axes
from opgraph.ops import statistics
from opgraph.ops.families import FLOAT
from opgraph.ops.library import in_numpy, in_torch, library, mean_of, wide
from opgraph.ops.spelling import as_declared, attr_of, in_dtype, inverse_deviation, mean, rank_of, widened
from opgraph.ops.statistics import AFFINE, EPSILON, KEEP_STATS, KEPT, TYPES, USE_AFFINE

_Gradients = Sequence[LogicalTensor | None]
BEGIN = Attr(name="begin_norm_axis", type="s64", default=-1)


def first_axis(attrs: Attrs, ndim: int) -> int:
    """The first axis that is normalized."""
    (first,) = normalized_axes([attrs["begin_norm_axis"]], ndim)
    return first


def last_axes(ndim: int, begin: int) -> tuple[int, ...]:
    """The axes that are normalized."""
    return tuple(range(begin % ndim, ndim))


def axes_of(op: Op) -> tuple[int, ...]:
    """The normalized axes of an op. They are negative where the attribute is negative, which needs no rank."""
    begin = attr_of(op, "begin_norm_axis")
    return tuple(range(begin, 0)) if begin < 0 else tuple(range(begin, rank_of(op, op.inputs[0])))


def _shapes(inputs: tuple[LogicalTensor, ...], attrs: Attrs) -> tuple[Dims, ...]:
    """The shape of src; mean and variance have its axes before begin_norm_axis, gamma and beta those from there on."""
    dims = inputs[0].dims
    if dims is None:
        return (None, None, None)
    first = first_axis(attrs, len(dims))
    check_operands(inputs[1:], ("gamma", "beta"), dims[first:])
    return dims, dims[:first], dims[:first]


def check_operands(operands: Sequence[LogicalTensor], names: Sequence[str], wanted: tuple[Dim, ...]) -> None:
    """Raises ShapeMismatch where an operand has another shape."""
    for tensor, name in zip(operands, names, strict=False):
        if tensor.dims is not None and not dims_agree(tensor.dims, wanted):
            raise ShapeMismatch(
                f"{name} is {dims_text(tensor.dims)}, and begin_norm_axis makes it {dims_text(wanted)}",
                f"give {name} this shape, or set begin_norm_axis",
            )


# -- LayerNorm --------------------------------------------------------------------------------------------------------


def _layer_norm(
    xp: Any, src: Any, gamma: Any = None, beta: Any = None, *, begin_norm_axis: int, epsilon: float, **_: Any
) -> Iterator[Any]:
    axes = last_axes(src.ndim, begin_norm_axis)
    center = mean_of(src, axes)
    variance = mean_of((src - center) ** 2, axes)
    made = (src - center) / xp.sqrt(variance + epsilon)
    yield made if gamma is None else made * gamma + beta
    yield center.reshape(src.shape[: axes[0]])
    yield variance.reshape(src.shape[: axes[0]])


def _torch_layer_norm(t: Any, src: Any, *affine: Any, begin_norm_axis: int, epsilon: float, **_: Any) -> Iterator[Any]:
    axes = last_axes(src.ndim, begin_norm_axis)
    values = [src, *affine] if all(a.dtype == src.dtype for a in affine) else [wide(src), *map(wide, affine)]
    yield t.nn.functional.layer_norm(values[0], src.shape[axes[0] :], *values[1:], eps=epsilon)
    src = wide(src)
    center = mean_of(src, axes)
    yield center.reshape(src.shape[: axes[0]])
    yield mean_of((src - center) ** 2, axes).reshape(src.shape[: axes[0]])


def _spell_layer_norm(build: Builder, op: Op) -> list[LogicalTensor]:
    axes = axes_of(op)
    src, *affine = (widened(build, t) for t in op.inputs)
    center, distance, variance = statistics.moments(build, src, axes)
    made = build("Multiply", distance, inverse_deviation(build, op, variance))
    if affine:
        made = build("Add", build("Multiply", made, affine[0]), affine[1])
    kept = [build("Squeeze", t, axes=axes) for t in (center, variance)] if len(op.outputs) > 1 else []
    return as_declared(build, op, [made, *kept])


def _layer_norm_gradient(build: Builder, op: Op, d: _Gradients) -> _Gradients:
    """LayerNormBackward of d, and the gradient that flows to src through the statistics."""
    src, *affine = op.inputs
    axes = axes_of(op)
    wide = affine
    if len(op.outputs) > 1 and op.outputs[1].dtype != "bf16":
        center, variance = op.outputs[1:]
    else:  # recomputed: statistics of 16 bits would be too inaccurate
        kept_mean, _, kept_variance = statistics.moments(build, widened(build, src), axes)
        center, variance = (build("Squeeze", t, axes=axes) for t in (kept_mean, kept_variance))
        wide = [in_dtype(build, t, center.dtype) for t in affine]
    parts: list[LogicalTensor] = []
    of_affine: list[LogicalTensor | None] = [None] * len(affine)
    if d[0] is not None:
        attrs = {n: v for n, v in op.attrs.items() if n in ("begin_norm_axis", "epsilon", "use_affine")}
        made = build.like(
            "LayerNormBackward", [src, d[0], center, variance, *wide], [src, *wide], f"{op.name}_backward", attrs
        )
        parts = [made[0]]
        of_affine = [in_dtype(build, made_of, t.dtype) for made_of, t in zip(made[1:], affine, strict=True)]
    kept = [None if g is None else build("Unsqueeze", g, axes=axes) for g in (*d[1:], None, None)[:2]]
    parts += statistics.through_moments(build, src, axes, build("Unsqueeze", center, axes=axes), *kept)
    return [statistics.summed(build, parts), *of_affine]


LAYER_NORM = library(
    "LayerNorm",
    "y = (src - mean) / sqrt(variance + epsilon) gamma + beta, mean and variance (that of the population) over the "
    "axes from begin_norm_axis on. f16 and bf16 are computed in f32.",
    family="norm",
    inputs=(Port(name="src", type="T1"), *AFFINE),
    outputs=(Port(name="dst", type="T1"), *KEPT),
    types=TYPES,
    attrs=(KEEP_STATS, BEGIN, USE_AFFINE, EPSILON),
    infer=_shapes,
    reference=in_numpy(_layer_norm),
    torch=_torch_layer_norm,
    spelled=_spell_layer_norm,
    gradient=_layer_norm_gradient,
    onnx=(
        Onnx(
            op_type="LayerNormalization",
            since=17,
            inputs=("src", "gamma", "beta"),
            attrs={"begin_norm_axis": "axis", "epsilon": "epsilon"},
            when={"keep_stats": False, "use_affine": True},
            applies=lambda attrs, ndims: ndims.get("gamma") is not None,
        ),
    ),
    source="oneDNN Graph LayerNorm",
    check=statistics.fits_forward,
)


# -- RMSNorm ----------------------------------------------------------------------------------------------------------


def _rms_norm(xp: Any, src: Any, gamma: Any = None, *, begin_norm_axis: int, epsilon: float) -> Any:
    made = src / xp.sqrt(mean_of(src * src, last_axes(src.ndim, begin_norm_axis)) + epsilon)
    return made if gamma is None else made * gamma


def _spell_rms_norm(build: Builder, op: Op) -> list[LogicalTensor]:
    src, *affine = (widened(build, t) for t in op.inputs)
    squares = mean(build, build("Square", src), axes_of(op))
    made = build("Multiply", src, inverse_deviation(build, op, squares))
    return as_declared(build, op, [build("Multiply", made, affine[0]) if affine else made])


RMS_NORM = library(
    "RMSNorm",
    "y = src / sqrt(mean(src^2) + epsilon) gamma, the mean over the axes from begin_norm_axis on. f16 and bf16 are "
    "computed in f32.",
    family="norm",
    inputs=(Port(name="src", type="T1"), Port(name="gamma", type="T2", optional=True)),
    outputs=(Port(name="dst", type="T1"),),
    types={"T1": FLOAT, "T2": FLOAT},
    attrs=(BEGIN, EPSILON),
    infer=lambda inputs, attrs: _shapes(inputs, attrs)[:1],
    reference=in_numpy(_rms_norm),
    torch=in_torch(_rms_norm),
    spelled=_spell_rms_norm,
    onnx=(
        Onnx(
            op_type="RMSNormalization",
            since=23,
            inputs=("src", "gamma"),
            attrs={"begin_norm_axis": "axis", "epsilon": "epsilon"},
            applies=lambda attrs, ndims: ndims.get("gamma") is not None,
        ),
    ),
    source="oneDNN Graph RMSNorm",
    check=statistics.parameters_fit,
)
