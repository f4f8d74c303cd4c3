"""Checks if arrays have memory in common, with each other or with themselves."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

#: Search steps after which two arrays with overlapping spans are assumed to share memory; slices of one array need few.
_MAX_WORK = 1000


def share_memory(one: np.ndarray, other: np.ndarray) -> bool:
    """True if two arrays have memory in common; interleaved halves of one array have none."""
    if not np.may_share_memory(one, other):
        return False
    try:
        return np.shares_memory(one, other, max_work=_MAX_WORK)  # type: ignore[arg-type] # any number
    except np.exceptions.TooHardError:
        return True


def repeats_memory(shape: Sequence[int], strides: Sequence[int], size: int = 1) -> bool:
    """True if two elements may lie on the same memory, as along a broadcast axis or in overlapping windows.

    Args:
        strides: in the unit of `size`, the size of one element.
    """
    if 0 in shape:
        return False
    reach = size
    for stride, extent in sorted((abs(s), d) for s, d in zip(strides, shape, strict=True) if d > 1):
        if stride < reach:
            return True
        reach += stride * (extent - 1)
    return False
