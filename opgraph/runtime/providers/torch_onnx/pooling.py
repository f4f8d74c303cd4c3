"""Torch forms of ONNX pooling."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  # torch's own name for it

from opgraph.runtime.providers.torch_onnx.padding import padded, pads_of, spatial, split_pads
from opgraph.runtime.providers.torch_onnx.table import Call, torch_form

_MAX_POOL = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
_AVG_POOL = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}


@torch_form("MaxPool", refuses=lambda c: "indices" if c.outputs > 1 else None)
def max_pool(c: Call, x: Tensor) -> Tensor:
    """The maximum of each window; torch has no integers here, but f32 holds those of 8 bits."""
    if not x.is_floating_point():
        wide: Tensor = max_pool(c, x.float())
        return wide.to(x.dtype)
    axes = spatial(c, x, _MAX_POOL)
    kernel = c.attr("kernel_shape")
    strides, dilations = c.attr("strides", [1] * axes), c.attr("dilations", [1] * axes)
    pads = pads_of(c, x, kernel, strides, dilations)
    if any(2 * p > k for p, k in zip(pads, [*kernel, *kernel])):
        wide, padding = padded(x, pads, -math.inf), [0] * axes
    else:
        wide, padding = split_pads(x, pads, -math.inf)
    ceil = bool(c.attr("ceil_mode", 0))
    result: Tensor = _MAX_POOL[axes](wide, kernel, strides, padding, dilations, ceil)
    return _begun(result, x, pads, strides) if ceil else result


@torch_form("AveragePool", refuses=lambda c: "dilations" if any(d != 1 for d in c.attr("dilations", [])) else None)
def average_pool(c: Call, x: Tensor) -> Tensor:
    """The mean of each window."""
    axes = spatial(c, x, _AVG_POOL)
    kernel, strides = c.attr("kernel_shape"), c.attr("strides", [1] * axes)
    ceil, count = bool(c.attr("ceil_mode", 0)), bool(c.attr("count_include_pad", 0))
    pads = pads_of(c, x, kernel, strides, [1] * axes)
    pool = _AVG_POOL[axes]
    if list(pads[:axes]) == list(pads[axes:]) and all(2 * p <= k for p, k in zip(pads, kernel)):
        result: Tensor = pool(x, kernel, strides, pads[:axes], ceil, count)
        return result
    total: Tensor = pool(padded(x, pads, 0.0), kernel, strides, 0, ceil, True)
    if not count:
        total = total / pool(padded(torch.ones_like(x), pads, 0.0), kernel, strides, 0, ceil, True)
    return _begun(total, x, pads, strides) if ceil else total


def _begun(result: Tensor, x: Tensor, pads: Sequence[int], strides: Sequence[int]) -> Tensor:
    """Keeps the windows that begin before the end of the data: torch treats explicit padding as data."""
    for axis, (before, stride) in enumerate(zip(pads, strides), start=2):
        result = result.narrow(axis, 0, min(result.shape[axis], -(-(x.shape[axis] + before) // stride)))
    return result


@torch_form("GlobalAveragePool")
def global_average_pool(c: Call, x: Tensor) -> Tensor:
    """The mean over all spatial axes."""
    return x.mean(tuple(range(2, x.dim())), keepdim=True)


@torch_form("GlobalMaxPool")
def global_max_pool(c: Call, x: Tensor) -> Tensor:
    """The maximum over all spatial axes."""
    return x.amax(tuple(range(2, x.dim())), keepdim=True)
