"""NumPy: the formula, op by op, on one thread."""

from __future__ import annotations

import types
from typing import Any

import numpy as np

from opgraph.bench.case import Case
from opgraph.bench.entries import EPSILON
from opgraph.bench.peers.peer import Built, Peer, Refused, forward_only
from opgraph.bench.peers.text import OPERATORS


def words(xp: Any) -> Any:
    """The vocabulary of formulas in NumPy or CuPy, as far as the library has it."""

    def layer_norm(x: Any, w: Any, b: Any) -> Any:
        centred = x - x.mean(-1, keepdims=True)
        return centred / xp.sqrt((centred * centred).mean(-1, keepdims=True) + EPSILON) * w + b

    def softmax(x: Any) -> Any:
        e = xp.exp(x - x.max(-1, keepdims=True))
        return e / e.sum(-1, keepdims=True)

    return types.SimpleNamespace(
        Sigmoid=lambda x: 1 / (1 + xp.exp(-x)),
        Tanh=xp.tanh,
        Exp=xp.exp,
        SoftPlus=lambda x: xp.log1p(xp.exp(x)),
        Sqrt=xp.sqrt,
        Abs=xp.abs,
        Pow=lambda x, p: x**p,
        Select=xp.where,
        Clamp=lambda x, *, min, max: xp.minimum(xp.maximum(x, min), max),
        SoftMax=softmax,
        LayerNorm=layer_norm,
        RMSNorm=lambda x, w: x / xp.sqrt((x * x).mean(-1, keepdims=True) + EPSILON) * w,
    )


def check_words(case: Case, known: Any) -> None:
    """Raises Refused for a formula with a function that the library does not have."""
    for step in case.entry.steps():
        if step.kind not in OPERATORS and not hasattr(known, step.kind):
            raise Refused(f"has no {step.kind}")


def _build(case: Case) -> Built:
    forward_only(case)
    if case.dtype != "f32":
        raise Refused("computes 16-bit floats one by one, in software")
    formula, known = case.entry.formula, words(np)
    check_words(case, known)
    xs = case.inputs

    def call() -> Any:
        with np.errstate(all="ignore"):
            return formula(known, *xs)

    if case.entry.in_place:

        def into() -> None:
            case.out[...] = call()

        return Built(call=into, note="one thread")
    return Built(call=call, returns=("y",), note="one thread")


PEER = Peer(
    name="NumPy",
    get="it is there",
    devices=("cpu",),
    find=lambda device: np.__version__,
    build=_build,
)
