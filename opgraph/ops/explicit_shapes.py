"""Shapes that are given to an op by an attribute or an input, and their match with those implied by its operands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from opgraph.ir.logical_tensor import Dim, Dims, LogicalTensor, dims_text
from opgraph.ir.opdef import Attrs, array_of
from opgraph.ir.shapes import ShapeMismatch


def given_shape(name: str, inputs: Sequence[LogicalTensor], index: int, attrs: Attrs, ndim: int) -> tuple[Dim, ...]:
    """The shape given to an op by a constant input or by an attribute; None for entries that are not known yet.

    An entry 0 of the attribute leaves that size open.

    Raises:
        ShapeMismatch: the number of entries is not `ndim`.
    """
    if len(inputs) > index:
        if not inputs[index].is_constant:
            return (None,) * ndim
        values: Sequence[int] = array_of(inputs[index]).reshape(-1).tolist()
    else:
        values = attrs[name]
        if not any(values):
            return (0,) * ndim
    if len(values) != ndim:
        raise ShapeMismatch(f"{name} has {len(values)} entries for {ndim} dimensions", "give one for each dimension")
    return tuple(values)


def told_shape(name: str, given: Sequence[Any], attrs: Mapping[str, Any], ndim: int) -> tuple[int, ...]:
    """The same when the op runs; 0 for sizes left open.

    Args:
        given: the array of the input, if the op has it.
    """
    values = [int(v) for v in given[0].reshape(-1).tolist()] if given else list(attrs[name])
    return tuple(values) if any(values) else (0,) * ndim


def completed(name: str, told: Sequence[Dim], implied: Sequence[Dim]) -> Dims:
    """Combines the shape given to an op with the one implied by its operands (0 and None: unknown).

    Raises:
        ShapeMismatch: they contradict each other.
    """
    for a, b in zip(told, implied, strict=True):
        if isinstance(a, int) and isinstance(b, int) and a and a != b:
            raise ShapeMismatch(
                f"{name} is {dims_text(tuple(told))}, and the operands make it {dims_text(tuple(implied))}",
                f"give a {name} that fits the operands",
            )
    return tuple(a if isinstance(a, int) and a else b for a, b in zip(told, implied, strict=True))
