"""Training with NumPy alone: vjp, and the contract for the tensors saved from forward to backward."""

from __future__ import annotations

import gc
import sys
import weakref

import numpy as np
import pytest

import opgraph as og
from opgraph.errors import InvalidArguments
from opgraph.transforms.cut import Cut
from opgraph.transforms.gradient import differentiated, prepared

SWISH = "graph(x: f32[n,8], a: f32[8]) -> (y)\n  %0 = Multiply(a, x)\n  %1 = Sigmoid(%0)\n  y = Multiply(x, %1)"

#: Graphs, the inputs by which they are differentiated, and the saved tensors: (name, role, bytes).
KEPT = {
    "one input: it is kept": (
        "graph(x: f32[64,64]) -> (y)\n  %0 = Sigmoid(x)\n  y = Multiply(x, %0)",
        ("x",),
        [("x", "input", 16384)],
    ),
    "a parameter: kept as well": (SWISH.replace("n,8", "64,8"), ("x", "a"), [("x", "input", 2048), ("a", "input", 32)]),
    "a gradient not asked for keeps nothing more": (
        "graph(x: f32[64,64], z: f32[64,64]) -> (y)\n  y = Multiply(x, z)",
        ("x",),
        [("x", "shape", 0), ("z", "input", 16384)],
    ),
    "a sum: nothing but shapes": (
        "graph(x: f32[64,64], b: f32[64]) -> (y)\n  y = Add(x, b)",
        ("x", "b"),
        [("x", "shape", 0), ("b", "shape", 0)],
    ),
    "a sum of two under an activation: the sum, not both": (
        "graph(x: f32[64,64], z: f32[64,64]) -> (y)\n  %0 = Add(x, z)\n  %1 = Sigmoid(%0)\n  y = Multiply(%0, %1)",
        ("x", "z"),
        [("x", "shape", 0), ("z", "shape", 0), ("", "value", 16384)],
    ),
    "where the output suffices, the output": (
        "graph(x: f32[64,64]) -> (y)\n  y = Exp(x)",
        ("x",),
        [("x", "shape", 0), ("y", "output", 16384)],
    ),
    "a branch by another tensor: its mask of one byte": (
        "graph(x: f32[64,64], z: f32[64,64]) -> (y)\n  %0 = Greater(z, 0.0)\n  y = Select(%0, x, 0.0)",
        ("x",),
        [("", "value", 4096)],
    ),
    "a branch by its own sign, spelled ReLU: the output tells it": (
        "graph(x: f32[64,64]) -> (y)\n  %0 = Greater(x, 0.0)\n  y = Select(%0, x, 0.0)",
        ("x",),
        [("y", "output", 16384)],
    ),
    "the same with a slope": (
        "graph(x: f32[64,64]) -> (y)\n  %0 = Greater(x, 0.0)\n  %1 = Multiply(x, 0.1)\n  y = Select(%0, x, %1)",
        ("x",),
        [("y", "output", 16384)],
    ),
    "with a slope below 0, which the output does not tell": (
        "graph(x: f32[64,64]) -> (y)\n  %0 = Greater(x, 0.0)\n  %1 = Multiply(x, -0.1)\n  y = Select(%0, x, %1)",
        ("x",),
        [("", "value", 4096)],
    ),
    "relu6 as torch differentiates it: the output tells both ends": (
        "graph(x: f32[64,64]) -> (y)\n  %0 = LessOrEqual(x, 0.0)\n  %1 = GreaterEqual(x, 6.0)\n"
        "  %2 = Select(%1, 6.0, x)\n  y = Select(%0, 0.0, %2)",
        ("x",),
        [("y", "output", 16384)],
    ),
    "a lower end alone, as torch differentiates it: the output tells": (
        "graph(x: f32[64,64]) -> (y)\n  %0 = LessOrEqual(x, 0.5)\n  y = Select(%0, 0.5, x)",
        ("x",),
        [("y", "output", 16384)],
    ),
    "an upper end alone: the output tells": (
        "graph(x: f32[64,64]) -> (y)\n  %0 = GreaterEqual(x, 0.5)\n  y = Select(%0, 0.5, x)",
        ("x",),
        [("y", "output", 16384)],
    ),
    "a jump at the end: a mask": (
        "graph(x: f32[64,64]) -> (y)\n  %0 = LessOrEqual(x, 0.5)\n  y = Select(%0, 0.0, x)",
        ("x",),
        [("", "value", 4096)],
    ),
    "between ends that are out of order: two masks": (
        "graph(x: f32[64,64]) -> (y)\n  %0 = LessOrEqual(x, 1.0)\n  %1 = GreaterEqual(x, 0.5)\n"
        "  %2 = Select(%1, 0.5, x)\n  y = Select(%0, 1.0, %2)",
        ("x",),
        [("", "value", 4096), ("", "value", 4096)],
    ),
    "an output that a library op's gradient reads": (
        "graph(x: f32[64,64]) -> (y)\n  y = ReduceL2(x, axes=[1])",
        ("x",),
        [("x", "input", 16384), ("y", "output", 256)],
    ),
    "the largest of each row: a mask": (
        "graph(x: f32[64,64]) -> (y)\n  y = ReduceMax(x, axes=[1])",
        ("x",),
        [("", "value", 4096)],
    ),
    "the largest of what is kept anyway: no mask": (
        "graph(x: f32[64,64]) -> (y)\n  %0 = ReduceMax(x, axes=[1], keep_dims=true)\n  %1 = Sin(x)\n"
        "  y = Multiply(%0, %1)",
        ("x",),
        [("x", "input", 16384), ("", "value", 256)],
    ),
    "the largest of what is computed again: a mask": (
        "graph(x: f32[64,64]) -> (y)\n  %0 = Sin(x)\n  %1 = ReduceMax(%0, axes=[1], keep_dims=true)\n"
        "  y = Multiply(%0, %1)",
        ("x",),
        [("x", "input", 16384), ("", "value", 256), ("", "value", 4096)],
    ),
    "a clamp: a mask, since at a bound the output does not tell": (
        "graph(x: f32[64,64]) -> (y)\n  y = Clamp(x, min=-1.0, max=1.0)",
        ("x",),
        [("", "value", 4096)],
    ),
    "a clamp of what is kept anyway: no mask": (
        "graph(x: f32[64,64]) -> (y)\n  %0 = Clamp(x, min=-1.0, max=1.0)\n  %1 = Sin(x)\n  y = Multiply(%0, %1)",
        ("x",),
        [("x", "input", 16384)],
    ),
    "a ReLU that is no output: a mask": (
        "graph(x: f32[64,64]) -> (y)\n  %0 = ReLU(x)\n  y = Multiply(%0, 2.0)",
        ("x",),
        [("", "value", 4096)],
    ),
    "a hard sigmoid: a mask": (
        "graph(x: f32[64,64]) -> (y)\n  y = HardSigmoid(x, alpha=0.2, beta=0.5)",
        ("x",),
        [("", "value", 4096)],
    ),
    "the larger of two, scaled: two masks": (
        "graph(x: f32[64,64], z: f32[64,64]) -> (y)\n  %0 = Maximum(x, z)\n  y = Multiply(%0, 2.0)",
        ("x",),
        [("", "value", 4096), ("", "value", 4096)],
    ),
    "a clamp between tensors: a mask, and none of the bounds": (
        "graph(x: f32[64,64], a: f32[64], b: f32[]) -> (y)\n  y = Clamp(x, a, b)",
        ("x",),
        [("", "value", 4096)],
    ),
    "relu6 as it is traced: the output tells": (
        "graph(x: f32[64,64]) -> (y)\n  %0 = LessOrEqual(x, 0.0)\n  %1 = GreaterEqual(x, 6.0)\n  %2 = Or(%0, %1)\n"
        "  %3 = Maximum(x, 0.0)\n  %4 = Minimum(%3, 6.0)\n  %5 = StopGradient(%4)\n  y = Select(%2, %5, x)",
        ("x",),
        [("y", "output", 16384)],
    ),
    "relu6 as it is traced, inside: one mask": (
        "graph(x: f32[64,64]) -> (y)\n  %0 = LessOrEqual(x, 0.0)\n  %1 = GreaterEqual(x, 6.0)\n  %2 = Or(%0, %1)\n"
        "  %3 = Maximum(x, 0.0)\n  %4 = Minimum(%3, 6.0)\n  %5 = StopGradient(%4)\n"
        "  %6 = Select(%2, %5, x)\n  y = Multiply(%6, 2.0)",
        ("x",),
        [("", "value", 4096)],
    ),
    "relu6 as it is traced, with a jump at one end: a mask": (
        "graph(x: f32[64,64]) -> (y)\n  %0 = LessOrEqual(x, 1.0)\n  %1 = GreaterEqual(x, 6.0)\n  %2 = Or(%0, %1)\n"
        "  %3 = Maximum(x, 0.0)\n  %4 = Minimum(%3, 6.0)\n  %5 = StopGradient(%4)\n  y = Select(%2, %5, x)",
        ("x",),
        [("", "value", 4096)],
    ),
    "clamp as it is traced: the output tells": (
        "graph(x: f32[64,64]) -> (y)\n  %0 = Greater(x, 0.0)\n  %1 = Less(x, 6.0)\n  %2 = And(%0, %1)\n"
        "  %3 = Maximum(x, 0.0)\n  %4 = Minimum(%3, 6.0)\n  %5 = StopGradient(%4)\n  y = Select(%2, x, %5)",
        ("x",),
        [("y", "output", 16384)],
    ),
    "clamp_min as it is traced: the output tells": (
        "graph(x: f32[64,64]) -> (y)\n  %0 = Greater(x, 0.5)\n  %1 = Maximum(x, 0.5)\n  %2 = StopGradient(%1)\n"
        "  y = Select(%0, x, %2)",
        ("x",),
        [("y", "output", 16384)],
    ),
    "clamp_max as it is traced: the output tells": (
        "graph(x: f32[64,64]) -> (y)\n  %0 = Less(x, 0.5)\n  %1 = Minimum(x, 0.5)\n  %2 = StopGradient(%1)\n"
        "  y = Select(%0, x, %2)",
        ("x",),
        [("y", "output", 16384)],
    ),
    "clamp as it is traced, inside: one mask": (
        "graph(x: f32[64,64]) -> (y)\n  %0 = Greater(x, 0.0)\n  %1 = Less(x, 6.0)\n  %2 = And(%0, %1)\n"
        "  %3 = Maximum(x, 0.0)\n  %4 = Minimum(%3, 6.0)\n  %5 = StopGradient(%4)\n"
        "  %6 = Select(%2, x, %5)\n  y = Multiply(%6, 2.0)",
        ("x",),
        [("", "value", 4096)],
    ),
    "a mask that is an input: the mask alone": (
        "graph(x: f32[64,64], m: boolean[64,64]) -> (y)\n  %0 = Select(m, x, 0.0)\n  y = Multiply(%0, 2.0)",
        ("x",),
        [("m", "input", 4096)],
    ),
    "a power with a trained exponent: base and exponent": (
        "graph(x: f32[64,64], a: f32[]) -> (y)\n  y = Pow(x, a)",
        ("x", "a"),
        [("x", "input", 16384), ("a", "input", 4)],
    ),
    "a mask from rounding: the input": (
        "graph(x: f32[64,64]) -> (y)\n  %0 = Round(x)\n  %1 = Equal(%0, x)\n  %2 = Exp(x)\n  %3 = Multiply(%2, x)\n"
        "  %4 = Sin(x)\n  y = Select(%1, %3, %4)",
        ("x",),
        [("x", "input", 16384)],
    ),
}


