"""THE table of named units: every spelling that opgraph recognises, one row each, first row first.

A unit found serves the rows above it as the op that it means: `Multiply(x, Sigmoid(x))` also takes a sigmoid that is
spelled out. specs/partitioning.md says what the rows mean together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

from opgraph.ir.graph import Graph
from opgraph.partition.examples import graph_of
from opgraph.partition.search import Match
from opgraph.partition.units import Rule, RuleTable, Unit, match_units

__all__ = ["RULES", "Rule", "Unit", "find_units"]

# The sizes of things. sqrt(2/pi), sqrt(2) and sqrt(1/2) to f64's precision; exporters round them to the graph's dtype.
_SQRT_2_PI = "0.7978845608028654"
_SQRT_2 = "1.4142135623730951"
_SQRT_HALF = "0.7071067811865476"
_SIXTH = "0.16666666666666666"

#: Ways to write -k x; what x sigmoid(k x) then becomes, its alpha as a product, and an example.
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
#: Of these, where 1 / (1 + exp(-k x)) alone is no Sigmoid of one value: other places of the sign and the factor. The
#: second by its f64 constants, which no f32 attribute holds.
_NO_SIGMOID = (1, 3, 4)
#: min(max(x + 3, 0), 6)
_X3 = "Add(x, 3)"
_RELU6 = (
    f"OneOf(Clamp({_X3}, min=0, max=6), Clamp({_X3}, 0, 6), Minimum(Maximum({_X3}, 0), 6), "
    f"Maximum(Minimum({_X3}, 6), 0), Minimum(ReLU({_X3}), 6))"
)
#: x^3, and GPT-2's x + 0.044715 x^3 times sqrt(2/pi), factored or not.
_CUBIC = (
    "OneOf(Multiply(0.044715, x, x, x), Multiply(0.044715, OneOf(Pow(x, beta=3), Pow(x, 3), Multiply(Square(x), x))))"
)
_QUADRATIC = "OneOf(Multiply(0.044715, x, x), Multiply(0.044715, OneOf(Square(x), Pow(x, beta=2), Pow(x, 2))))"
_TANH = f"Tanh(OneOf(Multiply({_SQRT_2_PI}, Add(x, {_CUBIC})), Multiply({_SQRT_2_PI}, x, Add(1, {_QUADRATIC}))))"
_ERF = f"Erf(OneOf(Divide(x, {_SQRT_2}), Multiply(x, {_SQRT_HALF})))"


def _half(value: str) -> str:
    """x (1 + value) / 2 in every association."""
    one = f"Add(1, {value})"
    return (
        f"OneOf(Multiply(0.5, x, {one}), Divide(Multiply(x, {one}), 2), Multiply(Divide(x, 2), {one}), "
        f"Multiply(x, Divide({one}, 2)))"
    )


def _is_gate(match: Match) -> bool:
    """Whether u gates: neither the activation's own input, nor the activation itself, nor a mere number."""
    u = match.tensors["u"]
    both = {t.id for t in match.root.inputs}
    return u.id != match.tensors["x"].id and len(both) == 2 and not (u.data is not None and u.data.size == 1)


def _is_not_f64(match: Match) -> bool:
    """Whether the f32 attribute 0.16666667 is as good as 1/6."""
    return match.root.outputs[0].dtype != "f64"


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
                pattern=f"Multiply(x, OneOf(Reciprocal(Add(1, Exp({minus_kx}))), Divide(1, Add(1, Exp({minus_kx})))))",
                becomes=becomes,
                given={"alpha": alpha},
                takes=graph_of(f"Multiply(x, Reciprocal({one_plus}))", dtype="f64"),
                leaves=graph_of(f"Multiply(z, Reciprocal({one_plus}))", dtype="f64"),
                why="x times 1 / (1 + exp(-k x))",
            )


