"""Gradients as graphs: compared with differences in float64, also second derivatives, and without leaks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import opgraph as og
from opgraph.errors import InvalidArguments
from opgraph.ir import opdef
from opgraph.ir.graph_builder import GraphBuilder
from opgraph.transforms.adjoint import Conditional, Conditions

R = np.random.default_rng(0)

#: Graphs, and the inputs by which they are differentiated.
GRAPHS = {
    "swish with a per-channel factor": (
        "graph(x: f64[?,8], a: f64[8]) -> (y)\n  %0 = Multiply(a, x)\n  %1 = Sigmoid(%0)\n  y = Multiply(x, %1)",
        ("x", "a"),
    ),
    "a 0-d parameter": (
        "graph(x: f64[3,4], a: f64[]) -> (y)\n  %0 = Multiply(x, a)\n  %1 = Tanh(%0)\n  y = Multiply(%1, a)",
        ("x", "a"),
    ),
    "a sum over axes of which one has size 1": (
        "graph(x: f64[5,1]) -> (y)\n  %0 = ReduceSum(x, axes=[0, 1], keep_dims=true)\n  %1 = Tanh(%0)\n"
        "  %2 = Multiply(%1, x)\n  y = Exp(%2)",
        ("x",),
    ),
    "a column and a row": (
        "graph(x: f64[3,4], c: f64[3,1], r: f64[4]) -> (y)\n  %0 = Multiply(x, c)\n  %1 = Add(%0, r)\n  y = Exp(%1)",
        ("x", "c", "r"),
    ),
    "a slope and a bias along the channel axis": (
        "graph(x: f64[2,3,4], s: f64[3], b: f64[3]) -> (y)\n"
        '  %0 = BiasAdd(x, b, data_format="NCX")\n  y = PReLU(%0, s, data_format="NCX")',
        ("x", "s", "b"),
    ),
    "a slope next to a tensor of unknown rank": (
        'graph(x: f64[*], s: f64[3]) -> (y)\n  y = PReLU(x, s, data_format="NCX")',
        ("x", "s"),
    ),
    "two outputs that share a value": (
        "graph(x: f64[5]) -> (y, z)\n  %0 = Exp(x)\n  y = Multiply(%0, x)\n  z = Sin(%0)",
        ("x",),
    ),
    "a value used three times": (
        "graph(x: f64[5]) -> (y)\n  %0 = Multiply(x, x)\n  %1 = Multiply(%0, x)\n  y = Add(%1, %0)",
        ("x",),
    ),
    "nested branches": (
        "graph(x: f64[9], a: f64[]) -> (y)\n  %0 = Greater(x, 0.0)\n  %1 = Greater(x, 1.0)\n  %2 = Multiply(x, a)\n"
        "  %3 = Exp(x)\n  %4 = Sin(%2)\n  %5 = Select(%1, %4, %2)\n  y = Select(%0, %5, %3)",
        ("x", "a"),
    ),
    "a value that both branches share": (
        "graph(x: f64[9]) -> (y)\n  %0 = Greater(x, 0.5)\n  %1 = Multiply(x, x)\n  %2 = Exp(%1)\n  %3 = Sin(%1)\n"
        "  y = Select(%0, %2, %3)",
        ("x",),
    ),
    "an output that is an input, and one without it": (
        "graph(x: f64[4], z: f64[4]) -> (y, w)\n  y = Add(x, z)\n  w = Exp(z)",
        ("x", "z"),
    ),
    "a narrow operand next to a wide one": (
        "graph(x: f64[4], z: f64[1]) -> (y)\n  y = Multiply(x, z)",
        ("z", "x"),
    ),
}


def as_dict(graph: og.Graph, value: object) -> Mapping[str, np.ndarray]:
    return value if isinstance(value, dict) else {str(graph.outputs[0].name): value}  # type: ignore[dict-item]


def sampled(graph: og.Graph) -> dict[str, np.ndarray]:
    return {
        str(t.name): R.standard_normal(
            [d if isinstance(d, int) else 3 for d in t.dims or (2, 3, 4)] if t.dims != () else ()
        )
        for t in graph.inputs
    }


def differences(graph: og.Graph, name: str, feeds: dict[str, np.ndarray], ds: Mapping[str, np.ndarray]) -> np.ndarray:
    """d(sum of ds * outputs) / d(name), by central differences."""
    result = np.zeros_like(feeds[name])
    for index in np.ndindex(feeds[name].shape):
        moved = []
        for step in (1e-6, -1e-6):
            at = {k: v.copy() for k, v in feeds.items()}
            at[name][index] += step
            made = as_dict(graph, og.evaluate(graph, at))
            moved.append(sum((made[k] * d).sum() for k, d in ds.items()))
        result[index] = (moved[0] - moved[1]) / 2e-6
    return result


def agrees(graph: og.Graph, wrt: Sequence[str], feeds: dict[str, np.ndarray]) -> og.Graph:
    """Checks the gradient graph of a graph, and returns it."""
    h = og.gradient(graph, wrt)
    assert [t.name for t in h.outputs] == [f"d_{name}" for name in wrt]
    ds = {k: R.standard_normal(v.shape) for k, v in as_dict(graph, og.evaluate(graph, feeds)).items()}
    given = {str(t.name): feeds[t.name] if t.name in feeds else ds[str(t.name)[2:]] for t in h.inputs}
    made = as_dict(h, og.evaluate(h, given))
    for name in wrt:
        expected = differences(graph, name, feeds, ds)
        assert made[f"d_{name}"].shape == feeds[name].shape
        np.testing.assert_allclose(made[f"d_{name}"], expected, rtol=1e-5, atol=1e-7)
    return h


@pytest.mark.parametrize("name", GRAPHS)
def test_compiled_gradients_agree_with_the_reference(name: str) -> None:
    text, wrt = GRAPHS[name]
    graph = og.parse(text)
    feeds = sampled(graph)
    h = og.gradient(graph, wrt=wrt)
    feeds |= {f"d_{n}": R.standard_normal(y.shape) for n, y in as_dict(graph, og.evaluate(graph, feeds)).items()}
    feeds = {str(t.name): feeds[str(t.name)] for t in h.inputs}
    exact = as_dict(h, og.evaluate(h, feeds))
    for key, got in as_dict(h, og.compile(h)(feeds)).items():
        np.testing.assert_allclose(got, exact[key], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", GRAPHS)
def test_first_and_second_derivatives_agree_with_differences(name: str) -> None:
    text, wrt = GRAPHS[name]
    graph = og.parse(text)
    feeds = sampled(graph)
    h = agrees(graph, wrt, feeds)
    feeds |= {str(t.name): R.standard_normal(as_dict(graph, og.evaluate(graph, feeds))[str(t.name)[2:]].shape)
              for t in h.inputs if t.name not in feeds}  # fmt: skip
    agrees(h, [str(t.name) for t in h.inputs], {str(t.name): feeds[str(t.name)] for t in h.inputs})


#: (branch where x > 0, branch elsewhere): each is NaN or infinite, or has such a derivative, where it is not taken.
BRANCHES = [
    ("Sqrt", "Exp"),
    ("Log", "Neg"),
    ("Reciprocal", "Exp"),
    ("Log", "Sqrt"),
    ("Rsqrt", "Tanh"),
    ("Log1p", "Exp"),
]


@pytest.mark.parametrize(("yes", "no"), BRANCHES)
@pytest.mark.parametrize("shared", [False, True], ids=["apart", "through a shared product"])
def test_branch_not_taken_does_not_leak_into_the_gradient(yes: str, no: str, shared: bool) -> None:
    g = og.Graph()
    x = g.input("x", "f64", ("n",))
    a = g.input("a", "f64", ())
    u = g.add_op("Multiply", x, a) if shared else x
    g.add_op("Select", g.add_op("Greater", x, 0.0), g.add_op(yes, u), g.add_op(no, u), name="y")
    h = og.gradient(g, ("x", "a"))
    positive, negative = np.array([5e-324, 1e-3, 1.0, 1e300]), np.array([-1e300, -700.0, -1.0, -1e-3])
    everywhere = np.concatenate([negative, positive])
    feeds = {"a": np.float64(1.0), "x": everywhere, "d_y": np.ones(8)}
    needs = {t.name for t in h.inputs}
    made = og.evaluate(h, {k: v for k, v in feeds.items() if k in needs})
    alone = []
    for kind, part in ((no, negative), (yes, positive)):
        one = og.Graph()
        z = one.input("x", "f64", ("n",))
        one.add_op(kind, one.add_op("Multiply", z, 1.0), name="y")
        k = og.gradient(one, ("x",))
        given = {"x": part, "d_y": np.ones(4)}
        alone.append(og.evaluate(k, {str(t.name): given[str(t.name)] for t in k.inputs}))
    np.testing.assert_array_equal(made["d_x"], np.concatenate(alone))


def test_value_shared_by_two_branches_does_not_leak_into_a_third() -> None:
    """Both use x / z, and where neither is taken, z is 0."""
    text = """graph(x: f64[n], z: f64[n]) -> (y)
      q = Divide(x, z)
      c = Atan(q)
      high = Greater(x, 1.0)
      low = Less(x, -1.0)
      n = Neg(c)
      inner = Select(low, n, x)
      y = Select(high, c, inner)"""
    h = og.gradient(og.parse(text), ("x", "z"))
    x, z = np.array([3.0, -3.0, 0.5, 0.0]), np.array([2.0, 2.0, 0.0, 0.0])
    for made in og.evaluate(h, x=x, z=z, d_y=np.ones(4)), og.compile(h)(x=x, z=z, d_y=np.ones(4)):
        np.testing.assert_allclose(made["d_x"], [2 / 13, -2 / 13, 1, 1])
        np.testing.assert_allclose(made["d_z"], [-3 / 13, -3 / 13, 0, 0])


@pytest.mark.parametrize("count", [2, 4, 5, 6, 12])
@pytest.mark.parametrize("nested", [False, True], ids=["separate", "nested"])
def test_value_read_only_by_untaken_branches_has_no_gradient(count: int, nested: bool) -> None:
    """Each of the branches reads a square root, whose derivative at 0 is infinite."""
    g = og.Graph()
    x = g.input("x", "f64", ("n",))
    root = g.add_op("Sqrt", x)
    total: og.LogicalTensor | None = None
    for k in range(count):
        term = g.add_op("Multiply", root, float(k + 1))
        if nested:
            term = g.add_op("Select", g.add_op("Less", x, float(k + 3)), term, 0.0)
        term = g.add_op("Select", g.add_op("Greater", x, float(k)), term, 0.0)
        total = term if total is None else g.add_op("Add", total, term)
    assert total is not None
    g.output(total)
    x_values = np.array([0.0, 0.5, 2.5, 9.0, 100.0])
    slope = np.zeros(5)
    for k in range(count):
        taken = (x_values > k) & ((x_values < k + 3) | (not nested))
        slope[taken] += (k + 1) / (2 * np.sqrt(x_values[taken]))
    h = og.gradient(g.finalize(), wrt="x")
    got = og.evaluate(h, {t.name: x_values if t.name == "x" else np.ones(5) for t in h.inputs})
    np.testing.assert_allclose(got, slope, rtol=1e-12)


def test_naive_select_gradient_leaks_nan() -> None:
    """The gradient that writes the Select directly is NaN: the tests above would detect it."""
    with np.errstate(all="ignore"):
        x = np.array([-1.0])
        assert np.isnan(np.where(x > 0, 1.0, 0.0) * 0.5 / np.sqrt(x)).all()


def test_wrt_names_are_checked() -> None:
    g = og.parse("graph(x: f32[4], n: s32[4]) -> (y)\n  y = Exp(x)")
    with pytest.raises(og.errors.InvalidArguments, match="no input or constant 'q'"):
        og.gradient(g, ("q",))
    with pytest.raises(og.errors.InvalidArguments, match="named twice"):
        og.gradient(g, ("x", "x"))
    with pytest.raises(og.errors.InvalidArguments, match="no input is named"):
        og.gradient(g, ())
    with pytest.raises(og.errors.InvalidDataType, match="no gradient"):
        og.gradient(g, ("n",))


def test_op_without_a_gradient_is_refused_by_name() -> None:
    g = og.Graph()
    x = g.input("x", "f32", (4,))
    g.add_op("Wildcard", x, name="w", outputs=1, dtype="f32")
    with pytest.raises(og.errors.Unimplemented, match="Wildcard") as error:
        og.gradient(g, ("x",))
    assert 'Wildcard "w"' in str(error.value)


def test_input_without_effect_has_zero_gradient() -> None:
    g = og.parse("graph(x: f32[2,3], z: f32[3]) -> (y)\n  %0 = Floor(z)\n  y = Add(x, %0)")
    h = og.gradient(g, ("z",))
    made = og.evaluate(h, {str(t.name): np.ones([2, 3] if t.name != "z" else [3], np.float32) for t in h.inputs})
    np.testing.assert_array_equal(made, np.zeros(3))


def test_a_constant_of_wrt_becomes_an_input() -> None:
    g = og.Graph()
    x = g.input("x", "f64", (4,))
    a = g.constant("a", np.array([1.0, 2.0, 3.0, 4.0]))
    g.add_op("Multiply", x, a, name="y")
    h = og.gradient(g, ("a",))
    assert [t.name for t in h.inputs] == ["x", "d_y"] or [t.name for t in h.inputs] == ["x", "a", "d_y"]


def test_colliding_gradient_name_is_refused() -> None:
    g = og.parse("graph(x: f32[4], d_y: f32[4]) -> (y)\n  y = Multiply(x, d_y)")
    with pytest.raises(og.errors.InvalidArguments, match='two inputs called "d_y"'):
        og.gradient(g, ("x",))


def choices(count: int) -> og.Graph:
    """A chain of choices between the current value and one tensor that all of them read."""
    g = og.Graph()
    x = value = g.input("x", "f64", ("n",))
    for i in range(count):
        bound = g.add_op("Greater", value, (i % 7 - 3) / 4)
        value = g.add_op("Select", bound, *((g.add_op("Sqrt", value), x) if i % 2 else (x, value)))
    g.output(value)
    return g.finalize()


def test_gradient_of_chained_selects_is_linear_in_length(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Counts the gradient's ops, and the conditions that contributions carry on the way."""
    carried = 0
    under = Conditional.under

    def counting(self: Conditional, *given: Any) -> Conditions:
        nonlocal carried
        made = under(self, *given)
        carried += len(made)
        return made

    monkeypatch.setattr(Conditional, "under", counting)
    work = []
    for count in (100, 200, 400):
        carried = 0
        work.append((len(og.gradient(choices(count), wrt="x").ops), carried))
    for first, second, third in zip(*work, strict=True):
        assert third - second <= 2.1 * (second - first)
    assert work[2][0] < 3 * len(choices(400).ops)


