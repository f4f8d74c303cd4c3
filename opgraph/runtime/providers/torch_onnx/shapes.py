"""Torch forms of ONNX ops that move data: shapes, joining, slicing, padding, resizing."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  # torch's own name for it

from opgraph.runtime.providers.torch_onnx.table import Call, torch_form


@torch_form("Reshape", numbers=(1,))
def reshape(c: Call, x: Tensor, shape: Sequence[int] | None = None) -> Tensor:
    """The same elements in another shape; 0 copies a size, -1 is inferred."""
    shape = c.attr("shape") if shape is None else shape
    if not c.attr("allowzero", 0):
        shape = [x.shape[i] if d == 0 else d for i, d in enumerate(shape)]
    return x.reshape(tuple(shape))


@torch_form("Flatten")
def flatten(c: Call, x: Tensor) -> Tensor:
    """Flattens to a matrix: the axes before `axis`, and the rest."""
    axis = c.attr("axis", 1)
    axis = axis + x.dim() if axis < 0 else axis
    rows = 1
    for size in x.shape[:axis]:
        rows *= size
    return x.reshape(rows, -1) if x.numel() else x.reshape(rows, 0)


@torch_form("Transpose")
def transpose(c: Call, x: Tensor) -> Tensor:
    """The axes in another order; reversed by default."""
    return x.permute(c.attr("perm", list(range(x.dim()))[::-1]))


@torch_form("Squeeze", numbers=(1,))
def squeeze(c: Call, x: Tensor, axes: Sequence[int] | None = None) -> Tensor:
    """Removes some axes of size 1."""
    found = c.attr("axes") if axes is None else axes
    return x.squeeze() if found is None else x.squeeze(tuple(found))


@torch_form("Unsqueeze", numbers=(1,))
def unsqueeze(c: Call, x: Tensor, axes: Sequence[int] | None = None) -> Tensor:
    """Inserts axes of size 1 at positions of the result."""
    found = c.attr("axes") if axes is None else axes
    rank = x.dim() + len(found)
    for axis in sorted(a % rank for a in found):
        x = x.unsqueeze(axis)
    return x


@torch_form("Expand", numbers=(1,))
def expand(c: Call, x: Tensor, shape: Sequence[int]) -> Tensor:
    """Broadcasts with a shape, in both directions."""
    return x.expand(torch.broadcast_shapes(x.shape, tuple(shape)))  # type: ignore[no-untyped-call]


@torch_form("Tile", numbers=(1,))
def tile(c: Call, x: Tensor, repeats: Sequence[int]) -> Tensor:
    """Repeats a tensor along its axes."""
    return x.repeat(tuple(repeats))


@torch_form("Shape", on_host=True)
def shape(c: Call, x: Tensor) -> Tensor:
    """The sizes, on the CPU: they control later ops."""
    return torch.tensor(x.shape[c.attr("start", 0) : c.attr("end")], dtype=torch.int64)


@torch_form("Size", on_host=True)
def size(c: Call, x: Tensor) -> Tensor:
    """The number of elements, on the CPU."""
    return torch.tensor(x.numel())


@torch_form("ConstantOfShape", numbers=(0,))
def constant_of_shape(c: Call, shape: Sequence[int]) -> Tensor:
    """A tensor filled with one value."""
    value = c.attr("value")
    number = 0.0 if value is None else value.item()
    return torch.full(tuple(shape), number, dtype=c.dtype or torch.float32, device=c.device)


@torch_form("Range", numbers=(0, 1, 2))
def arange(c: Call, start: float, limit: float, delta: float) -> Tensor:
    """Numbers from start, below limit."""
    return torch.arange(start, limit, delta, dtype=c.dtype, device=c.device)


@torch_form("Concat")
def concat(c: Call, *parts: Tensor) -> Tensor:
    """Joins tensors along an axis."""
    return torch.cat(parts, c.attr("axis"))


@torch_form("Split", numbers=(1,))
def split(c: Call, x: Tensor, sizes: Sequence[int] | None = None) -> tuple[Tensor, ...]:
    """Pieces along an axis; of equal size by default, the last ones smaller or empty."""
    axis, found = c.attr("axis", 0), c.attr("split") if sizes is None else sizes
    if found is not None:
        return torch.split(x, list(found), axis)
    size, count = x.shape[axis], c.attr("num_outputs", c.listed)
    ends = [min(size, -(-size // count) * i) for i in range(count + 1)]
    return torch.split(x, [end - start for start, end in itertools.pairwise(ends)], axis)


@torch_form("Slice", numbers=(1, 2, 3, 4))
def slice_(
    c: Call,
    x: Tensor,
    starts: Sequence[int] | None = None,
    ends: Sequence[int] | None = None,
    axes: Sequence[int] | None = None,
    steps: Sequence[int] | None = None,
) -> Tensor:
    """A range of each axis, backwards where its step is negative."""
    starts = c.attr("starts") if starts is None else starts
    ends = c.attr("ends") if ends is None else ends
    axes = c.attr("axes") if axes is None else axes
    axes = range(len(starts)) if axes is None else axes
    for start, end, axis, step in zip(starts, ends, axes, steps or [1] * len(starts)):
        places = (
            range(x.shape[axis])[slice(start, end, step)] if step > 0 else _backwards(x.shape[axis], start, end, step)
        )
        if step == 1:
            x = x.narrow(axis, places.start, len(places))
        else:
            x = x.index_select(axis, torch.tensor(places, dtype=torch.int64, device=x.device))
    return x


def _backwards(size: int, start: int, end: int, step: int) -> range:
    # Python reads an end below -size as "none left"; ONNX clamps it to just before the first element,
    # and a start to the first one.
    first = min(max(start + size if start < 0 else start, 0), size - 1)
    last = max(end + size if end < 0 else end, -1)
    return range(first, last, step)


def _padded_index(size: int, before: int, after: int, mode: str, device: torch.device) -> Tensor:
    place = torch.arange(-before, size + after, device=device)
    if mode == "edge":
        return place.clamp(0, size - 1)
    if mode == "wrap":
        return place % size
    period = 2 * (size - 1) or 1
    place = place.abs() % period
    return torch.where(place >= size, period - place, place)


@torch_form("Pad", numbers=(1, 2, 3))
def pad(
    c: Call, x: Tensor, pads: Sequence[int] | None = None, value: Any = None, axes: Sequence[int] | None = None
) -> Tensor:
    """Pads with a constant, or with values of the tensor by mode."""
    found, mode = list(c.attr("pads") if pads is None else pads), c.attr("mode", "constant")
    places = list(range(x.dim())) if axes is None else [a % x.dim() for a in axes]
    half = len(found) // 2
    before, after = dict(zip(places, found[:half])), dict(zip(places, found[half:]))
    if mode == "constant":
        fill = c.attr("value", 0.0) if value is None else value[0] if isinstance(value, list) else value
        flat = [n for a in reversed(range(x.dim())) for n in (before.get(a, 0), after.get(a, 0))]
        return F.pad(x, flat, value=fill)
    for axis in places:
        if before[axis] or after[axis]:
            x = x.index_select(axis, _padded_index(x.shape[axis], before[axis], after[axis], mode, x.device))
    return x


@torch_form("DepthToSpace")
def depth_to_space(c: Call, x: Tensor) -> Tensor:
    """Blocks of channels become blocks of pixels."""
    n, channels, h, w = x.shape
    b = c.attr("blocksize")
    if c.attr("mode", "DCR") == "CRD":
        return F.pixel_shuffle(x, b)
    return x.reshape(n, b, b, channels // (b * b), h, w).permute(0, 3, 4, 1, 5, 2).reshape(n, -1, h * b, w * b)


@torch_form("SpaceToDepth")
def space_to_depth(c: Call, x: Tensor) -> Tensor:
    """Blocks of pixels become blocks of channels."""
    n, channels, h, w = x.shape
    b = c.attr("blocksize")
    blocks = x.reshape(n, channels, h // b, b, w // b, b)
    order = (0, 1, 3, 5, 2, 4) if c.attr("mode", "DCR") == "CRD" else (0, 3, 5, 1, 2, 4)
    return blocks.permute(order).reshape(n, -1, h // b, w // b)


@torch_form("CastLike")
def cast_like(c: Call, x: Tensor, like: Tensor) -> Tensor:
    """Converts to the dtype of another tensor."""
    return x.to(like.dtype)
