"""The distance of one result from another in units in the last place, and rules for acceptable distances."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from opgraph.errors import InvalidArguments
from opgraph.ir import dtypes

#: A result may be this many times as far from the float64 truth as the same formula in the same dtype elsewhere.
SLACK = 2.0

#: The text for the distance of tensors without elements.
NO_ELEMENTS = "no elements"

#: Dtypes whose values are either right or wrong; values of quantized dtypes are rounded.
_COUNTED = ("boolean", "s32", "s64")


@dataclass(frozen=True, slots=True, kw_only=True)
class Distance:
    """The distance of a tensor from the truth.

    Attributes:
        absolute: largest absolute difference; inf where one is nan or infinite and the other is not.
        ulp: the largest difference in units in the last place of the tensor's dtype at each true value. If terms
            cancel, it is large even for the best methods; `scaled` is not.
        index: the element with the largest `ulp`.
        values: result and truth there.
        resolution: the unit in the last place at the largest true magnitude.
        largest: the largest finite difference.
        beyond: a bit for each element, set if it differs by inf; None if no element does.
        count: the number of elements compared.
        unequal: the number of differing elements, if values are right or wrong (booleans, s32, s64); else None.
    """

    absolute: float
    ulp: float
    index: tuple[int, ...]
    values: tuple[float | int, float | int]
    resolution: float
    largest: float = 0.0
    beyond: np.ndarray | None = None
    unequal: int | None = None
    count: int = 1

    def is_within(self, peer: Distance) -> bool:
        """The slack rule: at most twice as far from the truth as a peer, plus one unit at the largest value.

        An element that is nan or infinite in the peer alone excuses that element, not the others. Booleans and counted
        values (s32, s64) have no near misses: at most twice as many elements as in the peer may be wrong.
        """
        if self.unequal is not None and peer.unequal is not None:
            return self.unequal <= SLACK * peer.unequal
        if self.beyond is not None and (peer.beyond is None or (self.beyond & ~peer.beyond).any()):
            return False
        return self.largest <= SLACK * peer.largest + self.resolution

    @property
    def scaled(self) -> float:
        """The largest absolute difference in units in the last place at the largest true magnitude."""
        return self.absolute / self.resolution if self.absolute else 0.0

    def has_half_the_digits(self, dtype: str) -> bool:
        """True if the result keeps half of the dtype's digits, relative to the largest true magnitude.

        For a quantized dtype: True if it is at most one unit off.
        """
        info = _float_info(dtype)
        bits = 0 if info is None else info.nmant
        return bool(self.scaled <= 2.0 ** (bits / 2))

    def __str__(self) -> str:
        return f"{number(self.absolute)} ({number(self.scaled)} ulp)" if self.count else NO_ELEMENTS


def distance(result: np.ndarray, truth: np.ndarray, dtype: str) -> Distance:
    """The distance of two arrays of one shape.

    Args:
        result: an array of `dtype`.
        truth: the same in `dtype`, or in float64.
        dtype: the distance is in units in the last place of this dtype; for integers and booleans the unit is 1.

    nan equals nan. A true value beyond the dtype's range counts as the infinity that it rounds to.
    """
    if result.size == 0:
        unequal = 0 if dtype in _COUNTED else None
        return Distance(absolute=0.0, ulp=0.0, index=(), values=(0.0, 0.0), resolution=0.0, unequal=unequal, count=0)
    with np.errstate(all="ignore"):
        got, want = result.astype(np.float64), truth.astype(np.float64)
        rounded = want.astype(dtypes.get(dtype).numpy).astype(np.float64)
        finite = np.isfinite(got) & np.isfinite(rounded)
        same = (got == rounded) | (np.isnan(got) & np.isnan(rounded))
        gap = np.where(finite, np.abs(got - want), np.where(same, 0.0, np.inf))
        if result.dtype.kind in "biu" and truth.dtype.kind in "biu":  # float64 does not hold every s64
            gap = np.where(result != truth, np.maximum(gap, 1.0), 0.0)
        unit = spacing(want, dtype)
        ulps = np.where(finite, gap / unit, gap)
        magnitude = np.abs(np.where(np.isfinite(rounded), want, 0.0)).max()
    index = np.unravel_index(int(np.argmax(ulps)), ulps.shape)
    beyond = np.isinf(gap)
    return Distance(
        absolute=float(gap.max()),
        ulp=float(ulps.max()),
        index=tuple(int(i) for i in index),
        values=(_exact(result[index]), _exact(truth[index])),
        resolution=float(spacing(np.asarray(magnitude), dtype)),
        largest=float(np.where(beyond, 0.0, gap).max()),
        beyond=np.packbits(beyond) if beyond.any() else None,
        unequal=int(np.count_nonzero(gap)) if dtype in _COUNTED else None,
        count=result.size,
    )


def refuse_empty(distances: Iterable[Distance], model: str) -> None:
    """Raises InvalidArguments if tensors were compared, and none of them has an element."""
    counts = [d.count for d in distances]
    if counts and not any(counts):
        raise InvalidArguments(
            "nothing was compared: no output has an element",
            where=model,
            fix="give sizes above 0: --dim NAME=SIZE or --inputs FILE.npz",
        )


def _exact(value: Any) -> float | int:
    return int(value) if value.dtype.kind in "biu" else float(value)


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """True if two arrays of one dtype and shape are equal bit by bit, signs of zeros and nan included."""
    left, right = (np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in (a, b))
    return np.array_equal(left, right)


def spacing(values: np.ndarray, dtype: str) -> np.ndarray:
    """The distance between neighbouring numbers of a dtype at these values (f64); for subnormals, the smallest one."""
    info = _float_info(dtype)
    if info is None:
        return np.ones_like(values)
    _, exponent = np.frexp(np.abs(values))
    exponent = np.where(np.isfinite(values) & (values != 0), exponent, info.minexp)
    return np.asarray(np.ldexp(1.0, np.clip(exponent - 1, info.minexp, info.maxexp - 1) - info.nmant))


def _float_info(dtype: str) -> Any:
    """The limits of a float dtype, 8-bit floats included; None for other dtypes."""
    record = dtypes.get(dtype)
    if not record.is_float and not record.name.startswith("f8"):
        return None
    return ml_dtypes.finfo(record.numpy)  # type: ignore[no-untyped-call]


def whole_number(value: float) -> str:
    """A tensor's value as text, with enough digits to distinguish it from the next in f32; integers with all digits."""
    return str(value) if isinstance(value, int) else f"{value:.9g}"


def number(value: float) -> str:
    """A number in a table: 0, 1.5e-07, 12, 0.51."""
    if value == 0 or value != value or abs(value) == float("inf"):
        return f"{value:g}"
    if 0.01 <= abs(value) < 10000:
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
    return f"{value:.1e}"
