"""The table of units: every row matches its example and not its counterexample, and has the stated meaning."""

import itertools
import re

import numpy as np
import pytest

import opgraph as og
from opgraph.errors import InvalidArguments
from opgraph.ir import opdef
from opgraph.ir.expression import Call, Num, Param, parse_expression
from opgraph.partition.examples import graph_of
from opgraph.partition.rules import RULES, find_units
from opgraph.partition.units import Rule

#: The values of captured constants and attributes in examples that are made from patterns.
CAPTURES = {"c": 1.5, "a": 0.75, "m": "gelu_tanh"}


@pytest.fixture(params=RULES, ids=[f"{i}-{r.name}" for i, r in enumerate(RULES)])
def rule(request):
    return request.param


def units_of(expression, **types):
    return [u.name for u in find_units(og.parse(graph_of(expression, **types)))]


# -- each row --------------------------------------------------------------------------------------------------------


def test_rule_matches_its_whole_example(rule):
    graph = og.parse(rule.takes)
    unit = find_units(graph)[-1]
    assert unit.name == rule.name
    assert unit.root.outputs[0].id == graph.outputs[0].id
    assert unit.ops == graph.ops


def test_no_earlier_rule_matches_a_rules_example(rule):
    """Otherwise the row would never match the graphs that it was written for."""
    earlier = RULES[: RULES.index(rule)]
    root = og.parse(rule.takes).ops[-1]
    assert not any(u.root.id == root.id for u in find_units(og.parse(rule.takes), earlier))


def test_rule_does_not_match_its_counterexample(rule):
    assert rule.name not in [u.name for u in find_units(og.parse(rule.leaves))]


def test_every_variant_of_a_pattern_is_matched_and_equals_the_op(rule):
    dtype = "f32" if "HardSigmoid" in rule.pattern else "f64"  # 1/6 as an attribute is an f32
    for tree in spellings(parse_expression(rule.pattern)):
        graph = og.parse(graph_of(tree, dtype=dtype))
        unit = find_units(graph)[-1]
        assert unit.name == rule.name, graph
        assert unit.root.outputs[0].id == graph.outputs[0].id
        if unit.kind:
            assert_means(unit, graph)


def assert_means(unit, graph):
    rng = np.random.default_rng(0)
    dtype = np.float64 if graph.inputs[0].dtype == "f64" else np.float32
    arrays = {t.name: rng.uniform(-6, 6, t.shape).astype(dtype) for t in graph.inputs}
    single = og.Graph()
    inputs = [
        single.constant(None, t.data) if t.is_constant else single.input(t.name, t.dtype, t.dims) for t in unit.inputs
    ]
    single.add_op(unit.kind, *inputs, name="y", **unit.attrs)
    spelled = og.evaluate(graph, arrays)
    meant = og.evaluate(single, {t.name: arrays[t.name] for t in single.inputs})
    # Both are computed in float64 and differ by the rounding of constants and of a written 1 + x: by some eps of the
    # values they are multiplied by, |x| <= 6.
    np.testing.assert_allclose(spelled, meant, rtol=0, atol=64 * np.finfo(dtype).eps * 6, err_msg=str(graph))


def spellings(tree):
    """Every expression that a pattern matches: alternatives, associations, and operands all in order or reversed."""
    for flipped in (False, True):
        yield from _spellings(tree, flipped)


def _spellings(tree, flipped):
    if isinstance(tree, Param):
        yield Num(CAPTURES[tree.name])
    elif not isinstance(tree, Call):
        yield tree
    elif tree.kind == "OneOf":
        for arg in tree.args:
            yield from _spellings(arg, flipped)
    else:
        attrs = tuple((k, CAPTURES[v.name] if isinstance(v, Param) else v) for k, v in tree.attrs)
        commutative = opdef.find(tree.kind).commutative
        for args in itertools.product(*[list(_spellings(a, flipped)) for a in tree.args]):
            if commutative and len(args) >= 2:
                yield from _associations(tree.kind, args[::-1] if flipped else args)
            else:
                yield Call(tree.kind, args, attrs)


def _associations(kind, args):
    """All binary trees over `args`, as unordered trees."""
    if len(args) == 1:
        yield args[0]
        return
    rest = range(1, len(args))
    for size in range(len(args) - 1):
        for chosen in itertools.combinations(rest, size):
            left = (args[0], *(args[i] for i in chosen))
            right = tuple(args[i] for i in rest if i not in chosen)
            for a, b in itertools.product(list(_associations(kind, left)), list(_associations(kind, right))):
                yield Call(kind, (a, b))


