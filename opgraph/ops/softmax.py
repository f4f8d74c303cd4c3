"""SoftMax and LogSoftmax, and oneDNN's Backward kinds for them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from opgraph.errors import InvalidDataType
from opgraph.ir.logical_tensor import Dims, LogicalTensor
from opgraph.ir.op import Op
from opgraph.ir.opdef import Attr, Attrs, Builder, Onnx, OpDef, Port
from opgraph.ir.shapes import ShapeMismatch, normalized_axes, unify
from opgraph.ops import reference_math
from opgraph.ops.families import FLOAT
from opgraph.ops.library import in_numpy, in_torch, library, wide
from opgraph.ops.spelling import as_declared, attr_of, in_dtype, total, widened

_INF = float("inf")
_GRADS = Sequence[LogicalTensor | None]


def _axis_checked(inputs: tuple[LogicalTensor, ...], attrs: Attrs) -> tuple[Dims, ...]:
    """The shape of src, which must have the axis; stats have size 1 along it."""
    dims = inputs[0].dims
    if dims is None:
        return (None, None)
    (axis,) = normalized_axes([attrs["axis"]], len(dims))
    return dims, (*dims[:axis], 1, *dims[axis + 1 :])


def _both_alike(inputs: tuple[LogicalTensor, ...], attrs: Attrs) -> tuple[Dims, ...]:
    """The shape of dst and of diff_dst, which must be equal."""
    if inputs[0].dims is not None:
        normalized_axes([attrs["axis"]], len(inputs[0].dims))
    try:
        return (unify(inputs[0].dims, inputs[1].dims, "diff_dst"),)
    except ShapeMismatch:
        raise ShapeMismatch("dst and diff_dst differ in shape", "give the gradient of dst") from None


def _result_is_wider(op: Op) -> None:
    """The result has the dtype of src, or one of the two is f32.

    Raises:
        InvalidDataType: it has another one.
    """
    src, dst = op.inputs[0].dtype, op.outputs[0].dtype
    if src != dst and "f32" not in (src, dst):
        raise InvalidDataType(
            f"{op.kind} of {src} does not make {dst}", where=op.where, fix=f"declare the output {src} or f32"
        )


def _gradient_is_wider(op: Op) -> None:
    """The result has the dtype of diff_dst, or is f32; or diff_dst is f32, as where SoftMax widened its result.

    Raises:
        InvalidDataType: another one.
    """
    _result_is_wider(op)


# -- SoftMax ----------------------------------------------------------------------------------------------------------


def _softmax(src: Any, *, axis: int, mode: str) -> Iterator[Any]:
    top = np.max(src, axis=axis, keepdims=True, initial=-_INF)
    if mode == "inf_as_zero":
        top = np.where(top == -_INF, src.dtype.type(0), top)
    powers = np.exp(src - top)
    sums = reference_math.sum_over(powers, (axis,), keep=True)
    yield powers / (np.where(sums == 0, src.dtype.type(1), sums) if mode == "inf_as_zero" else sums)
    yield top + np.log(sums)


def _torch_softmax(t: Any, src: Any, *, axis: int, mode: str) -> Iterator[Any]:
    # Along axes other than the last, the error of torch's sums is 6 times as large (12 epsilon at 128 terms).
    made = t.softmax(src.movedim(axis, -1), -1).movedim(-1, axis) if src.ndim else t.softmax(src, axis)
    if mode == "inf_as_zero" and src.shape[axis]:
        made = t.where(t.amax(src, axis, keepdim=True) == -_INF, 0.0, made)
    yield made
    # Torch's is inf if an element is inf, and in strict mode -inf if all are -inf; dst is NaN there.
    yield t.where(made.isnan().any(axis, keepdim=True), float("nan"), t.logsumexp(wide(src), axis, keepdim=True))


def _spell_softmax(build: Builder, op: Op) -> list[LogicalTensor]:
    axes, lenient = (attr_of(op, "axis"),), op.attrs["mode"] == "inf_as_zero"
    src = widened(build, op.inputs[0])
    top = build("ReduceMax", src, axes=axes, keep_dims=True)
    if lenient:
        top = build("Select", build("Equal", top, -_INF), 0.0, top)
    powers = build("Exp", build("Subtract", src, top))
    sums = total(build, powers, axes)
    divisor = build("Select", build("Equal", sums, 0.0), 1.0, sums) if lenient else sums
    made = [build("Divide", powers, divisor)]
    if len(op.outputs) > 1:
        made.append(build("Add", top, build("Log", sums)))
    return as_declared(build, op, made)


def _softmax_gradient(build: Builder, op: Op, d: _GRADS) -> _GRADS:
    """SoftMaxBackward of d; the gradient of the logarithm of the sum is the softmax itself."""
    src, dst = op.inputs[0], op.outputs[0]
    parts = []
    if d[0] is not None:
        parts.append(build("SoftMaxBackward", d[0], dst, dtype=src.dtype, axis=op.attrs["axis"]))
    if len(d) > 1 and d[1] is not None:
        parts.append(in_dtype(build, build("Multiply", in_dtype(build, dst, d[1].dtype), d[1]), src.dtype))
    return [parts[0] if len(parts) == 1 else build("Add", *parts) if parts else None]


SOFTMAX = library(
    "SoftMax",
    "y = e^(src - m) / sum(e^(src - m)) along axis, m the largest element; NaN where all are -inf, or 0 there with "
    "mode inf_as_zero. stats = m + ln sum(e^(src - m)), -inf for all -inf. f16 and bf16 are computed in f32.",
    family="norm",
    inputs=(Port(name="src", type="T1"),),
    outputs=(Port(name="dst", type="T2"), Port(name="stats", type="T3", optional=True, wide=True)),
    types={"T1": FLOAT, "T2": FLOAT, "T3": ("f32", "f64")},
    attrs=(
        Attr(name="axis", type="s64", default=1),
        Attr(name="mode", type="string", default="none", choices=("none", "inf_as_zero")),
    ),
    infer=_axis_checked,
    reference=_softmax,
    torch=_torch_softmax,
    spelled=_spell_softmax,
    gradient=_softmax_gradient,
    onnx=(Onnx(op_type="Softmax", since=13, attrs={"axis": "axis"}, when={"mode": "none"}),),
    source="oneDNN Graph SoftMax",
    check=_result_is_wider,
)


# -- LogSoftmax -------------------------------------------------------------------------------------------------------


def _log_softmax(src: Any, *, axis: int) -> Any:
    lower = src - np.max(src, axis=axis, keepdims=True, initial=-_INF)
    return lower - np.log(reference_math.sum_over(np.exp(lower), (axis,), keep=True))


def _spell_log_softmax(build: Builder, op: Op) -> list[LogicalTensor]:
    axes = (attr_of(op, "axis"),)
    src = widened(build, op.inputs[0])
    lower = build("Subtract", src, build("ReduceMax", src, axes=axes, keep_dims=True))
    sums = total(build, build("Exp", lower), axes)
    return as_declared(build, op, [build("Subtract", lower, build("Log", sums))])


LOG_SOFTMAX = library(
    "LogSoftmax",
    "y = src - m - ln sum(e^(src - m)) along axis, m the largest element. f16 and bf16 are computed in f32.",
    family="norm",
    attrs=(Attr(name="axis", type="s64", default=-1),),
    infer=lambda inputs, attrs: _axis_checked(inputs, attrs)[:1],
    reference=_log_softmax,
    torch=lambda t, src, axis: t.log_softmax(src, axis),
    spelled=_spell_log_softmax,
    gradient=lambda build, op, d: [
        None if d[0] is None else build("LogSoftmaxBackward", d[0], op.outputs[0], axis=op.attrs["axis"])
    ],
    onnx=(Onnx(op_type="LogSoftmax", since=13, attrs={"axis": "axis"}),),
    source="oneDNN Graph LogSoftmax",
)


# -- Backward ---------------------------------------------------------------------------------------------------------


def _backward(xp: Any, diff_dst: Any, dst: Any, *, axis: int) -> Any:
    return dst * (diff_dst - reference_math.sum_over(diff_dst * dst, (axis,), keep=True))


def _log_backward(xp: Any, diff_dst: Any, dst: Any, *, axis: int) -> Any:
    sums, p = reference_math.sum_over(diff_dst, (axis,), keep=True), xp.exp(dst)
    near_one = (diff_dst - sums) + sums * (1 - p)
    return xp.where((p > 0.5) & (abs(sums) < _INF), near_one, diff_dst - p * sums)


def _spell_backward(build: Builder, op: Op) -> list[LogicalTensor]:
    grad, dst = (widened(build, t) for t in op.inputs)
    inner = total(build, build("Multiply", grad, dst), (attr_of(op, "axis"),))
    return as_declared(build, op, [build("Multiply", dst, build("Subtract", grad, inner))])


def _spell_log_backward(build: Builder, op: Op) -> list[LogicalTensor]:
    grad, dst = (widened(build, t) for t in op.inputs)
    return as_declared(build, op, [log_softmax_backward(build, grad, dst, attr_of(op, "axis"))])


def log_softmax_backward(build: Builder, grad: LogicalTensor, dst: LogicalTensor, axis: int) -> LogicalTensor:
    """g - p sum(g), p = e^dst, in f32 or f64.

    Most of it cancels where p is near 1. There it is computed from 1 - p, which is exact for p from 1/2 on.
    """
    inner, p = total(build, grad, (axis,)), build("Exp", dst)
    near_one = build("Add", build("Subtract", grad, inner), build("Multiply", inner, build("Subtract", 1.0, p)))
    is_near = build("And", build("Greater", p, 0.5), build("Less", build("Abs", inner), _INF))
    result: LogicalTensor = build("Select", is_near, near_one, build("Subtract", grad, build("Multiply", p, inner)))
    return result


_NO_ONNX = "none: ai.onnx has no gradients"

SOFTMAX_BACKWARD: OpDef = library(
    "SoftMaxBackward",
    "diff_src = dst (diff_dst - sum(diff_dst dst)), the sum along axis. f16 and bf16 are computed in f32.",
    family="norm",
    inputs=(Port(name="diff_dst", type="T1"), Port(name="dst", type="T1")),
    outputs=(Port(name="diff_src", type="T2"),),
    types={"T1": FLOAT, "T2": FLOAT},
    attrs=(Attr(name="axis", type="s64", default=1),),
    infer=_both_alike,
    reference=in_numpy(_backward),
    torch=in_torch(_backward),
    spelled=_spell_backward,
    onnx=_NO_ONNX,
    domain=((-4.0, 4.0), (0.0, 1.0)),
    source="oneDNN Graph SoftMaxBackward",
    check=_gradient_is_wider,
)

LOG_SOFTMAX_BACKWARD: OpDef = library(
    "LogSoftmaxBackward",
    "diff_src = diff_dst - e^dst sum(diff_dst), the sum along axis; nothing is lost where e^dst is near 1. f16 and "
    "bf16 are computed in f32.",
    family="norm",
    inputs=("diff_dst", "dst"),
    outputs=("diff_src",),
    attrs=(Attr(name="axis", type="s64", default=-1),),
    infer=_both_alike,
    reference=in_numpy(_log_backward),
    torch=in_torch(_log_backward),
    spelled=_spell_log_backward,
    onnx=_NO_ONNX,
    domain=((-4.0, 4.0), (-4.0, 0.0)),
    source="oneDNN Graph LogSoftmaxBackward",
)
