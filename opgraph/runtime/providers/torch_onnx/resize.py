"""The torch form of ONNX Resize: axis by axis, with the formulas of its ONNX page, in f32 as in onnxruntime."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from opgraph.runtime.providers.torch_onnx.table import Call, torch_form

#: Place in the source of each element of the result: (index, scale, source size, size of the result before rounding).
_PLACES: dict[str, Callable[[Tensor, float, int, float], Tensor]] = {
    "half_pixel": lambda i, scale, size, resized: (i + 0.5) / scale - 0.5,
    "pytorch_half_pixel": lambda i, scale, size, resized: (i + 0.5) / scale - 0.5 if resized > 1 else i * 0,
    "align_corners": lambda i, scale, size, resized: i * ((size - 1) / (resized - 1)) if resized != 1 else i * 0,
    "asymmetric": lambda i, scale, size, resized: i / scale,
}
_ROUND: dict[str, Callable[[Tensor], Tensor]] = {
    "round_prefer_floor": lambda x: torch.ceil(x - 0.5),
    "round_prefer_ceil": lambda x: torch.floor(x + 0.5),
    "floor": torch.floor,
    "ceil": torch.ceil,
}


def _beyond(c: Call) -> str | None:
    if c.opset < 11:
        return "the definition of an opset before 11"
    mode, where = c.attr("mode", "nearest"), c.attr("coordinate_transformation_mode", "half_pixel")
    if where not in _PLACES or c.attr("antialias", 0):
        return f"coordinates {where}" if where not in _PLACES else "antialias"
    if c.attr("keep_aspect_ratio_policy", "stretch") != "stretch":
        return "keep_aspect_ratio_policy"
    usual = abs(c.attr("cubic_coeff_a", -0.75) + 0.75) < 1e-6 and not c.attr("exclude_outside", 0)
    if mode == "cubic" and not (usual and where.endswith("half_pixel")):
        return f"mode cubic with {where}, another coefficient or exclude_outside"
    return None


@torch_form("Resize", numbers=(1, 2, 3), refuses=_beyond)
def resize(
    c: Call, x: Tensor, roi: Any = None, scales: Sequence[float] | None = None, sizes: Sequence[int] | None = None
) -> Tensor:
    """Interpolation: nearest and linear over any axes, cubic over the two last ones."""
    axes = [a % x.dim() for a in c.attr("axes", range(x.dim()))]
    if sizes:
        factors = {a: n / x.shape[a] for a, n in zip(axes, sizes)}
        lengths = dict(zip(axes, (int(n) for n in sizes)))
    elif scales:
        factors = dict(zip(axes, (float(s) for s in scales)))
        lengths = {a: int(np.float32(x.shape[a]) * np.float32(s)) for a, s in factors.items()}
    else:
        raise c.refuse("Resize without scales and sizes")
    mode = c.attr("mode", "nearest")
    moved = [a for a in axes if factors[a] != 1 or lengths[a] != x.shape[a]]
    if mode == "cubic" and moved:
        return _cubic(c, x, moved, factors, lengths, bool(sizes))
    for axis in moved:
        size = x.shape[axis]
        index = torch.arange(lengths[axis], device=x.device, dtype=torch.float32)
        resized = float(lengths[axis]) if sizes else size * factors[axis]
        place = _PLACES[c.attr("coordinate_transformation_mode", "half_pixel")](index, factors[axis], size, resized)
        if mode == "nearest":
            near = _ROUND[c.attr("nearest_mode", "round_prefer_floor")](place)
            x = x.index_select(axis, near.clamp(0, size - 1).long())
            continue
        low = torch.floor(place)
        share = (place - low).to(x.dtype).reshape([-1 if a == axis else 1 for a in range(x.dim())])
        first, second = (x.index_select(axis, (low + k).clamp(0, size - 1).long()) for k in (0, 1))
        x = first * (1 - share) + second * share
    return x


def _cubic(
    c: Call, x: Tensor, moved: Sequence[int], factors: dict[int, float], lengths: dict[int, int], by_size: bool
) -> Tensor:
    if x.dim() != 4 or any(a < 2 for a in moved):
        raise c.refuse("cubic Resize of other axes than the two last of four")
    if c.attr("coordinate_transformation_mode", "half_pixel") == "pytorch_half_pixel":  # one element is the first one
        single = [a for a in moved if (lengths[a] if by_size else x.shape[a] * factors[a]) <= 1]
        for axis in single:
            x = x.narrow(axis, 0, lengths[axis])
        moved = [a for a in moved if a not in single]
    size = [lengths.get(a, x.shape[a]) for a in (2, 3)]
    scale = [None if by_size else factors[a] if a in moved else 1.0 for a in (2, 3)]
    # F.interpolate takes no size beside a scale.
    result: Tensor = torch.ops.aten.upsample_bicubic2d(x, size, False, *scale)
    return result
