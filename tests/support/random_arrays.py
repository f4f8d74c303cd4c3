"""The same values with another layout in memory."""

from __future__ import annotations

import random

import numpy as np


def laid_out(array: np.ndarray, rng: random.Random) -> np.ndarray:
    """An array of the same values: strided, reversed, transposed, unaligned, with strides of 0, read-only, ..."""
    how = rng.randrange(9)
    if how == 0 or array.ndim == 0:
        made = np.zeros(array.nbytes + 64, np.uint8)  # unaligned by whole elements
        start = array.itemsize * rng.randrange(1, 5)
        view = made[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
        view[...] = array
        return view
    axis = rng.randrange(array.ndim)
    if how == 1:
        return np.flip(np.flip(array, axis).copy(), axis)
    if how == 2:  # every second, or third, of a larger one
        shape = list(array.shape)
        step = rng.choice((2, 3))
        shape[axis] *= step
        wide = np.full(shape, 77, np.float64).astype(array.dtype)
        view = wide[tuple(slice(None, None, step) if a == axis else slice(None) for a in range(array.ndim))]
        view[...] = array
        return view
    if how == 3:
        return array.copy(order="F")
    if how == 4:
        order = list(range(array.ndim))
        rng.shuffle(order)
        return array.transpose(order).copy(order="C").transpose(np.argsort(order))
    if how == 5:  # rows of a wider array
        shape = list(array.shape)
        shape[-1] += rng.choice((1, 3, 8))
        wide = np.full(shape, 77, np.float64).astype(array.dtype)
        first = shape[-1] - array.shape[-1] - rng.choice((0, 1))
        view = wide[..., first : first + array.shape[-1]]
        view[...] = array
        return view
    if how == 6:
        made = array.copy()
        made.flags.writeable = False
        return made
    if how == 7:
        return np.flip(np.flip(array).copy(order="F"))
    return array.copy()


def without_steps(array: np.ndarray, rng: random.Random) -> np.ndarray:
    """Other values, which repeat along some axes by a stride of 0; writable."""
    kept = tuple(slice(0, 1) if rng.random() < 0.6 else slice(None) for _ in range(array.ndim))
    base = array[kept].copy()
    strides = tuple(0 if k.stop is not None else s for k, s in zip(kept, base.strides, strict=True))
    return np.lib.stride_tricks.as_strided(base, array.shape, strides)
