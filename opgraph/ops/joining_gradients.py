"""Gradients of Concat, Slice and their adjoints, which are each other's gradients, also where shapes are unknown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from opgraph.ir.logical_tensor import LogicalTensor
from opgraph.ir.op import Op
from opgraph.ir.opdef import Builder

_Gradients: TypeAlias = Sequence[LogicalTensor | None]


def of_concat(build: Builder, op: Op, d: _Gradients) -> _Gradients:
    """The part of d that belongs to each input: a Slice where its bounds are known."""
    (grad,) = d
    if grad is None:
        return [None] * len(op.inputs)
    axis = op.attrs["axis"]
    assert isinstance(axis, int)
    parts: list[LogicalTensor | None] = []
    start: int | None = 0
    for index, tensor in enumerate(op.inputs):
        size = None if tensor.dims is None else tensor.dims[axis]
        end = start + size if isinstance(start, int) and isinstance(size, int) else None
        if end is None:
            parts.append(build("ConcatBackward", grad, *op.inputs, axis=axis, index=index))
        else:
            parts.append(build("Slice", grad, starts=[start], ends=[end], axes=[axis]))
        start = end
    return parts


def of_concat_backward(build: Builder, op: Op, d: _Gradients) -> _Gradients:
    """d in its place in a tensor of zeros."""
    (grad,), srcs = d, op.inputs[1:]
    rest: _Gradients = [None] * len(srcs)
    if grad is None:
        return [None, *rest]
    parts = [_zeros(build, src, grad.dtype) for src in srcs]
    index = op.attrs["index"]
    assert isinstance(index, int)
    parts[index] = grad
    return [build("Concat", *parts, axis=op.attrs["axis"]), *rest]


def _zeros(build: Builder, like: LogicalTensor, dtype: str) -> LogicalTensor:
    zeros: LogicalTensor = build("BroadcastTo", 0.0, like)
    if zeros.dtype != dtype:
        zeros = build("TypeCast", zeros, dtype=dtype)
    return zeros


def of_slice(build: Builder, op: Op, d: _Gradients) -> _Gradients:
    """d in its place in a tensor of zeros."""
    (grad,) = d
    return [None if grad is None else build("SliceBackward", grad, op.inputs[0], **op.attrs)]


def of_slice_backward(build: Builder, op: Op, d: _Gradients) -> _Gradients:
    """The slice of d."""
    (grad,) = d
    return [None if grad is None else build("Slice", grad, **op.attrs), None]
