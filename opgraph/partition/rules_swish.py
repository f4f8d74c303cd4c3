"""Rows of the table of units: swish in every spelling."""

from __future__ import annotations

from collections.abc import Iterator

from opgraph.partition.examples import graph_of
from opgraph.partition.spellings import half_of, sigmoid_of_minus
from opgraph.partition.units import Rule

#: Spellings of -k x; the op for x sigmoid(k x), its alpha as a product, and an example.
_MINUS_KX: tuple[tuple[str, str, tuple[float | str, ...], str], ...] = (
    ("OneOf(Neg(x), Subtract(0, x))", "Swish(x)", (1.0,), "Neg(x)"),
    ("Multiply(x, $c)", "Swish(x)", (-1.0, "c"), "Multiply(x, -1.702)"),
    ("Neg(Multiply(x, $c))", "Swish(x)", ("c",), "Neg(Multiply(1.702, x))"),
    ("Multiply(Neg(x), $c)", "Swish(x)", ("c",), "Multiply(Neg(x), 1.702)"),
    (
        "OneOf(Neg(Multiply(x, f)), Multiply(Neg(x), f), Multiply(x, Neg(f)))",
        "Swish(x, f)",
        (1.0,),
        "Multiply(Neg(x), f)",
    ),
)
#: Indices of those where 1 / (1 + exp(-k x)) alone is not a Sigmoid of one value, since the sign and the factor are in
#: other places. Index 1 is included for f64 constants, which an f32 attribute does not hold.
_NO_SIGMOID = (1, 3, 4)


def _swish_by_division() -> Iterator[Rule]:
    for index, (minus_kx, becomes, alpha, example) in enumerate(_MINUS_KX):
        one_plus = f"Add(1, Exp({example}))"
        yield Rule(
            name="swish",
            pattern=f"Divide(x, Add(1, Exp({minus_kx})))",
            becomes=becomes,
            given={"alpha": alpha},
            takes=graph_of(f"Divide(x, {one_plus})"),
            leaves=graph_of(f"Divide(z, {one_plus})"),
            why="x / (1 + exp(-k x))",
        )
        if index in _NO_SIGMOID:
            yield Rule(
                name="swish",
                pattern=f"Multiply(x, {sigmoid_of_minus(minus_kx)})",
                becomes=becomes,
                given={"alpha": alpha},
                takes=graph_of(f"Multiply(x, Reciprocal({one_plus}))", dtype="f64"),
                leaves=graph_of(f"Multiply(z, Reciprocal({one_plus}))", dtype="f64"),
                why="x times 1 / (1 + exp(-k x))",
            )


SWISH: tuple[Rule, ...] = (
    Rule(
        name="swish",
        pattern="Swish(x, alpha=$a)",
        becomes="Swish(x, alpha=$a)",
        takes=graph_of("Swish(x, alpha=1.5)"),
        leaves=graph_of("Sigmoid(x, alpha=1.5)"),
        why="the op itself",
    ),
    Rule(
        name="swish",
        pattern="Swish(x, f, alpha=$a)",
        becomes="Swish(x, f, alpha=$a)",
        takes=graph_of("Swish(x, f)"),
        leaves=graph_of("Sigmoid(Multiply(x, f))"),
        why="the op itself, with a factor operand",
    ),
    Rule(
        name="swish",
        pattern="Multiply(x, Sigmoid(x, alpha=$a))",
        becomes="Swish(x, alpha=$a)",
        takes=graph_of("Multiply(Sigmoid(x), x)"),
        leaves=graph_of("Multiply(Sigmoid(x), z)"),
        why="oneDNN's swish RFC, option 1, and its first extension route: a factor on Sigmoid",
    ),
    Rule(
        name="swish",
        pattern="Multiply(x, Sigmoid(Multiply(x, $c), alpha=$a))",
        becomes="Swish(x)",
        given={"alpha": ("a", "c")},
        takes=graph_of("Multiply(x, Sigmoid(Multiply(1.702, x)))"),
        leaves=graph_of("Multiply(x, Sigmoid(Multiply(1.702, z)))"),
        why="x sigmoid(a x) with a constant a: quick GELU is alpha = 1.702",
    ),
    Rule(
        name="swish",
        pattern="Multiply(x, Sigmoid(Multiply(x, f), alpha=$a))",
        becomes="Swish(x, f, alpha=$a)",
        takes=graph_of("Multiply(x, Sigmoid(Multiply(x, f)))", f="f32[8]"),
        leaves=graph_of("Multiply(x, Sigmoid(Add(x, f)))", f="f32[8]"),
        why="x sigmoid(a x) with a known at run time: one number, one per channel, or a whole tensor",
    ),
    *_swish_by_division(),
    Rule(
        name="swish",
        pattern=half_of("Tanh(Multiply(x, $c))"),
        becomes="Swish(x)",
        given={"alpha": (2.0, "c")},
        takes=graph_of("Multiply(Multiply(0.5, x), Add(1, Tanh(Multiply(0.5, x))))"),
        leaves=graph_of("Multiply(Multiply(0.5, x), Add(1, Tanh(Multiply(0.5, z))))"),
        why="(1 + tanh(k x / 2)) / 2 is sigmoid(k x)",
    ),
)