@pytest.mark.parametrize("name", KEPT)
def test_saved_tensors_are_the_expected_ones(name: str) -> None:
    text, wrt, expected = KEPT[name]
    f = og.compile(og.parse(text), wrt=wrt)
    saved = [s for s in f.saved_tensors() if s.role != "shape"]
    found = [("" if s.role == "value" else s.name, s.role, s.bytes) for s in saved]
    assert found == [e for e in expected if e[1] != "shape"]
    assert all(s.name.startswith("kept_") for s in saved if s.role == "value")
    assert all(s.bytes == 0 for s in f.saved_tensors() if s.role == "shape")


@pytest.mark.parametrize("name", KEPT)
def test_only_saved_tensors_stay_alive(name: str) -> None:
    text, wrt, expected = KEPT[name]
    g = og.parse(text)
    f = og.compile(g, wrt=wrt)
    rng = np.random.default_rng(0)
    arrays = {}
    for t in g.inputs:
        values = rng.random(t.shape)
        arrays[str(t.name)] = np.asarray(values > 0.5 if t.dtype == "boolean" else values.astype(np.float32))
    alive = {k: weakref.ref(v) for k, v in arrays.items()}
    y, vjp = f.vjp(arrays)
    alive["y"] = weakref.ref(y)
    assert sum(s.bytes for s in vjp.saved) == sum(e[2] for e in expected)
    d = np.ones(y.shape, np.float32)
    del arrays, y
    gc.collect()
    kept = {e[0] for e in expected if e[1] in ("input", "output")}
    assert {k for k, ref in alive.items() if ref() is not None} == kept
    vjp(d)


