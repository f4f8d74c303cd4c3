"""Matrix products."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from opgraph.errors import InvalidDataType, Unimplemented
from opgraph.ir.logical_tensor import Dim, Dims, LogicalTensor, dims_text
from opgraph.ir.op import Op
from opgraph.ir.opdef import Attr, Attrs, Builder, Onnx, Port
from opgraph.ir.shapes import ShapeMismatch, broadcast
from opgraph.ops.families import FLOAT
from opgraph.ops.library import library, wide
from opgraph.ops.spelling import in_dtype


def _product_shape(inputs: tuple[LogicalTensor, ...], attrs: Attrs) -> tuple[Dims, ...]:
    """[..., M, N] of [..., M, K] and [..., K, N], the leading axes broadcast; a 1-d operand has no M or N."""
    a, b = inputs[0].dims, inputs[1].dims
    if a is None or b is None:
        return (None,)
    if not a or not b:
        raise ShapeMismatch("an operand of a matrix product has no dimensions", "multiply by a scalar with Multiply")
    rows, inner_a = _last_two(a, attrs["transpose_a"], (1, a[0]))
    inner_b, columns = _last_two(b, attrs["transpose_b"], (b[0], 1))
    if isinstance(inner_a, int) and isinstance(inner_b, int) and inner_a != inner_b:
        raise ShapeMismatch(
            f"{dims_text(a)} and {dims_text(b)} have no common inner size: {inner_a} and {inner_b}",
            "transpose an operand, or set transpose_a or transpose_b",
        )
    made = (*(broadcast([a[:-2], b[:-2]]) or ()), *([rows] if len(a) > 1 else []), *([columns] if len(b) > 1 else []))
    if len(inputs) > 2 and inputs[2].dims is not None:
        _check_bias(inputs[2].dims, made)
    return (made,)


def _last_two(dims: tuple[Dim, ...], transposed: bool, alone: tuple[Dim, Dim]) -> tuple[Dim, Dim]:
    if len(dims) == 1:
        return alone
    return (dims[-1], dims[-2]) if transposed else (dims[-2], dims[-1])


def _check_bias(bias: tuple[Dim, ...], made: tuple[Dim, ...]) -> None:
    """Raises ShapeMismatch where a bias does not fit, or would make the result larger."""
    longer = len(bias) > len(made)
    if longer or any(
        isinstance(m, int) and isinstance(b, int) and b not in (1, m) for b, m in zip(bias[::-1], made[::-1])
    ):
        raise ShapeMismatch(
            f"a bias {dims_text(bias)} does not broadcast to {dims_text(made)}", "give one for each column"
        )


def _output_is_of_inputs_or_f32(op: Op) -> None:
    """The result has the operands' dtype, or f32.

    Raises:
        InvalidDataType: it has another one.
    """
    if op.outputs and op.outputs[0].dtype not in (op.inputs[0].dtype, "f32"):
        raise InvalidDataType(
            f"MatMul of {op.inputs[0].dtype} does not make {op.outputs[0].dtype}",
            where=op.where,
            fix=f"declare the output {op.inputs[0].dtype} or f32, or add a TypeCast",
        )


def _reference(src: Any, weights: Any, *bias: Any, transpose_a: bool, transpose_b: bool, accumulation_mode: str) -> Any:
    a = np.swapaxes(src, -1, -2) if transpose_a and src.ndim > 1 else src
    b = np.swapaxes(weights, -1, -2) if transpose_b and weights.ndim > 1 else weights
    return np.matmul(a, b) + bias[0] if bias else np.matmul(a, b)


def _torch_form(
    t: Any, src: Any, weights: Any, *bias: Any, transpose_a: bool, transpose_b: bool, accumulation_mode: str
) -> Any:
    a = src.mT if transpose_a and src.ndim > 1 else src
    if not bias:
        return t.matmul(a, weights.mT if transpose_b and weights.ndim > 1 else weights)
    if weights.ndim == 2 and bias[0].ndim == 1 and a.ndim > 1:  # one kernel that rounds once
        rows = a.flatten(0, -2)  # for batches that are not contiguous, `linear` rounds before it adds the bias
        made = t.nn.functional.linear(rows, weights if transpose_b else weights.mT, bias[0])
        return made.reshape(*a.shape[:-1], made.shape[-1])
    b = weights.mT if transpose_b and weights.ndim > 1 else weights
    if min(a.ndim, b.ndim) < 2:
        return t.matmul(wide(a), wide(b)) + wide(bias[0])
    batch, made = t.broadcast_shapes(a.shape[:-2], b.shape[:-2]), (a.shape[-2], b.shape[-1])
    flat = [
        v.expand(*batch, *last).reshape(prod(batch), *last)
        for v, last in ((bias[0], made), (a, a.shape[-2:]), (b, b.shape[-2:]))
    ]
    return t.baddbmm(*flat).reshape(*batch, *made)


def _gradient(build: Builder, op: Op, d: Sequence[LogicalTensor | None]) -> Sequence[LogicalTensor | None]:
    """dA = d B^T and dB = A^T d, with the operands' transpositions; d for the bias. Sums over batches follow.

    Raises:
        Unimplemented: it is unknown if an operand is a vector.
    """
    (grad,) = d
    none = [None] * (len(op.inputs) - 2)
    if grad is None:
        return [None, None, *none]
    a, b = (in_dtype(build, t, grad.dtype) for t in op.inputs[:2])
    if a.ndim is None or b.ndim is None:
        raise Unimplemented(
            "MatMul has no gradient where the number of dimensions of an operand is unknown",
            where=op.where,
            fix="declare its shape, with None for unknown sizes",
        )
    biases = [grad] * len(none)
    if a.ndim == b.ndim == 1:
        return [build("Multiply", grad, b), build("Multiply", grad, a), *biases]
    flip_a, flip_b = bool(op.attrs["transpose_a"]) and a.ndim > 1, bool(op.attrs["transpose_b"]) and b.ndim > 1
    if a.ndim == 1:  # a row
        a, grad = build("Unsqueeze", a, axes=[0]), build("Unsqueeze", grad, axes=[-2])
    if b.ndim == 1:  # a column
        b, grad = build("Unsqueeze", b, axes=[1]), build("Unsqueeze", grad, axes=[-1])
    if flip_a:
        of_a = build("MatMul", b, grad, transpose_a=flip_b, transpose_b=True)
    else:
        of_a = build("MatMul", grad, b, transpose_b=not flip_b)
    if flip_b:
        rows, columns = _rows(build, a, grad) if b.ndim == 2 and not flip_a else (a, grad)
        of_b = build("MatMul", columns, rows, transpose_a=True, transpose_b=flip_a)
    else:
        rows, columns = _rows(build, a, grad) if b.ndim == 2 and not flip_a else (a, grad)
        of_b = build("MatMul", rows, columns, transpose_a=not flip_a)
    if op.inputs[0].ndim == 1:
        of_a = build("Squeeze", of_a, axes=[-2])
    if op.inputs[1].ndim == 1:
        of_b = build("Squeeze", of_b, axes=[-1])
    return [of_a, of_b, *biases]


def _rows(build: Builder, a: LogicalTensor, grad: LogicalTensor) -> tuple[LogicalTensor, LogicalTensor]:
    """Folds batches into rows where the other operand has no batches: one product, not one per batch and a sum."""
    if a.dims is None or grad.dims is None or not isinstance(a.dims[-1], int) or not isinstance(grad.dims[-1], int):
        return a, grad
    if len(a.dims) == 2 or 0 in (a.dims[-1], grad.dims[-1]):
        return a, grad
    flat = [build("StaticReshape", t, shape=[-1, t.dims[-1]], special_zero=False) for t in (a, grad) if t.dims]
    return flat[0], flat[1]


def _pieces(attrs: Attrs, given: Collection[str]) -> str:
    """The plain product of transposed operands, and the sum with the bias; "" where that is the same op.

    A transposition can be written only where the rank is known; elsewhere there is no decomposition.
    """
    ranks = given if isinstance(given, Mapping) else {}
    factors = [
        _factor(n, bool(attrs[f]), ranks.get(n)) for n, f in (("src", "transpose_a"), ("weights", "transpose_b"))
    ]
    plain = factors == ["src", "weights"] and attrs["accumulation_mode"] == "strict"
    if "" in factors or (plain and "bias" not in given):
        return ""
    product = f"MatMul({factors[0]}, {factors[1]})"
    if ranks.get("weights") == 1 and factors[0] != "src":
        # onnxruntime 1.31 fuses Transpose with MatMul, and is wrong where the other operand is a vector.
        product = f"Squeeze(MatMul({factors[0]}, Unsqueeze({factors[1]}, axes=[1])), axes=[-1])"
    return f"Add({product}, bias)" if "bias" in given else product


def _factor(name: str, transposed: bool, ndim: int | None) -> str:
    if not transposed or ndim == 1:
        return name
    return "" if ndim is None else f"StaticTranspose({name}, order={[*range(ndim - 2), ndim - 1, ndim - 2]})"


MATMUL = library(
    "MatMul",
    "y = A B + bias over the last two axes, the axes before them broadcast as in NumPy. transpose_a and transpose_b "
    "swap the last two axes of an operand first. A 1-d operand is a row (src) or a column (weights), whose axis the "
    "result does not have. f16 and bf16 accumulate in f32, whatever accumulation_mode is; the result may be f32.",
    family="linear",
    inputs=(Port(name="src"), Port(name="weights"), Port(name="bias", optional=True)),
    outputs=(Port(name="dst", type="T1"),),
    types={"T": FLOAT, "T1": FLOAT},
    attrs=(
        Attr(name="transpose_a", type="bool", default=False),
        Attr(name="transpose_b", type="bool", default=False),
        Attr(
            name="accumulation_mode",
            type="string",
            default="strict",
            choices=("strict", "relaxed", "any", "f32", "s32", "f16"),
        ),
    ),
    infer=_product_shape,
    reference=_reference,
    torch=_torch_form,
    gradient=_gradient,
    onnx=(
        Onnx(
            op_type="MatMul",
            since=1,
            inputs=("src", "weights"),
            when={"transpose_a": False, "transpose_b": False, "accumulation_mode": "strict"},
        ),
        Onnx(
            op_type="Gemm",
            since=11,
            attrs={"transpose_a": "transA", "transpose_b": "transB"},
            when={"accumulation_mode": "strict"},
            fixed={"alpha": 1.0, "beta": 1.0},
            applies=lambda attrs, ndims: ndims["src"] == ndims["weights"] == 2,
        ),
    ),
    decomposition=_pieces,
    domain=((-2.0, 2.0),),
    source="oneDNN Graph MatMul",
    check=_output_is_of_inputs_or_f32,
)
