"""Every reduction, a softmax and an addition over rows: the true results, and those of torch."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from row_graphs import ALL

#: Every reduction, a softmax, and ops after both.
EVERYTHING = ALL.replace("x: {t}[n,c]", "x: {t}[n,c], r: {t}[n,c]").replace("f, g)", "f, g, y)")
EVERYTHING += "  s = SoftMax(x, axis=-1)\n  y = Add(s, r)\n"


def truth_and_peer(x: np.ndarray, r: np.ndarray, device: str = "cpu") -> tuple[dict[str, Any], dict[str, Any]]:
    """Results of EVERYTHING but the product, by name: in long double, infinite beyond the dtype's range, and by torch.

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
    largest = np.longdouble(float(ml_dtypes.finfo(x.dtype).max))  # 200,000 numbers add up to more than the largest f16
    exact = {name: np.where(np.abs(value) > largest, np.inf, value) for name, value in exact.items()}
    return exact, {name: from_torch(value.cpu()) for name, value in peer.items()}


def assert_near(got: np.ndarray, exact: np.ndarray, peer: np.ndarray) -> None:
    """At most twice as far from the truth as torch in the same dtype, or one rounding of the result."""
    assert got.shape == exact.shape
    finite = np.isfinite(exact)
    np.testing.assert_array_equal(np.isfinite(got.astype(np.float64)), finite)
    if not finite.any():
        return
    eps = 2.0 ** -{"f8": 52, "f4": 23, "f2": 10, "V2": 7}[got.dtype.str[1:]]
    off = np.abs(got.astype(np.longdouble) - exact)[finite].max()
    limit = np.abs(peer.astype(np.longdouble) - exact)[finite].max()
    assert off <= max(2 * limit, eps * np.abs(exact[finite]).max()), f"{off} from the truth; torch {limit}"


def as_torch(array: np.ndarray) -> Any:
    from opgraph.runtime.providers.torch import from_numpy

    return from_numpy(np.ascontiguousarray(array))


def from_torch(tensor: Any) -> np.ndarray:
    from opgraph.runtime.providers.torch import to_numpy

    return to_numpy(tensor)
