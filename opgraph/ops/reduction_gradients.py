"""Gradients of reductions, as graphs. d of a reduced value is broadcast to src; shapes may be unknown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from opgraph.errors import Unimplemented
from opgraph.ir.logical_tensor import LogicalTensor
from opgraph.ir.op import Op
from opgraph.ir.opdef import Attrs, Builder, array_of
from opgraph.ops.spelling import in_dtype, widened

_Gradients: TypeAlias = Sequence[LogicalTensor | None]


def static_axes(inputs: Sequence[LogicalTensor], attrs: Attrs) -> tuple[int, ...] | None:
    """The axes where they are known before running, from the attribute or a constant input; else None."""
    if len(inputs) > 1:
        return tuple(array_of(inputs[1]).reshape(-1).tolist()) if inputs[1].is_constant else None
    return tuple(attrs.get("axes", ()))


def of_sum(build: Builder, op: Op, d: _Gradients) -> _Gradients:
    """d, broadcast to src."""
    src, (grad,) = op.inputs[0], d
    if grad is None or _is_identity(op):
        return _first(op, grad)
    return _first(op, build("BroadcastTo", _kept(build, op, grad), src))


def of_mean(build: Builder, op: Op, d: _Gradients) -> _Gradients:
    """d divided by the number of elements, broadcast to src."""
    src, (grad,) = op.inputs[0], d
    if grad is None or _is_identity(op):
        return _first(op, grad)
    kept = _kept(build, op, grad)
    # No TypeCast at the end: it would round a value that a kernel keeps in f32 throughout.
    share = build("Divide", widened(build, kept), _count(build, op, kept), dtype=grad.dtype)
    return _first(op, build("BroadcastTo", share, src))


def of_extreme(build: Builder, op: Op, d: _Gradients) -> _Gradients:
    """d in equal parts to all elements that are the largest (smallest), as in torch.amax."""
    src, (grad,) = op.inputs[0], d
    if grad is None or _is_identity(op):
        return _first(op, grad)
    kept = _kept(build, op, grad)
    is_one = is_extreme(build, op)
    ones = build("Select", is_one, _filled(build, 1.0, src), 0.0)
    # The division is last, so that NaN, which equals nothing, gives 0 / 0.
    share = build("Divide", build("Select", is_one, widened(build, kept), 0.0), build("SumTo", ones, kept))
    return _first(op, in_dtype(build, share, grad.dtype))


def is_extreme(build: Builder, op: Op) -> LogicalTensor:
    """A mask of the elements of an op's input that are the largest (smallest) ones that the op found."""
    found: LogicalTensor = build("Equal", op.inputs[0], _kept(build, op, op.outputs[0]))
    return found


def has_places(op: Op) -> bool:
    """True if it is known before running which elements of its input each result of a reduction belongs to."""
    return bool(op.attrs["keep_dims"]) or static_axes(op.inputs, op.attrs) is not None


def of_product(build: Builder, op: Op, d: _Gradients) -> _Gradients:
    """d times the product of the other elements.

    That is y / src. Where src is 0, it is the product of the non-zero elements if this is the only 0, else 0. With two
    zeros it is written as the other zero times that product. This is 0 too, but has the correct derivative, so that
    second derivatives are exact.
    """
    src, (grad,) = op.inputs[0], d
    if grad is None or _is_identity(op):
        return _first(op, grad)
    kept = _kept(build, op, grad)
    is_zero = build("Equal", src, 0.0)
    zeros = build("SumTo", build("Select", is_zero, _filled(build, 1.0, src), 0.0), kept)
    rest = build("Select", is_zero, 1.0, src)
    product = build(op.kind, rest, *op.inputs[1:], **{**op.attrs, "keep_dims": True})
    other_zero = build("Subtract", build("SumTo", build("Select", is_zero, src, 0.0), kept), src)
    of_zeros = build(
        "Select", build("Equal", zeros, 1.0), 1.0, build("Select", build("Equal", zeros, 2.0), other_zero, 0.0)
    )
    others = build(
        "Select",
        is_zero,
        build("Multiply", product, of_zeros),
        build("Divide", _kept(build, op, op.outputs[0]), rest),
    )
    return _first(op, build("Multiply", kept, others))


def of_l1(build: Builder, op: Op, d: _Gradients) -> _Gradients:
    """d times the sign of the element: 0 at 0."""
    src, (grad,) = op.inputs[0], d
    if grad is None or _is_identity(op):
        return _first(op, grad)
    sign = build("Sign", src)
    if static_axes(op.inputs, op.attrs) is None:  # there may be no axes: a result below 0 is the element itself
        sign = build("Select", build("Less", _kept(build, op, op.outputs[0]), 0.0), 1.0, sign)
    return _first(op, build("Multiply", _kept(build, op, grad), sign))


def of_l2(build: Builder, op: Op, d: _Gradients) -> _Gradients:
    """d times src / y; 0 where y is 0, as in torch.linalg.vector_norm."""
    src, (grad,) = op.inputs[0], d
    if grad is None or _is_identity(op):
        return _first(op, grad)
    norm = _kept(build, op, op.outputs[0])
    is_zero = build("Equal", norm, 0.0)
    share = build("Divide", _kept(build, op, grad), build("Select", is_zero, 1.0, norm))
    return _first(op, build("Select", is_zero, 0.0, build("Multiply", share, src)))


def _first(op: Op, grad: LogicalTensor | None) -> _Gradients:
    return [grad, *[None] * (len(op.inputs) - 1)]


def _is_identity(op: Op) -> bool:
    return static_axes(op.inputs, op.attrs) == ()


def _kept(build: Builder, op: Op, reduced: LogicalTensor) -> LogicalTensor:
    """A tensor of the result's shape, with the reduced axes restored as axes of size 1.

    Raises:
        Unimplemented: the axes are known only at run time.
    """
    axes = static_axes(op.inputs, op.attrs)
    if op.attrs["keep_dims"]:
        return reduced
    if not has_places(op):
        raise Unimplemented(
            f"{op.kind} has no gradient where its axes are known at run time only",
            where=op.where,
            fix="give the axes as an attribute or a constant, or keep the dimensions: keep_dims=True",
        )
    result: LogicalTensor = build("Unsqueeze", reduced, axes=axes)
    return result


def _count(build: Builder, op: Op, kept: LogicalTensor) -> Any:
    """The number of elements that are reduced to each result."""
    return element_count(build, op.inputs[0], static_axes(op.inputs, op.attrs), kept)


def element_count(build: Builder, src: LogicalTensor, axes: Sequence[int] | None, kept: LogicalTensor) -> Any:
    """The number of elements along axes: a number where it is known, else a tensor computed from the shape alone.

    Args:
        axes: None if they are unknown.
        kept: a tensor of the shape of src, with size 1 along the axes.
    """
    sizes = None if src.dims is None or axes is None else [src.dims[axis] for axis in axes]
    if sizes is None or not all(isinstance(size, int) for size in sizes):
        return build("SumTo", _filled(build, 1.0, src), kept)
    count = 1.0
    for size in sizes:
        count *= float(size or 0)
    return count


def _filled(build: Builder, value: float, like: LogicalTensor) -> LogicalTensor:
    """A number in the shape of a tensor; in f32 for f16 and bf16, which cannot represent large counts."""
    return widened(build, build("BroadcastTo", value, like))
