"""Torch forms of ONNX layers: convolutions, products, norms, pooling, attention."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  # torch's own name for it

from opgraph.torch.onnx_table import Call, torch_form

_CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_CONV_TRANSPOSE = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}
_MAX_POOL = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
_AVG_POOL = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}


def _spatial(c: Call, x: Tensor, known: dict[int, Any]) -> int:
    axes = x.dim() - 2
    if axes not in known:
        raise c.refuse(f"{axes} spatial axes; torch has 1 to 3")
    return axes


def _pads(c: Call, x: Tensor, kernel: Sequence[int], strides: Sequence[int], dilations: Sequence[int]) -> list[int]:
    """Padding before and after each spatial axis: all befores, then all afters."""
    mode, axes = c.attr("auto_pad", "NOTSET"), len(kernel)
    if mode == "NOTSET":
        return list(c.attr("pads", [0] * (2 * axes)))
    if mode == "VALID":
        return [0] * (2 * axes)
    before, after = [], []
    for size, k, s, d in zip(x.shape[2:], kernel, strides, dilations):
        total = max((math.ceil(size / s) - 1) * s + (k - 1) * d + 1 - size, 0)
        small, large = total // 2, total - total // 2
        before.append(small if mode == "SAME_UPPER" else large)
        after.append(large if mode == "SAME_UPPER" else small)
    return before + after


def _split_pads(x: Tensor, pads: Sequence[int], value: float) -> tuple[Tensor, list[int]]:
    """The part of a padding that is the same on both sides is left to the op; the rest is done here."""
    half = len(pads) // 2
    if list(pads[:half]) == list(pads[half:]):
        return x, list(pads[:half])
    return _padded(x, pads, value), [0] * half


def _padded(x: Tensor, pads: Sequence[int], value: float) -> Tensor:
    half = len(pads) // 2
    return F.pad(x, [p for i in reversed(range(half)) for p in (pads[i], pads[half + i])], value=value)


@torch_form("Conv", weights=(1, 2))
def conv(c: Call, x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
    """Convolution."""
    axes = _spatial(c, x, _CONV)
    strides, dilations = c.attr("strides", [1] * axes), c.attr("dilations", [1] * axes)
    x, padding = _split_pads(x, _pads(c, x, w.shape[2:], strides, dilations), 0.0)
    result: Tensor = _CONV[axes](x, w, b, strides, padding, dilations, c.attr("group", 1))
    return result


def _transposed_pads(c: Call, x: Tensor, kernel: Sequence[int], strides: Sequence[int]) -> list[int]:
    """Pads that give the output shape asked for; the odd one goes to the end for SAME_UPPER, else to the start."""
    axes, mode = len(kernel), c.attr("auto_pad", "NOTSET")
    wanted = c.attr("output_shape") or (
        [n * s for n, s in zip(x.shape[2:], strides)] if mode.startswith("SAME") else None
    )
    if wanted is None:
        return list(c.attr("pads", [0] * (2 * axes))) if mode == "NOTSET" else [0] * (2 * axes)
    extra, dilations = c.attr("output_padding", [0] * axes), c.attr("dilations", [1] * axes)
    sizes = zip(x.shape[2:], strides, extra, kernel, dilations, wanted)
    total = [s * (n - 1) + e + (k - 1) * d + 1 - out for n, s, e, k, d, out in sizes]
    small = [t // 2 for t in total]
    large = [t - half for t, half in zip(total, small)]
    return small + large if mode == "SAME_UPPER" else large + small


@torch_form("ConvTranspose", weights=(1, 2))
def conv_transpose(c: Call, x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
    """Transposed convolution; the padding is cut off the result."""
    axes = _spatial(c, x, _CONV_TRANSPOSE)
    strides, dilations = c.attr("strides", [1] * axes), c.attr("dilations", [1] * axes)
    extra, pads = c.attr("output_padding", [0] * axes), _transposed_pads(c, x, w.shape[2:], strides)
    if list(pads[:axes]) == list(pads[axes:]) and min(pads) >= 0:
        even: Tensor = _CONV_TRANSPOSE[axes](x, w, b, strides, pads[:axes], extra, c.attr("group", 1), dilations)
        return even
    y: Tensor = _CONV_TRANSPOSE[axes](x, w, b, strides, [0] * axes, extra, c.attr("group", 1), dilations)
    return _padded(y, [-p for p in pads], 0.0)


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
    """The product of dtypes that the native op does not take."""
    return torch.matmul(a, b)


@torch_form("Einsum", weights=(0, 1))
def einsum(c: Call, *operands: Tensor) -> Tensor:
    """Einstein's sum."""
    return torch.einsum(c.attr("equation"), *operands)


