"""NumPy forms of derivatives without cancellation, overflow or inf * 0: the references of `opgraph.ops.backward`.

Each function takes the incoming gradient `d` and returns f'(x) d, for float arrays of one dtype, which the result has
too. At infinity it returns the limit of f' times d. Arguments of exponentials are rounded once: their error acts like
an error of x, which changes f' by x f''. In the far tail, the factors are multiplied in an order in which no
intermediate product underflows.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from opgraph.ops import reference_math

_where: Callable[..., np.ndarray] = np.where
#: A z at which d e^-z is 0 for every d.
_END = 1500.0
_NORMAL = 1 / math.sqrt(2 * math.pi)
_SLOPE, _CUBE = 2 * math.sqrt(2 / math.pi), 2 * math.sqrt(2 / math.pi) * 0.044715


def scaled(d: np.ndarray, g: np.ndarray | float, z: np.ndarray) -> np.ndarray:
    """d g exp(z) for z <= 0, also where exp(z) underflows and d is large."""
    quarter = np.exp(z / 4)
    near = z > np.log(np.finfo(z.dtype).tiny) / 2
    return _where(near, d * (g * np.exp(z)), (d * quarter * quarter * quarter) * (g * quarter))


def sigmoid(z: np.ndarray, d: np.ndarray) -> np.ndarray:
    """The derivative of 1 / (1 + exp(-z)): e / (1 + e)^2 with e = exp(-|z|)."""
    a = np.minimum(np.abs(z), _END)
    return scaled(d, 1 / np.square(1 + np.exp(-a)), -a)


def softplus(z: np.ndarray, d: np.ndarray) -> np.ndarray:
    """sigmoid(z) d, the derivative of log(1 + exp(z))."""
    a = np.minimum(np.abs(z), _END)
    q = 1 / (1 + np.exp(-a))
    return _where(z < 0, scaled(d, q, -a), d * q)


def gated(z: np.ndarray, m: np.ndarray, d: np.ndarray) -> np.ndarray:
    """The derivative of x sigmoid(z): s (1 + m (1 - s)) with s = sigmoid(z) and m = x dz/dx, which is finite."""
    a = np.minimum(np.abs(z), _END)
    e = np.exp(-a)
    q = 1 / (1 + e)
    return _where(z < 0, scaled(d, q * (1 + m * q), -a), d * (q * (1 + m * (e * q))))


def swish(x: np.ndarray, d: np.ndarray, alpha: float, factor: np.ndarray | None = None) -> np.ndarray:
    """The derivative of x sigmoid(alpha factor x); 1/2 where the factor is 0, at infinity too."""
    slope: np.ndarray = np.asarray(alpha, x.dtype) if factor is None else factor
    used = _where((slope == 0) | (alpha == 0), x.dtype.type(0), x)
    product = used * slope if factor is None else alpha * (used * slope)
    z = np.clip(product, -_END, _END)
    return gated(z, z, d)


def gelu_tanh(x: np.ndarray, d: np.ndarray) -> np.ndarray:
    """The derivative of x sigmoid(2u), 2u = 2 sqrt(2 / pi) (x + 0.044715 x^3)."""
    v = np.clip(x, -30, 30)
    square = np.square(v)
    return gated(v * (_SLOPE + _CUBE * square), v * (_SLOPE + 3 * _CUBE * square), d)


def gelu_erf(x: np.ndarray, d: np.ndarray) -> np.ndarray:
    """Phi(x) + x phi(x): exp(-t^2 / 2) (erfcx(t / sqrt 2) / 2 - t / sqrt(2 pi)) at -t, and 1 minus that at t."""
    t = np.minimum(np.abs(x), 54.0)
    h = 0.5 * reference_math.erfcx(t * math.sqrt(0.5)) - _NORMAL * t
    z = -0.5 * t * t
    return _where(x < 0, scaled(d, h, z), d * (1 - h * np.exp(z)))


def mish(x: np.ndarray, d: np.ndarray) -> np.ndarray:
    """T + x T', T = tanh(log(1 + exp(x))), in terms of e = exp(-|x|); the formula of kernels/math/derivatives.h."""
    z = np.clip(x, -_END, _END)
    e = np.exp(-np.abs(z))
    below = e * (e + 2) + 2
    left = ((e + 2) * below + 4 * z * (e + 1)) / np.square(below)
    above = 2 * e * (e + 1) + 1
    right = ((2 * e + 1) * above + 4 * z * np.square(e) * (e + 1)) / np.square(above)
    return _where(x < 0, scaled(d, left, -np.abs(z)), d * right)


