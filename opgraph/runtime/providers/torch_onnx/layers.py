"""Torch forms of ONNX layers: convolutions, products, norms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  # torch's own name for it

from opgraph.runtime.providers.torch_onnx.padding import padded, pads_of, spatial, split_pads
from opgraph.runtime.providers.torch_onnx.table import Call, torch_form

_CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_CONV_TRANSPOSE = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


@torch_form("Conv", weights=(1, 2))
def conv(c: Call, x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
    """Convolution."""
    axes = spatial(c, x, _CONV)
    strides, dilations = c.attr("strides", [1] * axes), c.attr("dilations", [1] * axes)
    x, padding = split_pads(x, pads_of(c, x, w.shape[2:], strides, dilations), 0.0)
    result: Tensor = _CONV[axes](x, w, b, strides, padding, dilations, c.attr("group", 1))
    return result


def _transposed_pads(c: Call, x: Tensor, kernel: Sequence[int], strides: Sequence[int]) -> list[int]:
    """Pads that give the requested output shape; an odd one goes to the end for SAME_UPPER, else to the start."""
    axes, mode = len(kernel), c.attr("auto_pad", "NOTSET")
    wanted = c.attr("output_shape") or (
        [n * s for n, s in zip(x.shape[2:], strides)] if mode.startswith("SAME") else None
    )
    if wanted is None:
        return list(c.attr("pads", [0] * (2 * axes))) if mode == "NOTSET" else [0] * (2 * axes)
    extra, dilations = c.attr("output_padding", [0] * axes), c.attr("dilations", [1] * axes)
    sizes = zip(x.shape[2:], strides, extra, kernel, dilations, wanted)
    total = [s * (n - 1) + e + (k - 1) * d + 1 - out for n, s, e, k, d, out in sizes]
    if not c.attr("output_shape"):  # a window shorter than its stride makes the result shorter, as in onnxruntime
        total = [max(t, 0) for t in total]
    small = [t // 2 for t in total]
    large = [t - half for t, half in zip(total, small)]
    return small + large if mode == "SAME_UPPER" else large + small


@torch_form("ConvTranspose", weights=(1, 2))
def conv_transpose(c: Call, x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
    """Transposed convolution; the padding is cropped from the result."""
    axes = spatial(c, x, _CONV_TRANSPOSE)
    strides, dilations = c.attr("strides", [1] * axes), c.attr("dilations", [1] * axes)
    extra, pads = c.attr("output_padding", [0] * axes), _transposed_pads(c, x, w.shape[2:], strides)
    if list(pads[:axes]) == list(pads[axes:]) and min(pads) >= 0:
        even: Tensor = _CONV_TRANSPOSE[axes](x, w, b, strides, pads[:axes], extra, c.attr("group", 1), dilations)
        return even
    y: Tensor = _CONV_TRANSPOSE[axes](x, w, b, strides, [0] * axes, extra, c.attr("group", 1), dilations)
    return padded(y, [-p for p in pads], 0.0)


@torch_form("Gemm", weights=(0, 1, 2))
def gemm(c: Call, a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """alpha A B + beta C."""
    a = a.t() if c.attr("transA", 0) else a
    b = b.t() if c.attr("transB", 0) else b
    alpha, beta = c.attr("alpha", 1.0), c.attr("beta", 1.0)
    y = a @ b
    y = y if alpha == 1.0 else y * alpha
    if bias is None or beta == 0.0:
        return y
    return y + (bias if beta == 1.0 else bias * beta)


@torch_form("MatMul", weights=(0, 1))
def matmul(c: Call, a: Tensor, b: Tensor) -> Tensor:
    """The matrix product, for dtypes that the native op does not support."""
    return torch.matmul(a, b)


@torch_form("Einsum", weights=(0, 1))
def einsum(c: Call, *operands: Tensor) -> Tensor:
    """Einstein summation."""
    return torch.einsum(c.attr("equation"), *operands)


def _in_training_form(c: Call) -> str | None:
    training = c.outputs > 1 or c.attr("training_mode", 0)
    return "the training form; export the model in eval mode, and call module.train()" if training else None


@torch_form("BatchNormalization", weights=(1, 2), refuses=_in_training_form)
def batch_norm(c: Call, x: Tensor, scale: Tensor, bias: Tensor, mean: Tensor, var: Tensor) -> Tensor:
    """Like torch.nn.BatchNorm: training uses the batch's statistics, and updates the stored ones with them."""
    if not c.training and (mean.requires_grad or var.requires_grad):  # torch has no gradients of the statistics
        mean, var, scale, bias = (t.reshape(-1, *[1] * (x.dim() - 2)) for t in (mean, var, scale, bias))
        return (x - mean) * torch.rsqrt(var + c.attr("epsilon", 1e-5)) * scale + bias
    # ONNX's momentum is the weight of the old statistics, torch's that of the new ones.
    moving = 1.0 - c.attr("momentum", 0.9)
    return F.batch_norm(x, mean, var, scale, bias, bool(c.training), moving, c.attr("epsilon", 1e-5))


