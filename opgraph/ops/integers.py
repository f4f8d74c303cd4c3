"""Integer arithmetic that is defined for every input, in NumPy and in torch, as in kernels/math/integer.h.

Results wrap modulo 2^width, x / 0 = x mod 0 = 0, lowest / -1 = lowest, and a shift by the width or more leaves only
the sign.
"""

from __future__ import annotations

from typing import Any

import numpy as np


def is_integer(a: np.ndarray) -> bool:
    """True if an array holds integers."""
    return a.dtype.kind in "iu"


def divide(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Truncates toward zero; x / 0 = 0."""
    floor = np.floor_divide(a, b)
    inexact = np.multiply(floor, b) != a
    quotient: np.ndarray = floor + (inexact & ((a < 0) != (b < 0)))
    return np.where(b == 0, 0, quotient).astype(floor.dtype)


def power(base: np.ndarray, exponent: np.ndarray) -> np.ndarray:
    """Powers by repeated squaring, which wrap. A negative exponent gives 0, except for base 1 and -1."""
    unit = np.where(exponent % 2 != 0, base, np.ones_like(base))
    negative = np.where((base == 1) | ((base + 1) == 0), unit, np.zeros_like(base))
    positive = np.power(base, np.maximum(exponent, 0))
    return np.where(exponent < 0, negative, positive).astype(positive.dtype)


def torch_quotient(t: Any, operation: Any, a: Any, b: Any, by_minus_one: Any) -> Any:
    """`operation(a, b)` where it is safe: torch raises for b = 0 and traps for lowest / -1."""
    unsafe = (b == 0) | ((b == -1) if b.dtype.is_signed else t.zeros_like(b, dtype=t.bool))
    a, b = t.broadcast_tensors(a, b)
    safe = operation(a, t.where(unsafe, t.ones_like(b), b))
    return t.where(b == 0, t.zeros_like(a), t.where(unsafe, by_minus_one(a), safe))


def torch_divide(t: Any, a: Any, b: Any) -> Any:
    """`divide` in torch."""
    return torch_quotient(t, lambda x, y: t.div(x, y, rounding_mode="trunc"), a, b, t.neg)