@pytest.mark.parametrize("count", [3, 8, 9, 10, 40])
def test_gradient_of_chained_selects_follows_the_taken_branches(count: int) -> None:
    """Branches that are not taken have infinite or NaN derivatives: the square root at 0 and below."""
    x = np.concatenate([R.uniform(-1, 1, 500), [0.0, -0.0, 1e-300]])
    value, slope = x, np.ones_like(x)
    with np.errstate(all="ignore"):
        for i in range(count):
            holds = value > (i % 7 - 3) / 4
            root = np.sqrt(value), slope / (2 * np.sqrt(value))
            yes, no = (root, (x, np.ones_like(x))) if i % 2 else ((x, np.ones_like(x)), (value, slope))
            value, slope = np.where(holds, yes[0], no[0]), np.where(holds, yes[1], no[1])
    h = og.gradient(choices(count), wrt="x")
    got = og.evaluate(h, {t.name: x if t.name == "x" else np.ones_like(x) for t in h.inputs})
    np.testing.assert_allclose(got, slope, rtol=1e-12)


def test_gradient_of_a_long_chain_is_linear_in_size() -> None:
    g = og.Graph()
    x = g.input("x", "f32", ("n",))
    value = x
    for _ in range(3000):  # more than the depth of Python's stack
        value = g.add_op("Sin", value)
    h = og.gradient(g, ("x",))
    assert len(h.ops) < 4 * 3000


