"""Derivatives of smooth activations as ops: oneDNN's Backward kinds, and SwishBackward, which it lacks.

As in `opgraph.ops.backward`. Composed of smaller ops, these derivatives cancel in their tails and give inf * 0 at
infinity.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

from opgraph.ir.opdef import Attr, Attrs, Port
from opgraph.ops import derivative_references
from opgraph.ops.backward import BOTH, EITHER, USE_DST, backward, by_dst
from opgraph.ops.reference_math import product

_ONE = Attr(name="alpha", type="f32", default=1.0)

# -- the logistic family ----------------------------------------------------------------------------------------------

SIGMOID_BACKWARD = backward(
    "SigmoidBackward",
    "diff_src = alpha s (1 - s) diff_dst with s = sigmoid(alpha src), or s = dst; 0 at infinity. oneDNN has no alpha.",
    src=EITHER,
    attrs=(_ONE, USE_DST),
    reference=lambda x, d, alpha, use_dst: (
        derivative_references.sigmoid_of_output(x, d, alpha)
        if use_dst
        else derivative_references.sigmoid(product(alpha, x)[0], d) * alpha
    ),
    expression=lambda attrs, given: (
        f"og::sigmoid_backward{'_dst' * attrs['use_dst']}({{src/dst}}, {{diff_dst}}"
        + (")" if attrs["alpha"] == 1 else ", {alpha})")
    ),
    torch=lambda t, x, d, alpha, use_dst: (
        alpha * d * (x * (1 - x) if use_dst else t.sigmoid(alpha * x) * t.sigmoid(-alpha * x))
    ),
    decomposition=lambda attrs, given: (
        "Multiply(diff_dst, Multiply(Multiply(src/dst, Subtract(1, src/dst)), $alpha))"
        if attrs["use_dst"]
        else "Multiply(diff_dst, Multiply(Multiply(Sigmoid(Multiply(src/dst, $alpha)), "
        "Sigmoid(Neg(Multiply(src/dst, $alpha)))), $alpha))"
    ),
    # s'' = s' (1 - 2s) = -s' tanh(x / 2)
    second=by_dst(
        f"Multiply({BOTH}, Multiply(Subtract(1, Multiply(src/dst, 2)), $alpha))",
        "Neg(Multiply(Multiply(d, diff_src), Multiply(Tanh(Multiply(Multiply(src/dst, 0.5), $alpha)), $alpha)))",
    ),
    cost=30,
    source="oneDNN Graph SigmoidBackward",
)

TANH_BACKWARD = backward(
    "TanhBackward",
    "diff_src = (1 - tanh(src)^2) diff_dst, or (1 - dst^2) diff_dst; 0 at infinity.",
    src=EITHER,
    attrs=(USE_DST,),
    reference=lambda x, d, use_dst: (
        derivative_references.tanh_of_output(x, d) if use_dst else 4 * derivative_references.sigmoid(2 * x, d)
    ),
    expression=lambda attrs, given: f"og::tanh_backward{'_dst' * attrs['use_dst']}({{src/dst}}, {{diff_dst}})",
    torch=lambda t, x, d, use_dst: d * (1 - t.square(x) if use_dst else 4 * t.sigmoid(2 * x) * t.sigmoid(-2 * x)),
    decomposition=by_dst(
        "Multiply(diff_dst, Subtract(1, Multiply(src/dst, src/dst)))",
        "Multiply(diff_dst, Multiply(Multiply(Sigmoid(Multiply(src/dst, 2)), Sigmoid(Multiply(src/dst, -2))), 4))",
    ),
    second=by_dst(
        f"Multiply({BOTH}, Multiply(src/dst, -2))", "Multiply(Multiply(d, diff_src), Multiply(Tanh(src/dst), -2))"
    ),
    cost=30,
    domain=((-5, 5), (-4, 4)),
    source="oneDNN Graph TanhBackward",
)

SOFT_PLUS_BACKWARD = backward(
    "SoftPlusBackward",
    "diff_src = sigmoid(beta src) diff_dst.",
    attrs=(Attr(name="beta", type="f32", default=1.0),),
    reference=lambda x, d, beta: derivative_references.softplus(product(beta, x)[0], d),
    expression="og::softplus_backward({src}, {diff_dst}, {beta})",
    torch=lambda t, x, d, beta: d * t.sigmoid(beta * x),
    decomposition="Multiply(diff_dst, Sigmoid(Multiply(src, $beta)))",
    second=f"SigmoidBackward(src, {BOTH}, alpha=$beta, use_dst=false)",
    cost=30,
    source="oneDNN Graph SoftPlusBackward",
)


def _swish_expression(attrs: Attrs, given: Collection[str]) -> str:
    factors = ["{factor}"] * ("factor" in given) + ["{alpha}"] * (attrs["alpha"] != 1)
    return f"og::swish_backward({', '.join(['{src}', '{diff_dst}', *factors])})"


def _swish_argument(attrs: Attrs, given: Collection[str]) -> str:
    inner = "Multiply(src, factor)" if "factor" in given else "src"
    return inner if attrs["alpha"] == 1 else f"Multiply({inner}, $alpha)"


def _swish_decomposition(attrs: Attrs, given: Collection[str]) -> str:
    z = _swish_argument(attrs, given)
    return f"Multiply(diff_dst, Multiply(Sigmoid({z}), Add(Multiply({z}, Sigmoid(Neg({z}))), 1)))"


def _swish_second(attrs: Attrs, given: Collection[str]) -> str:
    # With z = c x: s'(z) c (2 - z tanh(z / 2)). Where z is clamped, s' is 0 in every dtype.
    inner = "Multiply(src, factor)" if "factor" in given else "src"
    z = f"Clamp({_swish_argument(attrs, given)}, min=-2000, max=2000)"
    slope = f"SigmoidBackward({inner}, {BOTH}, alpha=$alpha, use_dst=false)"
    return f"Multiply({slope}, Subtract(2, Multiply({z}, Tanh(Multiply({z}, 0.5)))))"


def _torch_swish(t: Any, x: Any, d: Any, factor: Any = None, *, alpha: float) -> Any:
    z = t.clamp(alpha * (x if factor is None else x * factor), -2000, 2000)
    return d * t.sigmoid(z) * (1 + z * t.sigmoid(-z))


SWISH_BACKWARD = backward(
    "SwishBackward",
    "diff_src = (s + z s (1 - s)) diff_dst with z = alpha factor src and s = sigmoid(z), factor 1 where it is not "
    "given. At infinity the limits, 1 and 0.",
    others=(Port(name="factor", optional=True),),
    attrs=(_ONE,),
    reference=lambda x, d, factor=None, *, alpha: derivative_references.swish(x, d, alpha, factor),
    expression=_swish_expression,
    torch=_torch_swish,
    decomposition=_swish_decomposition,
    second=lambda attrs, given: (
        f"Multiply({_swish_second(attrs, given)}, factor)" if "factor" in given else _swish_second(attrs, given)
    ),
    further={"factor": lambda attrs, given: f"Multiply({_swish_second(attrs, given)}, src)"},
    cost=35,
    domain=((-8, 8), (-4, 4), (0.5, 2)),
    source="the derivative of x sigmoid(alpha x)",
)

MISH_BACKWARD = backward(
    "MishBackward",
    "diff_src = (t + src (1 - t^2) sigmoid(src)) diff_dst with t = tanh(ln(1 + e^src)). At infinity the limits, 1 "
    "and 0.",
    reference=derivative_references.mish,
    expression="og::mish_backward({src}, {diff_dst})",
    torch=lambda t, x, d: _torch_mish(t, t.clamp(x, -2000, 2000), d),
    decomposition="Multiply(diff_dst, Add(Tanh(SoftPlus(src)), Multiply(Multiply(src, Sigmoid(src)), "
    "Subtract(1, Multiply(Tanh(SoftPlus(src)), Tanh(SoftPlus(src)))))))",
    # t' (2 + x ((1 - s) - 2 t s)) with t' = (1 - t^2) s; where x is clamped, t' is 0 in every dtype.
    second="Multiply(TanhBackward(SoftPlus(X), Multiply(Multiply(d, diff_dst), Sigmoid(X)), use_dst=false), "
    "Add(Multiply(X, Subtract(Sigmoid(Neg(X)), Multiply(Multiply(Tanh(SoftPlus(X)), 2), Sigmoid(X)))), 2))".replace(
        "X", "Clamp(src, min=-2000, max=2000)"
    ),
    cost=40,
    source="oneDNN Graph MishBackward",
)


def _torch_mish(t: Any, x: Any, d: Any) -> Any:
    u = t.tanh(t.nn.functional.softplus(x, 1.0, threshold=700.0))
    return d * (u + x * t.sigmoid(x) * (1 - u * u))


# -- GELU -------------------------------------------------------------------------------------------------------------

_NORMAL, _SLOPE = 1 / math.sqrt(2 * math.pi), 2 * math.sqrt(2 / math.pi)
_CUBE = 0.044715 * _SLOPE


def _gelu_parts(x: str) -> tuple[str, str]:
    """v = 2u and v' of gelu_tanh(x) = x sigmoid(v)."""
    return (
        f"Multiply({x}, Add(Multiply(Multiply({x}, {x}), {_CUBE!r}), {_SLOPE!r}))",
        f"Add(Multiply(Multiply({x}, {x}), {3 * _CUBE!r}), {_SLOPE!r})",
    )


