"""Torch forms of the attention ops of opset 23."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  # torch's own name for it

from opgraph.runtime.providers.torch_onnx.table import Call, torch_form


def _heads(x: Tensor, count: int) -> Tensor:
    """[batch, seq, heads * size] as [batch, heads, seq, size]."""
    return x.reshape(*x.shape[:2], count, -1).transpose(1, 2)


@torch_form("RotaryEmbedding")
def rotary_embedding(c: Call, x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None = None) -> Tensor:
    """Rotates pairs of features by an angle that grows with the position (ai.onnx, opset 23)."""
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
    # Attributes of later opsets (windows) that have an effect; values 0 and -1 have none.
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
