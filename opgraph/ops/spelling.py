"""Helpers to write the spelled forms of ops: see `OpDef.spelled`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from opgraph.errors import Unimplemented
from opgraph.ir.logical_tensor import LogicalTensor
from opgraph.ir.op import Op
from opgraph.ir.opdef import Builder


def widened(build: Builder, tensor: LogicalTensor) -> LogicalTensor:
    """Casts a tensor to its compute dtype: f32 for f16 and bf16."""
    return in_dtype(build, tensor, "f32") if tensor.dtype in ("f16", "bf16") else tensor


def in_dtype(build: Builder, tensor: LogicalTensor, dtype: str) -> LogicalTensor:
    """Casts a tensor to a dtype, if it has another one."""
    result: LogicalTensor = tensor if tensor.dtype == dtype else build("TypeCast", tensor, dtype=dtype)
    return result


def as_declared(build: Builder, op: Op, values: Sequence[LogicalTensor]) -> list[LogicalTensor]:
    """The values of the outputs that an op has, cast to its declared dtypes; further values are left out."""
    return [in_dtype(build, v, t.dtype) for v, t in zip(values, op.outputs, strict=False)]


def attr_of(op: Op, name: str) -> Any:
    """The value of an attribute, of the type that the record declares."""
    return op.attr(name)


def rank_of(op: Op, tensor: LogicalTensor) -> int:
    """The number of dimensions of an operand.

    Raises:
        Unimplemented: it is unknown.
    """
    if tensor.ndim is None:
        raise Unimplemented(
            f"{op.kind} cannot be made of smaller ops where the number of dimensions of {tensor.label} is unknown",
            where=op.where,
            fix="declare its shape, with None for unknown sizes",
        )
    return tensor.ndim


def mean(build: Builder, tensor: LogicalTensor, axes: Sequence[int]) -> LogicalTensor:
    """The mean over axes, which stay with size 1."""
    result: LogicalTensor = build("ReduceMean", tensor, axes=tuple(axes), keep_dims=True)
    return result


def total(build: Builder, tensor: LogicalTensor, axes: Sequence[int]) -> LogicalTensor:
    """The sum over axes, which stay with size 1."""
    result: LogicalTensor = build("ReduceSum", tensor, axes=tuple(axes), keep_dims=True)
    return result


def inverse_deviation(build: Builder, op: Op, variance: LogicalTensor) -> LogicalTensor:
    """1 / sqrt(variance + epsilon), epsilon an attribute of the op."""
    result: LogicalTensor = build("Reciprocal", build("Sqrt", build("Add", variance, attr_of(op, "epsilon"))))
    return result
