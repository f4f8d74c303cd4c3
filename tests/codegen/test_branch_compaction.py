"""Choices between two costly values on the CPU: packed by the condition, with the same bits as unpacked."""

from __future__ import annotations

import numpy as np
import pytest

import opgraph as og
from opgraph.ir import dtypes
from opgraph.runtime import cpu_compiler
from opgraph.schedule import cpu_body

#: Two costly sides; one condition in two forms, another that is not its complement (NaN), a choice of operands, a
#: number as the value of one side, a value shared by both sides, one number for all elements, and a column.
COSTLY = """graph(x: DTYPE[n,m], a: DTYPE[], c: DTYPE[n,1]) -> (y, z)
  up = Greater(x, 0.0)
  up2 = Greater(x, 0.0)
  down = LessOrEqual(x, 0.0)
  %0 = Select(up, x, 1.0)
  %1 = Select(down, x, 1.0)
  %2 = Multiply(x, c)
  %3 = Pow(%0, a)
  %4 = Add(%3, %2)
  %5 = Exp(%1)
  %6 = Tanh(%1)
  %7 = Multiply(%5, %6)
  %8 = Add(%7, %2)
  y = Select(up, %4, %8)
  %9 = Log(%3)
  z = Select(up2, %9, 0.25)"""

SIZES = [(1, 1), (1, 15), (3, 17), (2, 255), (2, 257), (1, 5000)]


def has_branches(f: og.Executable) -> bool:
    return any("branch_inputs =" in source.split("struct Fused {")[1] for source in f.kernels.values())


def feeds_of(shape: tuple[int, int], dtype: str, case: str) -> dict[str, np.ndarray]:
    numpy_dtype = dtypes.get(dtype).numpy
    rng = np.random.default_rng(shape[1])
    x = rng.normal(size=shape)
    x = {"both": x, "above": np.abs(x) + 0.1, "below": -np.abs(x)}[case]
    if case == "both":
        specials = [np.nan, np.inf, -np.inf, 0.0, -0.0]
        x.ravel()[:: max(1, x.size // 5)][:5] = specials[: x.ravel()[:: max(1, x.size // 5)][:5].size]
    return {
        "x": x.astype(numpy_dtype),
        "a": np.asarray(0.4, numpy_dtype),
        "c": rng.normal(size=(shape[0], 1)).astype(numpy_dtype),
    }


def without_branches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_body, "branches_of", lambda values: None)


def without_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_compiler, "FLAGS", (*cpu_compiler.FLAGS, cpu_compiler.NO_LANES))


