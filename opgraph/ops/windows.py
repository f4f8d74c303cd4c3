"""Sliding windows: sizes, paddings and layouts of convolutions and pools, in shapes and in arrays.

Internally data are NCX and weights OIX; oneDNN's NXC, XIO and XOI are permuted on the way in and out. Arrays are
NumPy's, or torch's where a function receives the module.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from opgraph.errors import InvalidGraphOp
from opgraph.ir.logical_tensor import Dim, dims_text
from opgraph.ir.op import Op
from opgraph.ir.opdef import Attr, Attrs
from opgraph.ir.shapes import ShapeMismatch

#: DNNL_MAX_NDIMS, the length of oneDNN's default lists.
_MAX_NDIMS = 12
NOT_GIVEN = (0,) * _MAX_NDIMS
ONES = (1,) * _MAX_NDIMS

STRIDES = Attr(name="strides", type="s64[]")
PADS_BEGIN = Attr(name="pads_begin", type="s64[]")
PADS_END = Attr(name="pads_end", type="s64[]")
KERNEL = Attr(name="kernel", type="s64[]")
DILATIONS = Attr(name="dilations", type="s64[]")
AUTO_PAD = Attr(name="auto_pad", type="string", default="None", choices=("None", "SAME_UPPER", "SAME_LOWER", "VALID"))

Sizes = Sequence[Dim]


@dataclass(frozen=True, slots=True)
class Window:
    """A window along each spatial axis, with the padding of the data (None where it depends on unknown sizes)."""

    kernel: tuple[Dim, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    begin: tuple[int | None, ...]
    end: tuple[int | None, ...]

    @classmethod
    def of(cls, attrs: Attrs, kernel: Sizes, data: Sizes) -> Window:
        """The window that attributes describe.

        Args:
            kernel: its size along each spatial axis.
            data: sizes of the data, from which auto_pad computes the padding.

        Raises:
            ShapeMismatch: lists have other lengths.
        """
        strides = attrs["strides"]
        dilations = attrs.get("dilations", ONES)
        dilations = dilations[: len(strides)] if tuple(dilations) == ONES else dilations
        begin, end = (attrs[n] or (0,) * len(strides) for n in ("pads_begin", "pads_end"))
        lists = {"strides": strides, "dilations": dilations, "pads_begin": begin, "pads_end": end, "kernel": kernel}
        for name, values in lists.items():
            if len(values) != len(data):
                raise ShapeMismatch(
                    f"{name} has {len(values)} entries for {len(data)} spatial axes", "give one for each spatial axis"
                )
            if not name.startswith("pads") and any(isinstance(v, int) and v < 1 for v in values):
                raise ShapeMismatch(f"{name} is {dims_text(tuple(values))}", "give numbers of at least 1")
        if attrs["auto_pad"] != "None":
            pairs = [_automatic(attrs["auto_pad"], *a) for a in zip(data, kernel, strides, dilations, strict=True)]
            begin, end = [b for b, _ in pairs], [e for _, e in pairs]
        return cls(tuple(kernel), tuple(strides), tuple(dilations), tuple(begin), tuple(end))

    @property
    def extents(self) -> tuple[int | None, ...]:
        """The span from the first to the last element of the window along each axis."""
        return tuple(
            d * (k - 1) + 1 if isinstance(k, int) else None for k, d in zip(self.kernel, self.dilations, strict=True)
        )

    def positions(self, data: Sizes, *, up: bool = False) -> tuple[Dim, ...]:
        """The number of positions where the window fits; with `up` a last partial step counts.

        Raises:
            ShapeMismatch: the window does not fit at all.
        """
        found: list[Dim] = []
        for size, extent, stride, pads in zip(data, self.extents, self.strides, self._pads(), strict=True):
            if not isinstance(size, int) or extent is None or pads is None:
                found.append(None)
                continue
            room = size + pads - extent
            if room < 0:
                raise ShapeMismatch(
                    f"a window of {extent} does not fit into {size} padded by {pads}", "pad more, or use a smaller one"
                )
            found.append((-(-room // stride) if up else room // stride) + 1)
        return tuple(found)

    def covered(self, positions: Sizes, padding: Sequence[int] = ()) -> tuple[Dim, ...]:
        """The sizes of the smallest data on which the window has `positions`, plus `padding`."""
        found: list[Dim] = []
        more = tuple(padding) or (0,) * len(self.kernel)
        for count, extent, stride, pads, extra in zip(
            positions, self.extents, self.strides, self._pads(), more, strict=True
        ):
            known = isinstance(count, int) and extent is not None and pads is not None
            found.append(stride * (count - 1) + extent - pads + extra if known else None)  # type: ignore[operator]
        return tuple(found)

    def _pads(self) -> list[int | None]:
        return [None if b is None or e is None else b + e for b, e in zip(self.begin, self.end, strict=True)]

    # -- arrays -------------------------------------------------------------------------------------------------

    def taps(self, positions: Sequence[int]) -> Iterator[tuple[tuple[int, ...], tuple[Any, ...]]]:
        """Yields for each element of the window its place, and its slices of padded data at all positions."""
        for place in itertools.product(*(range(int(k or 0)) for k in self.kernel)):
            starts = [i * d for i, d in zip(place, self.dilations, strict=True)]
            steps = zip(starts, positions, self.strides, strict=True)
            yield place, (..., *[slice(a, a + (n - 1) * s + 1, s) for a, n, s in steps])


def _automatic(mode: str, size: Dim, kernel: Dim, stride: int, dilation: int) -> tuple[int | None, int | None]:
    """The paddings of one axis: those with which the result has ceil(size / stride) elements, or none (VALID)."""
    if mode == "VALID":
        return 0, 0
    if not isinstance(kernel, int) or (not isinstance(size, int) and stride != 1):
        return None, None
    rest = size % stride if isinstance(size, int) else 0
    total = max((kernel - 1) * dilation + 1 - (rest or stride), 0)
    begin = (total + 1) // 2 if mode == "SAME_LOWER" else total // 2
    return begin, total - begin


def checked_lists(op: Op) -> None:
    """Strides, dilations and kernel are positive, paddings not negative.

    Raises:
        InvalidGraphOp: a number is less.
    """
    for name, least in (("strides", 1), ("dilations", 1), ("kernel", 1), ("pads_begin", 0), ("pads_end", 0)):
        values = op.attrs.get(name, ())
        if any(v < least for v in values):  # type: ignore[union-attr, operator]
            raise InvalidGraphOp(
                f"{op.kind} got {name}={list(values)}",  # type: ignore[arg-type]
                where=op.where,
                fix=f"give numbers of at least {least}",
            )


# -- layouts ----------------------------------------------------------------------------------------------------------


def data_order(ndim: int, attrs: Attrs) -> tuple[int, ...]:
    """The axes of the data in the order NCX.

    Raises:
        ShapeMismatch: there are no spatial axes.
    """
    _check_spatial(ndim, "data")
    return tuple(range(ndim)) if attrs["data_format"] == "NCX" else (0, ndim - 1, *range(1, ndim - 1))


def weights_order(ndim: int, attrs: Attrs) -> tuple[int, ...]:
    """The axes of the weights in the order OIX (for ConvTranspose: IOX).

    Raises:
        ShapeMismatch: there are no spatial axes.
    """
    _check_spatial(ndim, "weights")
    if attrs["weights_format"] in ("OIX", "IOX"):
        return tuple(range(ndim))
    return (ndim - 1, ndim - 2, *range(ndim - 2))


def _check_spatial(ndim: int, what: str) -> None:
    if ndim < 3:
        raise ShapeMismatch(
            f"{what} of {ndim} dimensions have no spatial axes", "give a batch, channels and one spatial axis or more"
        )


def ordered(values: Sequence[Any], order: Sequence[int]) -> tuple[Any, ...]:
    """Values in another order."""
    return tuple(values[i] for i in order)


def restored(values: Sequence[Any], order: Sequence[int]) -> tuple[Any, ...]:
    """The inverse of `ordered`."""
    back: list[Any] = [None] * len(order)
    for value, place in zip(values, order, strict=True):
        back[place] = value
    return tuple(back)


def moved(array: Any, order: Sequence[int]) -> Any:
    """An array, of NumPy or torch, with its axes in another order."""
    return array.permute(tuple(order)) if hasattr(array, "permute") else array.transpose(order)


def moved_back(array: Any, order: Sequence[int]) -> Any:
    """The inverse of `moved`."""
    return moved(array, restored(range(len(order)), order))
