"""Identity, conversion between dtypes, and the index of an element."""

from __future__ import annotations

from typing import Any

import numpy as np

from opgraph.ir import dtypes
from opgraph.ir.logical_tensor import Dims, LogicalTensor
from opgraph.ir.opdef import Attr, Attrs, Onnx, Port, TorchCall
from opgraph.ir.shapes import ShapeMismatch
from opgraph.ops.families import ANY, FLOAT, pointwise


def cast(array: np.ndarray, dtype: str) -> np.ndarray:
    """Converts an array to a dtype, given by name, as TypeCast and every rounding to a declared dtype do.

    To a float: one rounding to the nearest, ties to even (an integer becomes f16 or bf16 through f32, with a rounding
    in both steps). Float to integer: truncates toward zero and saturates; NaN becomes 0. Integer to integer: the low
    bits. To boolean: false for zero, else true, NaN included. The same as kernels/math/cast.h and
    kernels/math/convert.h.
    """
    target = dtypes.get(dtype)
    if array.dtype == target.numpy:
        return array
    from_float = dtypes.of_array(array.dtype, where="cast").is_float
    with np.errstate(all="ignore"):
        if target.category == "int" and from_float:
            return _to_integer(array.astype(np.float64), target.numpy)
        if target.name == "bf16" and array.dtype == np.float64:
            return _to_odd_f32(array).astype(target.numpy)
        if target.name in ("bf16", "f16") and not from_float:
            # Through f32, the compute type of both, as the kernels do.
            return array.astype(np.float32).astype(target.numpy)
        return array.astype(target.numpy)


def _to_integer(wide: np.ndarray, target: np.dtype[Any]) -> np.ndarray:
    info = np.iinfo(target)
    # The limits as floats: the first values that no longer fit, exact for every width.
    above, below = float(2.0 ** (info.bits - (info.min < 0))), float(info.min)
    whole = np.where((wide < above) & (wide > below), wide, 0.0).astype(np.int64).astype(target)
    limit = np.where(wide >= above, target.type(info.max), np.where(wide <= below, target.type(info.min), whole))
    return np.asarray(limit, target)


def _to_odd_f32(wide: np.ndarray) -> np.ndarray:
    """Rounds f64 to f32, to odd; rounding that to bf16 then gives the same as one rounding (Boldo, Melquiond 2008)."""
    nearest = np.asarray(wide.astype(np.float32))
    away = np.abs(nearest.astype(np.float64)) > np.abs(wide)
    bits = nearest.view(np.uint32) - away.astype(np.uint32)
    inexact = (bits.view(np.float32).astype(np.float64) != wide) & ~np.isnan(wide)
    odd: np.ndarray = (bits | inexact.astype(np.uint32)).view(np.float32)
    return odd


IDENTITY = pointwise(
    "Identity",
    "y = x.",
    types=ANY,
    reference=lambda x: x,
    expression="{src}",
    torch=lambda t, x: x,
    onnx=(Onnx(op_type="Identity", since=1),),
    source="ONNX Identity",
    gradient={"src": "d"},
)

REORDER = pointwise(
    "Reorder",
    "y = x, in the layout of the output.",
    types=FLOAT,
    reference=lambda x: x,
    expression="{src}",
    torch=lambda t, x: x,
    decomposition="Identity(src)",
    source="oneDNN Graph Reorder",
    gradient={"src": "d"},
)

STOP_GRADIENT = pointwise(
    "StopGradient",
    "y = x, whose gradient is zero: what is computed from it counts as a constant in differentiation.",
    types=ANY,
    reference=lambda x: x,
    expression="{src}",
    torch=lambda t, x: x.detach(),
    decomposition="Identity(src)",
    torch_calls=(TorchCall("detach(input)"),),
    source="torch.Tensor.detach",
    gradient={"src": "0"},
)

TYPE_CAST = pointwise(
    "TypeCast",
    "x in the dtype of the output. To a float: the nearest, halves to even. Float to integer: truncated toward zero, "
    "saturated, NaN to 0. Integer to integer: the low bits. To boolean: whether it is not zero.",
    inputs=(Port(name="src", type="T1"),),
    outputs=(Port(name="dst", type="T2"),),
    types={"T1": ANY, "T2": ANY},
    reference=lambda x: x,
    expression="{src}",
    torch=lambda t, x: x,
    onnx=(
        Onnx(
            op_type="Cast",
            since=6,
            note="attribute `to` is the output's dtype; floats beyond an integer's range are undefined",
        ),
    ),
    source="oneDNN Graph TypeCast, which allows only f32 with bf16 or f16",
    is_cast=True,
    gradient={"src": "d"},
)


def _index_rule(inputs: tuple[LogicalTensor, ...], attrs: Attrs) -> tuple[Dims, ...]:
    """The shape of src, which must have the axis."""
    dims = inputs[0].dims
    if dims is not None and not -len(dims) <= attrs["axis"] < len(dims):
        raise ShapeMismatch(f"there is no axis {attrs['axis']} in {len(dims)} dimensions", "name an axis of src")
    return (dims,)


def _index(src: np.ndarray, axis: int) -> np.ndarray:
    shape = [1] * src.ndim
    shape[axis] = src.shape[axis]
    return np.broadcast_to(np.arange(src.shape[axis], dtype=np.int32).reshape(shape), src.shape).copy()


GEN_INDEX = pointwise(
    "GenIndex",
    "The index of each element along axis. The values of src do not count.",
    inputs=(Port(name="src", type="T1"),),
    outputs=(Port(name="dst", type="s32"),),
    types={"T1": (*FLOAT, *dtypes.INTS, "boolean")},
    attrs=(Attr(name="axis", type="s64"),),
    infer=_index_rule,
    reference=_index,
    expression="{src}",
    torch=lambda t, x, axis: (
        t.arange(x.shape[axis], dtype=t.int32, device=x.device)
        .reshape([-1 if i == axis % x.ndim else 1 for i in range(x.ndim)])
        .expand(x.shape)
    ),
    onnx="none: an index is made of Shape, Range and Expand, which are not pointwise",
    source="oneDNN Graph GenIndex",
    index_of="axis",
)
