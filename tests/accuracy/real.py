"""The real functions behind the float ops, in mpmath: an independent check of the references, which are the truth of
all other tests. Arguments are exact; results are mpf or Fraction, complex where the function is not real (NaN)."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import mpmath as mp
import numpy as np

from opgraph.ir import opdef
from opgraph.ops.families import LAYOUT_ATTRS


def _fraction(x: Any) -> Fraction:
    sign, mantissa, exponent, _ = x._mpf_
    return Fraction((-1) ** sign * int(mantissa)) * Fraction(2) ** int(exponent)


def _gelu(x: Any, mode: str) -> Any:
    if abs(x) > 60:
        return x if x > 0 else mp.mpf(0)
    if mode == "gelu_erf":
        return x / 2 * mp.erfc(-x / mp.sqrt(2))
    return x / (1 + mp.exp(-2 * mp.sqrt(2 / mp.pi) * (x + mp.mpf("0.044715") * x**3)))


def _mod(a: Any, b: Any, fmod: int) -> Any:
    x, y = _fraction(a), _fraction(b)
    return (abs(x) % abs(y)) * (-1 if x < 0 else 1) if fmod else x % y


def _clamp(x: Any, low: Any = None, high: Any = None, *, min: Any = None, max: Any = None) -> Any:
    lower, upper = min if low is None else low, max if high is None else high
    y = x if lower is None or x >= lower else lower
    return y if upper is None or y <= upper else upper


def _pow(x: Any, exponent: Any = None, *, beta: Any = None) -> Any:
    y = beta if exponent is None else exponent
    if abs(x) == 1 or x == 0 or y == 0 or abs(y * mp.log(abs(x))) < 800:
        return mp.power(x, y)
    if x < 0 and y != mp.floor(y):
        return mp.mpc(0, 1)
    size = mp.exp(mp.sign(y * mp.log(abs(x))) * 800)  # 0 or infinity in every dtype
    return -size if x < 0 and mp.fmod(y, 2) != 0 else size


def _shrink(x: Any, bias: Any, lambd: Any) -> Any:
    return x + bias if x < -lambd else x - bias if x > lambd else mp.mpf(0)


def _lgamma(x: Any) -> Any:
    if x < 0:  # by reflection, because loggamma of a negative number is complex
        return mp.log(mp.pi / abs(x * mp.sinpi(x))) - mp.loggamma(-x)
    return mp.loggamma(x)


def _digamma(x: Any) -> Any:
    return mp.digamma(1 - x) - mp.pi * mp.cospi(x) / mp.sinpi(x) if x < 0 else mp.digamma(x)


def _trigamma(x: Any) -> Any:
    return (mp.pi / mp.sinpi(x)) ** 2 - mp.psi(1, 1 - x) if x < 0 else mp.psi(1, x)


def _tail(t: Any) -> Any:
    """log(erfc(t)) for t > 0, also where erfc underflows in any precision: t^2 and the logarithm of erfcx(t)."""
    return mp.log(mp.erfc(t)) if t < 1000 else -t * t - mp.log(t * mp.sqrt(mp.pi)) - 1 / (2 * t * t)


def _erfcx(x: Any) -> Any:
    if x < -60:
        return mp.exp(3600)
    return mp.exp(x * x) * mp.erfc(x) if x < 1000 else (1 - 1 / (2 * x * x) + 3 / (4 * x**4)) / (x * mp.sqrt(mp.pi))


def _log_ndtr(x: Any) -> Any:
    return _tail(-x / mp.sqrt(2)) - mp.log(2) if x < 0 else mp.log1p(-mp.erfc(min(x, mp.mpf(100)) / mp.sqrt(2)) / 2)


def _quantile(p: Any) -> Any:
    """The t >= 0 with erfc(t) = p <= 1, by Newton's method on the logarithm of erfc, which is concave."""
    if p == 1:
        return mp.mpf(0)
    t, target = mp.sqrt(max(-mp.log(p) - 1, mp.mpf("0.01"))), mp.log(p)
    for _ in range(60):
        step = (mp.log(mp.erfc(t)) - target) * mp.erfc(t) * mp.exp(t * t) * mp.sqrt(mp.pi) / 2
        t += step
        if abs(step) < abs(t) * mp.mpf(10) ** -40:
            break
    return t