def test_fused_units_are_differentiated_as_single_ops() -> None:
    g = og.parse("graph(x: f64[n]) -> (y)\n  %0 = Sigmoid(x)\n  y = Multiply(x, %0)")
    h = og.gradient(g, ("x",))
    made = og.evaluate(h, x=np.array([-np.inf, np.inf, 0.0]), d_y=np.ones(3))
    np.testing.assert_array_equal(made, [0.0, 1.0, 0.5])


def test_the_same_graph_gives_the_same_gradient_graph() -> None:
    text, wrt = GRAPHS["nested branches"]
    assert str(og.gradient(og.parse(text), wrt)) == str(og.gradient(og.parse(text), wrt))


def test_generated_size_symbols_do_not_collide_with_inputs() -> None:
    g = og.parse(
        "graph(x: f64[?,2], unread: f64[n0]) -> (y)\n  s = ReduceSum(x, axes=[0], keep_dims=true)\n  y = Add(x, s)"
    )
    x, unread = np.ones((3, 2)), np.zeros(5)
    y, vjp = og.compile(g, wrt=("x", "unread")).vjp(x=x, unread=unread)
    found = vjp(np.ones_like(y))
    np.testing.assert_array_equal(found["x"], np.full((3, 2), 4.0))
    np.testing.assert_array_equal(found["unread"], np.zeros(5))
    h = og.gradient(g, ("x", "unread"))
    named = {t.name: t.dims for t in h.inputs}
    assert named["unread"] == ("n0",) and named["x"] == (named["x"][0], 2) and named["x"][0] != "n0"


