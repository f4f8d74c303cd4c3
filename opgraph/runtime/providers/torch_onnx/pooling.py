"""Torch forms of ONNX pooling."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  # torch's own name for it

from opgraph.runtime.providers.torch_onnx.padding import padded, pads_of, spatial, split_pads
from opgraph.runtime.providers.torch_onnx.table import Call, torch_form

_MAX_POOL = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
_AVG_POOL = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}


@torch_form("MaxPool", refuses=lambda c: "indices" if c.outputs > 1 else None)
def max_pool(c: Call, x: Tensor) -> Tensor:
    """The largest of each window."""
    axes = spatial(c, x, _MAX_POOL)
    kernel = c.attr("kernel_shape")
    strides, dilations = c.attr("strides", [1] * axes), c.attr("dilations", [1] * axes)
    pads = pads_of(c, x, kernel, strides, dilations)
    if any(2 * p > k for p, k in zip(pads, [*kernel, *kernel])):
        x, padding = padded(x, pads, -math.inf), [0] * axes
    else:
        x, padding = split_pads(x, pads, -math.inf)
    result: Tensor = _MAX_POOL[axes](x, kernel, strides, padding, dilations, bool(c.attr("ceil_mode", 0)))
    return result


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
    if count:
        return total
    share: Tensor = pool(padded(torch.ones_like(x), pads, 0.0), kernel, strides, 0, ceil, True)
    return total / share


@torch_form("GlobalAveragePool")
def global_average_pool(c: Call, x: Tensor) -> Tensor:
    """The mean over all spatial axes."""
    return x.mean(tuple(range(2, x.dim())), keepdim=True)


@torch_form("GlobalMaxPool")
def global_max_pool(c: Call, x: Tensor) -> Tensor:
    """The largest over all spatial axes."""
    return x.amax(tuple(range(2, x.dim())), keepdim=True)