def _erfinv(y: Any) -> Any:
    if abs(y) >= 1:
        return mp.mpc(0, 1) if abs(y) > 1 else mp.sign(y) * mp.inf
    # Series next to 0: 50 digits of 1 - y hold few of y.
    return y * mp.sqrt(mp.pi) / 2 if abs(y) < mp.mpf(10) ** -17 else mp.sign(y) * _quantile(1 - abs(y))


def _ndtri(p: Any) -> Any:
    if not 0 < p < 1:
        return mp.mpc(0, 1) if p != 0 and p != 1 else (2 * p - 1) * mp.inf
    return mp.sqrt(2) * mp.sign(p - mp.mpf("0.5")) * _quantile(2 * min(p, 1 - p))


def _bessel_series(order: int, a: Any) -> list[Any]:
    """The terms of the asymptotic series (Abramowitz and Stegun 9.7.1)."""
    terms = [mp.fprod((2 * k - 1) ** 2 - 4 * order**2 for k in range(1, n + 1)) for n in range(8)]
    return [t / (mp.factorial(n) * (8 * a) ** n) / mp.sqrt(2 * mp.pi * a) for n, t in enumerate(terms)]


def _scaled_bessel(order: int, x: Any) -> Any:
    a = abs(x)
    y = mp.exp(-a) * mp.besseli(order, a) if a < 1000 else mp.fsum(_bessel_series(order, a))
    return -y if order and x < 0 else y


def _i0e_slope(x: Any) -> Any:
    a = abs(x)
    if a < 1000:
        y = _scaled_bessel(1, a) - _scaled_bessel(0, a)
    else:  # the first terms cancel
        y = mp.fsum(_bessel_series(1, a)[1:]) - mp.fsum(_bessel_series(0, a)[1:])
    return mp.sign(x) * y


def _expm1(x: Any) -> Any:
    return mp.expm1(x) if x < 800 else mp.exp(800)


def _exp(x: Any) -> Any:
    return mp.exp(min(x, mp.mpf(800)))


def _sigmoid(z: Any) -> Any:
    return 1 / (1 + mp.exp(max(min(-z, mp.mpf(3000)), mp.mpf(-3000))))


def _bounded(x: Any, limit: int = 3000) -> Any:
    return max(min(x, mp.mpf(limit)), mp.mpf(-limit))


def _elu_backward(x: Any, d: Any, alpha: Any, use_dst: bool) -> Any:
    return d if x > 0 else d * (x + alpha) if use_dst else d * alpha * mp.exp(_bounded(x))


def _gated_backward(z: Any, m: Any, d: Any) -> Any:
    return d * _sigmoid(z) * (1 + m * _sigmoid(-z))


def _gelu_backward(x: Any, d: Any, mode: str) -> Any:
    x = _bounded(x, 100)
    if mode == "gelu_erf":
        return d * (mp.erfc(-x / mp.sqrt(2)) / 2 + x * mp.npdf(x))
    a, b = 2 * mp.sqrt(2 / mp.pi), 2 * mp.sqrt(2 / mp.pi) * mp.mpf("0.044715")
    return _gated_backward(a * x + b * x**3, a * x + 3 * b * x**3, d)


def _mish_backward(x: Any, d: Any) -> Any:
    x = _bounded(x)
    t = mp.tanh(mp.log1p(mp.exp(x)))
    return d * (t + x * (1 - t) * (1 + t) * _sigmoid(x))


def _swish_backward(x: Any, d: Any, factor: Any = 1, *, alpha: Any) -> Any:
    z = _bounded(alpha * factor * x)
    return _gated_backward(z, z, d)


def _pow_backward(x: Any, d: Any, exponent: Any = None, *, order: int, beta: Any = None) -> Any:
    b = beta if exponent is None else exponent
    coefficient = mp.fprod(b - k for k in range(order))
    if coefficient == 0:
        return mp.mpf(0)
    if x < 0:
        if b != mp.floor(b):
            return mp.mpc(0, 1)
        d = d if (int(b) - order) % 2 == 0 else -d  # 50 digits may round b - order
    # A larger range than `_pow` has, as d may be small.
    y, size = b - order, abs(x)
    if x == 0 or abs(y * mp.log(size)) < 5000:
        return d * coefficient * mp.power(size, y)
    return d * coefficient * _pow(size, y) ** 7


def _hard_sigmoid_backward(x: Any, d: Any, alpha: Any, beta: Any) -> Any:
    inner = _fraction(alpha) * _fraction(x) + _fraction(beta)  # 50 digits would round numbers next to 1
    return alpha * d if 0 < inner < 1 else mp.mpf(0)