@pytest.mark.parametrize("name", [name for name, case in KEPT.items() if any(not e[0] for e in case[2])])
def test_substitutes_saved_for_inputs_give_the_same_gradients(name: str) -> None:
    """At ties, bounds, infinities and NaN the gradients are those computed from the inputs themselves."""
    text, wrt, _ = KEPT[name]
    g = og.parse(text)
    rng, special = np.random.default_rng(0), [0.0, -0.0, 1.0, -1.0, 2.5, -2.5, np.inf, -np.inf, np.nan, 1e-40]
    feeds = {str(t.name): rng.choice(special, t.shape).astype(np.float32) for t in g.inputs}
    f, h = og.compile(g, wrt=wrt), og.gradient(g, wrt)
    with np.errstate(invalid="ignore", over="ignore"):
        y, vjp = f.vjp(feeds)
        d = rng.standard_normal(y.shape).astype(np.float32)
        wanted = og.compile(h)({**{n: a for n, a in feeds.items() if any(t.name == n for t in h.inputs)}, "d_y": d})
    got = vjp(d)
    for name in wrt:
        np.testing.assert_array_equal(got[name], wanted[f"d_{name}"] if isinstance(wanted, dict) else wanted)


def test_gradients_agree_with_the_reference_and_repeat_their_bits() -> None:
    g = og.parse(SWISH)
    f = og.compile(g, wrt=("x", "a"))
    rng = np.random.default_rng(0)
    x, a, d = (rng.standard_normal(s).astype(np.float32) for s in ((300, 8), (8,), (300, 8)))
    y, vjp = f.vjp(x=x, a=a)
    np.testing.assert_array_equal(y, f(x=x, a=a))
    first, again = vjp(d), vjp(d)
    truth = og.evaluate(og.gradient(g, ("x", "a")), {"x": x, "a": a, "d_y": d})
    for name in ("x", "a"):
        np.testing.assert_array_equal(first[name], again[name])
        scale = np.abs(truth[f"d_{name}"]).max()
        assert np.abs(first[name] - truth[f"d_{name}"]).max() <= 4e-7 * scale * (1 if name == "x" else 8)


