"""Rows of the table of units: sigmoid, softplus, hardswish, GELU and mish."""

from __future__ import annotations

from opgraph.partition.examples import graph_of
from opgraph.partition.search import Match
from opgraph.partition.spellings import half_of, sigmoid_of_minus
from opgraph.partition.units import Rule

# Constants: sqrt(2/pi), sqrt(2), sqrt(1/2) and 1/6 to f64's precision; exporters round them to the graph's dtype.
_SQRT_2_PI = "0.7978845608028654"
_SQRT_2 = "1.4142135623730951"
_SQRT_HALF = "0.7071067811865476"
_SIXTH = "0.16666666666666666"

#: min(max(x + 3, 0), 6)
_X3 = "Add(x, 3)"
_RELU6 = (
    f"OneOf(Clamp({_X3}, min=0, max=6), Clamp({_X3}, 0, 6), Minimum(Maximum({_X3}, 0), 6), "
    f"Maximum(Minimum({_X3}, 6), 0), Minimum(ReLU({_X3}), 6), "
    f"Select(Or(LessOrEqual({_X3}, 0), GreaterEqual({_X3}, 6)), StopGradient(Minimum(Maximum({_X3}, 0), 6)), {_X3}))"
)
#: x^3, and GPT-2's x + 0.044715 x^3 times sqrt(2/pi), factored or not.
_CUBIC = (
    "OneOf(Multiply(0.044715, x, x, x), Multiply(0.044715, OneOf(Pow(x, beta=3), Pow(x, 3), Multiply(Square(x), x))))"
)
_QUADRATIC = "OneOf(Multiply(0.044715, x, x), Multiply(0.044715, OneOf(Square(x), Pow(x, beta=2), Pow(x, 2))))"
_TANH = f"Tanh(OneOf(Multiply({_SQRT_2_PI}, Add(x, {_CUBIC})), Multiply({_SQRT_2_PI}, x, Add(1, {_QUADRATIC}))))"
_ERF = f"Erf(OneOf(Divide(x, {_SQRT_2}), Multiply(x, {_SQRT_HALF})))"


def _is_not_f64(match: Match) -> bool:
    """True if the f32 attribute 0.16666667 is exact enough for 1/6."""
    return match.root.outputs[0].dtype != "f64"


#: Units that occur inside other units; they match before the units that contain them.
INNER: tuple[Rule, ...] = (
    Rule(
        name="sigmoid",
        pattern=sigmoid_of_minus("OneOf(Neg(x), Subtract(0, x))"),
        becomes="Sigmoid(x)",
        takes=graph_of("Reciprocal(Add(1, Exp(Neg(x))))"),
        leaves=graph_of("Reciprocal(Add(2, Exp(Neg(x))))"),
        why="the sigmoid's definition; one op is more accurate and cheaper than four",
    ),
    Rule(
        name="sigmoid",
        pattern=sigmoid_of_minus("Multiply(x, $c)"),
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
)

ACTIVATIONS: tuple[Rule, ...] = (
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
        pattern=half_of(_ERF),
        becomes="GELU(x, mode=gelu_erf)",
        takes=graph_of("Multiply(Multiply(x, Add(Erf(Divide(x, 1.4142135)), 1)), 0.5)"),
        leaves=graph_of("Multiply(Multiply(x, Add(Erf(Divide(x, 1.5)), 1)), 0.5)"),
        why="as torch's exporter and ONNX's function body write it",
    ),
    Rule(
        name="gelu",
        pattern=half_of(_TANH),
        becomes="GELU(x, mode=gelu_tanh)",
        takes=graph_of(
            "Multiply(Multiply(0.5, x), Add(1, Tanh(Multiply(0.7978845608, Add(x, Multiply(0.044715, Pow(x, 3)))))))"
        ),
        leaves=graph_of(
            "Multiply(Multiply(0.5, x), Add(1, Tanh(Multiply(0.7978845608, Add(x, Multiply(0.05, Pow(x, 3)))))))"
        ),
        why="GPT-2's approximation, as its exporters write it; spelled out, it loses its far tail to cancellation",
    ),
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
)
