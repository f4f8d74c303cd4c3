"""Convolution in NumPy and in torch: between big data, small data and weights, any two of which make the third.

`big` [N, g I, X...] is what a window slides over, `small` [N, g O, Y...] has one element for each of its positions, and
`weights` are [g O, I, K...]. Convolution makes small, ConvTranspose makes big, their gradients all three.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from opgraph.ops.windows import Window

# -- NumPy: one matrix product for each element of the window ---------------------------------------------------------


def numpy_small(big: Any, weights: Any, bias: Any, window: Window, groups: int) -> Any:
    """sum over i, k of big[n, i, y s + k d] weights[o, i, k], plus the bias if there is one."""
    positions = _ints(window.positions(big.shape[2:]))
    padded = _padded(big, window)
    factors = weights.reshape((groups, -1, *weights.shape[1:]))
    made = np.zeros((len(big), groups, factors.shape[1], prod(positions)), big.dtype)
    for place, where in window.taps(positions):
        made += np.matmul(factors[(..., *place)], _by_groups(padded[where], groups))
    return _biased(made.reshape((len(big), len(weights), *positions)), bias)


def numpy_big(small: Any, weights: Any, bias: Any, window: Window, groups: int, sizes: Sequence[int]) -> Any:
    """The adjoint: every element of small, times the weights, is added to where the window was.

    Args:
        sizes: spatial, of the result.
    """
    factors = weights.reshape((groups, -1, *weights.shape[1:])).swapaxes(1, 2)
    channels = groups * weights.shape[1]
    padded = np.zeros((len(small), channels, *_padded_sizes(window, sizes)), small.dtype)
    for place, where in window.taps(small.shape[2:]):
        part = np.matmul(factors[(..., *place)], _by_groups(small, groups))
        padded[where] += part.reshape(padded[where].shape)
    return _biased(_cropped(padded, window, sizes), bias)


def numpy_weights(big: Any, small: Any, window: Window, groups: int) -> Any:
    """sum over n, y of small[n, o, y] big[n, i, y s + k d]."""
    padded, positions = _padded(big, window), small.shape[2:]
    inner, outer = big.shape[1] // groups, small.shape[1] // groups
    made: Any = np.zeros((groups, outer, inner, *_ints(window.kernel)), big.dtype)
    rows = _by_groups(small, groups)
    for place, where in window.taps(positions):
        made[(..., *place)] = np.matmul(rows, _by_groups(padded[where], groups).swapaxes(2, 3)).sum(axis=0)
    return made.reshape((small.shape[1], inner, *made.shape[3:]))


def _by_groups(data: Any, groups: int) -> Any:
    """[N, g, C, positions]"""
    return data.reshape((data.shape[0], groups, data.shape[1] // groups, prod(data.shape[2:])))


def _ints(values: Sequence[Any]) -> tuple[int, ...]:
    return tuple(int(v) for v in values)


def _padded(big: Any, window: Window) -> Any:
    pads = [(0, 0), (0, 0), *zip(_ints(window.begin), _ints(window.end), strict=True)]
    return np.pad(big, pads) if any(map(any, pads)) else big


def _padded_sizes(window: Window, sizes: Sequence[int]) -> list[int]:
    pads = zip(sizes, _ints(window.begin), _ints(window.end), strict=True)
    return [size + begin + end for size, begin, end in pads]


def _cropped(padded: Any, window: Window, sizes: Sequence[int]) -> Any:
    return padded[(..., *[slice(b, b + n) for b, n in zip(_ints(window.begin), sizes, strict=True)])]


def _biased(made: Any, bias: Any) -> Any:
    return made if bias is None else made + bias.reshape((-1, *[1] * (made.ndim - 2)))


# -- torch ------------------------------------------------------------------------------------------------------------


def torch_small(t: Any, big: Any, weights: Any, bias: Any, window: Window, groups: int) -> Any:
    """As `numpy_small`, with a bias or None."""
    big, padding = _evenly_padded(t, big, window)
    function = getattr(t.nn.functional, f"conv{len(window.kernel)}d")
    return function(big, weights, bias, window.strides, padding, window.dilations, groups)


def torch_big(t: Any, small: Any, weights: Any, bias: Any, window: Window, groups: int, sizes: Sequence[int]) -> Any:
    """As `numpy_big`, with a bias or None."""
    function = getattr(t.nn.functional, f"conv_transpose{len(window.kernel)}d")
    begin, end = _ints(window.begin), _ints(window.end)
    rest = [n - int(m or 0) for n, m in zip(sizes, window.covered(small.shape[2:]), strict=True)]
    limits = map(max, window.strides, window.dilations)
    if begin == end and all(0 <= r < most for r, most in zip(rest, limits, strict=True)):
        return function(small, weights, bias, window.strides, begin, rest, groups, window.dilations)
    whole = function(small, weights, None, window.strides, 0, 0, groups, window.dilations)
    further = [have - n for n, have in zip(_padded_sizes(window, sizes), whole.shape[2:], strict=True)]
    whole = t.nn.functional.pad(whole, [v for f in reversed(further) for v in (0, -f)])
    return _biased(_cropped(whole, window, sizes), bias)


def torch_weights(t: Any, big: Any, small: Any, window: Window, groups: int) -> Any:
    """As `numpy_weights`."""
    shape = (small.shape[1], big.shape[1] // groups, *_ints(window.kernel))
    big, padding = _evenly_padded(t, big, window)
    if 0 in (*big.shape, *small.shape):  # torch has no gradient of an empty product
        return (big.sum() + small.sum()) * big.new_zeros(shape)
    function = getattr(t.nn.grad, f"conv{len(window.kernel)}d_weight")
    return function(big, shape, small, window.strides, padding, window.dilations, groups)


def _evenly_padded(t: Any, big: Any, window: Window) -> tuple[Any, tuple[int, ...]]:
    """Data and the padding that remains to be done, which torch has the same at both ends."""
    begin, end = _ints(window.begin), _ints(window.end)
    if begin == end:
        return big, begin
    pairs = [v for pair in reversed(list(zip(begin, end, strict=True))) for v in pair]
    return t.nn.functional.pad(big, pairs), (0,) * len(begin)