def test_omitted_output_gradients_are_zero() -> None:
    g = og.parse("graph(x: f32[4]) -> (y, z)\n  y = Exp(x)\n  z = Sin(x)")
    x = np.linspace(0, 1, 4, dtype=np.float32)
    _, vjp = og.compile(g, wrt="x").vjp(x=x)
    np.testing.assert_allclose(vjp({"z": np.ones(4, np.float32)})["x"], np.cos(x), rtol=1e-6)
    with pytest.raises(og.errors.InvalidArguments, match="several outputs"):
        vjp(np.ones(4, np.float32))
    with pytest.raises(og.errors.InvalidArguments, match="no output 'q'"):
        vjp({"q": np.ones(4, np.float32)})
    with pytest.raises(og.errors.InvalidShape, match="d_y"):
        vjp({"y": np.ones(3, np.float32)})
    with pytest.raises(og.errors.InvalidDataType):
        vjp({"y": np.ones(4)})


def test_a_constant_of_wrt_is_an_input_of_the_executable() -> None:
    g = og.Graph()
    x = g.input("x", "f32", (4,))
    g.add_op("Multiply", x, g.constant("a", np.ones(4, np.float32)), name="y")
    f = og.compile(g, wrt=("a",))
    y, vjp = f.vjp(x=np.arange(4, dtype=np.float32), a=np.full(4, 2, np.float32))
    np.testing.assert_array_equal(y, [0, 2, 4, 6])
    np.testing.assert_array_equal(vjp(np.ones(4, np.float32))["a"], [0, 1, 2, 3])


def test_inputs_read_by_backward_cannot_be_donated() -> None:
    g = og.parse(SWISH)
    with pytest.raises(og.errors.InvalidArguments, match='"x" cannot be donated: the backward pass reads it'):
        og.compile(g, wrt=("x",), donate=("x",))
    f = og.compile(og.parse("graph(x: f32[64]) -> (y)\n  y = Exp(x)"), wrt="x", donate="x")
    x = np.linspace(0, 1, 64, dtype=np.float32)
    expected = np.exp(x.astype(np.float64))
    y, vjp = f.vjp(x=x)
    assert np.shares_memory(x, y)
    np.testing.assert_allclose(vjp(np.ones(64, np.float32))["x"], expected, rtol=1e-6)


