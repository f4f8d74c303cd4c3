"""Units with reductions: spelled-out norms. They have a separate table, as they are not part of pointwise kernels.

The table is for writing models: one norm node runs faster than the seven nodes that exporters write. The rows need a
graph whose reductions are native (`opgraph.onnx.load(model, library=True)`).
"""

from __future__ import annotations

from opgraph.partition.search import Match
from opgraph.partition.units import Rule
from opgraph.partition.view import scalar


def _square(x: str) -> str:
    return f"OneOf(Pow({x}, beta=2), Pow({x}, 2), Square({x}), Multiply({x}, {x}))"


def _mean(x: str) -> str:
    return f"ReduceMean({x}, axes=$axes, keep_dims=true)"


def _inverse(variance: str) -> str:
    root = f"OneOf(Sqrt({variance}), Pow({variance}, beta=0.5))"
    return f"OneOf(Reciprocal({root}), Divide(1, {root}), Rsqrt({variance}), Pow({variance}, beta=-0.5))"


def _scaled(x: str, variance: str) -> str:
    """x / sqrt(variance + epsilon), by division or by the inverse."""
    inner = f"Add({variance}, $e)"
    root = f"OneOf(Sqrt({inner}), Pow({inner}, beta=0.5))"
    return f"OneOf(Divide({x}, {root}), Multiply({x}, {_inverse(inner)}))"


def _times(x: str, variance: str, factor: str) -> str:
    """Like `_scaled`, times a factor, in every association."""
    inner = f"Add({variance}, $e)"
    root = f"OneOf(Sqrt({inner}), Pow({inner}, beta=0.5))"
    return f"OneOf(Multiply({factor}, Divide({x}, {root})), Multiply({factor}, {x}, {_inverse(inner)}))"


_DISTANCE = f"Subtract(x, {_mean('x')})"
_OF_SQUARES, _OF_DISTANCES = _mean(_square("x")), _mean(_square(_DISTANCE))


def _over_last_axis(match: Match) -> bool:
    """True if the norm is over the last axis, with a small positive number under the root."""
    ndim = match.tensors["x"].ndim
    axes = match.attrs["axes"]
    return (axes == (-1,) or (ndim is not None and axes == (ndim - 1,))) and 0 < scalar(match.scalars["e"]) < 1


def _along_rows(match: Match) -> bool:
    """True if also the factor and the summand are [C] next to [..., C], with both sizes known."""
    dims = match.tensors["x"].dims
    if not _over_last_axis(match) or not dims or not isinstance(dims[-1], int):
        return False
    return all(match.tensors[n].dims == (dims[-1],) for n in ("w", "b") if n in match.tensors)


def _example(body: str, **types: str) -> str:
    inputs = ", ".join(f"{name}: {type_}" for name, type_ in {"x": "f32[2,3,8]", **types}.items())
    return "\n".join([f"graph({inputs}) -> (y)", *(f"  {line}" for line in body.split("; "))])


_RMS = "a = Pow(x, beta=2); m = ReduceMean(a, axes=[-1], keep_dims=true); v = Add(m, 1e-06); s = Sqrt(v); "
_LAYER = (
    "m = ReduceMean(x, axes=[-1], keep_dims=true); d = Subtract(x, m); a = Multiply(d, d); "
    "q = ReduceMean(a, axes=[-1], keep_dims=true); v = Add(q, 1e-05); s = Sqrt(v); n = Divide(d, s); "
)

NORMS: tuple[Rule, ...] = (
    Rule(
        name="rms_norm",
        pattern=_times("x", _OF_SQUARES, "w"),
        condition=_along_rows,
        takes=_example(_RMS + "r = Reciprocal(s); n = Multiply(x, r); y = Multiply(w, n)", w="f32[8]"),
        leaves=_example(_RMS + "r = Reciprocal(s); n = Multiply(x, r); y = Multiply(w, n)", w="f32[2,3,1]"),
        why="as transformers spells it and torch exports it (Zhang and Sennrich, Root mean square layer normalization)",
    ),
    Rule(
        name="rms_norm_core",
        pattern=_scaled("x", _OF_SQUARES),
        condition=_over_last_axis,
        takes=_example(_RMS + "y = Divide(x, s)"),
        leaves=_example(_RMS + "y = Divide(s, x)"),
        why="without its weight, which f16 models apply after a cast",
    ),
    Rule(
        name="layer_norm",
        pattern=f"Add(b, {_times(_DISTANCE, _OF_DISTANCES, 'w')})",
        condition=_along_rows,
        takes=_example(_LAYER + "p = Multiply(w, n); y = Add(p, b)", w="f32[8]", b="f32[8]"),
        leaves=_example(_LAYER + "p = Multiply(w, n); y = Add(p, x)", w="f32[8]"),
        why="spelled out, as exporters before opset 17 and user code write it (Ba et al., Layer normalization)",
    ),
)