RULES: tuple[Rule, ...] = (
    # -- sigmoid, softplus: spelled out; below the units that hold them only in the sense that these match first ------
    Rule(
        name="sigmoid",
        pattern="OneOf(Reciprocal(Add(1, Exp({e}))), Divide(1, Add(1, Exp({e}))))".replace(
            "{e}", "OneOf(Neg(x), Subtract(0, x))"
        ),
        becomes="Sigmoid(x)",
        takes=graph_of("Reciprocal(Add(1, Exp(Neg(x))))"),
        leaves=graph_of("Reciprocal(Add(2, Exp(Neg(x))))"),
        why="the sigmoid's definition; one op is more accurate and cheaper than four",
    ),
    Rule(
        name="sigmoid",
        pattern="OneOf(Reciprocal(Add(1, Exp(Multiply(x, $c)))), Divide(1, Add(1, Exp(Multiply(x, $c)))))",
        becomes="Sigmoid(x)",
        given={"alpha": (-1.0, "c")},
        takes=graph_of("Divide(1, Add(1, Exp(Multiply(x, -1.5))))"),
        leaves=graph_of("Divide(1, Add(1, Exp(Multiply(x, z))))"),
        why="a sigmoid with a constant factor, the sign folded into it",
    ),
    Rule(
        name="softplus",
        pattern="OneOf(Log(Add(1, Exp(x))), Log1p(Exp(x)))",
        becomes="SoftPlus(x)",
        takes=graph_of("Log(Add(1, Exp(x)))"),
        leaves=graph_of("Log(Add(2, Exp(x)))"),
        why="the definition of SoftPlus, which overflows where the op does not",
    ),
    # -- swish -------------------------------------------------------------------------------------------------------
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
        pattern=_half("Tanh(Multiply(x, $c))"),
        becomes="Swish(x)",
        given={"alpha": (2.0, "c")},
        takes=graph_of("Multiply(Multiply(0.5, x), Add(1, Tanh(Multiply(0.5, x))))"),
        leaves=graph_of("Multiply(Multiply(0.5, x), Add(1, Tanh(Multiply(0.5, z))))"),
        why="(1 + tanh(k x / 2)) / 2 is sigmoid(k x)",
    ),
    # -- hardswish ---------------------------------------------------------------------------------------------------
    Rule(
        name="hardswish",
        pattern="HardSwish(x)",
        becomes="HardSwish(x)",
        takes=graph_of("HardSwish(x)"),
        leaves=graph_of("HardSigmoid(x, alpha=0.16666667, beta=0.5)"),
        why="the op itself",
    ),
    Rule(
        name="hardswish",
        pattern=f"Multiply(x, HardSigmoid(x, alpha={_SIXTH}, beta=0.5))",
        becomes="HardSwish(x)",
        condition=_is_not_f64,
        takes=graph_of("Multiply(x, HardSigmoid(x, alpha=0.16666667, beta=0.5))"),
        leaves=graph_of("Multiply(x, HardSigmoid(x, alpha=0.2, beta=0.5))"),
        why="torch's exporter and ONNX's function body write it so; 0.2 is ONNX's default and another function",
    ),
    Rule(
        name="hardswish",
        pattern=(
            f"OneOf(Divide(Multiply(x, {_RELU6}), 6), Multiply(x, {_RELU6}, {_SIXTH}), "
            f"Multiply(x, Divide({_RELU6}, 6)), Multiply(Divide(x, 6), {_RELU6}))"
        ),
        becomes="HardSwish(x)",
        takes=graph_of("Divide(Multiply(x, Clamp(Add(x, 3), min=0, max=6)), 6)"),
        leaves=graph_of("Divide(Multiply(x, Clamp(Add(x, 3), min=0, max=6)), 5)"),
        why="x relu6(x + 3) / 6, the formula of the paper (Howard et al., Searching for MobileNetV3)",
    ),
    # -- gelu --------------------------------------------------------------------------------------------------------
    Rule(
        name="gelu",
        pattern="GELU(x, mode=$m)",
        becomes="GELU(x, mode=$m)",
        takes=graph_of("GELU(x, mode=gelu_tanh)"),
        leaves=graph_of("Tanh(x)"),
        why="the op itself",
    ),
    Rule(
        name="gelu",
        pattern=_half(_ERF),
        becomes="GELU(x, mode=gelu_erf)",
        takes=graph_of("Multiply(Multiply(x, Add(Erf(Divide(x, 1.4142135)), 1)), 0.5)"),
        leaves=graph_of("Multiply(Multiply(x, Add(Erf(Divide(x, 1.5)), 1)), 0.5)"),
        why="as torch's exporter and ONNX's function body write it",
    ),
    Rule(
        name="gelu",
        pattern=_half(_TANH),
        becomes="GELU(x, mode=gelu_tanh)",
        takes=graph_of(
            "Multiply(Multiply(0.5, x), Add(1, Tanh(Multiply(0.7978845608, Add(x, Multiply(0.044715, Pow(x, 3)))))))"
        ),
        leaves=graph_of(
            "Multiply(Multiply(0.5, x), Add(1, Tanh(Multiply(0.7978845608, Add(x, Multiply(0.05, Pow(x, 3)))))))"
        ),
        why="GPT-2's approximation, as its exporters write it; spelled out, it loses its far tail to cancellation",
    ),
    # -- mish --------------------------------------------------------------------------------------------------------
    Rule(
        name="mish",
        pattern="Mish(x)",
        becomes="Mish(x)",
        takes=graph_of("Mish(x)"),
        leaves=graph_of("SoftPlus(x)"),
        why="the op itself",
    ),
    Rule(
        name="mish",
        pattern="Multiply(x, Tanh(SoftPlus(x)))",
        becomes="Mish(x)",
        takes=graph_of("Multiply(x, Tanh(SoftPlus(x)))"),
        leaves=graph_of("Multiply(x, Tanh(SoftPlus(z)))"),
        why="Mish's definition; its softplus may be spelled out too",
    ),
    # -- gated units: names on top of the activation inside ------------------------------------------------------------
    Rule(
        name="swiglu",
        pattern="Multiply(OneOf(Swish(x, alpha=$a), Swish(x, f, alpha=$a)), u)",
        condition=_is_gate,
        takes=graph_of("Multiply(Multiply(x, Sigmoid(x)), u)"),
        leaves=graph_of("Multiply(Multiply(x, Sigmoid(x)), x)"),
        why="a gated linear unit (Shazeer, GLU variants improve transformer) without its matrix products",
    ),
    Rule(
        name="geglu",
        pattern="Multiply(GELU(x, mode=$m), u)",
        condition=_is_gate,
        takes=graph_of("Multiply(u, GELU(x))"),
        leaves=graph_of("Multiply(2, GELU(x))"),
        why="the same with GELU",
    ),
)


@lru_cache(maxsize=1)
def _indexed() -> RuleTable:
    return RuleTable(RULES)


def find_units(graph: Graph, rules: Sequence[Rule] = RULES) -> tuple[Unit, ...]:
    """Every named unit of a finalized graph, nested ones too, in topological order of their roots.

    At most one unit for each root op: the first row of `rules` that applies. Linear in the size of the graph.
    """
    return match_units(graph, _indexed() if rules is RULES else RuleTable(rules))