def _gelu_decomposition(attrs: Attrs, given: Collection[str]) -> str:
    if attrs["mode"] == "gelu_erf":
        return (
            "Multiply(diff_dst, Add(Multiply(Add(Erf(Multiply(src, 0.70710678118654752)), 1), 0.5), "
            f"Multiply(Multiply(src, {_NORMAL!r}), Exp(Multiply(Multiply(src, src), -0.5)))))"
        )
    v, slope = _gelu_parts("src")
    return f"Multiply(diff_dst, Multiply(Sigmoid({v}), Add(Multiply(Multiply(src, {slope}), Sigmoid(Neg({v}))), 1)))"


def _gelu_second(attrs: Attrs, given: Collection[str]) -> str:
    x = "Clamp(src, min=-60, max=60)"  # where it is clamped, the derivatives below are 0 in every dtype
    if attrs["mode"] == "gelu_erf":  # phi(x) (2 - x^2)
        factor = f"Multiply(Exp(Multiply(Square({x}), -0.5)), Subtract(2, Square({x})))"
        return f"Multiply(Multiply({BOTH}, {_NORMAL!r}), {factor})"
    # s'(v) (2 v' + x v'' - x v'^2 tanh(v / 2))
    v, slope = _gelu_parts(x)
    curved = f"Add(Multiply({slope}, 2), Multiply(Square({x}), {6 * _CUBE!r}))"
    return (
        f"Multiply(SigmoidBackward({v}, {BOTH}, use_dst=false), "
        f"Subtract({curved}, Multiply(Multiply({x}, Square({slope})), Tanh(Multiply({v}, 0.5)))))"
    )


