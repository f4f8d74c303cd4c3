"""The vocabulary of formulas in torch: `opgraph.bench.formula.Vocabulary`, as a module. Imports torch."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from opgraph.bench.entries import EPSILON

Sigmoid, Tanh, Exp, Erf, Sqrt, Abs, Pow = (
    torch.sigmoid, torch.tanh, torch.exp, torch.erf, torch.sqrt, torch.abs, torch.pow,
)  # fmt: skip
SoftPlus, Select, Clamp = functional.softplus, torch.where, torch.clamp


def SoftMax(x: Any) -> Any:  # noqa: N802 - a kind's name
    """Softmax along the last axis."""
    return torch.softmax(x, -1)


def LayerNorm(x: Any, w: Any, b: Any) -> Any:  # noqa: N802
    """Layer normalization along the last axis."""
    return functional.layer_norm(x, x.shape[-1:], w, b, EPSILON)


def RMSNorm(x: Any, w: Any) -> Any:  # noqa: N802
    """RMS normalization along the last axis."""
    return functional.rms_norm(x, x.shape[-1:], w, EPSILON)