def _sqrt_backward(x: Any, d: Any, use_dst: bool) -> Any:
    return mp.mpc(0, 1) if x < 0 and not use_dst else d / (2 * (x if use_dst else mp.sqrt(x)))


def _hard_swish_backward(x: Any, d: Any) -> Any:
    return mp.mpf(0) if x <= -3 else d if x >= 3 else d * (2 * x + 3) / 6


REAL: dict[str, Callable[..., Any]] = {
    "Abs": abs,
    "AbsBackward": lambda x, d: d * mp.sign(x),
    "Acos": mp.acos,
    "Acosh": lambda x: mp.acosh(x) if x >= 1 else mp.mpc(0, 1),
    "Add": lambda a, b: a + b,
    "Asin": mp.asin,
    "Asinh": mp.asinh,
    "Atan": mp.atan,
    "Atanh": mp.atanh,
    "BiasAdd": lambda a, b: a + b,
    "Ceil": mp.ceil,
    "Celu": lambda x, alpha: x if x > 0 else alpha * _expm1(x / alpha),
    "Clamp": _clamp,
    "ClampBackward": lambda x, d, min, max, use_dst: d if min < x < max else mp.mpf(0),
    "Cos": mp.cos,
    "Cosh": lambda x: mp.cosh(min(abs(x), mp.mpf(800))),
    "Digamma": _digamma,
    "Divide": lambda a, b: a / b,
    "Elu": lambda x, alpha: x if x > 0 else alpha * _expm1(x),
    "EluBackward": _elu_backward,
    "Erf": mp.erf,
    "Erfc": lambda x: mp.erfc(_bounded(x, 60)),
    "Erfcx": _erfcx,
    "Erfinv": _erfinv,
    "Exp": _exp,
    "Expm1": _expm1,
    "Floor": mp.floor,
    "GELU": _gelu,
    "GELUBackward": _gelu_backward,
    "HardSigmoidBackward": _hard_sigmoid_backward,
    "HardSwishBackward": _hard_swish_backward,
    "HardSigmoid": lambda x, alpha, beta: max(mp.mpf(0), min(mp.mpf(1), alpha * x + beta)),
    "HardSwish": lambda x: x * min(max(x + 3, 0), 6) / 6,
    "I0": lambda x: mp.besseli(0, _bounded(x, 800)),
    "I0e": lambda x: _scaled_bessel(0, x),
    "I0eSlope": _i0e_slope,
    "I1": lambda x: mp.besseli(1, _bounded(x, 800)),
    "I1e": lambda x: _scaled_bessel(1, x),
    "Identity": lambda x: x,
    "Reorder": lambda x: x,
    "StopGradient": lambda x: x,
    "LeakyReLU": lambda x, alpha: alpha * x if x < 0 else x,
    "Lgamma": _lgamma,
    "Log": mp.log,
    "Log1p": mp.log1p,
    "LogNdtr": _log_ndtr,
    "Maximum": max,
    "Minimum": min,
    "Mish": lambda x: x * mp.tanh(mp.log1p(_exp(x))) if x < 800 else x,
    "MishBackward": _mish_backward,
    "Mod": _mod,
    "Multiply": lambda a, b: a * b,
    "Ndtri": _ndtri,
    "Neg": lambda x: -x,
    "PReLU": lambda x, slope: slope * x if x < 0 else x,
    "Pow": _pow,
    "PowBackward": _pow_backward,
    "ReLUBackward": lambda x, d, use_dst: mp.mpf(0) if x <= 0 else d,
    "ReLU": lambda x: max(x, mp.mpf(0)),
    "Reciprocal": lambda x: 1 / x,
    "Round": mp.nint,
    "Rsqrt": lambda x: 1 / mp.sqrt(x),
    "Select": lambda c, a, b: a if c else b,
    "Selu": lambda x, alpha, gamma: gamma * (x if x > 0 else alpha * _expm1(x)),
    "Shrink": _shrink,
    "Sigmoid": lambda x, alpha: 1 / (1 + mp.exp(max(min(-alpha * x, mp.mpf(800)), mp.mpf(-800)))),
    "SigmoidBackward": lambda x, d, alpha, use_dst: (
        alpha * d * (x * (1 - x) if use_dst else _sigmoid(alpha * x) * _sigmoid(-alpha * x))
    ),
    "Sign": mp.sign,
    "Sin": mp.sin,
    "Sinh": lambda x: mp.sinh(max(min(x, mp.mpf(800)), mp.mpf(-800))),
    "SoftPlus": lambda x, beta: (mp.log1p(mp.exp(beta * x)) if beta * x < 800 else beta * x) / beta,
    "SoftPlusBackward": lambda x, d, beta: d * _sigmoid(beta * x),
    "Softsign": lambda x: x / (1 + abs(x)),
    "Sqrt": mp.sqrt,
    "SqrtBackward": _sqrt_backward,
    "Square": lambda x: x * x,
    "SquaredDifference": lambda a, b: (a - b) ** 2,
    "Subtract": lambda a, b: a - b,
    "Swish": lambda x, factor=1, *, alpha: x / (1 + mp.exp(max(min(-alpha * factor * x, mp.mpf(2000)), mp.mpf(-800)))),
    "SwishBackward": _swish_backward,
    "Tan": mp.tan,
    "Tanh": lambda x: mp.tanh(max(min(x, mp.mpf(800)), mp.mpf(-800))),
    "TanhBackward": lambda x, d, use_dst: d * (1 - x * x if use_dst else 1 / mp.cosh(_bounded(x)) ** 2),
    "ThresholdedRelu": lambda x, alpha: x if x > alpha else mp.mpf(0),
    "Trigamma": _trigamma,
    "Trunc": lambda x: mp.floor(x) if x >= 0 else mp.ceil(x),
}

