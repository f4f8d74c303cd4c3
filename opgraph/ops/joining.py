"""Concatenation of tensors along an axis, and its adjoint."""

from __future__ import annotations

from typing import Any

import numpy as np

from opgraph.errors import InvalidDataType, InvalidGraphOp
from opgraph.ir import dtypes
from opgraph.ir.logical_tensor import Dim, Dims, LogicalTensor, dims_text
from opgraph.ir.op import Op
from opgraph.ir.opdef import Attr, Attrs, Onnx, Port
from opgraph.ir.shapes import ShapeMismatch, normalized_axes, unify
from opgraph.ops import joining_gradients as gradients
from opgraph.ops.families import ANY
from opgraph.ops.library import library

_AXIS = Attr(name="axis", type="s64")
_ANY_SHAPE = (*dtypes.ARITHMETIC, dtypes.UNDEF)


def _joined(inputs: tuple[LogicalTensor, ...], attrs: Attrs) -> tuple[Dims, ...]:
    """The shape of the inputs, except along `axis`, where the sizes add up."""
    known = [t.dims for t in inputs if t.dims is not None]
    if not known:
        return (None,)
    (axis,) = normalized_axes((attrs["axis"],), len(known[0]))
    whole: Dims = tuple(None if i == axis else d for i, d in enumerate(known[0]))
    total: Dim = 0
    for dims in known:
        others = tuple(None if i == axis else d for i, d in enumerate(dims))
        try:
            whole = unify(whole, others, "")
        except ShapeMismatch:
            texts = " and ".join(dims_text(d) for d in known)
            raise ShapeMismatch(
                f"shapes {texts} do not join along axis {attrs['axis']}", "make all other axes equal"
            ) from None
        size = dims[axis]
        total = total + size if isinstance(total, int) and isinstance(size, int) else None
    assert whole is not None
    if len(known) < len(inputs):
        total = None
    return (tuple(total if i == axis else d for i, d in enumerate(whole)),)


def _of_one_dtype(op: Op) -> None:
    """There is at least one input, and all inputs have one dtype.

    Raises:
        InvalidGraphOp: there is no input.
        InvalidDataType: the dtypes differ.
    """
    if not op.inputs:
        raise InvalidGraphOp("Concat joins nothing", where=op.where, fix="give it one input or more")
    names = {t.dtype for t in (*op.inputs, *op.outputs)}
    if len(names) > 1:
        raise InvalidDataType(
            f"Concat needs one dtype, got {' and '.join(sorted(names))}", where=op.where, fix="insert a TypeCast"
        )


CONCAT = library(
    "Concat",
    "The inputs one after the other along axis; all other axes are equal.",
    family="shape",
    inputs=(Port(name="src", variadic=True),),
    types=ANY,
    attrs=(_AXIS,),
    infer=_joined,
    reference=lambda *srcs, axis: np.concatenate(srcs, axis),
    torch=lambda t, *srcs, axis: t.cat(srcs, axis),
    gradient=gradients.of_concat,
    onnx=(Onnx(op_type="Concat", since=4, attrs={"axis": "axis"}),),
    source="oneDNN Graph Concat, which takes up to 64 inputs of f32, bf16 or f16",
    check=_of_one_dtype,
)


def _part(inputs: tuple[LogicalTensor, ...], attrs: Attrs) -> tuple[Dims, ...]:
    """The shape of the input numbered `index`."""
    whole = _joined(inputs[1:], attrs)[0]
    try:
        unify(inputs[0].dims, whole, "")
    except ShapeMismatch:
        raise ShapeMismatch(
            f"{dims_text(inputs[0].dims)} is not the shape of what was joined, {dims_text(whole)}",
            "give the gradient of the joined tensor",
        ) from None
    # The op's check reports an index out of range.
    return (inputs[1 + attrs["index"]].dims if 0 <= attrs["index"] < len(inputs) - 1 else None,)


def _piece(d: Any, srcs: tuple[Any, ...], axis: int, index: int) -> Any:
    before = sum(s.shape[axis] for s in srcs[:index])
    cut = [slice(None)] * d.ndim
    cut[axis] = slice(before, before + srcs[index].shape[axis])
    return d[tuple(cut)]


def _index_is_an_input(op: Op) -> None:
    """`index` numbers one of the joined inputs.

    Raises:
        InvalidGraphOp: it does not.
    """
    index, count = op.attrs["index"], len(op.inputs) - 1
    if not isinstance(index, int) or not 0 <= index < count:
        raise InvalidGraphOp(f"index {index} is none of {count} inputs", where=op.where, fix="number the inputs from 0")


CONCAT_BACKWARD = library(
    "ConcatBackward",
    "The part of diff_dst that belongs to the input numbered `index` of a Concat of `src`, whose data is never read.",
    family="shape",
    inputs=(Port(name="diff_dst"), Port(name="src", type="T2", variadic=True, shape_only=True)),
    outputs=("diff_src",),
    types={"T": ANY, "T2": _ANY_SHAPE},
    attrs=(_AXIS, Attr(name="index", type="s64")),
    infer=_part,
    reference=lambda d, *srcs, axis, index: _piece(d, srcs, axis, index),
    torch=lambda t, d, *srcs, axis, index: _piece(d, srcs, axis, index),
    gradient=gradients.of_concat_backward,
    onnx="none: ai.onnx Slice takes bounds where this takes tensors",
    source="the adjoint of Concat",
    check=_index_is_an_input,
)
