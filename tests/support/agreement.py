"""Compares the results of a GPU with those of the CPU: the bits are the same, except for f16 and bf16, where
approximate instructions of a GPU (kernels/cuda/fast_math.h) sometimes round a result to the neighbour."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import ml_dtypes
import numpy as np
from ulp import spacing

from opgraph.runtime import cpu_compiler

NARROW = (np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))


def differing(got: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Marks the results that differ from the CPU's; NaN equals NaN, whatever its bits.

    A f16 or bf16 may be the next number, with a distance of at least that at 2^-10: results of cancellation keep the
    errors of the larger numbers. Other tests check the distance from the truth.
    """
    if got.dtype != expected.dtype or got.shape != expected.shape:
        return np.ones(got.shape, bool)
    if expected.dtype.kind in "biu":
        return got != expected
    both_nan = (got != got) & (expected != expected)
    if got.dtype in NARROW:
        a, b = got.astype(np.float64), expected.astype(np.float64)
        with np.errstate(invalid="ignore"):
            near = np.abs(a - b) <= spacing(np.maximum(np.abs(b), 2.0**-10), got.dtype)
        return ~(near | (a == b) | both_nan)
    unsigned = np.dtype(f"u{got.dtype.itemsize}")
    a, b = (np.ascontiguousarray(np.atleast_1d(x)).view(unsigned).reshape(x.shape) for x in (got, expected))
    return (a != b) & ~both_nan


def agree(got: np.ndarray, expected: np.ndarray) -> bool:
    """True if no element differs, nor dtype and shape."""
    return got.dtype == expected.dtype and got.shape == expected.shape and not differing(got, expected).any()


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Makes the CPU engine compile the GPU forms of functions, without tables (kernels/math/tables.h)."""
    before = cpu_compiler.FLAGS
    cpu_compiler.FLAGS = (*before, "-DOG_NO_TABLES")  # part of the key of compiled kernels
    try:
        yield
    finally:
        cpu_compiler.FLAGS = before


def assert_close_enough(fused: Iterable[Any], eager: Iterable[Any], exact: Iterable[Any]) -> None:
    """Checks that fused torch results are about as near to the truth as eager ones, which are finite."""
    for f, e, truth in zip(fused, eager, exact, strict=True):
        if not e.isfinite().all():
            continue
        size = truth.abs().max() + 1e-30
        own, theirs = (f - truth).abs().max() / size, (e - truth).abs().max() / size
        assert own <= max(4 * theirs, 2e-5)  # bf16 casts inside turn one ulp into 2**-8