#: Functions whose zeros are at ordinary arguments: next to one, the last bit of the argument changes the result by more
#: than the result. For them an ulp is one of max(|f|, |x f'(x)|). Kind -> f'.
SLOPE: dict[str, Callable[[Any], Any]] = {
    "Lgamma": _digamma,
    "Digamma": _trigamma,
}


def truth(kind: str, columns: list[np.ndarray], attrs: dict[str, Any]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The real function at float64 arguments, rounded to float64, the remainder, and |x f'(x)| where it is needed.

    It is needed for the kinds in SLOPE, and for derivatives: there it is the sum over all arguments except the incoming
    gradient, by differences. NaN where the function is not real. The third is -1 where mpmath has no answer (poles).
    """
    function, slope = REAL[kind], SLOPE.get(kind)
    moved = moved_inputs(kind)
    exact = {k: mp.mpf(v) if isinstance(v, float) else v for k, v in attrs.items() if k not in LAYOUT_ATTRS}
    high, low, scale = (np.zeros(len(columns[0])) for _ in range(3))
    with mp.workdps(50):
        for i, row in enumerate(zip(*columns)):
            args = [bool(a) if isinstance(a, np.bool_) else mp.mpf(float(a)) for a in row]
            try:
                value = function(*args, **exact)
            except (ZeroDivisionError, ValueError):
                high[i], scale[i] = np.nan, -1
                continue
            if isinstance(value, mp.mpc):
                if value.imag != 0:
                    high[i] = np.nan
                    continue
                value = value.real
            high[i] = float(value)
            if np.isfinite(high[i]):
                if moved and high[i] == 0 and value != 0:  # not a zero that must be exact
                    high[i] = np.copysign(np.nextafter(0.0, 1.0), float(mp.sign(value)))
                low[i] = float(value - (Fraction(high[i]) if isinstance(value, Fraction) else mp.mpf(high[i])))
                scale[i] = abs(float(args[0] * slope(args[0]))) if slope else _moves(function, args, exact, moved)
    return high, low, scale


def moved_inputs(kind: str) -> list[int]:
    """The positions of all inputs but d in a derivative f'(x) d, over which x f'' is taken. Empty for other ops."""
    names = [p.name for p in opdef.get(kind, where="accuracy").inputs]
    return [i for i, name in enumerate(names) if name != "diff_dst"] if "diff_dst" in names else []


def _moves(function: Callable[..., Any], args: list[Any], attrs: dict[str, Any], moved: list[int]) -> float:
    step, total = mp.mpf(2) ** -40, mp.mpf(0)
    for i in (m for m in moved if m < len(args)):
        up, down = (
            function(*[a * (1 + s) if k == i else a for k, a in enumerate(args)], **attrs) for s in (step, -step)
        )
        total += abs(up - down) / (2 * step)
    return min(float(total), float(np.finfo(float).max))
