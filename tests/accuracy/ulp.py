"""Distances from the truth, in units in the last place of a dtype."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np


def spacing(magnitude: np.ndarray, dtype: np.dtype[Any]) -> np.ndarray:
    """One ulp of `dtype` at a float64 magnitude: 2^(exponent - mantissa bits).

    Below the normal numbers it is that of the subnormals, above the finite ones that of the largest binade.
    """
    info = ml_dtypes.finfo(dtype)
    with np.errstate(invalid="ignore"):
        exponent = np.frexp(np.where(np.isfinite(magnitude), magnitude, 1.0))[1] - 1
    exponent = np.where(magnitude == 0, info.minexp, exponent)
    return np.ldexp(1.0, np.clip(exponent, info.minexp, info.maxexp - 1) - info.nmant)


def errors(
    got: np.ndarray,
    truth: np.ndarray,
    low: np.ndarray | float = 0.0,
    scale: Any = 0.0,
    factor: np.ndarray | None = None,
) -> np.ndarray:
    """The distance of results from the truth, in ulp of their dtype at the truth (or at `scale`, where that is larger).

    Args:
        got: results in a float dtype.
        truth, low: the truth in float64, as an unevaluated sum.
        scale: a magnitude to measure against where it exceeds that of the truth.
        factor: the d of a truth f'(x) d whose f' was computed in f32. Then f'(x) is measured, and the smallest f32
            number times d is allowed; in f32 so is the rounding of the product, and the ulp is that of f'.

    The distance is infinite where exactly one of the two is NaN, where an infinite truth is missed, where a zero has
    the wrong sign (except within `scale`), and where the truth is zero and the result is not. An infinite result for a
    finite truth counts as the first power of two that the dtype does not hold: rounding to infinity is right from half
    an ulp below.
    """
    info = ml_dtypes.finfo(got.dtype)
    with np.errstate(all="ignore"):
        wide = got.astype(np.float64)
        limit = np.ldexp(1.0, info.maxexp)  # infinite for f64: no finite truth reaches it
        past = np.isinf(wide) & np.isfinite(truth)
        reached = np.where(past & (np.abs(truth) >= limit), truth, np.where(past, np.copysign(limit, wide), wide))
        distance, magnitude = np.abs((reached - truth) - low), np.maximum(np.abs(truth), scale)
        unit = spacing(magnitude, got.dtype)
        if factor is not None:
            by = np.where(np.isfinite(factor) & (factor != 0), np.abs(factor), 1.0)
            aside = np.ldexp(by, -149)
            if got.dtype == np.float32:
                aside = np.where(by == 1, 0.0, aside + spacing(np.abs(truth), got.dtype) / 2)
                unit = np.maximum(spacing(magnitude / by, got.dtype) * by, unit / 2)
            distance = np.maximum(distance - aside, 0.0)
        distance = distance / unit
    wrong = (np.isnan(wide) != np.isnan(truth)) | (np.isinf(truth) & (wide != truth)) | ((truth == 0) & (wide != 0))
    zero_sign = (wide == 0) & (np.signbit(wide) != np.signbit(truth)) & (np.abs(truth) >= scale)
    distance = np.where(np.isnan(truth) | np.isinf(truth), 0.0, distance)
    return np.where(wrong | zero_sign, np.inf, distance)


def assert_as_accurate_as(
    got: np.ndarray, peer: np.ndarray, exact: np.ndarray, slack: float = 2.0, floor: float = 0.5, label: str = ""
) -> None:
    """Checks the slack rule: errors are at most `slack` times those of a peer in the same dtype.

    Both are measured in ulp at the truth, over the elements where the peer and the truth are finite; the worst element
    and the 99th percentile must both hold. `floor` is an error that is always allowed: half an ulp for one rounding,
    more where the bound of the last op is larger.

    Raises:
        AssertionError: with the worst element.
    """
    compared = np.isfinite(exact) & np.isfinite(peer.astype(np.float64))
    if not compared.any():
        return
    exact = exact[compared]
    ours, theirs = (_distance(a[compared], exact) for a in (got, peer))
    for name, mine, other in (
        ("worst", ours.max(), theirs.max()),
        ("99th percentile", *(np.quantile(e, 0.99) for e in (ours, theirs))),
    ):
        if not mine <= max(slack * other, floor):
            at = int(np.argmax(ours))
            raise AssertionError(
                f"{label}: {name} {mine:.3g} ulp, peer {other:.3g} ulp, slack {slack}; "
                f"element {at}: got {got[compared][at]!r}, peer {peer[compared][at]!r}, exact {exact[at]!r}"
            )


def _distance(values: np.ndarray, exact: np.ndarray) -> np.ndarray:
    """As `errors`, except that zeros of both signs are equal: the sign of a sum that cancels to zero is arbitrary."""
    signed = np.where(values == 0, np.copysign(np.zeros((), values.dtype), exact.astype(values.dtype)), values)
    ulp = spacing(exact, values.dtype)
    return np.where(exact == 0, np.abs(values.astype(np.float64)) / ulp, errors(signed, exact))
