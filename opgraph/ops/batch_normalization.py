"""Normalization over all axes except the channel axis: BatchNormInference and BatchNormForwardTraining."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from opgraph.ir.logical_tensor import Dims, LogicalTensor, dims_text
from opgraph.ir.op import Op
from opgraph.ir.opdef import Attr, Attrs, Builder, Onnx, Port
from opgraph.ir.shapes import ShapeMismatch, dims_agree
from opgraph.ops import statistics
from opgraph.ops.families import DATA_FORMAT
from opgraph.ops.library import in_numpy, in_torch, library, mean_of
from opgraph.ops.spelling import as_declared, attr_of, in_dtype, inverse_deviation, rank_of, widened
from opgraph.ops.statistics import AFFINE, NEEDED_EPSILON, TYPES

_Gradients = Sequence[LogicalTensor | None]
_MOMENTUM = Attr(name="momentum", type="f32", optional=True)
#: oneDNN's value where momentum is absent.
_USUAL_MOMENTUM = 0.5


def channel_axis(ndim: int, attrs: Attrs) -> int:
    """The index of the channel axis."""
    return 1 if attrs["data_format"] == "NCX" else ndim - 1


def other_axes(ndim: int, attrs: Attrs) -> tuple[int, ...]:
    """All axes except the channel axis."""
    return tuple(i for i in range(ndim) if i != channel_axis(ndim, attrs))


def along_channel(vector: Any, src: Any, data_format: str) -> Any:
    """Reshapes a vector, of NumPy or torch, to broadcast along the channels of src."""
    return vector.reshape((-1, *[1] * (src.ndim - 2))) if data_format == "NCX" else vector


def channel_shapes(count: int, first: int) -> Callable[[tuple[LogicalTensor, ...], Attrs], tuple[Dims, ...]]:
    """The shape rule of an op with `count` per-channel vectors as results; its input vectors begin at index `first`."""

    def rule(inputs: tuple[LogicalTensor, ...], attrs: Attrs) -> tuple[Dims, ...]:
        """The shape of src; parameters and statistics have one element for each channel."""
        dims = inputs[0].dims
        if dims is None:
            return (None, *[inputs[first].dims] * count)
        if len(dims) < 2:
            raise ShapeMismatch(f"src has {len(dims)} dimensions, no channel axis", "give src two dimensions or more")
        channels = dims[channel_axis(len(dims), attrs)]
        for tensor in inputs[1:first]:
            if tensor.dims is not None and not dims_agree(tensor.dims, dims):
                raise ShapeMismatch("diff_dst and src differ in shape", "give the gradient of dst")
        for tensor in inputs[first:]:
            if tensor.dims is not None and not dims_agree(tensor.dims, (channels,)):
                raise ShapeMismatch(
                    f"src has {channels} channels and {tensor.label} is {dims_text(tensor.dims)}",
                    "give one element for each channel, or set data_format",
                )
        return (dims, *[(channels,)] * count)

    return rule


def spread(build: Builder, vector: LogicalTensor, op: Op) -> LogicalTensor:
    """Aligns a vector with the channels, so that it broadcasts against src."""
    if op.attrs["data_format"] == "NXC":
        return vector
    result: LogicalTensor = build("BroadcastTo", vector, op.inputs[0], data_format="NCX")
    return result


# -- inference --------------------------------------------------------------------------------------------------------


def _inference(
    xp: Any, src: Any, gamma: Any, beta: Any, center: Any, variance: Any, *, epsilon: float, data_format: str
) -> Any:
    gamma, beta, center, variance = (along_channel(v, src, data_format) for v in (gamma, beta, center, variance))
    return (src - center) / xp.sqrt(variance + epsilon) * gamma + beta


def _spell_inference(build: Builder, op: Op) -> list[LogicalTensor]:
    # Broadcast first: a kernel then reads the vectors from memory along the channel, and the arithmetic that follows is
    # hoisted out of its innermost loop.
    src, *vectors = (widened(build, t) for t in op.inputs)
    gamma, beta, center, variance = (spread(build, t, op) for t in vectors)
    scale = build("Multiply", inverse_deviation(build, op, variance), gamma)
    return as_declared(build, op, [build("Add", build("Multiply", build("Subtract", src, center), scale), beta)])


_VECTOR = tuple(Port(name=n, type="T2") for n in ("gamma", "beta", "mean", "variance"))

BATCH_NORM_INFERENCE = library(
    "BatchNormInference",
    "y = (src - mean) / sqrt(variance + epsilon) gamma + beta, each of these with one element for each channel. f16 "
    "and bf16 are computed in f32.",
    family="norm",
    inputs=(Port(name="src", type="T1"), *_VECTOR),
    outputs=(Port(name="dst", type="T1"),),
    types=TYPES,
    attrs=(NEEDED_EPSILON, DATA_FORMAT),
    infer=lambda inputs, attrs: channel_shapes(0, 1)(inputs, attrs),
    reference=in_numpy(_inference),
    torch=in_torch(_inference),
    spelled=_spell_inference,
    onnx=(
        Onnx(
            op_type="BatchNormalization",
            since=15,
            attrs={"epsilon": "epsilon"},
            when={"data_format": "NCX"},
            fixed={"training_mode": 0},
        ),
    ),
    domain=((-4.0, 4.0), (-4.0, 4.0), (-4.0, 4.0), (-1.0, 1.0), (0.5, 4.0)),
    source="oneDNN Graph BatchNormInference",
    check=statistics.parameters_fit,
)


# -- training ---------------------------------------------------------------------------------------------------------


def _training(
    xp: Any,
    src: Any,
    running_mean: Any,
    running_variance: Any,
    gamma: Any = None,
    beta: Any = None,
    *,
    epsilon: float,
    data_format: str,
    momentum: float = _USUAL_MOMENTUM,
) -> Iterator[Any]:
    axes = other_axes(src.ndim, {"data_format": data_format})
    center = mean_of(src, axes)
    variance = mean_of((src - center) ** 2, axes)
    made = (src - center) / xp.sqrt(variance + epsilon)
    made = made if gamma is None else made * along_channel(gamma, src, data_format)
    yield made if beta is None else made + along_channel(beta, src, data_format)
    center, variance = center.reshape(-1), variance.reshape(-1)
    yield running_mean * momentum + center * (1 - momentum)
    yield running_variance * momentum + variance * (1 - momentum)
    yield center
    yield variance


def _momentum(op: Op) -> float:
    return float(attr_of(op, "momentum") if "momentum" in op.attrs else _USUAL_MOMENTUM)


def _spell_training(build: Builder, op: Op) -> list[LogicalTensor]:
    axes = other_axes(rank_of(op, op.inputs[0]), op.attrs)
    src, old_mean, old_variance, *affine = (widened(build, t) for t in op.inputs)
    center, distance, variance = statistics.moments(build, src, axes)
    made = build("Multiply", distance, inverse_deviation(build, op, variance))
    for kind, vector in zip(("Multiply", "Add"), affine, strict=False):
        made = build(kind, made, spread(build, vector, op))
    batch = [build("Squeeze", t, axes=axes) for t in (center, variance)]
    running = [
        build("Add", build("Multiply", old, _momentum(op)), build("Multiply", new, 1 - _momentum(op)))
        for old, new in zip((old_mean, old_variance), batch, strict=True)
    ]
    return as_declared(build, op, [made, *running, *batch])


def _training_gradient(build: Builder, op: Op, d: _Gradients) -> _Gradients:
    """BatchNormTrainingBackward of d, and the gradients that flow to the inputs through the statistics."""
    src, affine = op.inputs[0], op.inputs[3:]
    axes = other_axes(rank_of(op, src), op.attrs)
    center, variance = op.outputs[3:]
    wide: Sequence[LogicalTensor] = affine
    if center.dtype == "bf16":  # recomputed: statistics of 16 bits would be too inaccurate
        kept_mean, _, kept_variance = statistics.moments(build, widened(build, src), axes)
        center, variance = (build("Squeeze", t, axes=axes) for t in (kept_mean, kept_variance))
        wide = [widened(build, t) for t in affine]
    parts: list[LogicalTensor] = []
    of_affine: list[LogicalTensor | None] = [None] * len(affine)
    if d[0] is not None:
        attrs = {n: v for n, v in op.attrs.items() if n != "momentum"}
        inputs = [src, d[0], center, variance, *wide[:1]]
        made = build.like("BatchNormTrainingBackward", inputs, [src, *wide], f"{op.name}_backward", attrs)
        parts = [made[0]]
        of_affine = [in_dtype(build, made_of, t.dtype) for made_of, t in zip(made[1:], affine, strict=True)]
    old, new = _momentum(op), 1 - _momentum(op)
    of_old: list[LogicalTensor | None] = []
    of_moments = []
    for running, batch in ((d[1], d[3]), (d[2], d[4])):
        of_old.append(None if running is None else build("Multiply", running, old))
        arrived = [*([] if running is None else [build("Multiply", running, new)]), *([] if batch is None else [batch])]
        total = statistics.summed(build, arrived)
        of_moments.append(None if total is None else build("Unsqueeze", total, axes=axes))
    along = build("Unsqueeze", center, axes=axes)
    parts += statistics.through_moments(build, src, axes, along, *of_moments)
    return [statistics.summed(build, parts), *of_old, *of_affine]


BATCH_NORM_TRAINING = library(
    "BatchNormForwardTraining",
    "y = (src - m) / sqrt(v + epsilon) gamma + beta with m and v, the batch's mean and variance (that of the "
    "population) over all axes but the channels'; these are batch_mean and batch_variance. running_mean = momentum "
    "mean + (1 - momentum) m, and running_variance alike; momentum is 0.5 where it is absent, as in oneDNN. f16 and "
    "bf16 are computed in f32.",
    family="norm",
    inputs=(Port(name="src", type="T1"), *_VECTOR[2:], *AFFINE),
    outputs=(
        Port(name="dst", type="T1"),
        *[Port(name=n, type="T2") for n in ("running_mean", "running_variance", "batch_mean", "batch_variance")],
    ),
    types=TYPES,
    attrs=(NEEDED_EPSILON, _MOMENTUM, DATA_FORMAT),
    infer=channel_shapes(4, 1),
    reference=in_numpy(_training),
    torch=in_torch(_training),
    spelled=_spell_training,
    gradient=_training_gradient,
    onnx="none: ai.onnx BatchNormalization in training mode does not give the batch's mean and variance",
    domain=((-4.0, 4.0), (-1.0, 1.0), (0.5, 4.0), (-4.0, 4.0), (-4.0, 4.0)),
    source="oneDNN Graph BatchNormForwardTraining; for the momentum, batchnorm_executable_t of its CPU backend",
    check=statistics.parameters_fit,
)