@pytest.mark.parametrize("layout", ["NCX", "NXC"])
def test_group_norm_of_an_empty_batch_has_a_gradient(layout: str) -> None:
    attrs = f'keep_stats=false, groups=2, use_affine=false, data_format="{layout}"'
    g = og.parse(f"graph(x: f64[0,4]) -> (y)\n  y = GroupNorm(x, {attrs})")
    h = og.gradient(g, ("x",))
    assert og.evaluate(h, x=np.zeros((0, 4)), d_y=np.zeros((0, 4))).shape == (0, 4)


@pytest.mark.parametrize("shape", [(3, 4, 5), (3, 4, 4), (4, 4, 2, 3)])
def test_select_on_a_channel_sum_masks_its_channel(shape: tuple[int, ...]) -> None:
    """If the last axis has the same length, a condition along that axis would go unnoticed."""
    text = f"""graph(x: f64{list(shape)}, b: f64[4]) -> (y)
      q = Square(x)
      s = SumTo(q, b, data_format="NCX", per_channel_broadcast=true)
      c = Greater(s, b)
      y = Select(c, s, b)""".replace(", ", ",", len(shape) - 1)
    slope = og.gradient(og.parse(text), ("x",))
    x, d = np.random.default_rng(0).uniform(0.5, 2, shape), np.array([1.0, 2.0, 3.0, 4.0])
    total = np.square(x).sum(tuple(a for a in range(x.ndim) if a != 1))
    feeds = {"x": x, "b": total + np.array([1, -1, 1, -1]), "d_y": d}
    want = 2 * x * (d * [0, 1, 0, 1]).reshape([-1, *(1 for _ in shape[2:])])
    np.testing.assert_allclose(og.evaluate(slope, feeds), want)
    np.testing.assert_allclose(og.compile(slope)(feeds), want)


