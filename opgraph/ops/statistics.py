"""Parts shared by norms: attributes, ports, the rules that connect them, and moments in small ops."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from opgraph.errors import InvalidDataType, InvalidGraphOp
from opgraph.ir.logical_tensor import LogicalTensor
from opgraph.ir.op import Op
from opgraph.ir.opdef import Attr, Builder, Port
from opgraph.ops.families import FLOAT
from opgraph.ops.reduction_gradients import element_count
from opgraph.ops.spelling import in_dtype, mean, widened

KEEP_STATS = Attr(name="keep_stats", type="bool", default=True)
USE_AFFINE = Attr(name="use_affine", type="bool", default=True)
EPSILON = Attr(name="epsilon", type="f32", default=1e-5)
NEEDED_EPSILON = Attr(name="epsilon", type="f32")
#: Parameters and statistics are f32; or bf16, only if src is bf16; or f64 if src is f64.
TYPES = {"T1": FLOAT, "T2": ("f32", "bf16", "f64")}
AFFINE = (Port(name="gamma", type="T2", optional=True), Port(name="beta", type="T2", optional=True))
KEPT = tuple(Port(name=n, type="T2", optional=True, wide=True) for n in ("mean", "variance"))
GRADIENTS = tuple(Port(name=n, type="T2", optional=True, wide=True) for n in ("diff_gamma", "diff_beta"))


def parameters_fit(op: Op) -> None:
    """Parameters and statistics are f32 or have the dtype of src; they are f64 if src is.

    Raises:
        InvalidDataType: another dtype.
    """
    src = op.inputs[0].dtype
    for tensor in (*op.inputs[1:], *op.outputs):
        if tensor.dtype not in ((src,) if src == "f64" else (src, "f32")):
            raise InvalidDataType(
                f"{op.kind} of {src} does not take {tensor.dtype} as {tensor.name or tensor.label}",
                where=op.where,
                fix=f"use {src}" if src == "f64" else f"use f32 or {src}",
            )


def fits_forward(op: Op) -> None:
    """gamma and beta come together. keep_stats makes mean and variance outputs. Dtypes are f32 or that of src.

    Raises:
        InvalidGraphOp: there are more or fewer outputs or inputs than the attributes require.
        InvalidDataType: another dtype.
    """
    parameters_fit(op)
    _come_together(op, 1)
    if len(op.outputs) != (3 if op.attrs["keep_stats"] else 1):
        raise InvalidGraphOp(
            f"{op.kind} with keep_stats={op.attrs['keep_stats']} got {len(op.outputs)} outputs",
            where=op.where,
            fix="give it 3 outputs (outputs=3): dst, mean, variance; or set keep_stats=False and give it one",
        )


def fits_backward(op: Op) -> None:
    """With use_affine there are gamma and three outputs, without it one output. Dtypes are f32 or that of src.

    Raises:
        InvalidGraphOp: there are more or fewer outputs or inputs than the attributes require.
        InvalidDataType: another dtype.
    """
    parameters_fit(op)
    affine = bool(op.attrs["use_affine"])
    if affine != (len(op.inputs) > 4) or len(op.outputs) != (3 if affine else 1):
        raise InvalidGraphOp(
            f"{op.kind} with use_affine={affine} got {len(op.inputs)} inputs and {len(op.outputs)} outputs",
            where=op.where,
            fix="give it gamma and 3 outputs (outputs=3); or set use_affine=False and give it one, and no gamma",
        )


def _come_together(op: Op, first: int) -> None:
    if len(op.inputs) == first + 1 or (len(op.inputs) == first) == bool(op.attrs.get("use_affine", False)):
        raise InvalidGraphOp(
            f"{op.kind} with use_affine={op.attrs.get('use_affine')} got {len(op.inputs) - first} of gamma and beta",
            where=op.where,
            fix="give it both, or set use_affine=False and give it neither",
        )


# -- in small ops -----------------------------------------------------------------------------------------------------


def moments(
    build: Builder, src: LogicalTensor, axes: Sequence[int]
) -> tuple[LogicalTensor, LogicalTensor, LogicalTensor]:
    """The mean over axes, the distances from it, and the mean of their squares; axes stay with size 1."""
    center = mean(build, src, axes)
    distance = build("Subtract", src, center)
    return center, distance, mean(build, build("Square", distance), axes)


def backward(
    build: Builder,
    grad: LogicalTensor,
    normal: LogicalTensor,
    inverse: LogicalTensor,
    mean_of: Callable[[LogicalTensor], LogicalTensor],
) -> LogicalTensor:
    """The gradient of src of a norm: inverse (grad - mean(grad) - normal mean(grad normal)).

    Args:
        grad: the gradient of the normalized values.
        normal: the normalized values, (src - mean) inverse.
        inverse: 1 / sqrt(variance + epsilon).
        mean_of: the mean over the normalized axes.
    """
    along = build("Multiply", normal, mean_of(build("Multiply", grad, normal)))
    result: LogicalTensor = build("Multiply", inverse, build("Subtract", build("Subtract", grad, mean_of(grad)), along))
    return result


def through_moments(
    build: Builder,
    src: LogicalTensor,
    axes: Sequence[int],
    center: LogicalTensor,
    of_mean: LogicalTensor | None,
    of_variance: LogicalTensor | None,
) -> list[LogicalTensor]:
    """The gradients of src through mean and variance: of_mean / n, and 2 (src - mean) of_variance / n.

    Args:
        axes: the axes of the moments; in `center`, `of_mean` and `of_variance` they have size 1.
    """
    parts = []
    if of_mean is not None:
        share = build("Divide", widened(build, of_mean), element_count(build, src, axes, of_mean))
        parts.append(build("BroadcastTo", share, src))
    if of_variance is not None:
        share = build("Divide", widened(build, of_variance), element_count(build, src, axes, of_variance))
        distance = build("Subtract", widened(build, src), widened(build, center))
        parts.append(build("Multiply", distance, build("Multiply", share, 2.0)))
    return [in_dtype(build, p, src.dtype) for p in parts]


def summed(build: Builder, parts: Sequence[LogicalTensor]) -> LogicalTensor | None:
    """The sum of tensors of one shape; None if there are none."""
    result = None
    for part in parts:
        result = part if result is None else build("Add", result, part)
    return result
