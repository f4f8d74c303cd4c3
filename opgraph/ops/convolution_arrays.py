"""Convolution in NumPy and in torch: computes one of big data, small data and weights from the other two.

The window slides over `big` [N, g I, X...]. `small` [N, g O, Y...] has one element for each of its positions, and
`weights` are [g O, I, K...]. Convolution computes small, ConvTranspose computes big, their gradients all three.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

import numpy as np

from opgraph.ops.library import wide
from opgraph.ops.windows import Window


def _adds_nothing(data: Any, weights: Any) -> bool:
    """True if an operand has no elements; every sum is then empty, which most libraries reject."""
    return 0 in (*data.shape, *weights.shape)


# -- NumPy: the elements under the windows as columns of a matrix, one block of windows at a time ---------------------

#: The approximate number of elements of a block, which then stays in the cache.
_BLOCK = 1 << 20


def _blocks(channels: int, window: Window, positions: Sequence[int]) -> Iterator[slice]:
    """Slices of the first spatial axis of the positions, one for each block."""
    each = max(channels * prod(_ints(window.kernel)) * prod(positions[1:]), 1)
    step = max(_BLOCK // each, 1)
    return (slice(low, min(low + step, positions[0])) for low in range(0, positions[0], step))


def _columns(padded: Any, window: Window, positions: Sequence[int], block: slice, groups: int) -> Any:
    """[g, C K, windows]: the elements of one sample under the windows of a block."""
    channels, size = len(padded) // groups, prod(_ints(window.kernel))
    found = np.empty((groups, channels, size, (block.stop - block.start) * prod(positions[1:])), padded.dtype)
    for index, (_, where) in enumerate(window.taps(positions)):
        found[:, :, index] = padded[where][:, block].reshape((groups, channels, -1))
    return found.reshape((groups, channels * size, -1))


def numpy_small(big: Any, weights: Any, bias: Any, window: Window, groups: int) -> Any:
    """sum over i, k of big[n, i, y s + k d] weights[o, i, k], plus the bias if there is one."""
    positions = _ints(window.positions(big.shape[2:]))
    if _adds_nothing(big, weights):
        return _biased(np.zeros((len(big), len(weights), *positions), big.dtype), bias)
    padded, rows = _padded(big, window), _rows(weights, groups)
    made = np.empty((len(big), len(weights), *positions), big.dtype)
    for sample, result in zip(padded, made, strict=True):
        for block in _blocks(big.shape[1], window, positions):
            part = np.matmul(rows, _columns(sample, window, positions, block, groups))
            result[:, block] = part.reshape(result[:, block].shape)
    return _biased(made, bias)


def numpy_big(small: Any, weights: Any, bias: Any, window: Window, groups: int, sizes: Sequence[int]) -> Any:
    """The adjoint of `numpy_small`: adds every element of small, times the weights, at its position of the window.

    Args:
        sizes: spatial sizes of the result.
    """
    channels, positions = groups * weights.shape[1], small.shape[2:]
    if _adds_nothing(small, weights):
        return _biased(np.zeros((len(small), channels, *sizes), small.dtype), bias)
    rows = _rows(weights, groups).swapaxes(1, 2)
    padded = np.zeros((len(small), channels, *_padded_sizes(window, sizes)), small.dtype)
    for sample, result in zip(small, padded, strict=True):
        for block in _blocks(channels, window, positions):
            part = sample[:, block].reshape((groups, len(sample) // groups, -1))
            columns = np.matmul(rows, part).reshape((channels, -1, *sample[:1, block].shape[1:]))
            for index, (_, where) in enumerate(window.taps(positions)):
                result[where][:, block] += columns[:, index]
    return _biased(_cropped(padded, window, sizes), bias)


def numpy_weights(big: Any, small: Any, window: Window, groups: int) -> Any:
    """sum over n, y of small[n, o, y] big[n, i, y s + k d]."""
    padded, positions = _padded(big, window), small.shape[2:]
    inner, outer = big.shape[1] // groups, small.shape[1] // groups
    if _adds_nothing(big, small):
        return np.zeros((small.shape[1], inner, *_ints(window.kernel)), big.dtype)
    made: Any = np.zeros((groups, outer, inner * prod(_ints(window.kernel))), big.dtype)
    for sample, grad in zip(padded, small, strict=True):
        for block in _blocks(big.shape[1], window, positions):
            rows = grad[:, block].reshape((groups, outer, -1))
            made += np.matmul(rows, _columns(sample, window, positions, block, groups).swapaxes(1, 2))
    return made.reshape((small.shape[1], inner, *_ints(window.kernel)))


def _rows(weights: Any, groups: int) -> Any:
    """[g, O, I K]"""
    return weights.reshape((groups, weights.shape[0] // groups, prod(weights.shape[1:])))


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
    shape = (len(big), len(weights), *_ints(window.positions(big.shape[2:])))
    if _adds_nothing(big, weights) or 0 in shape:
        return _biased(_torch_zeros(big, weights, shape), bias)
    big, padding = _evenly_padded(t, big, window)
    function = getattr(t.nn.functional, f"conv{len(window.kernel)}d")
    return function(big, weights, bias, window.strides, padding, window.dilations, groups)


def torch_big(t: Any, small: Any, weights: Any, bias: Any, window: Window, groups: int, sizes: Sequence[int]) -> Any:
    """As `numpy_big`, with a bias or None."""
    if _adds_nothing(small, weights) or 0 in sizes:
        return _biased(_torch_zeros(small, weights, (len(small), groups * weights.shape[1], *sizes)), bias)
    function = getattr(t.nn.functional, f"conv_transpose{len(window.kernel)}d")
    begin, end = _ints(window.begin), _ints(window.end)
    rest = [n - int(m or 0) for n, m in zip(sizes, window.covered(small.shape[2:]), strict=True)]
    limits = map(max, window.strides, window.dilations)
    at_once = begin == end and all(0 <= r < most for r, most in zip(rest, limits, strict=True))
    if _adds_rounded_parts(small) or (bias is not None and not at_once):  # then the bias is a separate addition
        small, weights, bias = wide(small), wide(weights), None if bias is None else wide(bias)
    if at_once:
        return function(small, weights, bias, window.strides, begin, rest, groups, window.dilations)
    whole = function(small, weights, None, window.strides, 0, 0, groups, window.dilations)
    further = [have - n for n, have in zip(_padded_sizes(window, sizes), whole.shape[2:], strict=True)]
    whole = t.nn.functional.pad(whole, [v for f in reversed(further) for v in (0, -f)])
    return _biased(_cropped(whole, window, sizes), bias)


def torch_weights(t: Any, big: Any, small: Any, window: Window, groups: int) -> Any:
    """As `numpy_weights`."""
    if _adds_rounded_parts(small):
        big, small = wide(big), wide(small)
    shape = (small.shape[1], big.shape[1] // groups, *_ints(window.kernel))
    big, padding = _evenly_padded(t, big, window)
    if 0 in (*big.shape, *small.shape):  # torch has no gradient of an empty product
        return _torch_zeros(big, small, shape)
    function = getattr(t.nn.grad, f"conv{len(window.kernel)}d_weight")
    return function(big, shape, small, window.strides, padding, window.dilations, groups)


def _torch_zeros(a: Any, b: Any, shape: Sequence[int]) -> Any:
    """Zeros that depend on two tensors for autograd, but not on their elements, which may be infinite."""
    return a.flatten()[:0].sum() + b.flatten()[:0].sum() + a.new_zeros(shape)


def _adds_rounded_parts(tensor: Any) -> bool:
    """True if torch rounds partial sums before it adds them: those of windows at one element, or those of samples.

    On the CPU it does, in f16 and bf16 (torch 2.13); cuDNN accumulates in f32.
    """
    return bool(tensor.device.type == "cpu")


def _evenly_padded(t: Any, big: Any, window: Window) -> tuple[Any, tuple[int, ...]]:
    """The data and the remaining padding, which in torch is the same at both ends."""
    begin, end = _ints(window.begin), _ints(window.end)
    if begin == end:
        return big, begin
    pairs = [v for pair in reversed(list(zip(begin, end, strict=True))) for v in pair]
    return t.nn.functional.pad(big, pairs), (0,) * len(begin)
