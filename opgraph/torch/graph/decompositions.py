"""Decompositions: the ATen ops that are rewritten into smaller ones before a graph is partitioned.

An op is decomposed if its parts fuse with the ops around it (norms, softmax, losses, dropout), or if opgraph has no op
for it. Activations that opgraph has (SiLU, GELU, Mish) and their derivatives stay whole. Library ops (convolutions,
products, attention, embeddings) stay whole too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from opgraph.torch.graph.norm_decompositions import NARROW, norm_decompositions
from opgraph.torch.graph.refused_operands import unless_refused
from opgraph.torch.graph.torch_internals import get_decompositions, hint, order_in_memory, suggest_memory_format

aten = torch.ops.aten
#: Ops of two operands whose results have other strides under torch's rules for fake tensors than from its kernels, if
#: the operands have different axis orders in memory.
_IN_ONE_ORDER = (
    aten.copysign.Tensor, aten.heaviside.default, aten.logaddexp.default, aten.logaddexp2.default,
    aten.logical_and.default, aten.logical_or.default, aten.logical_xor.default, aten.special_xlog1py.default,
    aten.xlogy.Tensor,
)  # fmt: skip
#: ATen's number for the reduction of a loss to its mean.
_MEAN = 1

#: Ops that are decomposed as torch does it.
_BY_TORCH = (
    "_batch_norm_with_update", "_batch_norm_with_update_functional", "_fused_rms_norm", "_fused_rms_norm_backward",
    "_log_softmax", "_native_batch_norm_legit", "_native_batch_norm_legit_functional",
    "_native_batch_norm_legit_no_training", "_softmax", "_unsafe_view", "addcdiv", "addcmul",
    "batch_norm_backward", "celu", "cudnn_batch_norm", "cudnn_batch_norm_backward", "detach", "elu",
    "glu", "glu_backward", "hardsigmoid_backward", "hardtanh_backward", "huber_loss",
    "huber_loss_backward", "leaky_relu_backward", "log_sigmoid_backward", "log_sigmoid_forward", "logit",
    "logit_backward", "masked_fill", "mse_loss", "mse_loss_backward", "native_batch_norm", "native_batch_norm_backward",
    "native_group_norm", "native_group_norm_backward", "native_layer_norm",
    "native_layer_norm_backward", "new_full", "new_ones", "new_zeros", "nll_loss2d_backward", "nll_loss2d_forward",
    "nll_loss_backward", "nll_loss_forward", "ones_like", "rsub", "select_backward", "sigmoid_backward",
    "slice_backward", "smooth_l1_loss", "softplus_backward", "split_with_sizes_copy",
    "square", "t", "tanh_backward", "unsafe_split", "zeros_like",
)  # fmt: skip


#: Ops for which torch refuses some dtypes, or numbers, that a decomposition would accept.
_OF_SOME_OPERANDS = frozenset(
    (
        "_log_softmax", "_safe_softmax", "_softmax", "addcdiv", "addcmul", "celu", "elu", "glu", "huber_loss",
        "log_sigmoid_forward", "logit", "masked_fill", "mse_loss", "nll_loss2d_forward", "nll_loss_forward", "rsub",
        "smooth_l1_loss",
    )
)  # fmt: skip


@cache
def decompositions(*, shows_statistics: bool = False) -> dict[Any, Callable[..., Any]]:
    """Decompositions by ATen overload, as AOTAutograd takes them.

    Args:
        shows_statistics: True if mean and inverse deviation of norms may be results (`norm_decompositions`).
    """
    packets = [getattr(aten, name) for name in _BY_TORCH if hasattr(aten, name)]
    table: dict[Any, Callable[..., Any]] = dict(get_decompositions(packets))
    table |= norm_decompositions(table, shows_statistics=shows_statistics)
    table |= {op: _in_one_order(op) for op in _IN_ONE_ORDER}
    table[aten.pow.Scalar] = _of_contiguous(aten.pow.Scalar, 1)
    table[aten.index.Tensor] = _index
    table |= {op: _of_contiguous(op, 0) for op in (aten.isin.Tensor_Tensor, aten.isin.Tensor_Scalar)}
    table[aten.log_sigmoid_forward.default] = _contiguous(table[aten.log_sigmoid_forward.default])
    table[aten.native_dropout.default] = _dropout
    table[aten.roll.default] = _roll
    table |= dict.fromkeys((aten.channel_shuffle.default, aten.native_channel_shuffle.default), _channel_shuffle)
    table[aten.native_dropout_backward.default] = _dropout_backward
    table[aten._safe_softmax.default] = _safe_softmax
    table[aten.var_mean.correction] = _var_mean
    table[aten._softmax_backward_data.default] = _softmax_backward
    table[aten._log_softmax_backward_data.default] = _log_softmax_backward
    table[aten.as_strided_scatter.default] = _as_strided_scatter
    table[aten.constant_pad_nd.default] = _constant_pad_nd
    table[aten.full_like.default] = _full_like
    table[aten.elu_backward.default] = _unless_falling(_elu_backward, slope=1, is_result=4)
    own = table[aten.leaky_relu_backward.default]
    table[aten.leaky_relu_backward.default] = _unless_falling(own, slope=2, is_result=3)
    table[aten.nll_loss2d_forward.default] = _of_whole_images(table[aten.nll_loss2d_forward.default])
    table[aten.hardswish_backward.default] = _hardswish_backward
    table[aten.logit_backward.default] = _logit_backward
    table[aten.threshold_backward.default] = _threshold_backward
    table[aten.smooth_l1_loss_backward.default] = _smooth_l1_loss_backward
    numbers: dict[Any, Callable[[float], bool]] = {
        aten.elu.default: math.isfinite,
        aten.celu.default: lambda number: math.isfinite(number) and number != 0,
        aten.smooth_l1_loss.default: lambda number: number >= 0,
        aten.hardtanh_backward.default: lambda number: not math.isnan(number),
        aten.logit_backward.default: lambda number: not math.isnan(number),
    }
    table |= {op: _with_numbers(table[op], fits) for op, fits in numbers.items()}
    table |= {
        op: unless_refused(op, made) for op, made in table.items() if op.overloadpacket.__name__ in _OF_SOME_OPERANDS
    }
    return table


def _with_numbers(decomposed: Callable[..., Any], fits: Callable[[float], bool]) -> Callable[..., Any]:
    """A decomposition only for numbers that fit: for others torch's kernel computes something else, or fails."""

    def chosen(*args: Any, **kwargs: Any) -> Any:
        numbers = [a for a in (*args, *kwargs.values()) if isinstance(a, (int, float))]
        return decomposed(*args, **kwargs) if all(map(fits, numbers)) else NotImplemented

    return chosen