def test_unknown_sizes_that_must_be_equal_share_a_symbol() -> None:
    graph = og.parse(
        "graph(x: f64[?], w: f64[?]) -> (y, z)\n  a = Exp(x)\n"
        '  p = Multiply(a, w, auto_broadcast="none")\n  y = Tanh(p)\n  r = Cos(a)\n'
        '  z = Multiply(p, r, auto_broadcast="none")'
    )
    slope = og.gradient(graph.finalize(), ("x", "w"))
    assert len({t.dims for t in slope.inputs}) == 1
    x, w, d = (R.uniform(-1, 1, 5) for _ in range(3))
    made = og.compile(slope)(x=x, w=w, d_y=d, d_z=d)
    tanh = np.tanh(np.exp(x) * w)
    np.testing.assert_allclose(made["d_w"], np.exp(x) * d * (1 - tanh**2 + np.cos(np.exp(x))), rtol=1e-12)


@pytest.mark.parametrize("shape", ["[1,c]", "[]"])
@pytest.mark.parametrize("kind", ["Add", "Multiply", "Divide"])
def test_gradient_of_f32_operand_with_16_bit_data_is_summed_in_f32(kind: str, shape: str) -> None:
    graph = og.parse(f"graph(x: bf16[n,c], a: f32{shape}) -> (y)\n  y: bf16[n,c] = {kind}(x, a)")
    rule = og.gradient(graph, ["a"])
    rng = np.random.default_rng(0)
    given: dict[str, Any] = {name: rng.random((300, 3)).astype(ml_dtypes.bfloat16) for name in ("x", "d_y")}
    given["a"] = np.full((1, 3) if shape == "[1,c]" else (), 0.7, np.float32)
    feeds = {t.name: given[t.name] for t in rule.inputs}
    found = og.compile(rule, device="cpu")(feeds)
    np.testing.assert_allclose(found, og.evaluate(rule, feeds), rtol=1e-6)


