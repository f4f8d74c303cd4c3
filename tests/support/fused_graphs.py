"""Composed activations as graphs, with inputs to try them on: for the tests of torch's integration."""

from __future__ import annotations

from dataclasses import dataclass

import opgraph as og


@dataclass(frozen=True)
class Composed:
    """A graph.

    Attributes:
        ports: its inputs and outputs as in the text form, with dtypes left open as T.
        ops: its ops as in the text form, with semicolons between.
        shapes: of the inputs.
        low, high: where inputs are sampled.
    """

    ports: str
    ops: str
    shapes: tuple[tuple[int, ...], ...]
    low: float = -2.0
    high: float = 2.0

    def graph(self, dtype: str = "f64") -> og.Graph:
        lines = [f"graph{self.ports}", *(f"  {op.strip()}" for op in self.ops.split(";"))]
        return og.parse("\n".join(lines).replace("T[", f"{dtype}["))


def _chebyshev(degree: int) -> Composed:
    coefficients = [f"c{i}" for i in range(degree + 1)]
    ops = ["t = Tanh(x)", "d = Multiply(t, 2.0)", "p1 = Multiply(t, c1)", "s1 = Add(p1, c0)"]
    before, last = "1.0", "t"
    for i in range(2, degree + 1):
        ops += [f"m{i} = Multiply(d, {last})", f"t{i} = Subtract(m{i}, {before})"]
        ops += [f"p{i} = Multiply(t{i}, c{i})", f"{'y' if i == degree else f's{i}'} = Add(s{i - 1}, p{i})"]
        before, last = last, f"t{i}"
    ports = f"(x: T[n,m], {', '.join(f'{c}: T[]' for c in coefficients)}) -> (y)"
    return Composed(ports, ";".join(ops), ((2, 3), *[()] * (degree + 1)))


COMPOSED = {
    "swish": Composed("(x: T[n], a: T[]) -> (y)", "s = Multiply(a, x); t = Sigmoid(s); y = Multiply(x, t)", ((7,), ())),
    "swish per channel": Composed(
        "(x: T[n,c,k], a: T[c,1]) -> (y)",
        "s = Multiply(x, a); t = Sigmoid(s); y = Multiply(x, t)",
        ((2, 3, 4), (3, 1)),
    ),
    "swiglu clamped": Composed(
        "(gate: T[n,m], up: T[n,m], alpha: T[]) -> (y)",
        "g = Minimum(gate, 1.5); u = Clamp(up, min=-1.5, max=1.5); s = Multiply(g, alpha); t = Sigmoid(s);"
        "w = Multiply(g, t); v = Add(u, 1.0); y = Multiply(w, v)",
        ((3, 4), (3, 4), ()),
    ),
    "rational": Composed(
        "(x: T[n], p0: T[], p1: T[], p2: T[], q1: T[], q2: T[]) -> (y)",
        "a = Multiply(p2, x); b = Add(a, p1); c = Multiply(b, x); d = Add(c, p0); e = Multiply(q2, x); f = Add(e, q1);"
        "g = Multiply(f, x); h = Abs(g); i = Add(h, 1.0); y = Divide(d, i)",
        ((6,), (), (), (), (), ()),
    ),
    "chebyshev": _chebyshev(24),
    "squareplus": Composed(
        "(x: T[n], b: T[]) -> (y)",
        "p = Multiply(x, x); q = Multiply(b, b); r = Add(p, q); s = Sqrt(r); t = Add(x, s); y = Multiply(t, 0.5)",
        ((7,), ()),
    ),
    "where-split": Composed(
        "(x: T[n], a: T[]) -> (y)",
        "c = Greater(x, 0.0); p = Select(c, x, 1.0); q = Sqrt(p); r = Multiply(q, a); s = Exp(x); t = Subtract(s, a);"
        "y = Select(c, r, t)",
        ((8,), ()),
    ),
    "spline": Composed(
        "(x: T[n,m], c0: T[m], c1: T[m]) -> (y)",
        "a = Subtract(x, 0.5); b = Multiply(a, a); c = Subtract(1.0, b); d = ReLU(c); e = Multiply(d, d);"
        "f = Multiply(e, d); g = Add(x, 0.5); h = Multiply(g, g); i = Subtract(1.0, h); j = ReLU(i);"
        "k = Multiply(j, j); l = Multiply(k, j); p = Multiply(f, c0); q = Multiply(l, c1); y = Add(p, q)",
        ((3, 4), (4,), (4,)),
    ),
    "power": Composed("(x: T[n], p: T[n]) -> (y)", "y = Pow(x, p)", ((5,), (5,)), 0.5, 2.0),
    "mish": Composed(
        "(x: T[n], a: T[]) -> (y)",
        "s = Multiply(x, a); t = SoftPlus(s); u = Tanh(t); y = Multiply(x, u)",
        ((6,), ()),
    ),
    "bias": Composed("(x: T[n,m], b: T[m]) -> (y)", "y = Add(x, b)", ((3, 4), (4,))),
    "two results": Composed(
        "(x: T[n], a: T[]) -> (y, z)", "y = Multiply(x, a); t = Tanh(y); z = Multiply(t, x)", ((6,), ())
    ),
}
