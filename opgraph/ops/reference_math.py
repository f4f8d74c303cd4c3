"""NumPy forms without cancellation or overflow, for the references that the tests take as the truth.

All take float arrays of one dtype and return arrays of that dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from opgraph.errors import Unimplemented

#: np.where with its return type, which the stub lacks.
where: Callable[..., np.ndarray] = np.where


def sum_over(values: Any, axes: Iterable[int], *, keep: bool = False, dtype: Any = None) -> Any:
    """The sum over axes, in pairs. NumPy adds in pairs along an axis that is innermost in memory. Along others it adds
    one element after the other, with an error that grows with their number instead of its logarithm. Axes are taken in
    memory order, so that an array and a view of it with other axes in front give the same bits.

    Args:
        values: an array of NumPy, or of another library, which then sums in its own way.
        keep: the axes stay, with size 1.
    """
    over = tuple(axes)
    if isinstance(values, np.generic) or (isinstance(values, np.ndarray) and not (over and values.ndim)):
        return np.sum(values, axis=over if values.ndim else None, keepdims=keep, dtype=dtype)
    if not isinstance(values, np.ndarray):
        return values.sum(axis=over, keepdims=keep)
    over = tuple(sorted((axis % values.ndim for axis in over), key=lambda axis: (-abs(values.strides[axis]), axis)))
    rest = [axis for axis in range(values.ndim) if axis not in over]
    count = math.prod(values.shape[axis] for axis in over)
    turned = np.ascontiguousarray(values.transpose(*rest, *over))
    total = turned.reshape(*turned.shape[: len(rest)], count).sum(axis=-1, dtype=dtype)
    kept = tuple(1 if axis in over else size for axis, size in enumerate(values.shape))
    return np.reshape(total, kept) if keep else total


def product(a: np.ndarray | float, x: np.ndarray) -> tuple[np.ndarray, np.ndarray | float]:
    """a x and, in float64, its rounding error, which in an exponent of 700 causes an error of 400 ulp."""
    z: np.ndarray = a * x
    if z.dtype != np.float64:
        return z, 0.0
    low = _product(np.asarray(a, np.float64), x)[1]
    return z, where((np.abs(z) < 2000) & np.isfinite(low), low, 0.0)


def sigmoid(z: np.ndarray, low: np.ndarray | float = 0.0) -> np.ndarray:
    """1 / (1 + exp(-z - low)), a tiny `low`; the negative tail keeps its precision down to the smallest subnormal."""
    e = np.exp(-np.abs(z))
    y: np.ndarray = where(z >= 0, 1, e) / (1 + e) * (1 + low * where(z >= 0, e, 1) / (1 + e))
    return y


def times_exp(x: np.ndarray, z: np.ndarray) -> np.ndarray:
    """x exp(z), also where exp(z) alone is subnormal: the factor is applied in two halves there."""
    half = np.exp(z / 2)
    return where(z < np.log(np.finfo(z.dtype).tiny), (x * half) * half, x * np.exp(z))


def times_sigmoid(x: np.ndarray, z: np.ndarray, low: np.ndarray | float = 0.0) -> np.ndarray:
    """x sigmoid(z + low), a tiny `low`.

    An infinite x times sigmoid(-inf) = 0 gives a zero with the sign of x, the limit: swish(-inf) = -0.
    """
    e = np.exp(-np.abs(z))
    y = where(z >= 0, x, times_exp(x, -np.abs(z))) / (1 + e) * (1 + low * where(z >= 0, e, 1) / (1 + e))
    return where(np.isinf(x) & (z == -np.inf), np.copysign(np.zeros((), y.dtype), x), y)


def swish(x: np.ndarray, alpha: float, factor: np.ndarray | None = None) -> np.ndarray:
    """x sigmoid(alpha factor x); x / 2 where the factor is 0, at infinity too."""
    if factor is None:
        return times_sigmoid(x, *product(alpha, x if alpha else np.zeros_like(x)))
    used = where(np.equal(factor, 0) | (alpha == 0), x.dtype.type(0), x)
    inner, inner_low = product(factor, used)
    z, low = product(alpha, inner)
    return times_sigmoid(x, z, low + alpha * inner_low)


def softplus(z: np.ndarray, low: np.ndarray | float = 0.0) -> np.ndarray:
    """log(1 + exp(z + low)), a tiny `low`."""
    y: np.ndarray = np.maximum(z, 0) + np.log1p(np.exp(-np.abs(z)))
    return y if isinstance(low, float) else y + low * sigmoid(z)


def mish(x: np.ndarray) -> np.ndarray:
    """x tanh(softplus(x)) = x n / (n + 2) with n = e (e + 2), e = exp(x); by exp(-x) for positive x."""
    e = np.exp(-np.abs(x))
    y = where(x >= 0, x * ((1 + 2 * e) / (1 + 2 * e * (1 + e))), times_exp(x, -np.abs(x)) * (e + 2) / (e * (e + 2) + 2))
    return where(x == -np.inf, -np.zeros((), y.dtype), y)


def gelu_erf(x: np.ndarray) -> np.ndarray:
    """x Phi(x) = x/2 erfc(-x / sqrt 2); left of -1 as x/2 erfcx(-x / sqrt 2) exp(-x^2 / 2).

    There erfc would multiply the rounding error of its argument by x^2, and so would the exponential. Therefore x^2 is
    carried in two parts.
    """
    wide = np.maximum(np.asarray(x, np.float64), -60.0)  # the result is -0 from -39 down
    tail = np.minimum(wide, -1.0)
    square, rest = _product(tail, tail)
    left = times_exp(0.5 * wide * erfcx(tail * -math.sqrt(0.5)) * (1 - 0.5 * rest), -0.5 * square)
    y = where(wide < -1, left, 0.5 * wide * erfc(np.maximum(wide, -1.0) * -math.sqrt(0.5)))
    return where(np.isnan(x), x, y).astype(x.dtype)


# 2 sqrt(2 / pi) and 0.044715 times that, each as a sum of two doubles (mpmath).
_SLOPE, _SLOPE_REST = float.fromhex("0x1.9884533d43651p+0"), float.fromhex("-0x1.cbc0d30ebfd15p-54")
_CUBE, _CUBE_REST = float.fromhex("0x1.2444f2a4d8b4bp-4"), float.fromhex("-0x1.6c843a29d1c7p-61")


def gelu_tanh(x: np.ndarray) -> np.ndarray:
    """x/2 (1 + tanh u) = x sigmoid(2u) with u = sqrt(2 / pi) (x + 0.044715 x^3).

    2u reaches -700 before the result vanishes, so it is carried in two parts.
    """
    wide = np.maximum(np.asarray(x, np.float64), -25.0)  # the result is -0 from -22 down
    v = np.minimum(wide, 12.0)
    square, square_rest = _product(v, v)
    cube, cube_rest = _product(np.asarray(_CUBE), square)
    slope = _SLOPE + cube
    back = slope - _SLOPE
    rest = cube_rest + _CUBE * square_rest + _CUBE_REST * square + _SLOPE_REST
    slope_rest = ((_SLOPE - (slope - back)) + (cube - back)) + rest
    z, z_rest = _product(v, slope)
    y = times_sigmoid(wide, z) * (1 + (z_rest + v * slope_rest) * sigmoid(-z))
    return where(np.isnan(x), x, y).astype(x.dtype)


def _product(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """a b as an unevaluated sum (Dekker 1971); no factor beyond 2^500."""
    product = a * b
    a_high, a_low = _halves(a)
    b_high, b_low = _halves(b)
    return product, ((a_high * b_high - product) + a_high * b_low + a_low * b_high) + a_low * b_low


def _halves(a: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    scaled = 134217729.0 * a
    high = scaled - (scaled - a)
    return high, a - high


def erf(x: np.ndarray) -> np.ndarray:
    """The error function, by SciPy or the C library."""
    return _special("erf", math.erf)(x)


def erfc(x: np.ndarray) -> np.ndarray:
    """1 - erf(x); right of 1 as exp(-x^2) erfcx(x), the square in two parts."""
    wide = np.minimum(np.asarray(x, np.float64), 30.0)
    tail = np.maximum(wide, 1.0)
    square, rest = _product(tail, tail)
    right = times_exp(erfcx(tail) * (1 - rest), -square)
    return where(wide > 1, right, _special("erfc", math.erfc)(wide)).astype(x.dtype)


def erfcx(x: np.ndarray) -> np.ndarray:
    """exp(x^2) erfc(x); left of -1 as 2 exp(x^2) - erfcx(-x), the square in two parts."""
    wide = np.asarray(x, np.float64)
    general = _special(
        "erfcx", lambda v: math.exp(v * v) * math.erfc(v) if abs(v) < 25 else 1 / (v * math.sqrt(math.pi))
    )
    tail = np.clip(wide, -30.0, -1.0)
    square, rest = _product(tail, tail)
    left = 2 * np.exp(square) * (1 + rest) - general(-tail)
    return where(wide < -1, left, general(np.maximum(wide, -1.0))).astype(x.dtype)


def log_ndtr(x: np.ndarray) -> np.ndarray:
    """The logarithm of the normal distribution function; right of 1/2 from the tail, which is that of GELU."""
    wide = np.asarray(x, np.float64)
    tail = np.clip(wide, 0.5, 60.0)
    right = np.log1p(gelu_erf(-tail) / tail)
    return where(wide > 0.5, right, _special("log_ndtr", None)(wide)).astype(x.dtype)


def erfinv(y: np.ndarray) -> np.ndarray:
    """The x with erf(x) = y, with the sign of y."""
    x: np.ndarray = np.copysign(_special("erfinv", None)(y), y)
    return x


def ndtri(p: np.ndarray) -> np.ndarray:
    """The x at which the normal distribution function is p."""
    return _special("ndtri", None)(p)


def i0(x: np.ndarray) -> np.ndarray:
    """The modified Bessel function of the first kind of order 0; inf at both infinities."""
    return where(np.isinf(x), np.abs(x), _special("i0", None)(x))


def i0e(x: np.ndarray) -> np.ndarray:
    """exp(-|x|) i0(x)."""
    return _special("i0e", None)(x)


def i1(x: np.ndarray) -> np.ndarray:
    """The modified Bessel function of the first kind of order 1, an odd function: infinite at both infinities."""
    wide = np.asarray(x, np.float64)
    y = where(np.abs(wide) < 1e-8, 0.5 * wide, np.copysign(_special("i1", None)(wide), wide))
    return where(np.isinf(wide), wide, y).astype(x.dtype)


def i1e(x: np.ndarray) -> np.ndarray:
    """exp(-|x|) i1(x)."""
    wide = np.asarray(x, np.float64)
    general = np.copysign(_special("i1e", None)(wide), wide)
    return where(np.abs(wide) < 1e-17, 0.5 * wide, general).astype(x.dtype)


def i0e_slope(x: np.ndarray) -> np.ndarray:
    """i1e(x) - sign(x) i0e(x), by 1F1(3/2, 2, -2 |x|) = i0e - |i1e|; above 50 by its asymptotic series.

    Source: Abramowitz and Stegun 13.6.3 and 13.5.1.
    """
    wide = np.asarray(x, np.float64)
    size = np.abs(wide)
    near = _special("hyp1f1", None)(1.5, 2.0, -2 * np.minimum(size, 50.0))
    r = 0.5 / np.maximum(size, 50.0)
    term = series = np.ones_like(r)
    for n in range(15):
        term = term * ((1.5 + n) * (0.5 + n) / (n + 1)) * r
        series = series + term
    gap = where(size < 50, near, r * np.sqrt(r) * series / math.sqrt(math.pi))
    return where(wide == 0, wide, np.copysign(gap, -wide)).astype(x.dtype)


def lgamma(x: np.ndarray) -> np.ndarray:
    """log |gamma(x)|; inf at 0, -1, -2 ... and at both infinities.  The zeros at 1 and 2 keep their relative precision.

    Source: around 1, log gamma(1 + e) = -log1p(e) + e (1 - euler) + sum (-1)^k (zeta(k) - 1) e^k / k (Abramowitz and
    Stegun 6.1.33); around 2 without the logarithm.
    """
    wide = np.asarray(x, np.float64)
    general = _special("gammaln", None)(wide)
    zetac = _special("zetac", None)
    for centre in (1.0, 2.0):
        near = np.abs(wide - centre) <= 0.5
        e = where(near, wide - centre, 0.0)
        series = sum((-e) ** k * (zetac(float(k)) / k) for k in range(34, 1, -1)) + e * (1 - np.euler_gamma)
        general = where(near, series - np.log1p(e) if centre == 1.0 else series, general)
    # gamma(x) is 1 / x to the last bit near 0, where SciPy returns inf for subnormal x.
    general = where(np.abs(wide) < 1e-17, -np.log(np.abs(wide)), where(np.isinf(wide), np.inf, general))
    return general.astype(x.dtype)


def digamma(x: np.ndarray) -> np.ndarray:
    """The derivative of log gamma; NaN at -1, -2 ..., infinite of the opposite sign at 0.0 and -0.0."""
    return _special("digamma", None)(np.asarray(x, np.float64)).astype(x.dtype)


def trigamma(x: np.ndarray) -> np.ndarray:
    """The derivative of digamma; inf at 0, -1, -2 ...

    Left of 1/2 by reflection: pi^2 / sin^2(pi x) - trigamma(1 - x).
    """
    wide = np.asarray(x, np.float64)
    left = wide < 0.5
    direct = _special("zeta", None)(2.0, where(left, 1 - wide, wide))
    sine = np.sin(np.pi * (wide - np.round(wide)))
    y = where(left, (np.pi / sine) ** 2 - direct, direct)
    return where(wide == -np.inf, np.nan, y).astype(x.dtype)


def _special(name: str, fallback: Callable[[float], float] | None) -> Callable[..., np.ndarray]:
    try:
        import scipy.special  # 40 ms, and only these few functions need it
    except ImportError:
        if fallback is None:
            raise Unimplemented(
                f"the reference of {name} needs SciPy", where="opgraph reference", fix="pip install scipy"
            ) from None
        return lambda x: np.asarray(np.vectorize(fallback, otypes=[np.float64])(x)).astype(np.asarray(x).dtype)
    return getattr(scipy.special, name)  # type: ignore[no-any-return]
