"""The formulas that are measured, as a user writes them. `m` is the vocabulary: see `opgraph.bench.formula`."""

from __future__ import annotations

import math
from typing import Any

#: onnxruntime's QuickGelu, and the constant of CLIP.
QUICK = 1.702
#: The constants of SELU, as in NAF1 (opgraph/torch/naf1.py).
LAMBDA, ALPHA = 1.0507, 1.67326


def swish(m: Any, x: Any) -> Any:
    """x * sigmoid(x)."""
    return x * m.Sigmoid(x)


def swish_quick(m: Any, x: Any) -> Any:
    """x * sigmoid(1.702 x)."""
    return x * m.Sigmoid(QUICK * x)


def swish_alpha(m: Any, x: Any, a: Any) -> Any:
    """x * sigmoid(a x), a trained."""
    return x * m.Sigmoid(a * x)


def gated(m: Any, gate: Any, up: Any) -> Any:
    """SwiGLU: swish(gate) * up."""
    return gate * m.Sigmoid(gate) * up


def glu(m: Any, a: Any, b: Any) -> Any:
    """A * sigmoid(b): torch's glu, of the halves of one tensor."""
    return a * m.Sigmoid(b)


def gelu(m: Any, x: Any) -> Any:
    """GELU by erf."""
    return 0.5 * x * (1.0 + m.Erf(x * math.sqrt(0.5)))


def gelu_tanh(m: Any, x: Any) -> Any:
    """GELU by tanh."""
    return 0.5 * x * (1.0 + m.Tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))


def mish(m: Any, x: Any) -> Any:
    """x * tanh(softplus(x))."""
    return x * m.Tanh(m.SoftPlus(x))


def hard_swish(m: Any, x: Any) -> Any:
    """x * clamp(x + 3, 0, 6) / 6."""
    return x * m.Clamp(x + 3.0, min=0.0, max=6.0) / 6.0


def fractional(m: Any, x: Any, p: Any, r: Any, w0: Any, w1: Any, w2: Any) -> Any:
    """NAF1 for every element, its arithmetic on the trained order done: p the exponent, r, w0, w1, w2 factors."""
    positive = m.Select(x > 0.0, x, 1.0)
    negative = m.Select(x <= 0.0, x, 1.0)
    right = LAMBDA * m.Pow(positive, p) * r
    total = (1.0 - m.Exp(negative)) * w0
    total = total + (1.0 - m.Exp(negative - 1.0)) * w1
    total = total + (1.0 - m.Exp(negative - 2.0)) * w2
    return m.Select(x > 0.0, right, ALPHA * LAMBDA * total)


def chain_12(m: Any, x: Any, r: Any) -> Any:
    """12 ops: bias, swish, scale, clamp, tanh, residual, abs, sqrt, negation."""
    h = x + 0.5
    h = h * m.Sigmoid(h)
    h = m.Clamp(1.5 * h, min=-3.0, max=3.0)
    h = m.Tanh(h) + r
    h = m.Sqrt(m.Abs(h) + 1.0)
    return -h - x


def chain_60(m: Any, x: Any, r: Any) -> Any:
    """chain_12 five times, each on the result of the one before."""
    h = x
    for _ in range(5):
        h = chain_12(m, h, r)
    return h


def bias_gelu(m: Any, x: Any, b: Any) -> Any:
    """GELU by tanh of x + b."""
    return gelu_tanh(m, x + b)


def residual_swish(m: Any, x: Any, r: Any) -> Any:
    """swish(x) + r."""
    return x * m.Sigmoid(x) + r


def outer(m: Any, x: Any, row: Any, column: Any) -> Any:
    """tanh(x * row + column): every operand of another shape."""
    return m.Tanh(x * row + column)


def bounded(m: Any, x: Any, r: Any) -> Any:
    """clamp(swish(x) + r, -6, 6): may run on its own result for ever."""
    return m.Clamp(x * m.Sigmoid(x) + r, min=-6.0, max=6.0)


def softmax(m: Any, x: Any) -> Any:
    """Softmax of each row."""
    return m.SoftMax(x)


def scaled_softmax(m: Any, x: Any, mask: Any) -> Any:
    """Softmax of each row of x / 8 + mask: attention's."""
    return m.SoftMax(x * 0.125 + mask)


def layer_norm(m: Any, x: Any, w: Any, b: Any) -> Any:
    """Layer normalization of each row."""
    return m.LayerNorm(x, w, b)


def layer_norm_gelu(m: Any, x: Any, w: Any, b: Any) -> Any:
    """GELU by tanh of a layer normalization."""
    return gelu_tanh(m, m.LayerNorm(x, w, b))


def rms_norm(m: Any, x: Any, w: Any) -> Any:
    """RMS normalization of each row."""
    return m.RMSNorm(x, w)


def residual_rms_norm(m: Any, x: Any, r: Any, w: Any) -> Any:
    """RMS normalization of x + r."""
    return m.RMSNorm(x + r, w)
