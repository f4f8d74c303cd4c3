"""Converts operands of convolutions from the layouts of their attributes to that of the computation, and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from opgraph.ops import windows
from opgraph.ops.explicit_shapes import told_shape
from opgraph.ops.windows import NOT_GIVEN, Window, moved, moved_back, ordered


def make_small(compute: Callable[..., Any], big: Any, weights: Any, bias: Any = None, **attrs: Any) -> Any:
    """Computes `small` in the layouts of the attributes; `compute` works in NCX and OIX."""
    order = windows.data_order(big.ndim, attrs)
    big, weights = moved(big, order), moved(weights, windows.weights_order(weights.ndim, attrs))
    window = Window.of(attrs, weights.shape[2:], big.shape[2:])
    return moved_back(compute(big, weights, bias, window, attrs["groups"]), order)


def _make_big(
    compute: Callable[..., Any],
    small: Any,
    weights: Any,
    bias: Any,
    told: Sequence[int],
    **attrs: Any,
) -> Any:
    order = windows.data_order(small.ndim, attrs)
    small, weights = moved(small, order), moved(weights, windows.weights_order(weights.ndim, attrs))
    wanted = ordered(told, order)[2:]
    padding = () if tuple(attrs["output_padding"]) == NOT_GIVEN else attrs["output_padding"]
    covered = Window.of(attrs, weights.shape[2:], wanted).covered(small.shape[2:], padding)
    sizes = tuple(int(a or b or 0) for a, b in zip(wanted, covered, strict=True))
    window = Window.of(attrs, weights.shape[2:], sizes)
    return moved_back(compute(small, weights, bias, window, attrs["groups"], sizes), order)


def make_told_big(
    compute: Callable[..., Any], small: Any, weights: Any, *shape: Any, dst_shape: Sequence[int], **attrs: Any
) -> Any:
    """The adjoint of `make_small`, in a shape given by an attribute or an input."""
    told = told_shape("dst_shape", shape, {"dst_shape": dst_shape}, small.ndim)
    return _make_big(compute, small, weights, None, told, **attrs)


def make_free_big(compute: Callable[..., Any], small: Any, weights: Any, bias: Any = None, **attrs: Any) -> Any:
    """The adjoint of `make_small`, in the smallest possible shape."""
    return _make_big(compute, small, weights, bias, (0,) * small.ndim, **attrs)


def make_weights(
    compute: Callable[..., Any], first: Any, second: Any, *shape: Any, weights_shape: Sequence[int], **attrs: Any
) -> Any:
    """The gradient of weights; their layout determines which operand is the larger one."""
    big, small = (second, first) if attrs["weights_format"] in ("XOI", "IOX") else (first, second)
    data, order = windows.data_order(big.ndim, attrs), windows.weights_order(big.ndim, attrs)
    big, small = moved(big, data), moved(small, data)
    told = told_shape("weights_shape", shape, {"weights_shape": weights_shape}, big.ndim)
    window = Window.of(attrs, ordered(told, order)[2:], big.shape[2:])
    return moved_back(compute(big, small, window, attrs["groups"]), order)