# -- conditions of rules ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "expression",
    [
        "Multiply(Sigmoid(x), z)",  # a gate
        "Multiply(z, Sigmoid(Multiply(x, 1.5)))",
        "Multiply(Sigmoid(x), Sigmoid(x))",
        "Multiply(x, Sigmoid(Sigmoid(x)))",
        "Multiply(x, Sigmoid(Multiply(z, f)))",
        "Multiply(x, Sigmoid(Add(x, 1.5)))",
        "Multiply(x, Sigmoid(Multiply(Square(x), 1.5)))",
        "Divide(Add(1, Exp(Neg(x))), x)",
        "Divide(x, Add(1, Exp(x)))",  # x sigmoid(-x) must be written with Multiply(x, -1)
        "Divide(x, Add(1, Multiply(2, Exp(Neg(x)))))",
        "Multiply(x, HardSigmoid(x, alpha=0.16, beta=0.5))",
        "Multiply(x, HardSigmoid(z, alpha=0.16666667, beta=0.5))",
        "Divide(Multiply(x, Clamp(Add(x, 3), min=0, max=5)), 6)",
        "Multiply(Multiply(0.5, x), Add(1, Erf(Divide(z, 1.4142135))))",
        "Multiply(Multiply(0.25, x), Add(1, Erf(Divide(x, 1.4142135))))",
        "Multiply(x, Tanh(Sigmoid(x)))",
        "Log(Add(1, x))",
    ],
)
def test_look_alikes_of_units_are_not_matched(expression):
    assert units_of(expression) == []


def test_squeeze_and_excite_gate_is_not_a_swish():
    """sigmoid of the means times x: another tensor, although the graph looks the same."""
    assert units_of("Multiply(x, Sigmoid(Multiply(means, 1.702)))", means="f32[4,1]") == []


def test_f32_approximation_of_a_sixth_is_not_matched_in_f64():
    assert units_of("Multiply(x, HardSigmoid(x, alpha=0.16666667, beta=0.5))", x="f64[8]") == []
    assert units_of("Multiply(x, HardSigmoid(x, alpha=0.16666667, beta=0.5))", x="bf16[8]") == ["hardswish"]


@pytest.mark.parametrize("dtype", ["f64", "f32", "bf16", "f16"])
def test_swish_is_matched_in_every_float_dtype(dtype):
    graph = og.parse(graph_of("Multiply(x, Sigmoid(Multiply(x, 1.702)))", dtype=dtype))
    (unit,) = find_units(graph)
    rounded = float(np.asarray(1.702).astype(graph.ops[0].inputs[1].data.dtype))
    assert (unit.attrs["alpha"] if dtype != "f64" else unit.inputs[1].data.item()) == rounded


def test_constant_not_representable_in_f32_stays_an_operand():
    (unit,) = find_units(og.parse(graph_of("Multiply(x, Sigmoid(Multiply(x, 1.1)))", dtype="f64")))
    assert [t.name for t in unit.inputs[:1]] == ["x"]
    assert unit.inputs[1].data.item() == 1.1
    assert unit.attrs["alpha"] == 1.0
    (unit,) = find_units(og.parse(graph_of("Divide(x, Add(1, Exp(Multiply(x, 1.1))))", dtype="f64")))
    assert (unit.inputs[1].data.item(), unit.attrs["alpha"]) == (1.1, -1.0)
    (unit,) = find_units(og.parse(graph_of("Multiply(x, Sigmoid(Multiply(x, 1.5)))", dtype="f64")))
    assert (len(unit.inputs), unit.attrs["alpha"]) == (1, 1.5)
    # Sigmoid has no operand for the factor.
    assert units_of("Reciprocal(Add(1, Exp(Multiply(x, -1.1))))", x="f64[8]") == []
    assert units_of("Reciprocal(Add(1, Exp(Multiply(x, -1.5))))", x="f64[8]") == ["sigmoid"]


def test_unit_excludes_ops_of_failed_match_attempts():
    graph = og.parse(graph_of("Multiply(Sigmoid(z), Sigmoid(Sigmoid(z)))"))
    (unit,) = find_units(graph)
    assert unit.ops == graph.ops[1:]
    graph = og.parse(
        graph_of("Multiply(Multiply(a, b), Multiply(0.5, Add(1, Erf(Divide(Multiply(a, b), 1.4142135)))))")
    )
    (unit,) = find_units(graph)
    assert unit.ops == graph.ops[1:]