def test_output_independent_of_wrt_adds_no_gradient() -> None:
    g = og.parse("graph(x: f32[4], z: f32[4]) -> (y, w)\n  y = Exp(x)\n  w = Exp(z)")
    _, vjp = og.compile(g, wrt="x").vjp(x=np.zeros(4, np.float32), z=np.zeros(4, np.float32))
    d = np.ones(4, np.float32)
    np.testing.assert_array_equal(vjp({"y": d, "w": d})["x"], d)


def test_rounding_each_applies_in_backward() -> None:
    g = og.parse(SWISH.replace("f32", "bf16"))
    f = og.compile(g, wrt=("x",), rounding="each")
    assert not any(op.kind == "Swish" for op in f.backward_graph.ops)


def test_torch_inputs_give_torch_results() -> None:
    torch = pytest.importorskip("torch")
    f = og.compile(og.parse(SWISH), wrt=("x", "a"))
    x, a = torch.randn(5, 8), torch.randn(8)
    y, vjp = f.vjp(x=x, a=a)
    made = vjp(torch.ones(5, 8))
    assert isinstance(y, torch.Tensor) and all(isinstance(v, torch.Tensor) for v in made.values())


CHANGED = {
    "an input": (SWISH, ("x", "a"), "x"),
    "a view of an input": (SWISH, ("x", "a"), "x[:1]"),
    "an output": ("graph(x: f32[n,c]) -> (y)\n  y = Tanh(x)", ("x",), "y"),
    "an output that is an input": ("graph(x: f32[n,c]) -> (x, y)\n  y = Square(x)", ("x",), "out"),
}


@pytest.mark.parametrize("name", CHANGED)
def test_in_place_change_of_a_saved_tensor_is_detected(name: str) -> None:
    """As in autograd, by torch's own counter; changes before forward, or of unread tensors, are harmless."""
    torch = pytest.importorskip("torch")
    text, wrt, changed = CHANGED[name]
    f = og.compile(og.parse(text), wrt=wrt)
    x, more = torch.randn(5, 8).add_(1), {"a": torch.randn(8)} if "a" in wrt else {}
    y, vjp = f.vjp({"x": x}, **more)
    d = {"y": torch.ones(5, 8)} if isinstance(y, dict) else torch.ones(5, 8)
    first = vjp(d)
    {"x": x, "x[:1]": x[:1], "y": y, "out": y["x"] if isinstance(y, dict) else y}[changed].mul_(2)
    read = changed[0] if changed != "out" else "x"
    with pytest.raises(
        InvalidArguments, match=f'"{read}", which backward reads, was changed in place .*\n  where: vjp\n  fix: .*clone'
    ):
        vjp(d)
    again = f.vjp({"x": torch.randn(5, 8)}, **more)[1](d)
    assert again.keys() == first.keys()


def test_unsaved_tensor_may_change_before_backward() -> None:
    torch = pytest.importorskip("torch")
    f = og.compile(og.parse("graph(x: f32[n,c]) -> (y)\n  y = Tanh(x)"), wrt=("x",))
    x = torch.randn(5, 8)
    first, vjp = f.vjp(x=x)
    x.mul_(2)
    torch.testing.assert_close(vjp(torch.ones(5, 8))["x"], 1 - first * first)
    with torch.inference_mode():
        y, vjp = f.vjp(x=torch.randn(5, 8))  # torch does not count its changes
        assert vjp(torch.ones(5, 8))["x"].shape == y.shape


@pytest.mark.parametrize(
    "name", ["where the output suffices, the output", "a branch by another tensor: its mask of one byte"]
)
def test_single_cheapest_cut_needs_no_networkx(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "networkx", None)  # as if it were not installed
    test_saved_tensors_are_the_expected_ones(name)


def test_missing_networkx_is_named_if_a_search_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "networkx", None)
    g = og.parse(
        "graph(x: f32[64,64], z: f32[64,64], u: f32[64,64]) -> (y)\n  %0 = Add(x, z)\n  %1 = Sin(%0)\n"
        "  %2 = Sin(u)\n  y = Multiply(%1, %2)"
    )
    with pytest.raises(og.errors.Unimplemented, match="networkx") as error:
        og.compile(g, wrt=("x", "u"))
    assert "pip install 'opgraph[train]'" in str(error.value)


