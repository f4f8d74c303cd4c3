"""The slack rule: the allowed distance of a result from float64."""

from __future__ import annotations

import ml_dtypes
import numpy as np


def assert_near(got: np.ndarray, truth: np.ndarray, peer: np.ndarray) -> None:
    """At most twice as far from float64 as a peer in the same type, plus one unit of the largest value."""
    if got.dtype == bool:
        np.testing.assert_array_equal(got, peer)
        return
    if not got.size:
        return
    exact, mine, other = (np.asarray(a, np.float64) for a in (truth, got, peer))
    one = np.abs(exact).max() * float(ml_dtypes.finfo(got.dtype).eps)
    assert np.abs(mine - exact).max() <= 2 * np.abs(other - exact).max() + one