def elu(x: np.ndarray, d: np.ndarray, alpha: float) -> np.ndarray:
    """1 for x > 0, alpha exp(x) otherwise."""
    return _where(x > 0, d, scaled(d, alpha, np.clip(x, -_END, 0)))


def hard_sigmoid(x: np.ndarray, d: np.ndarray, alpha: float, beta: float) -> np.ndarray:
    """alpha where 0 < alpha x + beta < 1; both comparisons include the rounding error of the sum."""
    z, low = reference_math.product(alpha, x)
    below = beta - 1
    rest = (beta - (below + 1)) + low
    flat = ((z + beta) + low <= 0) | ((z + below) + rest >= 0)
    return _where(flat, x.dtype.type(0), alpha * d)


def half_quotient(d: np.ndarray, y: np.ndarray) -> np.ndarray:
    """d / (2y), also where 2y overflows."""
    large = np.abs(y) > np.finfo(y.dtype).max / 4
    return np.asarray(_where(large, 0.5 * d, d) / _where(large, y, 2 * y))


def sigmoid_of_output(y: np.ndarray, d: np.ndarray, alpha: float) -> np.ndarray:
    """alpha d y (1 - y), with the smaller factor first, so that no intermediate product overflows."""
    return np.asarray((d * _where(y > 0.5, 1 - y, y)) * (alpha * _where(y > 0.5, y, 1 - y)))


def tanh_of_output(y: np.ndarray, d: np.ndarray) -> np.ndarray:
    """d (1 - y^2)"""
    a = np.abs(y)
    return np.asarray((d * (1 - a)) * (1 + a))


def power(x: np.ndarray, d: np.ndarray, exponent: np.ndarray | float, order: int) -> np.ndarray:
    """The derivative of x^b of order `order`, times d: b (b - 1) ... (b - order + 1) x^(b - order) d.

    The result is 0 where b (b - 1) ... is 0, at x = 0 too. The power of a finite x other than 0 is kept from becoming 0
    or infinite by rounding, so 0 and infinity times it are 0 and infinity.
    """
    b = np.asarray(exponent, x.dtype)
    coefficient = math.prod((b - k for k in range(1, order)), start=b)
    y = b - order
    rest = (b - (y + order)) + (((y + order) - y) - order)
    size, odd = np.abs(x), np.isfinite(b) & (np.abs(np.fmod(b, 2)) == (order + 1) % 2)  # y is rounded, b is not
    sign = coefficient * _where(np.signbit(x) & odd, -1, 1).astype(x.dtype)
    sign = _where((x < 0) & np.isfinite(x) & (b != np.trunc(b)), np.nan, sign).astype(x.dtype)
    moved = _where((size > 0) & np.isfinite(size) & np.isfinite(b), rest * np.log(size), 0)
    part = np.power(size, y / 4) * np.exp(moved / 4)
    largest = np.exp(0.74 * np.log(np.finfo(x.dtype).max))
    regular = (size > 0) & np.isfinite(size) & np.isfinite(b)
    part = _where(regular, _where(np.equal(d, 0), 1, np.clip(part, 1 / largest, largest)), part)
    product = np.abs(d * sign)  # formed first where it is a normal number: neither d 2^n nor c 2^n need be one
    first = (product >= np.finfo(x.dtype).tiny) & np.isfinite(product)
    value = _where(first, d * sign, d) * part * part * part * _where(first, part, sign * part)
    # Far from the ends of the range: the formula as it is written.
    plain = (part > largest ** (-1 / 4)) & (part < largest ** (1 / 4)) & (product > 1 / largest) & (product < largest)
    value = _where(plain, d * (sign * (np.power(size, y) * np.exp(moved))), value)
    return _where(np.equal(coefficient, 0), 0, value).astype(x.dtype)
