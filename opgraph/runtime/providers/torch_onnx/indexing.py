"""Torch forms of ONNX ops that pick elements by index, and of reductions over axes known at run time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  # torch's own name for it

from opgraph.runtime.providers.torch_onnx.table import Call, torch_form


def _positive(index: Tensor, size: int) -> Tensor:
    return torch.where(index < 0, index + size, index).long()


@torch_form("Gather", weights=(0,))
def gather(c: Call, x: Tensor, index: Tensor) -> Tensor:
    """Whole slices along an axis; an embedding for the rows of a matrix."""
    axis = c.attr("axis", 0) % x.dim()
    places = _positive(index, x.shape[axis])
    if axis == 0 and x.dim() == 2:
        return F.embedding(places, x)
    found = x.index_select(axis, places.reshape(-1))
    return found.reshape((*x.shape[:axis], *index.shape, *x.shape[axis + 1 :]))  # a tuple: it may be empty


@torch_form("GatherElements")
def gather_elements(c: Call, x: Tensor, index: Tensor) -> Tensor:
    """One element for each index along an axis."""
    axis = c.attr("axis", 0)
    return torch.gather(x, axis, _positive(index, x.shape[axis]))


@torch_form("GatherND")
def gather_nd(c: Call, x: Tensor, index: Tensor) -> Tensor:
    """Elements or slices by coordinates."""
    batch, depth = c.attr("batch_dims", 0), index.shape[-1]
    coordinates = [_positive(index[..., i], x.shape[batch + i]) for i in range(depth)]
    inner = index.dim() - 1 - batch
    for axis in range(batch):
        place = torch.arange(x.shape[axis], device=x.device)
        shape = [1] * (batch + inner)
        shape[axis] = -1
        coordinates.insert(axis, place.reshape(shape))
    return x[tuple(coordinates)]


def _beyond_adding(c: Call) -> str | None:
    how = c.attr("reduction", "none")
    return None if how in ("none", "add") else f"reduction {how}"


@torch_form("ScatterND", refuses=_beyond_adding)
def scatter_nd(c: Call, x: Tensor, index: Tensor, updates: Tensor) -> Tensor:
    """A copy with elements or slices replaced (or added to) by coordinates."""
    how = c.attr("reduction", "none")
    places = tuple(_positive(index[..., i], x.shape[i]) for i in range(index.shape[-1]))
    return x.index_put(places, updates, accumulate=how == "add")


@torch_form("ScatterElements", refuses=_beyond_adding)
def scatter_elements(c: Call, x: Tensor, index: Tensor, updates: Tensor) -> Tensor:
    """A copy with one element for each index replaced (or added to)."""
    how, axis = c.attr("reduction", "none"), c.attr("axis", 0)
    places = _positive(index, x.shape[axis])
    if how == "none":
        return x.scatter(axis, places, updates)
    return x.scatter_add(axis, places, updates)


@torch_form("OneHot", numbers=(1,))
def one_hot(c: Call, index: Tensor, depth: Any, values: Tensor) -> Tensor:
    """`values[1]` where the index is, `values[0]` elsewhere."""
    count = int(depth[0] if isinstance(depth, list) else depth)
    # An index beyond the depth sets no element.
    hot = _positive(index, count).unsqueeze(-1) == torch.arange(count, device=index.device)
    hot = hot.movedim(-1, c.attr("axis", -1))
    return torch.where(hot, values[1], values[0])


@torch_form("TopK", numbers=(1,))
def top_k(c: Call, x: Tensor, k: Sequence[int] | None = None) -> tuple[Tensor, Tensor]:
    """The k largest (or smallest) elements and their indices; of equal elements, the first ones."""
    axis, count = c.attr("axis", -1), int(c.attr("k") if k is None else k[0])
    # torch.topk does not specify which of equal elements it takes.
    found = torch.sort(x, dim=axis, descending=bool(c.attr("largest", 1)), stable=True)
    return found.values.narrow(axis, 0, count), found.indices.narrow(axis, 0, count)


@torch_form("NonZero")
def non_zero(c: Call, x: Tensor) -> Tensor:
    """Coordinates of the nonzero elements, one row for each axis."""
    return x.nonzero().t()


@torch_form("CumSum", numbers=(1,))
def cumulative_sum(c: Call, x: Tensor, axis: Any) -> Tensor:
    """Running sums along an axis."""
    where = int(axis[0] if isinstance(axis, list) else axis)
    turned = x.flip(where) if c.attr("reverse", 0) else x
    if c.attr("exclusive", 0):  # each sum ends before its element, which may be infinite
        size = x.shape[where]
        first = torch.zeros_like(turned.narrow(where, 0, min(size, 1)))
        turned = torch.cat((first, turned.narrow(where, 0, max(size - 1, 0))), where)
    y = torch.cumsum(turned, where, dtype=x.dtype)
    return y.flip(where) if c.attr("reverse", 0) else y


@torch_form("Trilu", numbers=(1,))
def trilu(c: Call, x: Tensor, k: Any = None) -> Tensor:
    """The upper or lower triangle."""
    diagonal = int(k[0] if isinstance(k, list) else k or 0)
    return torch.triu(x, diagonal) if c.attr("upper", 1) else torch.tril(x, diagonal)


def _extreme(name: str, find: Callable[..., Tensor]) -> None:
    @torch_form(name, refuses=lambda c: "select_last_index" if c.attr("select_last_index", 0) else None)
    def place(c: Call, x: Tensor) -> Tensor:
        return find(x, c.attr("axis", 0), keepdim=bool(c.attr("keepdims", 1)))


#: A tensor, the axes to reduce, and whether they stay as axes of size 1.
Reduce = Callable[[Tensor, tuple[int, ...], bool], Tensor]


def _reduction(name: str, run: Reduce) -> None:
    @torch_form(name, numbers=(1,))
    def reduced(c: Call, x: Tensor, axes: Sequence[int] | None = None) -> Tensor:
        found = c.attr("axes") if axes is None else axes
        if not found and c.attr("noop_with_empty_axes", 0):  # reduces each element alone: its norm is its magnitude
            return run(x.unsqueeze(-1), (x.dim(),), False)
        return run(x, tuple(found or range(x.dim())), bool(c.attr("keepdims", 1)))


def _product(x: Tensor, axes: tuple[int, ...], keep: bool) -> Tensor:
    for axis in sorted((a % x.dim() for a in axes), reverse=True):
        x = x.prod(axis, keepdim=keep, dtype=x.dtype)
    return x


def _by_floats(run: Reduce) -> Reduce:
    """A reduction that torch has for floats only: integers are computed in f64 and truncated, as in onnxruntime."""

    def reduced(x: Tensor, axes: tuple[int, ...], keep: bool) -> Tensor:
        return run(x, axes, keep) if x.is_floating_point() else run(x.double(), axes, keep).to(x.dtype)

    return reduced


def _bound(run: Reduce) -> Reduce:
    """The largest or smallest element; if there are none, which torch refuses, the dtype's lowest or highest value."""

    def reduced(x: Tensor, axes: tuple[int, ...], keep: bool) -> Tensor:
        if x.numel() or all(x.shape[axis] for axis in axes):
            return run(x, axes, keep)
        if x.dtype == torch.bool:
            value: float | bool = run is torch.amin
        elif x.is_floating_point():
            value = float("inf" if run is torch.amin else "-inf")
        else:
            info = torch.iinfo(x.dtype)
            value = info.max if run is torch.amin else info.min
        gone = {axis % x.dim() for axis in axes}
        sizes = [1 if i in gone else size for i, size in enumerate(x.shape) if keep or i not in gone]
        return x.new_full(sizes, value)

    return reduced


_extreme("ArgMax", torch.argmax)
_extreme("ArgMin", torch.argmin)
_reduction("ReduceSum", lambda x, axes, keep: x.sum(axes, keep, dtype=x.dtype))
_reduction("ReduceMean", _by_floats(torch.mean))
_reduction("ReduceMax", _bound(torch.amax))
_reduction("ReduceMin", _bound(torch.amin))
_reduction("ReduceProd", _product)
_reduction("ReduceL1", lambda x, axes, keep: x.abs().sum(axes, keep, dtype=x.dtype))
_reduction("ReduceL2", _by_floats(lambda x, axes, keep: torch.linalg.vector_norm(x, 2, axes, keep)))
_reduction("ReduceSumSquare", lambda x, axes, keep: (x * x).sum(axes, keep, dtype=x.dtype))
_reduction("ReduceLogSum", _by_floats(lambda x, axes, keep: x.sum(axes, keep).log()))
_reduction("ReduceLogSumExp", _by_floats(torch.logsumexp))