def assert_same_bits(got: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> None:
    for name, array in want.items():
        nan = np.isnan(array)
        np.testing.assert_array_equal(np.isnan(got[name]), nan)
        bits = f"u{array.itemsize}"
        np.testing.assert_array_equal(got[name][~nan].view(bits), array[~nan].view(bits))


@pytest.mark.parametrize("case", ["both", "above", "below"])
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("lanes", [True, False], ids=["lanes", "one-by-one"])
def test_compacted_branches_give_the_same_bits(
    dtype: str, case: str, lanes: bool, no_cache: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not lanes:
        without_lanes(monkeypatch)
    packed = og.compile(og.parse(COSTLY.replace("DTYPE", dtype)))
    assert has_branches(packed)
    results = [packed(feeds_of(shape, dtype, case)) for shape in SIZES]
    without_branches(monkeypatch)
    plain = og.compile(og.parse(COSTLY.replace("DTYPE", dtype)))
    assert not has_branches(plain)
    for shape, got in zip(SIZES, results, strict=True):
        assert_same_bits(got, plain(feeds_of(shape, dtype, case)))


def test_strided_operands_in_compacted_branches(no_cache: None, monkeypatch: pytest.MonkeyPatch) -> None:
    feeds = feeds_of((7, 900), "f32", "both")
    apart = {**feeds, "x": np.repeat(feeds["x"], 3, axis=1)[:, ::3], "c": feeds["c"]}
    turned = {**feeds, "x": np.ascontiguousarray(feeds["x"].T).T}
    f = og.compile(og.parse(COSTLY.replace("DTYPE", "f32")))
    want = f(feeds)
    assert_same_bits(f(apart), want)
    assert_same_bits(f(turned), want)
    x = feeds["x"].copy()
    g = og.compile(og.parse(COSTLY.replace("DTYPE", "f32")), donate=("x",))
    assert_same_bits(g({**feeds, "x": x}), want)


@pytest.mark.parametrize("lanes", [True, False], ids=["lanes", "one-by-one"])
def test_compacted_gradients_with_total_row_and_column_sums(
    lanes: bool, no_cache: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not lanes:
        without_lanes(monkeypatch)
    rows = COSTLY.replace("DTYPE", "f32")
    for form in (rows, rows.replace("c: f32[n,1]", "c: f32[m]")):
        graph = og.parse(form)
        backward = og.gradient(graph, wrt=("x", "a", "c"))
        f = og.compile(backward)
        assert has_branches(f)
        for shape in [(3, 17), (40, 700)]:
            rng = np.random.default_rng(0)
            feeds = {
                "x": rng.normal(size=shape).astype(np.float32), "a": np.float32(0.4),
                "c": rng.normal(size=(shape[1],) if "[m]" in form else (shape[0], 1)).astype(np.float32),
                "d_y": rng.normal(size=shape).astype(np.float32), "d_z": rng.normal(size=shape).astype(np.float32),
            }  # fmt: skip
            feeds = {t.name: feeds[t.name] for t in backward.inputs}
            got = f(feeds)
            truth, peer = og.evaluate(backward, feeds), og.evaluate(backward, feeds, dtype="f32")
            for name, exact in truth.items():
                one = np.finfo(np.float32).eps * np.abs(exact).max()
                assert np.abs(got[name] - exact).max() <= max(2 * np.abs(peer[name] - exact).max(), one), name
            again = f(feeds)
            assert all(np.array_equal(again[name], got[name]) for name in got)


def test_vector_sums_equal_scalar_sums(no_cache: None, monkeypatch: pytest.MonkeyPatch) -> None:
    backward = og.gradient(og.parse(COSTLY.replace("DTYPE", "f32")), wrt=("x", "a", "c"))
    rng = np.random.default_rng(1)
    feeds = {
        t.name: np.float32(0.4) if t.name == "a" else rng.normal(size=(9, 1 if t.name == "c" else 777)).astype("f")
        for t in backward.inputs
    }
    got = og.compile(backward)(feeds)
    without_lanes(monkeypatch)
    want = og.compile(backward)(feeds)
    assert_same_bits(got, {name: np.asarray(a) for name, a in want.items()})


@pytest.mark.parametrize("lanes", [True, False], ids=["lanes", "one-by-one"])
def test_lanes_past_the_last_element_add_nothing(lanes: bool, no_cache: None, monkeypatch: pytest.MonkeyPatch) -> None:
    # 0 has no finite addend here: the gradient with respect to a takes the logarithm of x.
    if not lanes:
        without_lanes(monkeypatch)
    text = """graph(x: f32[n], a: f32[]) -> (y)
  up = GreaterEqual(x, 0.0)
  %0 = Log(x)
  %1 = Multiply(%0, a)
  %2 = Pow(x, a)
  %3 = Add(%1, %2)
  %4 = Exp(x)
  %5 = Tanh(x)
  %6 = Multiply(%4, %5)
  y = Select(up, %3, %6)"""
    f = og.compile(og.gradient(og.parse(text), wrt=("x", "a")))
    assert has_branches(f)
    x = np.linspace(-1, 1, 24, dtype="f")
    assert np.isfinite(f(x=x, a=np.float32(0.4), d_y=np.ones_like(x))["d_a"])


@pytest.mark.parametrize("kind", ["GreaterEqual", "Equal", "Less", "LessOrEqual", "NotEqual"])
def test_branch_condition_simplifies_other_comparisons(
    kind: str, no_cache: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the side where it holds; where it fails, a value may be NaN."""
    text = """graph(x: f32[n], a: f32[n]) -> (y)
  up = Greater(x, a)
  other = KIND(x, a)
  odd = Less(a, -0.5)
  both = And(other, odd)
  %0 = Abs(x)
  %1 = Log(%0)
  %2 = Tanh(%1)
  %3 = Pow(%0, 0.3)
  %4 = Select(other, %2, %3)
  %5 = Select(both, %4, 0.5)
  %6 = Exp(x)
  %7 = Erf(%6)
  %8 = Select(other, %7, %6)
  y = Select(up, %5, %8)""".replace("KIND", kind)
    f = og.compile(og.parse(text))
    assert has_branches(f)
    holds = next(iter(f.kernels.values())).split("if constexpr (side) {")[-1].split("} else {")[0]
    spelled = {
        "GreaterEqual": "og::ge(",
        "Equal": "og::eq(",
        "Less": "og::lt(v0",
        "LessOrEqual": "og::le(",
        "NotEqual": "og::eq(",
    }
    assert spelled[kind] not in holds
    rng = np.random.default_rng(3)
    x, a = rng.normal(size=(2, 999)).astype("f")
    a[::5] = x[::5]
    x[::7], a[::11] = np.nan, np.nan
    got = f(x=x, a=a)
    without_branches(monkeypatch)
    assert_same_bits({"y": got}, {"y": og.compile(og.parse(text))(x=x, a=a)})


@pytest.mark.parametrize(
    "text",
    [
        "y = Select(up, x, 0.0)",
        "%0 = Multiply(x, 0.1)\n y = Select(up, x, %0)",
        "%0 = Exp(x)\n %1 = Subtract(%0, 1.0)\n y = Select(up, x, %1)",  # ELU: only one side is costly
        # both sides are needed anyway
        "%0 = Pow(x, 0.3)\n %1 = Exp(x)\n %2 = Select(up, %0, %1)\n %3 = Add(%0, %1)\n y = Multiply(%2, %3)",
    ],
)
def test_branches_that_save_little_are_not_compacted(text: str) -> None:
    graph = og.parse(f"graph(x: f32[n]) -> (y)\n up = Greater(x, 0.0)\n {text}")
    assert not has_branches(og.compile(graph))


#: Functions with a shorter form for strips that stay away from the ends of f32.
SHORTER = """graph(x: f32[n,m], d: f32[n,m], b: f32[]) -> (y, dx)
  up = Greater(x, 0.0)
  %0 = Select(up, x, 1.0)
  %1 = Pow(%0, b)
  %2 = PowBackward(%0, d, b)
  %3 = Exp(x)
  %4 = Tanh(x)
  %5 = Multiply(%3, %4)
  y = Select(up, %1, %5)
  dx = Select(up, %2, %5)"""


EXPONENTS = [0.0, 2.0**-8, 0.0039, 0.1, 1.0, -2.5, 7.3, 1e5, 2.0**20, 3e6, 1e30, 1e-40, np.inf, np.nan]


@pytest.mark.parametrize("b", EXPONENTS)
@pytest.mark.parametrize("slope", [True, False], ids=["power-and-slope", "power"])
def test_strips_near_f32_limits_have_the_same_bits(
    b: float, slope: bool, no_cache: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The values of a strip have similar sizes, so that each end is reached in some strips only."""
    rng = np.random.default_rng(0)
    size = np.sort(rng.uniform(-104, 88, 40 * 256)).reshape(40, 256)
    near_one = np.sort(rng.uniform(-1e-3, 1e-3, (8, 256)).ravel()).reshape(8, 256)
    some = np.sort(rng.uniform(-12, 12, 16 * 256)).reshape(16, 256)
    x = np.exp(np.concatenate([size, near_one, some])).astype(np.float32)
    reach = np.resize([149, 90, 80, 70.5, 50, 20, 10, 5], (len(x), 1))
    d = (2.0 ** np.clip(rng.uniform(-reach, reach, x.shape), -149, 127)).astype(np.float32)
    d[rng.random(x.shape) < 0.1] = 0
    d[1::9, 5] = np.inf
    feeds = {"x": x, "d": d * rng.choice([-1, 1], d.shape).astype(np.float32), "b": np.float32(b)}
    text = SHORTER if slope else SHORTER.replace("PowBackward(%0, d, b)", "Multiply(%1, d)")
    packed = og.compile(og.parse(text))
    assert has_branches(packed)
    got = packed(feeds)
    assert not cpu_compiler.without_lanes
    without_branches(monkeypatch)
    assert_same_bits(got, og.compile(og.parse(text))(feeds))