@torch_form("InstanceNormalization", weights=(1, 2))
def instance_norm(c: Call, x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """Normalizes each channel of each sample."""
    # F.instance_norm refuses one element for each channel.
    return torch.instance_norm(x, scale, bias, None, None, True, 0.0, c.attr("epsilon", 1e-5), True)


@torch_form("LayerNormalization", weights=(1, 2))
def layer_norm(c: Call, x: Tensor, scale: Tensor, bias: Tensor | None = None) -> Any:
    """Normalizes the last axes; scale and bias broadcast."""
    axis, eps = c.attr("axis", -1) % x.dim(), c.attr("epsilon", 1e-5)
    shape = x.shape[axis:]
    if scale.shape == shape and (bias is None or bias.shape == shape):
        y = F.layer_norm(x, shape, scale, bias, eps)
    else:
        y = F.layer_norm(x, shape, eps=eps) * scale
        y = y if bias is None else y + bias
    if c.outputs == 1:
        return y
    over = tuple(range(axis, x.dim()))
    wide = _stash(c, x)
    mean = wide.mean(over, keepdim=True)
    return y, mean, torch.rsqrt(((wide - mean) ** 2).mean(over, keepdim=True) + eps)


def _stash(c: Call, x: Tensor) -> Tensor:
    """The data in the dtype of a norm's statistics: f32 if stash_type is 1, but f64 stays."""
    return x.float() if c.attr("stash_type", 1) == 1 and x.dtype != torch.float64 else x


@torch_form("GroupNormalization", weights=(1, 2))
def group_norm(c: Call, x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """Normalizes groups of channels; before opset 21 with one scale for each group."""
    groups = c.attr("num_groups")
    if scale.shape[0] != x.shape[1]:
        scale = scale.repeat_interleave(x.shape[1] // groups)
        bias = bias.repeat_interleave(x.shape[1] // groups)
    return torch.group_norm(x, groups, scale, bias, c.attr("epsilon", 1e-5))  # F.group_norm refuses one element


@torch_form("RMSNormalization", "SimplifiedLayerNormalization", weights=(1,))
def rms_norm(c: Call, x: Tensor, scale: Tensor) -> Tensor:
    """Divides by the root of the mean square over the last axes; computes in f32 if stash_type is 1."""
    axis = c.attr("axis", -1) % x.dim()
    wide = _stash(c, x)
    mean = (wide * wide).mean(tuple(range(axis, x.dim())), keepdim=True)
    return (wide * torch.rsqrt(mean + c.attr("epsilon", 1e-5))).to(x.dtype) * scale


def _softmax(c: Call, x: Tensor, function: Any) -> Tensor:
    if c.opset >= 13:
        result: Tensor = function(x, c.attr("axis", -1))
        return result
    # Older opsets flatten to a matrix: the axes before `axis`, and the rest.
    axis = c.attr("axis", 1) % x.dim()
    result = function(x.flatten(axis) if axis < x.dim() else x.unsqueeze(-1), -1).reshape(x.shape)
    return result


@torch_form("Softmax")
def softmax(c: Call, x: Tensor) -> Tensor:
    """exp(x) divided by its sum."""
    return _softmax(c, x, torch.softmax)


@torch_form("LogSoftmax")
def log_softmax(c: Call, x: Tensor) -> Tensor:
    """The logarithm of softmax."""
    return _softmax(c, x, torch.log_softmax)


@torch_form("Dropout", numbers=(1, 2))
def dropout(c: Call, x: Tensor, ratio: float | None = None, training: bool | None = None) -> Any:
    """Zeros elements with probability ratio in training; does nothing in eval mode. Ignores the node's training_mode.

    Raises:
        Unimplemented: a node outside a module is in training mode: the random zeros were not recorded.
    """
    if c.training is None and training:
        raise c.refuse("Dropout in training mode", "export the model in eval mode")
    p = c.attr("ratio", 0.5) if ratio is None else ratio
    y = F.dropout(x, p, bool(c.training))
    kept = (y != 0) | (x == 0)
    return y if c.outputs == 1 else (y, kept if c.opset >= 10 else kept.to(y.dtype))
