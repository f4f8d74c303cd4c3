"""Pools in NumPy and in torch, of data as [N, C, X...]."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from opgraph.ops.library import wide
from opgraph.ops.windows import Window

# -- both: one element of the window at a time, for all windows at once -----------------------------------------------


def _span(window: Window, sizes: Sequence[int], positions: Sequence[int]) -> list[tuple[int, int]]:
    """The padding along each axis: the given one, and at the end at least as much as windows read."""
    found = []
    for size, begin, end, extent, stride, count in zip(
        sizes, window.begin, window.end, window.extents, window.strides, positions, strict=True
    ):
        read = stride * (count - 1) + int(extent or 0) - size - int(begin or 0)
        found.append((int(begin or 0), max(int(end or 0), read)))
    return found


def _counts(window: Window, sizes: Sequence[int], positions: Sequence[int], exclude: bool, dtype: Any) -> Any:
    """The divisor of each window: an array [Y...], or a number."""
    if not exclude:
        return prod(int(k or 0) for k in window.kernel)
    found = np.ones((), dtype)
    for axis, (size, begin, kernel, stride, count) in enumerate(
        zip(sizes, window.begin, window.kernel, window.strides, positions, strict=True)
    ):
        first = np.arange(count) * stride - int(begin or 0)
        inside = np.clip(first + int(kernel or 0), 0, size) - np.clip(first, 0, size)
        found = found * inside.astype(dtype).reshape([-1 if i == axis else 1 for i in range(len(sizes))])
    return found


def _padded(xp: Any, data: Any, pads: Sequence[tuple[int, int]], value: float) -> Any:
    if not any(map(any, pads)):
        return data
    if xp is np:
        return np.pad(data, [(0, 0), (0, 0), *pads], constant_values=value)
    return xp.nn.functional.pad(data, [n for pair in reversed(pads) for n in pair], value=value)


def _zeros(xp: Any, like: Any, shape: Sequence[int]) -> Any:
    return np.zeros(shape, like.dtype) if xp is np else like.new_zeros(tuple(shape))


def _cropped(padded: Any, pads: Sequence[tuple[int, int]], sizes: Sequence[int]) -> Any:
    return padded[(..., *[slice(begin, begin + n) for (begin, _), n in zip(pads, sizes, strict=True)])]


def _choices(xp: Any, padded: Any, window: Window, positions: Sequence[int]) -> Any:
    """Yields for each element of the window its place in the data, and the mask of windows that take it."""
    best = None
    for _, where in window.taps(positions):
        piece = padded[where]
        best = piece if best is None else xp.maximum(best, piece)
    free = best == best
    free = free | ~free
    for _, where in window.taps(positions):
        piece = padded[where]
        taken = free & ((piece == best) | (piece != piece))
        free = free & ~taken
        yield where, taken


def _largest_back(xp: Any, src: Any, diff: Any, window: Window) -> Any:
    sizes, positions = src.shape[2:], diff.shape[2:]
    pads = _span(window, sizes, positions)
    padded = _padded(xp, src, pads, -np.inf)
    made, nothing = _zeros(xp, diff, padded.shape), _zeros(xp, diff, ())
    for where, taken in _choices(xp, padded, window, positions):
        made[where] += xp.where(taken, diff, nothing)
    return _cropped(made, pads, sizes)


def _taken(xp: Any, src: Any, values: Any, window: Window, positions: Sequence[int]) -> Any:
    pads = _span(window, src.shape[2:], positions)
    padded, given = _padded(xp, src, pads, -np.inf), _padded(xp, values, pads, 0.0)
    made = _zeros(xp, values, (*values.shape[:2], *positions))
    for where, taken in _choices(xp, padded, window, positions):
        made = xp.where(taken, given[where], made)
    return made


def _average_back(xp: Any, diff: Any, window: Window, sizes: Sequence[int], exclude: bool) -> Any:
    positions = diff.shape[2:]
    pads = _span(window, sizes, positions)
    counts = _counts(window, sizes, positions, exclude, np.float64 if diff.itemsize == 8 else np.float32)
    share = diff / (counts if xp is np or not exclude else xp.as_tensor(counts, device=diff.device))
    made = _zeros(xp, diff, (*diff.shape[:2], *[n + b + e for n, (b, e) in zip(sizes, pads, strict=True)]))
    for _, where in window.taps(positions):
        made[where] += share
    return _cropped(made, pads, sizes)


# -- NumPy ------------------------------------------------------------------------------------------------------------


def numpy_average(src: Any, window: Window, positions: Sequence[int], exclude: bool) -> Any:
    """The sum of each window divided by the number of its elements."""
    padded = _padded(np, src, _span(window, src.shape[2:], positions), 0.0)
    total = _zeros(np, src, (*src.shape[:2], *positions))
    for _, where in window.taps(positions):
        total += padded[where]
    return total / _counts(window, src.shape[2:], positions, exclude, src.dtype)


def numpy_largest(src: Any, window: Window, positions: Sequence[int], exclude: bool) -> Any:
    """The largest element of each window."""
    padded = _padded(np, src, _span(window, src.shape[2:], positions), -np.inf)
    made = np.full((*src.shape[:2], *positions), -np.inf, src.dtype)
    for _, where in window.taps(positions):
        made = np.maximum(made, padded[where])
    return made


def numpy_taken(src: Any, values: Any, window: Window, positions: Sequence[int], exclude: bool) -> Any:
    """The values at the places of the largest elements."""
    return _taken(np, src, values, window, positions)


def numpy_average_back(diff: Any, window: Window, sizes: Sequence[int], exclude: bool) -> Any:
    """Adds equal shares of diff to the elements of its windows."""
    return _average_back(np, diff, window, sizes, exclude)


def numpy_largest_back(src: Any, diff: Any, window: Window) -> Any:
    """Adds diff at the places of the largest elements."""
    return _largest_back(np, src, diff, window)


# -- torch: its pools forward; backward as above, which sums in a fixed order on CUDA too -----------------------------


def torch_average(t: Any, src: Any, window: Window, positions: Sequence[int], exclude: bool) -> Any:
    """As `numpy_average`."""
    sizes = src.shape[2:]
    padded = _padded(t, wide(src), _span(window, sizes, positions), 0.0)
    pool = getattr(t.nn.functional, f"avg_pool{len(sizes)}d")
    if 0 in padded.shape:
        return padded.new_zeros((*src.shape[:2], *positions))
    made = _first(pool(padded, window.kernel, window.strides), positions)
    if not exclude or not any(map(any, _span(window, sizes, positions))):
        return made
    counts = _counts(window, sizes, positions, True, np.float64 if made.itemsize == 8 else np.float32)
    return made * t.as_tensor(prod(int(k or 0) for k in window.kernel) / counts, device=src.device)


def torch_largest(t: Any, src: Any, window: Window, positions: Sequence[int], exclude: bool) -> Any:
    """As `numpy_largest`."""
    padded = _padded(t, src, _span(window, src.shape[2:], positions), -np.inf)
    pool = getattr(t.nn.functional, f"max_pool{len(positions)}d")
    if 0 in padded.shape:
        return padded.new_zeros((*src.shape[:2], *positions))
    return _first(pool(padded, window.kernel, window.strides, 0, window.dilations), positions)


def _first(pooled: Any, positions: Sequence[int]) -> Any:
    """The requested positions; the padding may leave room for more."""
    return pooled[(..., *[slice(0, n) for n in positions])]


def torch_taken(t: Any, src: Any, values: Any, window: Window, positions: Sequence[int], exclude: bool) -> Any:
    """As `numpy_taken`."""
    return _taken(t, src, values, window, positions)


def torch_average_back(t: Any, diff: Any, window: Window, sizes: Sequence[int], exclude: bool) -> Any:
    """As `numpy_average_back`."""
    return _average_back(t, wide(diff), window, sizes, exclude)


def torch_largest_back(t: Any, src: Any, diff: Any, window: Window) -> Any:
    """As `numpy_largest_back`."""
    return _largest_back(t, src, wide(diff), window)
