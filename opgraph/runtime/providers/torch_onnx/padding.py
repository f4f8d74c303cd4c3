"""Padding as ONNX defines it: explicit, by mode, uneven."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.nn import functional as F  # noqa: N812  # torch's own name for it

from opgraph.runtime.providers.torch_onnx.table import Call


def spatial(c: Call, x: Tensor, known: dict[int, Any]) -> int:
    """The number of spatial axes.

    Raises:
        Unimplemented: torch has no function for this number.
    """
    axes = x.dim() - 2
    if axes not in known:
        raise c.refuse(f"{axes} spatial axes; torch has 1 to 3")
    return axes


def pads_of(c: Call, x: Tensor, kernel: Sequence[int], strides: Sequence[int], dilations: Sequence[int]) -> list[int]:
    """Padding before and after each spatial axis: all befores, then all afters."""
    mode, axes = c.attr("auto_pad", "NOTSET"), len(kernel)
    if mode == "NOTSET":
        return list(c.attr("pads", [0] * (2 * axes)))
    if mode == "VALID":
        return [0] * (2 * axes)
    before, after = [], []
    for size, k, s, d in zip(x.shape[2:], kernel, strides, dilations):
        total = max((math.ceil(size / s) - 1) * s + (k - 1) * d + 1 - size, 0)
        small, large = total // 2, total - total // 2
        before.append(small if mode == "SAME_UPPER" else large)
        after.append(large if mode == "SAME_UPPER" else small)
    return before + after


def split_pads(x: Tensor, pads: Sequence[int], value: float) -> tuple[Tensor, list[int]]:
    """Leaves a padding that is the same on both sides to the op; applies any other padding here."""
    half = len(pads) // 2
    if list(pads[:half]) == list(pads[half:]):
        return x, list(pads[:half])
    return padded(x, pads, value), [0] * half


def padded(x: Tensor, pads: Sequence[int], value: float) -> Tensor:
    """Pads the spatial axes with a value; a negative padding crops."""
    half = len(pads) // 2
    return F.pad(x, [p for i in reversed(range(half)) for p in (pads[i], pads[half + i])], value=value)
