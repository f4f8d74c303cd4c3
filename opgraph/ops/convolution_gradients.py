"""Gradients of convolutions. They are convolutions again: those of each of the six kinds are others of the six."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from opgraph.errors import Unimplemented
from opgraph.ir.logical_tensor import Dim, LogicalTensor
from opgraph.ir.op import Op
from opgraph.ir.opdef import Builder
from opgraph.ops import windows
from opgraph.ops.spelling import attr_of
from opgraph.ops.windows import NOT_GIVEN, Window, ordered

_Gradients: TypeAlias = Sequence[LogicalTensor | None]
_COMMON = ("strides", "pads_begin", "pads_end", "dilations", "auto_pad", "groups", "data_format", "weights_format")


def of_convolution(build: Builder, op: Op, d: _Gradients) -> _Gradients:
    """The two Backward kinds, and the sum for the bias."""
    src, weights, *bias = op.inputs
    (grad,) = d
    if grad is None:
        return [None] * len(op.inputs)
    of_src = build("ConvolutionBackwardData", grad, weights, dst_shape=_data_shape(op, src), **_attrs(op))
    of_weights = build("ConvolutionBackwardWeights", src, grad, weights_shape=_weights_shape(op, weights), **_attrs(op))
    return [of_src, of_weights, *_of_bias(build, op, grad, bias)]


def of_convolution_data(build: Builder, op: Op, d: _Gradients) -> _Gradients:
    """Convolution of the incoming gradient, and ConvolutionBackwardWeights."""
    diff_dst, weights, *shape = op.inputs
    (grad,) = d
    if grad is None:
        return [None] * len(op.inputs)
    of_weights = build(
        "ConvolutionBackwardWeights", grad, diff_dst, weights_shape=_weights_shape(op, weights), **_attrs(op)
    )
    return [build("Convolution", grad, weights, **_attrs(op)), of_weights, *[None] * len(shape)]


def of_convolution_weights(build: Builder, op: Op, d: _Gradients) -> _Gradients:
    """ConvolutionBackwardData, and Convolution with the incoming gradient as weights."""
    src, diff_dst, *shape = op.inputs
    (grad,) = d
    if grad is None:
        return [None] * len(op.inputs)
    of_src = build("ConvolutionBackwardData", diff_dst, grad, dst_shape=_data_shape(op, src), **_attrs(op))
    return [of_src, build("Convolution", src, grad, **_attrs(op)), *[None] * len(shape)]


def of_transposed(build: Builder, op: Op, d: _Gradients) -> _Gradients:
    """The two Backward kinds, and the sum for the bias."""
    src, weights, *bias = op.inputs
    (grad,) = d
    if grad is None:
        return [None] * len(op.inputs)
    of_weights = build(
        "ConvTransposeBackwardWeights", src, grad, weights_shape=_weights_shape(op, weights), **_attrs(op)
    )
    of_src = build("ConvTransposeBackwardData", grad, weights, **_attrs(op))
    return [of_src, of_weights, *_of_bias(build, op, grad, bias)]


def of_transposed_data(build: Builder, op: Op, d: _Gradients) -> _Gradients:
    """ConvTranspose of the incoming gradient, and ConvTransposeBackwardWeights."""
    diff_dst, weights = op.inputs
    (grad,) = d
    if grad is None:
        return [None, None]
    of_weights = build(
        "ConvTransposeBackwardWeights", grad, diff_dst, weights_shape=_weights_shape(op, weights), **_attrs(op)
    )
    return [build("ConvTranspose", grad, weights, **_restoring(op, diff_dst, grad, weights)), of_weights]


def of_transposed_weights(build: Builder, op: Op, d: _Gradients) -> _Gradients:
    """ConvTransposeBackwardData, and ConvTranspose with the incoming gradient as weights."""
    src, diff_dst, *shape = op.inputs
    (grad,) = d
    if grad is None:
        return [None] * len(op.inputs)
    _weights_shape(op, grad)
    of_dst = build("ConvTranspose", src, grad, **_restoring(op, diff_dst, src, grad))
    return [build("ConvTransposeBackwardData", diff_dst, grad, **_attrs(op)), of_dst, *[None] * len(shape)]


# -- attributes of the gradient ops -----------------------------------------------------------------------------------


def _attrs(op: Op) -> dict[str, Any]:
    return {name: op.attrs[name] for name in _COMMON}


def _of_bias(build: Builder, op: Op, grad: LogicalTensor, bias: Sequence[LogicalTensor]) -> list[LogicalTensor]:
    return [build("SumTo", grad, b, data_format=op.attrs["data_format"]) for b in bias]


def _spatial(op: Op, data: LogicalTensor) -> tuple[Dim, ...]:
    """Spatial sizes of data.

    Raises:
        Unimplemented: a size is unknown, and the result depends on it.
    """
    sizes = () if data.dims is None else ordered(data.dims, windows.data_order(len(data.dims), op.attrs))[2:]
    strides = attr_of(op, "strides")
    if data.dims is None or any(not isinstance(n, int) and s > 1 for n, s in zip(sizes, strides, strict=True)):
        raise Unimplemented(
            f"{op.kind} has no gradient where its step is larger than 1 and the size of {data.label} unknown",
            where=op.where,
            fix="declare the sizes of the spatial axes; batch and channels may stay unknown",
        )
    return sizes


def _data_shape(op: Op, data: LogicalTensor) -> tuple[int, ...]:
    """The shape of data, with 0 for sizes that follow from the operands."""
    _spatial(op, data)
    return tuple(n if isinstance(n, int) else 0 for n in data.dims or ())


def _weights_shape(op: Op, weights: LogicalTensor) -> tuple[int, ...]:
    """The shape of weights, with 0 for sizes that follow from the operands.

    Raises:
        Unimplemented: the size of the window is unknown.
    """
    dims = weights.dims
    kernel = (None,) if dims is None else ordered(dims, windows.weights_order(len(dims), op.attrs))[2:]
    if dims is None or not all(isinstance(k, int) for k in kernel):
        raise Unimplemented(
            f"{op.kind} has no gradient where the size of its weights is unknown",
            where=op.where,
            fix="declare the shape of the weights; channels may stay unknown",
        )
    return tuple(n if isinstance(n, int) else 0 for n in dims)


def _restoring(op: Op, big: LogicalTensor, small: LogicalTensor, weights: LogicalTensor) -> dict[str, Any]:
    """The attributes with which ConvTranspose of `small` gives the spatial sizes of `big`."""
    sizes = _spatial(op, big)
    kernel = ordered(weights.dims or (), windows.weights_order(len(weights.dims or ()), op.attrs))[2:]
    window = Window.of(op.attrs, kernel, sizes)
    counts = window.positions(sizes)  # used for sizes of `small` that are unknown
    if small.dims is not None:
        own_counts = ordered(small.dims, windows.data_order(len(small.dims), op.attrs))[2:]
        counts = tuple(n if isinstance(n, int) else c for n, c in zip(own_counts, counts, strict=True))
    covered = window.covered(counts)
    rest = tuple(n - c if isinstance(n, int) and isinstance(c, int) else 0 for n, c in zip(sizes, covered, strict=True))
    # auto_pad would compute the pads for sizes that the stride divides; these pads are those of `big`.
    own = {"auto_pad": "None", "pads_begin": window.begin, "pads_end": window.end}
    return {**_attrs(op), **own, "output_padding": rest if any(rest) else NOT_GIVEN}
