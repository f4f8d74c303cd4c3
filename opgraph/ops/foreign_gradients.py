"""Gradients of ONNX nodes in native ops, so that these nodes need not be run a second time to differentiate them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from opgraph.ir.logical_tensor import LogicalTensor
from opgraph.ir.op import Op
from opgraph.ir.opdef import Builder
from opgraph.ops.linear import MATMUL
from opgraph.ops.shape_gradients import of_reshape
from opgraph.ops.softmax import log_softmax_backward

_Gradients: TypeAlias = Sequence[LogicalTensor | None]
#: `rule(build, op, d)`: gradients of the inputs of a Wildcard, given that of its only output; None if it cannot.
NodeRule: TypeAlias = Callable[[Builder, Op, LogicalTensor], _Gradients | None]


def _reshape(build: Builder, op: Op, d: LogicalTensor) -> _Gradients | None:
    """The gradient in the shape of the input."""
    return [*of_reshape(build, op, [d]), *[None] * (len(op.inputs) - 1)]


def _transpose(build: Builder, op: Op, d: LogicalTensor) -> _Gradients | None:
    """The inverse transposition; without perm the axes are reversed."""
    order = op.attrs.get("perm")
    if not isinstance(order, tuple):
        if d.ndim is None:
            return None
        order = tuple(reversed(range(d.ndim)))
    back = sorted(range(len(order)), key=lambda i: order[i])
    return [build("StaticTranspose", d, order=back)]


def _product(build: Builder, op: Op, d: LogicalTensor, *, flip_a: bool = False, flip_b: bool = False) -> _Gradients:
    attrs = {**MATMUL.default_attrs(), "transpose_a": flip_a, "transpose_b": flip_b}
    assert callable(MATMUL.gradient)
    return MATMUL.gradient(build, Op.locked(op.id, "MatMul", op.inputs[:2], op.outputs, op.name, attrs), [d])


def _matmul(build: Builder, op: Op, d: LogicalTensor) -> _Gradients | None:
    """The gradients of the native op."""
    return None if None in (op.inputs[0].ndim, op.inputs[1].ndim) else _product(build, op, d)


def _gemm(build: Builder, op: Op, d: LogicalTensor) -> _Gradients | None:
    """For alpha A B + beta C: the gradients of the product, times alpha, and d times beta, summed to the shape of C."""
    if op.inputs[0].ndim != 2 or op.inputs[1].ndim != 2:
        return None
    scaled = _times(build, d, op.attrs.get("alpha", 1.0))
    flips = {f: bool(op.attrs.get(n, 0)) for f, n in (("flip_a", "transA"), ("flip_b", "transB"))}
    biases = [_times(build, d, op.attrs.get("beta", 1.0))] if len(op.inputs) > 2 else []
    return [*_product(build, op, scaled, **flips), *biases]


def _times(build: Builder, d: LogicalTensor, factor: Any) -> LogicalTensor:
    result: LogicalTensor = d if factor == 1.0 else build("Multiply", d, factor)
    return result


def _softmax(build: Builder, op: Op, d: LogicalTensor) -> _Gradients | None:
    """y (d - sum(d y)), from the output alone, which the next reader of it saves anyway.

    Opsets before 13 treat the operand as a matrix; torch differentiates these.
    """
    y = op.outputs[0]
    if not _by_axis(op):
        return None
    wide = _wide(y)
    total = build("ReduceSum", build("Multiply", d, y, dtype=wide), axes=[_axis(op)], keep_dims=True)
    return [build("Multiply", y, build("Subtract", d, total, dtype=wide), dtype=wide)]


def _log_softmax(build: Builder, op: Op, d: LogicalTensor) -> _Gradients | None:
    """d - exp(y) sum(d), from the output alone."""
    y = op.outputs[0]
    if not _by_axis(op):
        return None
    wide = _wide(y)
    return [log_softmax_backward(build, _cast(build, d, wide), _cast(build, y, wide), _axis(op))]


def _by_axis(op: Op) -> bool:
    opset = op.attrs.get("onnx_opset", 1)
    return isinstance(opset, int) and opset >= 13 and op.outputs[0].ndim is not None


def _axis(op: Op) -> int:
    axis = op.attrs.get("axis", -1)
    return axis if isinstance(axis, int) else -1


def _wide(tensor: LogicalTensor) -> str:
    """The dtype in which sums are computed: f16 and bf16 would lose small addends."""
    return tensor.dtype if tensor.dtype == "f64" else "f32"


def _cast(build: Builder, tensor: LogicalTensor, dtype: str) -> LogicalTensor:
    result: LogicalTensor = tensor if tensor.dtype == dtype else build("TypeCast", tensor, dtype=dtype)
    return result


#: ai.onnx op -> its rule.
NODE_RULES: Mapping[str, NodeRule] = {
    **dict.fromkeys(("Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze"), _reshape),
    "Gemm": _gemm,
    "LogSoftmax": _log_softmax,
    "MatMul": _matmul,
    "Softmax": _softmax,
    "Transpose": _transpose,
}