def _torch_gelu(t: Any, x: Any, d: Any, mode: str) -> Any:
    x = t.clamp(x, -60, 60)
    if mode == "gelu_erf":
        return d * (0.5 * t.erfc(x * -math.sqrt(0.5)) + x * t.exp(-0.5 * x * x) * _NORMAL)
    v = x * (_SLOPE + _CUBE * x * x)
    return d * t.sigmoid(v) * (1 + x * (_SLOPE + 3 * _CUBE * x * x) * t.sigmoid(-v))


GELU_BACKWARD = backward(
    "GELUBackward",
    "diff_src = f'(src) diff_dst, f the GELU of that mode: f' = Phi(x) + x phi(x) for gelu_erf, Phi and phi of the "
    "normal distribution. At infinity the limits, 1 and 0.",
    attrs=(Attr(name="mode", type="string", default="gelu_erf", choices=("gelu_erf", "gelu_tanh")),),
    reference=lambda x, d, mode: (
        derivative_references.gelu_erf(x, d) if mode == "gelu_erf" else derivative_references.gelu_tanh(x, d)
    ),
    expression=lambda attrs, given: f"og::{attrs['mode']}_backward({{src}}, {{diff_dst}})",
    torch=_torch_gelu,
    decomposition=_gelu_decomposition,
    second=_gelu_second,
    cost=45,
    domain=((-5, 5), (-4, 4)),
    source="oneDNN Graph GELUBackward",
)
