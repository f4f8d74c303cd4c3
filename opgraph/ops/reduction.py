"""Reductions over axes: oneDNN's seven. They share the shape rule; each adds its formula and its gradient."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import numpy as np

from opgraph.errors import InvalidGraphOp
from opgraph.ir.logical_tensor import Dims, LogicalTensor
from opgraph.ir.op import Op
from opgraph.ir.opdef import Attr, Attrs, GradientRule, Onnx, OpDef, Port, Row
from opgraph.ir.shapes import normalized_axes
from opgraph.ops import reduction_gradients as gradients
from opgraph.ops import reference_math
from opgraph.ops.families import FLOAT
from opgraph.ops.library import library

_AXES = Attr(name="axes", type="s64[]", optional=True)
_KEEP_DIMS = Attr(name="keep_dims", type="bool", default=False)
#: From opset 18 on (ReduceSum: 13) ONNX takes the axes as an input.
_AXES_ARE_INPUT_SINCE = {"ReduceSum": 13}


def _reduced(inputs: tuple[LogicalTensor, ...], attrs: Attrs) -> tuple[Dims, ...]:
    """The shape of src without the axes, or with 1 in their place where keep_dims is true; without axes that of src."""
    dims = inputs[0].dims
    axes = gradients.static_axes(inputs, attrs)
    if dims is None or axes == ():
        return (dims,)
    if axes is None:
        return ((None,) * len(dims) if attrs["keep_dims"] else None,)
    gone = set(normalized_axes(axes, len(dims)))
    if attrs["keep_dims"]:
        return (tuple(1 if i in gone else d for i, d in enumerate(dims)),)
    return (tuple(d for i, d in enumerate(dims) if i not in gone),)


def _one_place_for_axes(op: Op) -> None:
    """The axes are the attribute or the second input, and not both.

    Raises:
        InvalidGraphOp: both are given, or none. (oneDNN treats the latter as an identity, which is never intended.)
    """
    given = op.attrs.get("axes")
    if (len(op.inputs) > 1 and given) or (len(op.inputs) == 1 and given is None):
        both = len(op.inputs) > 1
        raise InvalidGraphOp(
            f"{op.kind} has its axes {'twice' if both else 'nowhere'}: as attribute and as input are the two ways",
            where=op.where,
            fix="leave one of them out" if both else "set axes, for example axes=[-1]",
        )


def _arguments(src: Any, axes: tuple[Any, ...], attrs: Mapping[str, Any]) -> tuple[tuple[int, ...], bool]:
    wanted = [int(a) for a in axes[0].reshape(-1).tolist()] if axes else attrs["axes"]
    return tuple(wanted), attrs["keep_dims"]


def _reduction(
    kind: str,
    formula: str,
    *,
    numpy: Callable[[Any, tuple[int, ...], bool], Any],
    torch: Callable[[Any, Any, tuple[int, ...], bool], Any],
    gradient: GradientRule,
    row: Row,
) -> OpDef:
    """Registers one reduction.

    Args:
        numpy: a function of src, axes (at least one) and keep_dims.
        torch: a function of the torch module and the same.
    """

    def numpy_form(src: Any, *second: Any, **attrs: Any) -> Any:
        axes, keep = _arguments(src, second, attrs)
        return numpy(src, axes, keep) if axes else src

    def torch_form(t: Any, src: Any, *second: Any, **attrs: Any) -> Any:
        axes, keep = _arguments(src, second, attrs)
        return torch(t, src, axes, keep).to(src.dtype) if axes else src

    since = _AXES_ARE_INPUT_SINCE.get(kind, 18)
    keep = {"keep_dims": "keepdims"}
    # Without axes a norm is |src| in onnxruntime, but src according to oneDNN's page.
    empty = (
        Onnx(op_type="Identity", since=1, inputs=("src",), when={"axes": (), "keep_dims": False})
        if kind in ("ReduceL1", "ReduceL2")
        else Onnx(
            op_type=kind,
            since=since,
            inputs=("src", "$axes"),
            attrs=keep,
            when={"axes": ()},
            fixed={"noop_with_empty_axes": 1},
        )
    )
    return library(
        kind,
        f"{formula} Without axes (axes=[]) y = src. With keep_dims the axes stay, with size 1. f16 and bf16 are "
        "reduced in f32. The axes may be an s32 input instead of an attribute.",
        family="reduction",
        inputs=(Port(name="src", type="T1"), Port(name="axes", type="T2", optional=True, says_shape=True)),
        outputs=(Port(name="dst", type="T1"),),
        types={"T1": FLOAT, "T2": ("s32",)},
        attrs=(_AXES, _KEEP_DIMS),
        infer=_reduced,
        reference=numpy_form,
        torch=torch_form,
        gradient=gradient,
        row=row,
        onnx=(
            Onnx(
                op_type=kind,
                since=since,
                inputs=("src", "$axes"),
                attrs=keep,
                applies=lambda attrs, ndims: bool(attrs.get("axes")),
            ),
            empty,
            Onnx(
                op_type=kind,
                since=1,
                until=since - 1,
                inputs=("src",),
                attrs={"axes": "axes", **keep},
                applies=lambda attrs, ndims: bool(attrs.get("axes")),
            ),
        ),
        source=f"oneDNN Graph {kind}",
        check=_one_place_for_axes,
    )


def _mean(src: Any, axes: tuple[int, ...], keep: bool) -> Any:
    # numpy.mean warns if there are no elements.
    return reference_math.sum_over(src, axes, keep=keep) / prod(src.shape[axis] for axis in axes)


def _wide(t: Any, src: Any) -> Any:
    """The dtype in which torch accumulates."""
    return t.float32 if src.dtype in (t.float16, t.bfloat16) else src.dtype


def _torch_extreme(name: str, empty: float) -> Callable[..., Any]:
    def extreme(t: Any, src: Any, axes: tuple[int, ...], keep: bool) -> Any:
        if src.numel() == 0:  # torch has no largest element of an empty tensor
            return t.sum(src, axes, keep).fill_(empty)
        return getattr(t, name)(src, axes, keep)

    return extreme


def _torch_product(t: Any, src: Any, axes: tuple[int, ...], keep: bool) -> Any:
    for axis in reversed(normalized_axes(axes, src.ndim)):  # torch takes one axis at a time
        src = t.prod(src, axis, keep, dtype=_wide(t, src))
    return src


REDUCE_SUM = _reduction(
    "ReduceSum",
    "y = the sum of src over axes.",
    numpy=lambda src, axes, keep: reference_math.sum_over(src, axes, keep=keep),
    torch=lambda t, src, axes, keep: t.sum(src, axes, keep, dtype=_wide(t, src)),
    gradient=gradients.of_sum,
    row=Row(how="add"),
)

REDUCE_MEAN = _reduction(
    "ReduceMean",
    "y = the mean of src over axes; NaN over no elements.",
    numpy=_mean,
    torch=lambda t, src, axes, keep: t.mean(src, axes, keep, dtype=_wide(t, src)),
    gradient=gradients.of_mean,
    row=Row(how="add", total="{total} / {count}"),
)

REDUCE_MAX = _reduction(
    "ReduceMax",
    "y = the largest element of src over axes; NaN if one is NaN, -inf over no elements. Its gradient goes in equal "
    "parts to all that are largest.",
    numpy=lambda src, axes, keep: np.max(src, axis=axes, keepdims=keep, initial=-np.inf),
    torch=_torch_extreme("amax", -np.inf),
    gradient=gradients.of_extreme,
    row=Row(how="largest"),
)

REDUCE_MIN = _reduction(
    "ReduceMin",
    "y = the smallest element of src over axes; NaN if one is NaN, inf over no elements. Its gradient goes in equal "
    "parts to all that are smallest.",
    numpy=lambda src, axes, keep: np.min(src, axis=axes, keepdims=keep, initial=np.inf),
    torch=_torch_extreme("amin", np.inf),
    gradient=gradients.of_extreme,
    row=Row(how="smallest"),
)

REDUCE_PROD = _reduction(
    "ReduceProd",
    "y = the product of src over axes.",
    numpy=lambda src, axes, keep: np.prod(src, axis=axes, keepdims=keep),
    torch=_torch_product,
    gradient=gradients.of_product,
    row=Row(how="multiply"),
)

REDUCE_L1 = _reduction(
    "ReduceL1",
    "y = the sum of |src| over axes.",
    numpy=lambda src, axes, keep: reference_math.sum_over(np.abs(src), axes, keep=keep),
    torch=lambda t, src, axes, keep: t.linalg.vector_norm(src, 1, axes, keep, dtype=_wide(t, src)),
    gradient=gradients.of_l1,
    row=Row(how="add", each="og::abs({src})"),
)

REDUCE_L2 = _reduction(
    "ReduceL2",
    "y = the square root of the sum of src^2 over axes. Its gradient is 0 where y is 0.",
    numpy=lambda src, axes, keep: np.sqrt(reference_math.sum_over(np.square(src), axes, keep=keep)),
    torch=lambda t, src, axes, keep: t.linalg.vector_norm(src, 2, axes, keep, dtype=_wide(t, src)),
    gradient=gradients.of_l2,
    row=Row(how="add", each="{src} * {src}", total="og::sqrt({total})"),
)
