"""Shape rules of convolutions: the sizes of data, kernel and result, as far as they are known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from opgraph.ir.logical_tensor import Dim, Dims, LogicalTensor, dims_text
from opgraph.ir.opdef import Attrs
from opgraph.ir.shapes import ShapeMismatch, dims_agree
from opgraph.ops import windows
from opgraph.ops.explicit_shapes import completed, given_shape
from opgraph.ops.windows import NOT_GIVEN, Window, ordered, restored


def _canonical(dims: Dims, order: Any, attrs: Attrs) -> tuple[Dim, ...] | None:
    return None if dims is None else ordered(dims, order(len(dims), attrs))


def _split(attrs: Attrs, data: tuple[Dim, ...] | None, weights: tuple[Dim, ...] | None) -> int | None:
    """The number of dimensions of data and weights.

    Raises:
        ShapeMismatch: they differ.
    """
    ranks = {len(d) for d in (data, weights) if d is not None}
    if len(ranks) > 1:
        texts = " and ".join(dims_text(d) for d in (data, weights) if d is not None)
        raise ShapeMismatch(
            f"operands {texts} differ in their spatial axes", "give data and weights as many spatial axes"
        )
    return ranks.pop() if ranks else None


def _times(size: Dim, factor: int) -> Dim:
    return size * factor if isinstance(size, int) else size if factor == 1 else None


def _shared(size: Dim, groups: int, what: str) -> Dim:
    """The channels of one group."""
    if groups < 1:
        raise ShapeMismatch(f"there are {groups} groups", "give 1 or more")
    if isinstance(size, int) and size % groups:
        raise ShapeMismatch(f"{size} {what} do not make {groups} groups", "let groups divide the channels")
    return size // groups if isinstance(size, int) else size if groups == 1 else None


def _same(a: Dim, b: Dim, what: str) -> Dim:
    if isinstance(a, int) and isinstance(b, int) and a != b:
        raise ShapeMismatch(
            f"{what}: {a} in the data, {b} by weights and groups",
            "let the weights fit the channels, or set weights_format, data_format or groups",
        )
    return a if isinstance(a, int) else b


def _bias_fits(inputs: Sequence[LogicalTensor], channels: Dim) -> None:
    dims = inputs[2].dims if len(inputs) > 2 else None
    if dims is not None and not dims_agree(dims, (channels,)):
        raise ShapeMismatch(
            f"a bias {dims_text(dims)} for {channels} channels", "give one element for each channel of the result"
        )


def of_small(inputs: tuple[LogicalTensor, ...], attrs: Attrs) -> tuple[Dims, ...]:
    """Batch of the data; channels from the weights; positions of the kernel on each padded spatial axis."""
    big, weights = (
        _canonical(inputs[0].dims, windows.data_order, attrs),
        _canonical(inputs[1].dims, windows.weights_order, attrs),
    )
    ndim = _split(attrs, big, weights)
    if big is None or ndim is None:
        return (None,) if ndim is None else ((None,) * ndim,)
    kernel = (None,) * (ndim - 2) if weights is None else weights[2:]
    window = Window.of(attrs, kernel, big[2:])
    outer: Dim = None
    if weights is not None:
        _same(_shared(big[1], attrs["groups"], "channels"), weights[1], "input channels of a group")
        outer = weights[0]
        _shared(outer, attrs["groups"], "output channels")
        _bias_fits(inputs, outer)
    made = (big[0], outer, *window.positions(big[2:]))
    return (restored(made, windows.data_order(ndim, attrs)),)


def _big(inputs: tuple[LogicalTensor, ...], attrs: Attrs, *, told: bool) -> tuple[Dims, ...]:
    small, weights = (
        _canonical(inputs[0].dims, windows.data_order, attrs),
        _canonical(inputs[1].dims, windows.weights_order, attrs),
    )
    ndim = _split(attrs, small, weights)
    if small is None or ndim is None:
        return (None,) if ndim is None else ((None,) * ndim,)
    order = windows.data_order(ndim, attrs)
    kernel = (None,) * (ndim - 2) if weights is None else weights[2:]
    inner: Dim = None
    if weights is not None:
        _same(small[1], weights[0], "channels")
        _shared(small[1], attrs["groups"], "channels")
        inner = _times(weights[1], attrs["groups"])
    given: tuple[Dim, ...] = (0,) * ndim
    if told:
        given = ordered(given_shape("dst_shape", inputs, 2, attrs, ndim), order)
    else:
        _bias_fits(inputs, inner)
    sizes = tuple(0 if n is None else n for n in given[2:])
    window = Window.of(attrs, kernel, sizes)
    padding = () if tuple(attrs["output_padding"]) == NOT_GIVEN else attrs["output_padding"]
    if padding and len(padding) != ndim - 2:
        raise ShapeMismatch(
            f"output_padding has {len(padding)} entries for {ndim - 2} spatial axes", "give one for each spatial axis"
        )
    covered = window.covered(small[2:], padding)
    spatial = tuple(c if g == 0 else g for c, g in zip(covered, given[2:], strict=True))
    if any(isinstance(n, int) and n < 0 for n in spatial):
        raise ShapeMismatch(f"the result would be {dims_text(spatial)} large", "pad less")
    if told:
        _check_positions(Window.of(attrs, kernel, spatial).positions(spatial), small[2:], "dst_shape")
    found = completed("dst_shape", (*given[:2], *spatial), (small[0], inner, *spatial))
    assert found is not None
    return (restored(found, order),)


def of_told_big(inputs: tuple[LogicalTensor, ...], attrs: Attrs) -> tuple[Dims, ...]:
    """dst_shape, given as attribute or input; an entry 0 follows from diff_dst, weights and output_padding."""
    return _big(inputs, attrs, told=True)


def of_free_big(inputs: tuple[LogicalTensor, ...], attrs: Attrs) -> tuple[Dims, ...]:
    """Batch of the data; channels from the weights; the smallest sizes that give src, plus output_padding."""
    return _big(inputs, attrs, told=False)


def _check_positions(positions: Sequence[Dim], counts: Sequence[Dim], name: str) -> None:
    if not dims_agree(positions, counts):
        raise ShapeMismatch(
            f"with this {name} the window has {dims_text(tuple(positions))} positions, not {dims_text(tuple(counts))}",
            f"give the shape that the forward op had as {name}",
        )


def of_weights(inputs: tuple[LogicalTensor, ...], attrs: Attrs) -> tuple[Dims, ...]:
    """weights_shape, given as attribute or input; an entry 0 of the channels follows from the data."""
    transposed = attrs["weights_format"] in ("XOI", "IOX")
    first, second = (_canonical(t.dims, windows.data_order, attrs) for t in inputs[:2])
    big, small = (second, first) if transposed else (first, second)
    ndim = _split(attrs, big, small)
    if ndim is None:
        return (None,)
    order = windows.weights_order(ndim, attrs)
    given = ordered(given_shape("weights_shape", inputs, 2, attrs, ndim), order)
    if 0 in given[2:]:
        raise ShapeMismatch("nothing says how large the weights are", "give weights_shape, as attribute or input")
    outer = None if small is None else small[1]
    inner = None if big is None else _shared(big[1], attrs["groups"], "channels")
    if big is not None and small is not None:
        if not dims_agree(big[:1], small[:1]):
            raise ShapeMismatch(
                f"batches of {big[0]} and {small[0]} samples", "give src and diff_dst of one forward op"
            )
        _check_positions(Window.of(attrs, given[2:], big[2:]).positions(big[2:]), small[2:], "weights_shape")
    found = completed("weights_shape", given, (outer, inner, *given[2:]))
    assert found is not None
    return (restored(found, order),)