def test_integers_beyond_float_precision_stay_distinct() -> None:
    graph = og.Graph()
    x, i = graph.input("x", "f32", (3,)), graph.input("i", "s64", (3,))
    chosen = x
    for number, kind in ((2**53, "Sin"), (2**53 + 1, "Exp")):
        is_it = graph.add_op("Equal", i, graph.constant("", number, dtype="s64"))
        chosen = graph.add_op("Select", is_it, graph.add_op(kind, x), chosen)
    graph.output(chosen)
    feeds = {"x": np.array([0.5, 0.5, 0.5], np.float32), "i": np.array([2**53, 2**53 + 1, 0])}
    _, pullback = og.compile(graph, wrt=("x",)).vjp(feeds)
    want = [np.cos(0.5), np.exp(0.5), 1.0]
    np.testing.assert_allclose(pullback(np.ones(3, np.float32))["x"], want, rtol=1e-6)


def test_conv_transpose_weights_gradient_infers_undeclared_sizes() -> None:
    text = (
        "graph(x: f64[{shape}], d: f64[2,3,8,7]) -> (y)\n"
        "  y = ConvTransposeBackwardWeights(x, d, weights_shape=[3, 1, 3, 3], strides=[2, 2], pads_begin=[2, 2], "
        'pads_end=[1, 1], dilations=[2, 2], groups=3, data_format="NCX", weights_format="IOX")'
    )
    rng = np.random.default_rng(0)
    feeds = {
        "x": rng.normal(size=(2, 3, 4, 3)),
        "d": rng.normal(size=(2, 3, 8, 7)),
        "d_y": rng.normal(size=(3, 1, 3, 3)),
    }
    declared, open_ = (
        og.evaluate(og.gradient(og.parse(text.format(shape=shape)), ["x", "d"]), feeds)
        for shape in ("2,3,4,3", "?,?,4,?")
    )
    for name, value in declared.items():
        np.testing.assert_array_equal(open_[name], value)


@pytest.mark.parametrize("number", [np.int64(1), np.float32(1), np.bool_(True)])
def test_equal_constants_of_different_dtypes_stay_separate(number: Any) -> None:
    graph = og.Graph()
    x, w = graph.input("x", "f64", (3,)), graph.input("w", "f64", (3,))
    filled = graph.add_op("BroadcastTo", graph.constant("", number), w)
    top = graph.add_op("ReduceMax", w, axes=[0], keep_dims=True)  # its gradient counts with ones in the shape of w
    y = graph.add_op("Multiply", graph.add_op("TypeCast", filled, dtype="f64"), top, name="y")
    zeros = graph.add_op("BroadcastTo", graph.constant("", np.zeros((), number.dtype)), x)
    graph.output(y, zeros)
    slope = og.gradient(graph, ("x", "w"))
    assert [t.type_text for t in slope.outputs] == ["f64[3]", "f64[3]"]
    found = og.evaluate(slope, {"x": np.ones(3), "w": np.array([1.0, 3.0, 3.0]), "d_y": np.ones(3)})
    np.testing.assert_array_equal(found["d_x"], np.zeros(3))
    np.testing.assert_array_equal(found["d_w"], [0, 1.5, 1.5])


