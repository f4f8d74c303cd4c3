"""A small Llama, as exporters write it: norms, rotary positions, grouped attention and SwiGLU in primitive ops."""

from __future__ import annotations

import math

import numpy as np
from onnx import ModelProto, TensorProto

from opgraph.onnx.samples.builder import Builder

LAYERS, WIDTH, HEADS, KV_HEADS, HIDDEN, VOCABULARY = 2, 128, 4, 2, 352, 512
_HEAD = WIDTH // HEADS
_EPSILON = 1e-5


def llama() -> ModelProto:
    """The model: `input_ids` s64[batch,seq] -> `logits` f32[batch,seq,512]; two layers.

    Source: Touvron et al., arXiv 2302.13971; rotary positions Su et al., arXiv 2104.09864; gated units Shazeer,
    arXiv 2002.05202.
    """
    net = Builder("llama", seed=2)
    ids = net.input("input_ids", TensorProto.INT64, ("batch", "seq"))
    length = net("Squeeze", net("Shape", ids, start=1, end=2), name="seq_len")
    positions = net("Range", net.value(0, "int64"), length, net.value(1, "int64"), name="arange")
    cosine, sine = _rotary(net, positions)
    mask = _causal_mask(net, positions)
    x = net("Gather", net.weight("model.embed_tokens.weight", (VOCABULARY, WIDTH)), ids, name="embedding")
    for layer in range(LAYERS):
        name = f"model.layers.{layer}"
        y = _attention(net, _norm(net, x, f"{name}.input_layernorm"), f"{name}.self_attn", cosine, sine, mask)
        x = net("Add", x, y)
        x = net("Add", x, _swiglu(net, _norm(net, x, f"{name}.post_attention_layernorm"), f"{name}.mlp"))
    logits = _linear(net, _norm(net, x, "model.norm"), "lm_head", WIDTH, VOCABULARY, name="logits")
    return net.model(logits, TensorProto.FLOAT, ("batch", "seq", VOCABULARY))


def _linear(net: Builder, x: str, weight: str, wide: int, out: int, name: str = "linear") -> str:
    return str(net("MatMul", x, net.weight(f"{weight}.weight", (wide, out), 1 / math.sqrt(wide)), name=name))


def _norm(net: Builder, x: str, name: str) -> str:
    """RMSNorm as torch's exporter spells it: Pow, ReduceMean, Add, Sqrt, Reciprocal, Mul, Mul."""
    squares = net("Pow", x, net.value(2.0), name="pow")
    mean = net("ReduceMean", squares, net.value([-1], "int64"), keepdims=1, name="mean")
    inverse = net("Reciprocal", net("Sqrt", net("Add", mean, net.value(_EPSILON))), name="rsqrt")
    return str(net("Mul", net.weight(f"{name}.weight", (WIDTH,), 0.1, 1.0), net("Mul", x, inverse)))


def _swiglu(net: Builder, x: str, name: str) -> str:
    gate = _linear(net, x, f"{name}.gate_proj", WIDTH, HIDDEN)
    up = _linear(net, x, f"{name}.up_proj", WIDTH, HIDDEN)
    gated = net("Mul", net("Mul", gate, net("Sigmoid", gate), name="silu"), up)
    return _linear(net, gated, f"{name}.down_proj", HIDDEN, WIDTH)


def _rotary(net: Builder, positions: str) -> tuple[str, str]:
    """cos and sin of position times frequency, f32[seq,head]."""
    frequencies = net.value(1 / 10000 ** (np.arange(0, _HEAD, 2) / _HEAD))
    column = net("Unsqueeze", net("Cast", positions, to=TensorProto.FLOAT), net.value([1], "int64"))
    angles = net("Mul", column, frequencies)
    both = net("Concat", angles, angles, axis=-1)
    return net("Cos", both), net("Sin", both)


def _causal_mask(net: Builder, positions: str) -> str:
    """0 where a position may attend, -inf elsewhere; f32[seq,seq]."""
    later = net("Unsqueeze", positions, net.value([1], "int64"))
    allowed = net("LessOrEqual", net("Unsqueeze", positions, net.value([0], "int64")), later, name="le")
    return str(net("Where", allowed, net.value(0.0), net.value(-math.inf), name="mask"))


def _attention(net: Builder, x: str, name: str, cosine: str, sine: str, mask: str) -> str:
    query = _rotated(net, _heads(net, x, f"{name}.q_proj", HEADS), cosine, sine)
    key = _rotated(net, _heads(net, x, f"{name}.k_proj", KV_HEADS), cosine, sine)
    value = _heads(net, x, f"{name}.v_proj", KV_HEADS)
    key, value = _repeated(net, key), _repeated(net, value)
    # Both factors carry the square root of the scale, as in the decomposition of scaled_dot_product_attention.
    root = net.value(_HEAD**-0.25)
    scores = net("MatMul", net("Mul", query, root), net("Mul", net("Transpose", key, perm=[0, 1, 3, 2]), root))
    weights = net("Softmax", net("Add", scores, mask), axis=-1)
    guarded = net("Where", net("IsNaN", weights), net.value(0.0), weights)
    mixed = net("Transpose", net("MatMul", guarded, value), perm=[0, 2, 1, 3])
    return _linear(net, net("Reshape", mixed, net.value([0, 0, -1], "int64")), f"{name}.o_proj", WIDTH, WIDTH)


def _heads(net: Builder, x: str, name: str, heads: int) -> str:
    """[batch,seq,width] -> [batch,heads,seq,head]."""
    split = net("Reshape", _linear(net, x, name, WIDTH, heads * _HEAD), net.value([0, 0, heads, _HEAD], "int64"))
    return str(net("Transpose", split, perm=[0, 2, 1, 3]))


def _rotated(net: Builder, x: str, cosine: str, sine: str) -> str:
    """x cos + rotate_half(x) sin."""
    half, axis = _HEAD // 2, net.value([3], "int64")
    low = net("Slice", x, net.value([0], "int64"), net.value([half], "int64"), axis)
    high = net("Slice", x, net.value([half], "int64"), net.value([_HEAD], "int64"), axis)
    turned = net("Concat", net("Neg", high), low, axis=-1)
    return str(net("Add", net("Mul", x, cosine), net("Mul", turned, sine)))


def _repeated(net: Builder, x: str) -> str:
    """Repeats each key or value head for several query heads."""
    shape = net("Shape", x)
    batch, _, seq, _ = net("Split", shape, num_outputs=4, outputs=4, axis=0)
    groups = net.value([HEADS // KV_HEADS], "int64")
    wide = net("Concat", batch, net.value([KV_HEADS], "int64"), groups, seq, net.value([_HEAD], "int64"), axis=0)
    spread = net("Expand", net("Unsqueeze", x, net.value([2], "int64")), wide)
    whole = net("Concat", batch, net.value([HEADS], "int64"), seq, net.value([_HEAD], "int64"), axis=0)
    return str(net("Reshape", spread, whole))