def _unless_falling(decomposed: Callable[..., Any], *, slope: int, is_result: int) -> Callable[..., Any]:
    """The derivative of an activation, from its input or result. Torch refuses the latter if the slope is negative.

    Args:
        slope, is_result: places of the arguments.
    """

    def chosen(*args: Any) -> Any:
        return NotImplemented if args[is_result] and args[slope] < 0 else decomposed(*args)

    return chosen


def _of_whole_images(decomposed: Callable[..., Any]) -> Callable[..., Any]:
    """A loss of images of classes; torch refuses images of another size, which a decomposition would broadcast."""

    def chosen(x: torch.Tensor, target: torch.Tensor, *args: Any) -> Any:
        fits = x.dim() == 4 and (x.shape[0], *x.shape[2:]) == target.shape
        return decomposed(x, target, *args) if fits else NotImplemented

    return chosen


def _dropout(x: torch.Tensor, p: float, train: bool | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Dropout in which only the mask is random, so that the product may be recomputed.

    The numbers are those of eager dropout: both fill a tensor by Bernoulli draws, in the memory order of `x`.
    `bernoulli` returns a contiguous tensor, so its axes are put in that order. In host memory the numbers do not depend
    on its dtype.
    """
    if train is False:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    if p == 1:
        dropped = x * 0 if x.is_cpu else torch.zeros_like(x)  # in host memory torch keeps NaN
        return dropped, torch.zeros_like(x, dtype=torch.bool)
    like = torch.empty_like(x)
    axes = range(x.dim())
    order = list(axes) if like.is_contiguous() else sorted(axes, key=lambda axis: -hint(like.stride(axis)))
    # Drawn from a tensor without data, the mask depends on nothing: the ops before and after dropout are one kernel.
    dtype = torch.bool if x.is_cpu else x.dtype
    none = torch.empty((), dtype=dtype, device=x.device).expand([x.shape[axis] for axis in order])
    drawn: torch.Tensor = aten.bernoulli.p(none, 1 - p)
    if order != list(axes):
        drawn = drawn.permute(sorted(axes, key=order.__getitem__))
    mask = drawn.to(torch.bool)
    dropped = x * mask * (1 / (1 - p))
    return dropped, mask


def _roll(x: torch.Tensor, shifts: Sequence[int], dims: Sequence[int] = ()) -> Any:
    """As torch computes it in host memory, where channels stay last. On fake tensors torch's result is contiguous."""
    if x.is_contiguous() or not x.is_cpu or len(shifts) != len(dims):
        return NotImplemented
    for shift, axis in zip(shifts, dims, strict=True):
        size = x.shape[axis]
        start = -shift % size
        x = torch.cat((x.narrow(axis, start, size - start), x.narrow(axis, 0, start)), axis)
    return x


def _channel_shuffle(x: torch.Tensor, groups: int) -> Any:
    """As torch computes it in host memory, where channels stay last. On fake tensors torch's result is contiguous."""
    if x.is_contiguous() or not x.is_cpu or x.dim() != 4:
        return NotImplemented
    batch, channels, *sizes = x.shape
    shuffled = x.reshape(batch, groups, channels // groups, *sizes).transpose(1, 2).reshape(x.shape)
    return shuffled.contiguous(memory_format=suggest_memory_format(x))


def _in_one_order(op: Callable[..., Any]) -> Callable[..., Any]:
    """Decomposes an op of two operands into the same op on operands in the axis order that its kernel writes."""

    def decomposed(x: torch.Tensor, y: torch.Tensor) -> Any:
        is_alike = x.shape == y.shape and x.stride() == y.stride()
        if is_alike or (x.is_contiguous() and y.is_contiguous()):
            return NotImplemented
        like = x + y  # in the axis order that all such kernels write; its elements are not read
        axes = range(like.dim())
        order = sorted(axes, key=lambda axis: -hint(like.stride(axis)))
        # 0-d operands stay 0-d, because they do not decide the dtype.
        turned = [t.expand(like.shape).permute(order).contiguous() if t.dim() else t for t in (x, y)]
        return op(*turned).permute(sorted(axes, key=order.__getitem__))

    return decomposed


def _of_contiguous(op: Callable[..., Any], place: int) -> Callable[..., Any]:
    """Decomposes an op whose result is contiguous in torch, whatever the layout of its operand at this place."""

    def decomposed(*args: Any, **kwargs: Any) -> Any:
        if args[place].is_contiguous():
            return NotImplemented
        return op(*args[:place], args[place].contiguous(), *args[place + 1 :], **kwargs)

    return decomposed


def _index(x: torch.Tensor, indices: Sequence[torch.Tensor | None]) -> Any:
    """Indexing with torch's axis order, which depends on the strides of the indices, too; not so on fake tensors."""
    named = [axis for axis, i in enumerate(indices) if i is not None]
    given = [i for i in indices if i is not None]
    is_plain = all(t.is_contiguous() for t in (x, *given))
    if is_plain or any(i.dtype not in (torch.int64, torch.int32) for i in given):
        return NotImplemented
    # The axes of the indices stand together: in the place of the indexed axes, or first if these are not adjacent.
    rest = [axis for axis in range(x.dim()) if axis not in named]
    first = named[0] if named[-1] - named[0] < len(named) else 0
    x, given = x.permute(rest[:first] + named + rest[first:]), aten.broadcast_tensors(given)
    shape = given[0].shape
    last, more = first + len(shape), len(shape) - len(named)
    sizes, strides = list(x.shape), list(x.stride())
    sizes[first : last - more], strides[first : last - more] = shape, [0] * len(shape)
    found = [i.reshape([1] * first + list(shape) + [1] * (len(sizes) - last)).expand(sizes) for i in given]
    read = x.as_strided(sizes, strides)
    order = order_in_memory(read, *found)
    if order == order_in_memory(read):
        return NotImplemented
    # `x` and the indices in that order, without axes of one element.
    order = [axis for axis in order if hint(sizes[axis]) != 1]
    inner = [axis for axis in order if first <= axis < last]
    outer = [axis for axis in order if axis not in inner]
    place = order.index(inner[0]) if inner else 0
    kept = [axis if axis < first else axis - more for axis in outer]
    taken = [_with_axes(i, [axis - first for axis in inner]).contiguous() for i in given]
    x = _with_axes(x, [*kept[:place], *range(first, last - more), *kept[place:]])
    made, axes = aten.index.Tensor(x, [None] * place + taken), outer[:place] + inner + outer[place:]
    made = made.permute([axes.index(axis) for axis in order]).contiguous()
    return made.permute(sorted(range(len(order)), key=order.__getitem__)).reshape(sizes)


def _with_axes(x: torch.Tensor, axes: list[int]) -> torch.Tensor:
    """A view of these axes, in this order; the other axes have one element."""
    others = [axis for axis in range(x.dim()) if axis not in axes]
    return x.permute(axes + others).squeeze(list(range(len(axes), x.dim())))


def _contiguous(decomposed: Callable[..., Any]) -> Callable[..., Any]:
    """Decomposes an op whose results in host memory are contiguous, whatever the layout of its operand."""
    return lambda x: decomposed(x.contiguous() if x.is_cpu else x)


def _dropout_backward(grad: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
    """As torch's kernel computes it: the scale is not rounded to the dtype, and the result has the layout of `grad`."""
    made: torch.Tensor = grad * mask * scale
    return made


def _safe_softmax(x: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Softmax that is 0 in rows that are all -inf, as attention uses it for rows that a mask hides completely."""
    made = dtype or x.dtype
    x = x.to(made)
    x = x.float() if made in NARROW else x
    if x.dim() == 0 or x.numel() == 0:
        return torch.where(x == -math.inf, 0.0, torch.softmax(x, dim)).to(made)
    largest = x.amax(dim, keepdim=True)
    is_hidden = largest == -math.inf
    raised = torch.exp(x - torch.where(is_hidden, 0.0, largest))
    return torch.where(is_hidden, 0.0, raised / raised.sum(dim, keepdim=True)).to(made).contiguous()


def _as_strided_scatter(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Copies an expanded tensor first, as torch does. By torch's rule for fake tensors the result is expanded, too."""
    if all(stride or size == 1 for stride, size in zip(x.stride(), x.shape, strict=True)):
        return NotImplemented
    return aten.as_strided_scatter.default(x.clone(memory_format=torch.contiguous_format), *args, **kwargs)


def _constant_pad_nd(x: torch.Tensor, pad: list[int], value: float = 0) -> Any:
    """Decomposes a pad that only removes elements (the gradient of one that adds them) into slices."""
    if any(p > 0 for p in pad):
        return NotImplemented
    made = x
    for place in range(0, len(pad), 2):
        axis = x.dim() - 1 - place // 2
        made = made.narrow(axis, -pad[place], x.shape[axis] + pad[place] + pad[place + 1])
    return made.clone()


def _full_like(
    x: torch.Tensor, fill: float, *, dtype: torch.dtype | None = None, memory_format: Any = None, **where: Any
) -> Any:
    """A fill that reads nothing: it depends only on the shape of a computed tensor."""
    if not x.is_contiguous() or memory_format not in (None, torch.preserve_format, torch.contiguous_format):
        return NotImplemented
    return torch.full(x.shape, fill, dtype=dtype or x.dtype, device=where.get("device") or x.device)


def _softmax_backward(grad: torch.Tensor, output: torch.Tensor, dim: int, input_dtype: torch.dtype) -> torch.Tensor:
    """As torch's kernels compute it: if all gradients of a row are equal, no products cancel."""
    wide = torch.float64 if grad.dtype == torch.float64 else torch.float32
    g, y = grad.to(wide), output.to(wide)
    made: torch.Tensor = (g - (g * y).sum(dim, keepdim=True)) * y
    return made.to(input_dtype).contiguous()


def _widened(x: torch.Tensor) -> torch.Tensor:
    return x.float() if x.dtype in NARROW else x


def _elu_backward(
    grad: torch.Tensor, alpha: float, scale: float, input_scale: float, is_result: bool, x: torch.Tensor
) -> torch.Tensor:
    """As torch's kernels compute it: NaN gives NaN."""
    g, v = _widened(grad), _widened(x)
    if is_result:
        below = g * input_scale * (v + alpha * scale)
    else:
        below = g * input_scale * (alpha * scale) * torch.exp(v * input_scale)
    return torch.where(v > 0, g * scale, below).to(grad.dtype)


def _hardswish_backward(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """As torch's kernels compute it: NaN gives NaN."""
    g, v = _widened(grad), _widened(x)
    return torch.where(v <= -3, 0.0, torch.where(v >= 3, g, g * (v / 3 + 0.5))).to(grad.dtype)


def _logit_backward(grad: torch.Tensor, x: torch.Tensor, eps: float | None = None) -> torch.Tensor:
    """As torch's kernels compute it: NaN gives NaN, and a negative `eps` means None."""
    low, beyond = (0.0, math.nan) if eps is None or eps < 0 else (eps, 0.0)
    return torch.where((x < low) | (x > 1 - low), beyond, grad / (x * (1 - x)))


def _threshold_backward(grad: torch.Tensor, x: torch.Tensor, threshold: float) -> torch.Tensor:
    """As torch's kernels compute it: the threshold is not rounded to a value of the dtype."""
    return torch.where((_widened(x) if threshold else x) <= threshold, 0, grad)


def _smooth_l1_loss_backward(
    grad: torch.Tensor, x: torch.Tensor, target: torch.Tensor, reduction: int, beta: float
) -> torch.Tensor:
    """As torch's kernels compute it: NaN gives NaN, although the sign of NaN is 0."""
    g, difference = _widened(grad), _widened(x) - _widened(target)
    g = g / difference.numel() if reduction == _MEAN else g
    made = torch.where(difference <= -beta, -g, torch.where(difference >= beta, g, g * difference / beta))
    return made.to(torch.result_type(x, target))


def _log_softmax_backward(grad: torch.Tensor, output: torch.Tensor, dim: int, input_dtype: torch.dtype) -> torch.Tensor:
    """g - p sum(g), p = e^y. Torch's kernel contracts it, so no product is rounded before most of it cancels.

    Where p is near 1, the same is computed with 1 - p, which is exact from p = 1/2 on.
    """
    wide = torch.float64 if grad.dtype == torch.float64 else torch.float32
    g, p = grad.to(wide), output.to(wide).exp()
    total = g.sum(dim, keepdim=True)
    near_one = (g - total) + total * (1 - p)
    made = torch.where((p > 0.5) & (total.abs() < math.inf), near_one, g - p * total)
    return made.to(input_dtype)


def _var_mean(
    x: torch.Tensor, dim: list[int] | None = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Variance and mean in two passes: sums that fuse with the ops around them.

    Elements are compared with a mean that is not rounded to 16 bits, as in torch's kernels.
    """
    if x.dtype.is_complex:
        return NotImplemented  # type: ignore[no-any-return]
    axes = sorted({axis % x.dim() for axis in dim}) if dim else list(range(x.dim()))
    wide = _widened(x)
    mean = wide.mean(axes, keepdim=True)
    count = 1
    for axis in axes:
        count *= x.shape[axis]
    squares = (wide - mean).square().mean(axes, keepdim=True)
    taken = 1 if correction is None else correction
    left = max(count - taken, 0)
    variance = squares if taken == 0 else squares * (count / left if left else math.inf)
    found = variance.to(x.dtype), mean.to(x.dtype)
    return found if keepdim else (found[0].squeeze(axes), found[1].squeeze(axes))
