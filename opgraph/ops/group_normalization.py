"""GroupNorm: a separate mean and variance for every group of channels of every sample."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

from opgraph.errors import Unimplemented
from opgraph.ir.logical_tensor import Dims, LogicalTensor, dims_text
from opgraph.ir.op import Op
from opgraph.ir.opdef import Attr, Attrs, Builder, Onnx, Port
from opgraph.ir.shapes import ShapeMismatch, dims_agree
from opgraph.ops import statistics
from opgraph.ops.batch_normalization import channel_axis, spread
from opgraph.ops.families import DATA_FORMAT
from opgraph.ops.library import in_numpy, in_torch, library, mean_of
from opgraph.ops.spelling import as_declared, attr_of, in_dtype, inverse_deviation, mean, rank_of, widened
from opgraph.ops.statistics import AFFINE, EPSILON, KEEP_STATS, KEPT, TYPES, USE_AFFINE


def _shapes(inputs: tuple[LogicalTensor, ...], attrs: Attrs) -> tuple[Dims, ...]:
    """The shape of src; mean and variance have one element per group of a sample, gamma and beta one per channel."""
    dims, groups = inputs[0].dims, attrs["groups"]
    if dims is None:
        return (None, None, None)
    if len(dims) < 2:
        raise ShapeMismatch(f"src has {len(dims)} dimensions, no channel axis", "give src two dimensions or more")
    channels = dims[channel_axis(len(dims), attrs)]
    if groups < 0 or (groups and isinstance(channels, int) and channels % groups):
        raise ShapeMismatch(f"{channels} channels do not make {groups} groups", "let groups divide the channels")
    for tensor in inputs[1:]:
        if tensor.dims is not None and not dims_agree(tensor.dims, (channels,)):
            raise ShapeMismatch(
                f"src has {channels} channels and {tensor.label} is {dims_text(tensor.dims)}",
                "give one element for each channel, or set data_format",
            )
    kept = (dims[0], groups or channels)
    return dims, kept, kept


def _group_norm(
    xp: Any,
    src: Any,
    gamma: Any = None,
    beta: Any = None,
    *,
    groups: int,
    epsilon: float,
    data_format: str,
    **_: Any,
) -> Iterator[Any]:
    samples = src.shape[0]
    channels = src.shape[1 if data_format == "NCX" else -1]
    groups = groups or channels
    if data_format == "NCX":
        split, axes = (samples, groups, channels // groups, prod(src.shape[2:])), (2, 3)
    else:
        split, axes = (samples, prod(src.shape[1:-1]), groups, channels // groups), (1, 3)
    grouped = src.reshape(split)
    center = mean_of(grouped, axes)
    variance = mean_of((grouped - center) ** 2, axes)
    made = ((grouped - center) / xp.sqrt(variance + epsilon)).reshape(src.shape)
    if gamma is not None:
        along = (-1, *[1] * (src.ndim - 2)) if data_format == "NCX" else (-1,)
        made = made * gamma.reshape(along) + beta.reshape(along)
    yield made
    yield center.reshape((samples, groups))
    yield variance.reshape((samples, groups))


def _grouped(build: Builder, op: Op, src: LogicalTensor) -> tuple[LogicalTensor, tuple[int, ...]]:
    """src with its groups as an axis (the channels, where each is a group), and the axes within a group of a sample.

    Raises:
        Unimplemented: the rank or the number of channels is unknown.
    """
    groups, by_rows, rank = attr_of(op, "groups"), op.attrs["data_format"] == "NCX", rank_of(op, src)
    if not groups:
        return src, tuple(range(2, rank)) if by_rows else tuple(range(1, rank - 1))
    channels = src.dims[-1] if src.dims else None
    if not by_rows and not isinstance(channels, int):
        raise Unimplemented(
            "GroupNorm cannot be made of smaller ops where nobody knows how many channels there are",
            where=op.where,
            fix="declare the size of the last axis",
        )
    dims = src.dims or (None, None, None)
    inner = dims[1:] if by_rows else dims[1:-1]
    known = [d for d in inner if isinstance(d, int)]
    rest = None if len(known) < len(inner) else prod(known) // (groups if by_rows else 1)
    split = (groups, rest) if by_rows else (rest, groups, int(channels or 0) // groups)
    return _split(build, op, src, split), (2,) if by_rows else (1, 3)


def _split(build: Builder, op: Op, src: LogicalTensor, sizes: Sequence[int | None]) -> LogicalTensor:
    """Reshapes each sample of a tensor to `sizes`; one of them may be unknown.

    Raises:
        Unimplemented: the number of samples is unknown, and several sizes are 0 or unknown.
    """
    samples = src.dims[0] if src.dims else None
    result: LogicalTensor
    if isinstance(samples, int) and None not in sizes:
        result = build("StaticReshape", src, shape=(samples, *sizes), special_zero=False)
        return result
    if sum(not size for size in sizes) > 1:
        raise Unimplemented(
            "GroupNorm cannot be made of smaller ops where nobody knows how many samples, of no elements, there are",
            where=op.where,
            fix="declare the size of the first axis",
        )
    # A leading 0 copies the number of samples. Another 0 would copy the size of that axis of src, so it becomes -1.
    shape = (0, *(size or -1 for size in sizes))
    result = build("StaticReshape", src, shape=shape, special_zero=True)
    return result


def _spell(build: Builder, op: Op) -> list[LogicalTensor]:
    source = op.inputs[0]
    src, *affine = (widened(build, t) for t in op.inputs)
    grouped, axes = _grouped(build, op, src)
    center, distance, variance = statistics.moments(build, grouped, axes)
    made = build("Multiply", distance, inverse_deviation(build, op, variance))
    made = _like_source(build, op, made, source)
    for kind, vector in zip(("Multiply", "Add"), affine, strict=False):
        made = build(kind, made, spread(build, vector, op))
    kept = [build("Squeeze", t, axes=axes) for t in (center, variance)] if len(op.outputs) > 1 else []
    return as_declared(build, op, [made, *kept])


def _like_source(build: Builder, op: Op, value: LogicalTensor, like: LogicalTensor) -> LogicalTensor:
    """Reshapes a grouped value to the shape of another tensor."""
    result: LogicalTensor = build("ReshapeTo", value, like) if op.attrs["groups"] else value
    return result


def _gradient(build: Builder, op: Op, d: Sequence[LogicalTensor | None]) -> Sequence[LogicalTensor | None]:
    """As for LayerNorm, over the axes of a group, plus the gradient that flows to src through the statistics."""
    src, *affine = op.inputs
    grouped, axes = _grouped(build, op, widened(build, src))
    center, distance, variance = statistics.moments(build, grouped, axes)
    parts: list[LogicalTensor] = []
    of_affine: list[LogicalTensor | None] = [None] * len(affine)
    if d[0] is not None:
        grad, inverse = widened(build, d[0]), inverse_deviation(build, op, variance)
        normal = build("Multiply", distance, inverse)
        scaled = build("Multiply", grad, spread(build, widened(build, affine[0]), op)) if affine else grad
        in_groups = _like_source(build, op, scaled, grouped)
        made = statistics.backward(build, in_groups, normal, inverse, lambda t: mean(build, t, axes))
        parts.append(_like_source(build, op, made, src))
        if affine:
            both = build("Multiply", grad, _like_source(build, op, normal, src)), grad
            sums = (build("SumTo", t, affine[0], data_format=op.attrs["data_format"]) for t in both)
            of_affine = [in_dtype(build, t, affine[0].dtype) for t in sums]
    if any(g is not None for g in d[1:]):
        kept = [None if g is None else build("Unsqueeze", g, axes=axes) for g in d[1:]]
        through = statistics.through_moments(build, grouped, axes, center, kept[0], kept[1])
        parts += [_like_source(build, op, part, src) for part in through]
    total = statistics.summed(build, parts)
    return [None if total is None else in_dtype(build, total, src.dtype), *of_affine]


GROUP_NORM = library(
    "GroupNorm",
    "y = (src - mean) / sqrt(variance + epsilon) gamma + beta, mean and variance (that of the population) over one "
    "group of neighbouring channels of one sample, gamma and beta with one element for each channel. 0 groups: each "
    "channel is one. f16 and bf16 are computed in f32.",
    family="norm",
    inputs=(Port(name="src", type="T1"), *AFFINE),
    outputs=(Port(name="dst", type="T1"), *KEPT),
    types=TYPES,
    attrs=(KEEP_STATS, Attr(name="groups", type="s64"), USE_AFFINE, EPSILON, DATA_FORMAT),
    infer=_shapes,
    reference=in_numpy(_group_norm),
    torch=in_torch(_group_norm),
    spelled=_spell,
    gradient=_gradient,
    onnx=(
        Onnx(
            op_type="GroupNormalization",
            since=21,
            inputs=("src", "gamma", "beta"),
            attrs={"groups": "num_groups", "epsilon": "epsilon"},
            when={"keep_stats": False, "use_affine": True, "data_format": "NCX"},
            applies=lambda attrs, ndims: ndims.get("gamma") is not None and attrs["groups"] > 0,
        ),
        Onnx(
            op_type="InstanceNormalization",
            since=6,
            inputs=("src", "gamma", "beta"),
            attrs={"epsilon": "epsilon"},
            when={"keep_stats": False, "use_affine": True, "data_format": "NCX", "groups": 0},
            applies=lambda attrs, ndims: ndims.get("gamma") is not None and (ndims.get("src") or 0) > 2,
        ),
    ),
    source="oneDNN Graph GroupNorm; 0 groups: InstanceNormalization of ai.onnx",
    check=statistics.fits_forward,
)