def test_attribute_capture_is_undone_after_a_failed_match():
    pattern = "Add(HardSigmoid(x, alpha=$a, beta=0.5), y)"
    own = Rule(name="own", pattern=pattern, becomes="Elu(x, alpha=$a)", takes="", leaves="", why="")
    graph = og.parse(graph_of("Add(HardSigmoid(x, alpha=0.25, beta=1), HardSigmoid(z, alpha=0.75, beta=0.5))"))
    (unit,) = find_units(graph, (own,))
    assert (unit.attrs["alpha"], [t.name for t in unit.inputs]) == (0.75, ["z"])


def test_sigmoid_alpha_is_multiplied_by_the_constant():
    (unit,) = find_units(og.parse(graph_of("Multiply(x, Sigmoid(Multiply(x, 1.5), alpha=3))")))
    assert (len(unit.inputs), unit.attrs["alpha"]) == (1, 4.5)


def test_inexact_alpha_product_leaves_the_constant_as_operand():
    (unit,) = find_units(og.parse(graph_of("Multiply(x, Sigmoid(Multiply(x, 1.702), alpha=1.1))")))
    assert unit.attrs["alpha"] == float(np.float32(1.1))
    assert unit.inputs[1].data == np.float32(1.702)


@pytest.mark.parametrize(("shape", "found"), [("1", ["hardswish"]), ("1,1", [])])
def test_constant_of_higher_rank_than_the_operand_prevents_a_match(shape, found):
    graph = og.parse(
        f"graph(x: f32[5]) -> (y)\n  const low: f32[{shape}] = [0.0]\n  const high: f32[{shape}] = [6.0]\n"
        "  %0 = Add(x, 3.0)\n  %1 = Clamp(%0, low, high)\n  %2 = Multiply(x, %1)\n  y = Divide(%2, 6.0)"
    )
    assert [u.name for u in find_units(graph)] == found
    x = np.linspace(-5, 5, 5, dtype=np.float32)
    assert og.compile(graph)(x=x).shape == graph.outputs[0].dims
    assert og.gradient(graph, "x").outputs[0].dims == (5,)


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize(
    ("number", "gate", "other"),
    [(0.1, "Sigmoid(%0, alpha=1.5)", "x"), (np.inf, "Sigmoid(%0)", "x"), (2.0, "Sigmoid(%0)", "c")],
)
def test_f32_constant_with_16_bit_operand_is_not_matched(dtype, number, gate, other):
    graph = og.parse(
        f"graph(x: {dtype}[4]) -> (y)\n  const c: f32[] = {number}\n  %0: {dtype}[4] = Multiply(x, c)\n"
        f"  %1 = {gate}\n  y: {dtype}[4] = Multiply({other}, %1)"
    )
    assert find_units(graph) == ()
    assert [t.type_text for t in og.gradient(graph, "x").outputs] == [f"{dtype}[4]"]


@pytest.mark.parametrize("factor", ["f32[]", "f32[8]", "f32[4,1]", "f32[4,8]", "f32[?,8]"])
def test_run_time_factor_becomes_an_operand(factor):
    (unit,) = find_units(og.parse(graph_of("Multiply(x, Sigmoid(Multiply(f, x)))", f=factor)))
    assert (unit.name, [t.name for t in unit.inputs], unit.attrs["alpha"]) == ("swish", ["x", "f"], 1.0)


def test_channel_constant_is_an_operand_and_scalar_constant_an_attribute():
    graph = og.Graph()
    x = graph.input("x", shape=(4, 8))
    for data in (np.arange(8, dtype=np.float32), np.full((1, 1), 1.5, np.float32)):
        graph.add_op("Multiply", x, graph.add_op("Sigmoid", graph.add_op("Multiply", x, graph.constant("", data))))
    first, second = find_units(graph.finalize())
    assert (len(first.inputs), first.attrs["alpha"]) == (2, 1.0)
    assert (len(second.inputs), second.attrs["alpha"]) == (1, 1.5)


def test_constant_that_adds_a_dimension_is_not_a_scalar():
    graph = og.Graph()
    x = graph.input("x", shape=())
    graph.add_op(
        "Multiply", x, graph.add_op("Sigmoid", graph.add_op("Multiply", x, graph.constant("", np.ones(1, np.float32))))
    )
    (unit,) = find_units(graph.finalize())
    assert len(unit.inputs) == 2


