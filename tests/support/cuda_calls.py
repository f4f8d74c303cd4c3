"""A graph for the CUDA engine, and arrays in its memory."""

from __future__ import annotations

import numpy as np
from emulator import FakeArray, FakeCupy

import opgraph as og
from opgraph.ir import dtypes


def gated(dtype: str, x: tuple[int | None, ...] | None, a: tuple[int | None, ...] | None) -> og.Graph:
    """y = x sigmoid(a x) + a"""
    g = og.Graph()
    left, right = g.input("x", dtype=dtype, shape=x), g.input("a", dtype=dtype, shape=a)
    g.output(g.add_op("Add", g.add_op("Swish", left, right), right, name="y"))
    return g


def random(shape: tuple[int, ...], dtype: str, seed: int = 0) -> np.ndarray:
    made = np.random.default_rng(seed).normal(0, 2, shape)
    return np.asarray(made).astype(dtypes.get(dtype).numpy)


def moved(cupy: FakeCupy, array: np.ndarray) -> FakeArray:
    """The same values on the "GPU", as densely as the array was made."""
    return cupy.asarray(array)
