"""What every reduction, a softmax and an addition make of rows: the truth, and what torch makes of them."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from test_rows import ALL, as_torch, from_torch

#: Every reduction, a softmax, and what follows both.
EVERYTHING = ALL.replace("x: {t}[n,c]", "x: {t}[n,c], r: {t}[n,c]").replace("f, g)", "f, g, y)")
EVERYTHING += "  s = SoftMax(x, axis=-1)\n  y = Add(s, r)\n"


def truth_and_peer(x: np.ndarray, r: np.ndarray, device: str = "cpu") -> tuple[dict[str, Any], dict[str, Any]]:
    """Of EVERYTHING, product aside, by name: in long double, infinite where the dtype ends, and by torch in the dtype.

    Args:
        x, r: rows, [n,c].
        device: torch's.
    """
    import torch

    wide, t = x.astype(np.longdouble), as_torch(x).to(device)
    powers = np.exp(wide - wide.max(1, keepdims=True))
    exact = {
        "a": wide.sum(1), "b": wide.mean(1, keepdims=True), "f": np.abs(wide).sum(1),
        "g": np.sqrt((wide * wide).sum(1)), "c": wide.max(1), "d": wide.min(1, keepdims=True),
        "y": powers / powers.sum(1, keepdims=True) + r.astype(np.longdouble),
    }  # fmt: skip
    peer = {
        "a": t.sum(1), "b": t.mean(1, keepdim=True), "f": t.norm(1, 1), "g": t.norm(2, 1), "c": t.amax(1),
        "d": t.amin(1, keepdim=True), "y": torch.softmax(t, -1) + as_torch(r).to(device),
    }  # fmt: skip
    largest = np.longdouble(float(ml_dtypes.finfo(x.dtype).max))  # 200,000 numbers add up to more than f16 has
    exact = {name: np.where(np.abs(value) > largest, np.inf, value) for name, value in exact.items()}
    return exact, {name: from_torch(value.cpu()) for name, value in peer.items()}