def test_rounded_product_is_not_reused_as_an_exact_one() -> None:
    graph = og.parse("graph(x: bf16[3], z: f32[3]) -> (y)\n  y: bf16[3] = Multiply(x, z)")
    builder = GraphBuilder(graph)
    x, z = map(builder.input, graph.inputs)
    builder.enter(graph.ops[0])
    assert builder("Multiply", x, z, dtype="bf16").id == graph.outputs[0].id
    exact = builder("Multiply", x, z)
    assert exact.dtype == "f32" and builder("Multiply", x, z).id == exact.id


def test_gradient_graph_keeps_the_engine() -> None:
    for kind in ("cpu", "cuda"):
        graph = og.Graph(kind)
        graph.output(graph.add_op("Sin", graph.input("x", "f32", (3,))))
        assert og.gradient(graph, "x").engine == kind
        assert og.gradient(og.gradient(graph, "x"), "x").engine == kind


def test_wrt_prefers_an_input_over_a_constant_of_that_name() -> None:
    for name, constant in (("x", "x"), ("t1", "")):
        graph = og.Graph()
        x, k = graph.input(name, "f64", (2,)), graph.constant(constant, np.array([3.0, 2.0]))
        graph.output(graph.add_op("Multiply", x, k, name="y"))
        slope = og.gradient(graph, name)
        np.testing.assert_array_equal(og.evaluate(slope, d_y=np.ones(2)), [3, 2])
        _, pull = og.compile(graph, wrt=(name,)).vjp({name: np.ones(2)})
        np.testing.assert_array_equal(pull(np.ones(2))[name], [3, 2])


def test_wrt_names_an_unnamed_constant_by_its_id() -> None:
    graph = og.Graph()
    x, k = graph.input("x", "f64", (2,)), graph.constant("", np.array([3.0, 2.0]))
    graph.output(graph.add_op("Multiply", x, k, name="y"))
    slope = og.gradient(graph, f"t{k.id}")
    np.testing.assert_array_equal(og.evaluate(slope, x=np.array([5.0, 6.0]), d_y=np.ones(2)), [5, 6])
    _, pull = og.compile(graph, wrt=(f"t{k.id}",)).vjp({"x": np.array([5.0, 6.0]), f"t{k.id}": np.ones(2)})
    np.testing.assert_array_equal(pull(np.ones(2))[f"t{k.id}"], [5, 6])


def test_wrt_name_shared_by_two_constants_is_refused() -> None:
    graph = og.Graph()
    x, *ks = graph.input("x", "f64", (2,)), *(graph.constant("k", np.full(2, n)) for n in (1.0, 2.0))
    graph.output(graph.add_op("Multiply", graph.add_op("Add", x, ks[0]), ks[1]))
    with pytest.raises(InvalidArguments, match="two constants are called 'k'"):
        og.gradient(graph, "k")


@pytest.mark.parametrize("kind", [r.kind for r in opdef.all_ops() if r.family == "reduction"])
@pytest.mark.parametrize("axes", [(), (0,), (0, -1)])
def test_gradient_of_a_reduction_along_run_time_axes(kind: str, axes: tuple[int, ...]) -> None:
    graph = og.parse(f"graph(x: f64[2,3], axes: s32[?]) -> (y)\n  y = {kind}(x, axes, keep_dims=true)")
    x = R.standard_normal((2, 3))
    x[0, 0] = -abs(x[0, 0])  # along no axes the result is the input itself
    feeds: dict[str, Any] = {"x": x, "axes": np.array(axes, np.int32)}
    d = R.standard_normal(np.shape(og.evaluate(graph, feeds)))
    slope = og.gradient(graph, "x")
    made = og.evaluate(slope, {n: a for n, a in {**feeds, "d_y": d}.items() if n in {t.name for t in slope.inputs}})
    np.testing.assert_allclose(made, differences(graph, "x", feeds, {"y": d}), rtol=1e-5, atol=1e-7)
