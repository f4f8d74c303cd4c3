"""Gradients of ops that change the shape of a tensor: the inverse change, also where shapes are unknown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from opgraph.ir.logical_tensor import LogicalTensor
from opgraph.ir.op import Op
from opgraph.ir.opdef import Builder

_Gradients: TypeAlias = Sequence[LogicalTensor | None]


def permutation(order: Sequence[int]) -> tuple[int, ...] | None:
    """An order of axes with non-negative entries; None if it is not a permutation."""
    places = tuple(i + len(order) if i < 0 else i for i in order)
    return places if sorted(places) == list(range(len(places))) else None


def of_reshape(build: Builder, op: Op, d: _Gradients) -> _Gradients:
    """d in the shape of src: given by numbers where they are known, which ONNX can write, else by the tensor."""
    (grad,), src = d, op.inputs[0]
    if grad is None:
        return [None]
    if src.has_known_shape:
        return [build("StaticReshape", grad, shape=src.shape, special_zero=False)]
    return [build("ReshapeTo", grad, src)]


def of_reshape_to(build: Builder, op: Op, d: _Gradients) -> _Gradients:
    """d in the shape of src."""
    (grad,) = d
    return [None if grad is None else build("ReshapeTo", grad, op.inputs[0]), None]


def of_unsqueeze(build: Builder, op: Op, d: _Gradients) -> _Gradients:
    """d without the new axes."""
    (grad,) = d
    return [None if grad is None else build("Squeeze", grad, axes=op.attrs["axes"])]


def of_squeeze(build: Builder, op: Op, d: _Gradients) -> _Gradients:
    """d with the axes restored; the shape is given by the tensor where it is not known yet that their size is 1."""
    (grad,), src, axes = d, op.inputs[0], op.attrs["axes"]
    assert isinstance(axes, tuple)
    if grad is None:
        return [None]
    if src.dims is None or any(src.dims[int(axis)] != 1 for axis in axes):
        return [build("ReshapeTo", grad, src)]
    return [build("Unsqueeze", grad, axes=axes)]


def of_transpose(build: Builder, op: Op, d: _Gradients) -> _Gradients:
    """d with the axes in their original order."""
    (grad,), order = d, op.attrs["order"]
    assert isinstance(order, tuple)
    places = permutation([int(i) for i in order])
    assert places is not None, "its shape rule demands a permutation"
    return [
        None if grad is None else build("StaticTranspose", grad, order=[places.index(i) for i in range(len(places))])
    ]
