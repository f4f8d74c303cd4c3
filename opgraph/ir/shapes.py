"""Shape rules shared by many ops. Dimensions may be sizes, symbols or unknown (None)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from opgraph.ir.logical_tensor import Dim, Dims, dims_text


class ShapeMismatch(Exception):  # noqa: N818 - the error that users see is InvalidShape
    """The shapes violate a shape rule. The graph converts it to an InvalidShape that names op and tensors."""

    def __init__(self, what: str, fix: str) -> None:
        super().__init__(what, fix)
        self.what = what
        self.fix = fix


def dims_agree(a: Sequence[Dim], b: Sequence[Dim]) -> bool:
    """True if two shapes may be equal; an unknown dimension may have any size."""
    return len(a) == len(b) and all(
        x == y or not isinstance(x, int) or not isinstance(y, int) for x, y in zip(a, b, strict=True)
    )


def broadcast_dim(a: Dim, b: Dim) -> Dim:
    """NumPy broadcasting of one dimension; None if the result is unknown.

    Raises:
        ShapeMismatch: two different sizes, neither 1.
    """
    if a == b or b == 1:
        return a
    if a == 1:
        return b
    if isinstance(a, int) and isinstance(b, int):
        raise ShapeMismatch(f"sizes {a} and {b} do not broadcast", "make each axis equal or 1")
    # A size other than 1 next to an unknown one, which must turn out to be 1 or equal.
    if isinstance(a, int):
        return a
    return b if isinstance(b, int) else None


def broadcast(shapes: Sequence[Dims]) -> Dims:
    """NumPy broadcasting, right-aligned; None if the rank of any shape is unknown.

    Raises:
        ShapeMismatch: the shapes do not broadcast.
    """
    known = [s for s in shapes if s is not None]
    if len(known) != len(shapes):
        return None
    first = known[0]
    if all(s == first for s in known[1:]):
        return first
    rank = max(len(s) for s in known)
    result: list[Dim] = [1] * rank
    for shape in known:
        for axis, dim in enumerate(shape, start=rank - len(shape)):
            try:
                result[axis] = broadcast_dim(result[axis], dim)
            except ShapeMismatch:
                text = " and ".join(dims_text(s) for s in known)
                raise ShapeMismatch(
                    f"shapes {text} do not broadcast", "insert a Reshape, or make each axis equal or 1"
                ) from None
    return tuple(result)


def unify(declared: Dims, inferred: Dims, what: str) -> Dims:
    """Merges the declared and the inferred shape of a tensor.

    Raises:
        ShapeMismatch: they contradict each other.
    """
    if declared is None or inferred is None or declared == inferred:
        return inferred if declared is None else declared
    fit = len(declared) == len(inferred)
    result: list[Dim] = []
    for a, b in zip(declared, inferred):
        fit = fit and (a == b or not isinstance(a, int) or not isinstance(b, int))
        result.append(a if isinstance(a, int) or b is None else b if isinstance(b, int) or a is None else a)
    if not fit:
        raise ShapeMismatch(
            f"{what} is declared {dims_text(declared)}, but its op makes {dims_text(inferred)}",
            "declare the inferred shape, or leave it unknown (None)",
        )
    return tuple(result)


def normalized_axes(axes: Sequence[int], ndim: int) -> tuple[int, ...]:
    """Axes counted from 0, in ascending order.

    Raises:
        ShapeMismatch: an axis does not exist, or is named twice.
    """
    for axis in axes:
        if not -ndim <= axis < ndim:
            raise ShapeMismatch(
                f"there is no axis {axis} in {ndim} dimensions",
                f"name axes from {-ndim} to {ndim - 1}" if ndim else "name none",
            )
    found = sorted(axis % ndim for axis in axes)
    if len(set(found)) != len(found):
        raise ShapeMismatch(f"axes {list(axes)} name one axis twice", "name each axis once")
    return tuple(found)


def channel_axes(ndim: int | None, of_ndim: int | None, attrs: Mapping[str, object]) -> int:
    """The number of axes of size 1 that follow a channel operand before it broadcasts with a tensor of `of_ndim` axes.

    A 1-d operand next to an NCX tensor of n axes lies along axis 1, so n - 2 axes follow it. In every other case the
    operand broadcasts unchanged. Source: oneDNN Graph BiasAdd and PReLU.
    """
    if ndim != 1 or attrs.get("data_format") != "NCX" or attrs.get("per_channel_broadcast") is False:
        return 0
    return max((of_ndim or 0) - 2, 0)