@pytest.mark.parametrize(
    "lines",
    [
        ("%0 = Sigmoid(x)", "%1: f32[8] = TypeCast(%0)", "%2: f32[8] = TypeCast(x)", "y = Multiply(%2, %1)"),
        ("%0: f32[8] = TypeCast(x)", "%1 = Sigmoid(%0)", "y = Multiply(x, %1)"),
        ("%0: f32[8] = TypeCast(x)", "%1 = Sigmoid(%0)", "%2: bf16[8] = TypeCast(%1)", "y = Multiply(x, %2)"),
        ("%0 = Sigmoid(x)", "y: f32[8] = Multiply(x, %0)"),
    ],
    ids=["after", "mixed product", "there and back", "wider result"],
)
def test_swish_with_a_dtype_change_inside_is_not_matched(lines):
    assert find_units(og.parse("\n".join(["graph(x: bf16[8]) -> (y)", *lines]))) == ()


def test_inner_values_of_a_unit_may_have_other_readers():
    text = "graph(x: f32[8]) -> (s, y, z)\n s = Sigmoid(x)\n y = Multiply(x, s)\n z = ReLU(s)"
    assert [u.name for u in find_units(og.parse(text))] == ["swish"]


def test_unmentioned_attributes_must_have_their_defaults():
    assert units_of("Multiply(x, Tanh(SoftPlus(x, beta=2)))") == []
    assert units_of("Multiply(x, Tanh(SoftPlus(x)))") == ["mish"]


# -- nested units ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expression", "units"),
    [
        ("Multiply(Multiply(x, Sigmoid(x)), u)", ["swish", "swiglu"]),
        ("Multiply(u, Multiply(Sigmoid(x), x))", ["swish", "swiglu"]),
        ("Multiply(Swish(x, f), u)", ["swish", "swiglu"]),
        ("Multiply(u, Divide(x, Add(1, Exp(Neg(x)))))", ["swish", "swiglu"]),
        ("Multiply(x, Multiply(x, Sigmoid(x)))", ["swish"]),
        ("Multiply(3, Multiply(x, Sigmoid(x)))", ["swish"]),
        ("Multiply(Swish(x), Swish(x))", ["swish"]),
        ("Multiply(Swish(x), Swish(z))", ["swish", "swish", "swiglu"]),
        ("Swish(Multiply(x, Sigmoid(x)))", ["swish", "swish"]),
        ("Multiply(Multiply(x, 0.5), Add(1, Erf(Divide(x, 1.4142135))))", ["gelu"]),
        ("Multiply(u, Multiply(Multiply(x, 0.5), Add(1, Erf(Divide(x, 1.4142135)))))", ["gelu", "geglu"]),
        ("Multiply(x, Reciprocal(Add(1, Exp(Neg(x)))))", ["sigmoid", "swish"]),
        ("Multiply(x, Tanh(Log(Add(1, Exp(x)))))", ["softplus", "mish"]),
        ("Multiply(x, Tanh(Log1p(Exp(x))))", ["softplus", "mish"]),
        ("Divide(Multiply(x, Minimum(ReLU(Add(3, x)), 6)), 6)", ["hardswish"]),
    ],
)
def test_nested_units_are_all_listed(expression, units):
    assert units_of(expression) == units


def test_unit_contains_the_ops_of_nested_units():
    graph = og.parse(graph_of("Multiply(Multiply(x, Sigmoid(x)), u)"))
    swish, swiglu = find_units(graph)
    assert [op.kind for op in swish.ops] == ["Sigmoid", "Multiply"]
    assert swiglu.ops == graph.ops
    assert (swish.kind, swiglu.kind) == ("Swish", "")


# -- the table itself ------------------------------------------------------------------------------------------------


def test_long_product_is_matched_in_linear_time():
    graph = og.Graph()
    value = x = graph.input("x", shape=(4,))
    for _ in range(20_000):
        value = graph.add_op("Multiply", value, x)
    assert find_units(graph.finalize()) == ()


def test_custom_rules_are_accepted():
    own = Rule(name="square", pattern="Multiply(x, x)", becomes="Square(x)", takes="", leaves="", why="x x is a square")
    (unit,) = find_units(og.parse(graph_of("Multiply(x, x)")), (own,))
    assert (unit.name, unit.kind) == ("square", "Square")


@pytest.mark.parametrize("pattern", ["x", "OneOf(ReLU(x), x)", "Multiply(a, b, c, d, e)"])
def test_invalid_pattern_is_refused(pattern):
    own = Rule(name="bad", pattern=pattern, takes="", leaves="", why="")
    with pytest.raises(InvalidArguments, match=re.compile("fix:", re.S)):
        find_units(og.parse(graph_of("ReLU(x)")), (own,))


def test_a_rule_over_an_unknown_op_is_refused():
    own = Rule(name="bad", pattern="Relu(x)", takes="", leaves="", why="")
    with pytest.raises(og.errors.InvalidGraphOp, match="unknown op kind 'Relu'"):
        find_units(og.parse(graph_of("ReLU(x)")), (own,))