def test_path_check_agrees_with_the_minimum_cut() -> None:
    networkx_free = 0
    for seed in range(60):
        cut = _random_cut(seed)
        sources = {i for i in cut.slice if i in cut.fixed or i not in cut.made_from}
        if sources and cut._each_has_a_way(sources):
            weight, kept = cut._minimum_cut(sources)
            assert weight == sum(cut.weights[i] for i in sources) and kept == sources, f"seed {seed}"
            networkx_free += 1
    assert networkx_free > 30


def test_cut_weights_are_integers_for_reproducible_choices() -> None:
    """With rounding, the choice would depend on the order of networkx's sets, which differs between processes."""
    weights = [w for seed in range(20) for w in _random_cut(seed).weights.values()]
    assert len(weights) > 50 and all(isinstance(w, int) for w in weights)


def _random_cut(seed: int) -> Cut:
    rng = np.random.default_rng(seed)
    g = og.Graph()
    shapes = ((64, 64), (64, 1), (64,))
    values = [g.input(f"x{i}", shape=shapes[rng.integers(3)]) for i in range(rng.integers(1, 5))]
    for _ in range(rng.integers(3, 14)):
        kind = ("Add", "Multiply", "Sin", "Exp", "Select")[rng.integers(5)]
        a, b = (values[rng.integers(len(values))] for _ in range(2))
        if kind == "Select":
            values.append(g.add_op(kind, g.add_op("Greater", a, b), a, b))
        else:
            values.append(g.add_op(kind, *((a,) if kind in ("Sin", "Exp") else (a, b))))
    ready = prepared(g.finalize(), ["x0"], units=True)
    return Cut(ready, differentiated(ready, ["x0"], from_outputs=()), ())


def test_constant_may_be_an_output_in_training() -> None:
    text = "graph(x: f32[3]) -> (y, k)\n  const k: f32[2] = [0.5, 4.0]\n"
    g = og.parse(text + "  c = Clamp(x, min=1.0, max=9.0)\n  y = Sqrt(c)")
    x = np.array([1, 4, 9], np.float32)
    results, vjp = og.compile(g, wrt=("x",)).vjp(x=x)
    np.testing.assert_array_equal(results["k"], np.array([0.5, 4], np.float32))
    np.testing.assert_allclose(vjp({"y": np.ones(3, np.float32)})["x"], 0.5 / np.sqrt(x), rtol=1e-6)


def test_constant_may_be_an_output_beside_saved_values() -> None:
    text = "graph(x: f32[64,64], w: f32[64,64]) -> (y, k)\n  const k: f32[2] = [0.5, 4.0]\n"
    g = og.parse(text + "  m = MatMul(x, w)\n  n = MatMul(m, w)\n  y = Tanh(n)")
    f = og.compile(g, wrt=("x", "w"))
    assert any(entry.role not in ("input", "output") for entry in f.saved_tensors())
    x = np.eye(64, dtype=np.float32)
    np.testing.assert_array_equal(f.vjp(x=x, w=x)[0]["k"], np.array([0.5, 4], np.float32))


#: Graphs with names that saved values might have, each with the same graph without them.
NAMES = {
    "an input": (
        "graph(x: f32[8], kept_2: f32[8]) -> (y)\n  a = Add(x, kept_2)\n  b = Sigmoid(a)\n  y = Multiply(a, b)",
        ("kept_2", "z"),
    ),
    "another output": (
        "graph(x: f32[8], z: f32[8]) -> (kept_2, y)\n  a = Add(x, z)\n  b = Sin(a)\n  kept_2 = Multiply(b, a)\n"
        "  y = Cos(a)",
        ("kept_2", "w"),
    ),
    "the gradient of an output": ("graph(x: f32[8]) -> (y, d_y)\n  d_y = Exp(x)\n  y = Sin(d_y)", ("d_y", "w")),
}


@pytest.mark.parametrize("case", NAMES)
def test_names_of_saved_values_do_not_collide(case: str) -> None:
    text, renamed = NAMES[case]
    found = []
    for graph in (og.parse(text), og.parse(text.replace(*renamed))):
        arrays = {str(t.name): np.linspace(-2 + i, 2, 8, dtype=np.float32) for i, t in enumerate(graph.inputs)}
        _, pullback = og.compile(graph, wrt=arrays).vjp(arrays)
        found.append(pullback({str(t.name): np.full(8, 1.5, np.float32) for t in graph.outputs}))
    for got, want in zip(*(gradients.values() for gradients in found), strict=True):
        np.testing.assert_array_equal(got, want)