def _in_training_form(c: Call) -> str | None:
    training = c.outputs > 1 or c.attr("training_mode", 0)
    return "the training form; export the model in eval mode, and call module.train()" if training else None


@torch_form("BatchNormalization", weights=(1, 2), refuses=_in_training_form)
def batch_norm(c: Call, x: Tensor, scale: Tensor, bias: Tensor, mean: Tensor, var: Tensor) -> Tensor:
    """As torch.nn.BatchNorm: in training with the batch's statistics, which move the stored ones."""
    # ONNX's momentum is what stays, torch's is what comes.
    moving = 1.0 - c.attr("momentum", 0.9)
    return F.batch_norm(x, mean, var, scale, bias, c.training, moving, c.attr("epsilon", 1e-5))


@torch_form("InstanceNormalization", weights=(1, 2))
def instance_norm(c: Call, x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """Each channel of each sample, normalized."""
    return F.instance_norm(x, weight=scale, bias=bias, eps=c.attr("epsilon", 1e-5))


@torch_form("LayerNormalization", weights=(1, 2))
def layer_norm(c: Call, x: Tensor, scale: Tensor, bias: Tensor | None = None) -> Any:
    """The last axes, normalized; scale and bias broadcast."""
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
    mean = x.mean(over, keepdim=True)
    return y, mean, torch.rsqrt(((x - mean) ** 2).mean(over, keepdim=True) + eps)


@torch_form("GroupNormalization", weights=(1, 2))
def group_norm(c: Call, x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """Groups of channels, normalized; before opset 21 with one scale for each group."""
    groups = c.attr("num_groups")
    if scale.shape[0] != x.shape[1]:
        scale = scale.repeat_interleave(x.shape[1] // groups)
        bias = bias.repeat_interleave(x.shape[1] // groups)
    return F.group_norm(x, groups, scale, bias, c.attr("epsilon", 1e-5))


@torch_form("RMSNormalization", "SimplifiedLayerNormalization", weights=(1,))
def rms_norm(c: Call, x: Tensor, scale: Tensor) -> Tensor:
    """Divided by the root of the mean square over the last axes; computed in f32 as stash_type says."""
    axis = c.attr("axis", -1) % x.dim()
    wide = x.float() if c.attr("stash_type", 1) == 1 and x.dtype != torch.float64 else x
    mean = (wide * wide).mean(tuple(range(axis, x.dim())), keepdim=True)
    return (wide * torch.rsqrt(mean + c.attr("epsilon", 1e-5))).to(x.dtype) * scale


def _softmax(c: Call, x: Tensor, function: Any) -> Tensor:
    if c.opset >= 13:
        result: Tensor = function(x, c.attr("axis", -1))
        return result
    # Older opsets see a matrix: the axes before `axis`, and the rest.
    axis = c.attr("axis", 1) % x.dim()
    result = function(x.flatten(axis) if axis < x.dim() else x.unsqueeze(-1), -1).reshape(x.shape)
    return result


@torch_form("Softmax")
def softmax(c: Call, x: Tensor) -> Tensor:
    """exp(x) over its sum."""
    return _softmax(c, x, torch.softmax)


@torch_form("LogSoftmax")
def log_softmax(c: Call, x: Tensor) -> Tensor:
    """The logarithm of softmax."""
    return _softmax(c, x, torch.log_softmax)


@torch_form("MaxPool", refuses=lambda c: "indices" if c.outputs > 1 else None)
def max_pool(c: Call, x: Tensor) -> Tensor:
    """The largest of each window."""
    axes = _spatial(c, x, _MAX_POOL)
    kernel = c.attr("kernel_shape")
    strides, dilations = c.attr("strides", [1] * axes), c.attr("dilations", [1] * axes)
    pads = _pads(c, x, kernel, strides, dilations)
    if any(2 * p > k for p, k in zip(pads, [*kernel, *kernel])):
        x, padding = _padded(x, pads, -math.inf), [0] * axes
    else:
        x, padding = _split_pads(x, pads, -math.inf)
    result: Tensor = _MAX_POOL[axes](x, kernel, strides, padding, dilations, bool(c.attr("ceil_mode", 0)))
    return result


@torch_form("AveragePool", refuses=lambda c: "dilations" if any(d != 1 for d in c.attr("dilations", [])) else None)
def average_pool(c: Call, x: Tensor) -> Tensor:
    """The mean of each window."""
    axes = _spatial(c, x, _AVG_POOL)
    kernel, strides = c.attr("kernel_shape"), c.attr("strides", [1] * axes)
    ceil, count = bool(c.attr("ceil_mode", 0)), bool(c.attr("count_include_pad", 0))
    pads = _pads(c, x, kernel, strides, [1] * axes)
    pool = _AVG_POOL[axes]
    if list(pads[:axes]) == list(pads[axes:]) and all(2 * p <= k for p, k in zip(pads, kernel)):
        result: Tensor = pool(x, kernel, strides, pads[:axes], ceil, count)
        return result
    total: Tensor = pool(_padded(x, pads, 0.0), kernel, strides, 0, ceil, True)
    if count:
        return total
    share: Tensor = pool(_padded(torch.ones_like(x), pads, 0.0), kernel, strides, 0, ceil, True)
    return total / share


@torch_form("GlobalAveragePool")
def global_average_pool(c: Call, x: Tensor) -> Tensor:
    """The mean over all spatial axes."""
    return x.mean(tuple(range(2, x.dim())), keepdim=True)


@torch_form("GlobalMaxPool")
def global_max_pool(c: Call, x: Tensor) -> Tensor:
    """The largest over all spatial axes."""
    return x.amax(tuple(range(2, x.dim())), keepdim=True)


@torch_form("Dropout", numbers=(1, 2))
def dropout(c: Call, x: Tensor, ratio: float | None = None, training: bool | None = None) -> Any:
    """In training, zeros with probability ratio; in eval mode, nothing. The node's own training_mode does not count."""
    p = c.attr("ratio", 0.5) if ratio is None else ratio
    y = F.dropout(x, p, c.training)
    return y if c.outputs == 1 else (y, (y != 0) | (x == 0))


def _heads(x: Tensor, count: int) -> Tensor:
    """[batch, seq, heads * size] as [batch, heads, seq, size]."""
    return x.reshape(*x.shape[:2], count, -1).transpose(1, 2)


@torch_form("RotaryEmbedding")
def rotary_embedding(c: Call, x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None = None) -> Tensor:
    """Pairs of features, turned by an angle that grows with the position (ai.onnx, opset 23)."""
    flat = x.dim() == 3
    if flat:
        x = _heads(x, c.attr("num_heads"))
    if positions is not None:
        cos, sin = cos[positions], sin[positions]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    size = c.attr("rotary_embedding_dim", 0) or x.shape[-1]
    turned, rest = x[..., :size], x[..., size:]
    if c.attr("interleaved", 0):
        a, b = turned[..., 0::2], turned[..., 1::2]
        y = torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)
    else:
        a, b = turned.chunk(2, -1)
        y = torch.cat((a * cos - b * sin, a * sin + b * cos), -1)
    y = torch.cat((y, rest), -1)
    return y.transpose(1, 2).flatten(-2) if flat else y


_ATTENTION = {"is_causal", "kv_num_heads", "q_num_heads", "qk_matmul_output_mode", "scale", "softmax_precision"}


def _beyond_attention(c: Call) -> str | None:
    if c.outputs > 1:
        return "a cache or several outputs"
    # Attributes of later opsets (windows) that say something; 0 and -1 are their ways of saying nothing.
    other = [name for name, value in c.attrs.items() if name not in _ATTENTION and value not in (0, 0.0, -1)]
    return f"attribute {other[0]}" if other else None


@torch_form("Attention", refuses=_beyond_attention)
def attention(c: Call, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *past: Tensor | None) -> Tensor:
    """Scaled dot-product attention (ai.onnx, opset 23) without a cache."""
    if any(p is not None for p in past):
        raise c.refuse("Attention with a cache")
    flat = q.dim() == 3
    if flat:
        q, k, v = _heads(q, c.attr("q_num_heads")), _heads(k, c.attr("kv_num_heads")), _heads(v, c.attr("kv_num_heads"))
    if k.shape[1] != q.shape[1]:
        k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
        v = v.repeat_interleave(q.shape[1] // v.shape[1], 1)
    causal = bool(c.attr("is_causal", 0))
    if causal and mask is not None:
        past_or_present = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
        none = (
            torch.tensor(-math.inf, dtype=mask.dtype, device=q.device)
            if mask.is_floating_point()
            else mask.new_zeros(())
        )
        mask, causal = torch.where(past_or_present, mask, none), False
    y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=c.attr("scale"))
    return y.transpose(1, 2).flatten(-2) if flat else y
