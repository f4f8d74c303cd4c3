"""Dropout: random bits are computed from the position, so that recomputing them needs nothing saved for backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from opgraph.ir.opdef import Port
from opgraph.ops.families import FLOAT, pointwise

_LOW = 0xFFFFFFFF
#: Multipliers of the rounds, and the increments of the two words of the key from round to round.
_M = (0xD2511F53, 0xCD9E8D57)
_W = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def philox(counter: tuple[Any, Any, Any, Any], key: tuple[Any, Any]) -> tuple[Any, Any, Any, Any]:
    """Four random words for a counter of four words and a key of two: Philox 4x32-10.

    Args:
        counter, key: 32-bit words in s64 arrays, of NumPy or torch. Products wrap modulo 2^64, which keeps their
            halves correct.

    Source: Salmon, Moraes, Dror, Shaw, Parallel random numbers: as easy as 1, 2, 3, SC 2011.
    """
    a, b, c, d = counter
    for i in range(_ROUNDS):
        k0, k1 = ((k + i * w) & _LOW for k, w in zip(key, _W, strict=True))
        p, q = a * _M[0], c * _M[1]
        a, b, c, d = ((q >> 32) & _LOW) ^ b ^ k0, q & _LOW, ((p >> 32) & _LOW) ^ d ^ k1, p & _LOW
    return a, b, c, d


def random_word(where: Callable[..., Any], position: Any, seed: Any, offset: Any) -> Any:
    """32 random bits for each position, in an s64 array.

    Args:
        where: `where` of NumPy or torch.
        position, seed, offset: s64 arrays that broadcast.
    """
    block = position & ~3
    counter = (offset & _LOW, (offset >> 32) & _LOW, block & _LOW, (block >> 32) & _LOW)
    a, b, c, d = philox(counter, (seed & _LOW, (seed >> 32) & _LOW))
    odd = (position & 1) != 0
    return where((position & 2) != 0, where(odd, d, c), where(odd, b, a))


def _kept(t: Any, seed: Any, offset: Any, probability: Any, position: Any, f64: Any) -> Any:
    bound = f64(t.clip(probability, 0, 1)) * 4294967295.0
    return f64(random_word(t.where, position, seed, offset)) > bound  # nothing is greater than NaN


def _f64(x: Any) -> Any:
    return np.asarray(x, np.float64)


def _mask(seed: Any, offset: Any, probability: Any, like: Any = None, *, position: Any) -> Any:
    return _kept(np, seed, offset, probability, position, _f64).astype(np.uint8)


def _torch_mask(t: Any, seed: Any, offset: Any, probability: Any, like: Any = None, *, position: Any) -> Any:
    return _kept(t, seed, offset, probability, position, lambda x: x.to(t.float64)).to(t.uint8)


def _dropout(src: Any, seed: Any, offset: Any, probability: Any, *, position: Any) -> Any:
    p, one = probability.astype(src.dtype), src.dtype.type(1)
    scale = np.where(p == 1, 0, one / (one - p)).astype(src.dtype)
    return np.where(_kept(np, seed, offset, probability, position, _f64), src * scale, src.dtype.type(0))


def _torch_dropout(t: Any, src: Any, seed: Any, offset: Any, probability: Any, *, position: Any) -> Any:
    p = probability.to(src.dtype)
    scale = t.where(p == 1, t.zeros_like(p), 1 / (1 - p))
    kept = _kept(t, seed, offset, probability, position, lambda x: x.to(t.float64))
    return t.where(kept, src * scale, t.zeros((), dtype=src.dtype, device=src.device))


_DRAWN = (Port(name="seed", type="s64"), Port(name="offset", type="s64"), Port(name="probability", type="f32"))
_DOMAIN = ((-(2.0**40), 2.0**40), (0.0, 2.0**40), (0.0, 1.0))
_BITS = (
    "An element is kept where its word is greater than (2^32 - 1) P, compared in f64, P held to [0, 1]. With i the "
    "row-major index of the element in the result and j = i - i mod 4, its word is number i mod 4 of the four that "
    "Philox 4x32-10 gives for the counter (offset mod 2^32, offset / 2^32, j mod 2^32, j / 2^32) and the key "
    "(seed mod 2^32, seed / 2^32)"
)
_ONNX = "none: what ai.onnx Dropout draws from its seed is up to each runtime, and it takes no offset"

DROPOUT_MASK = pointwise(
    "DropoutMask",
    f"mask = 1 where Dropout keeps an element, else 0. {_BITS}. The data of `like` is never read.",
    inputs=(*_DRAWN, Port(name="like", shape_only=True)),
    outputs=(Port(name="mask", type="u8"),),
    types=FLOAT,
    reference=_mask,
    expression="og::dropout_keeps({position}, {seed}, {offset}, {probability})",
    torch=_torch_mask,
    onnx=_ONNX,
    cost=60,
    domain=(*_DOMAIN, (-4.0, 4.0)),
    by_position=True,
    source="the mask of oneDNN Graph Dropout",
)

DROPOUT = pointwise(
    "Dropout",
    "dst = src / (1 - P) and mask = 1 where an element is kept, else 0, whatever src is. "
    f"{_BITS}. P = 1 keeps none; P = 0 drops one in 2^32. These are oneDNN's bits where its dst is dense and row-major "
    "(its i is the offset in memory), by its sources for a given offset; they were not compared with a run of it. f16 "
    "and bf16 are computed in f32, 1 / (1 - P) and its product with src each rounded, as there.",
    inputs=(Port(name="src"), *_DRAWN),
    outputs=(Port(name="dst"), Port(name="mask", type="u8", optional=True)),
    types=FLOAT,
    reference=_dropout,
    expression="og::dropout({src}, {position}, {seed}, {offset}, {probability})",
    torch=_torch_dropout,
    onnx=_ONNX,
    cost=62,
    domain=((-4.0, 4.0), *_DOMAIN),
    by_position=True,
    also={"mask": "DropoutMask(seed, offset, probability, src)"},
    gradient={
        "src": "Dropout(d, seed, offset, probability)",
        "probability": "none: the mask jumps with it, and a derivative without the jumps says nothing of the mean",
    },
    source=(
        "oneDNN Graph Dropout, dropout attribute, and philox4x32(idx, seed, offset) of its src/common/math_utils.hpp; "
        "its seed, offset and probability have one element"
    ),
)
