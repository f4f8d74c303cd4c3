"""Exponentials of one value minus several numbers, e^(x - c), on one side of a choice share e^x."""

from __future__ import annotations

import numpy as np
import pytest

import opgraph as og
from opgraph.runtime import cpu_compiler

#: Three exponentials, one with an added number and one without a number, next to another costly side.
THREE = """graph(x: f32[n], a: f32[], c: f32[]) -> (y, z, w)
  up = Greater(x, LIMIT)
  %0 = Log(x)
  %1 = Tanh(%0)
  %2 = Log(%1)
  %3 = Exp(%2)
  %4 = Subtract(x, a)
  %5 = Exp(%4)
  y = Select(up, %3, %5)
  %6 = Add(c, x)
  %7 = Exp(%6)
  z = Select(up, %2, %7)
  %8 = Exp(x)
  w = Select(up, %1, %8)"""


def exponentials(x: np.ndarray, a: np.float32, c: np.float32, sizes: list[int]) -> list[np.ndarray]:
    """y, z and w of a graph whose choice always takes the exponentials, except for NaN."""
    f = og.compile(og.parse(THREE.replace("LIMIT", "3.4028234e38")))
    text = "".join(f.kernels.values()).split("struct Fused {")[1]
    assert text.count("og::shifted_exp(") == 3, "they share their costly part"
    made = [f(x=part, a=a, c=c) for part in np.split(x, np.cumsum(sizes)[:-1])]
    return [np.concatenate([m[name] for m in made]) for name in "yzw"]


def ulps(got: np.ndarray, exact: np.ndarray) -> np.ndarray:
    """The error in units of the last place of float32, at least of the smallest subnormal."""
    place = np.maximum(np.exp2(np.floor(np.log2(np.maximum(exact, 1e-300))) - 23), 2.0**-149)
    return np.abs(got.astype(np.float64) - exact) / place


NEAR = [(0.0, 0.0), (1.5, -0.25), (-87.3, 87.3), (131072.0, 131071.5), (-131072.0, 5e4), (1e-40, -1e-3)]
FAR = [(131073.0, 1.0), (-1e6, 2.5), (3e38, -3e38)]


@pytest.mark.parametrize(("a", "c"), [*NEAR, *FAR])
def test_shifted_exponentials_are_within_2_ulp(a: float, c: float, no_cache: None) -> None:
    """If the number is too large, the truth is that of the rounded x - c: rounding before the exponential counts."""
    rng = np.random.default_rng(0)
    a, c = np.float32(a), np.float32(c)
    around = [np.float32(0), a, -c]
    x = np.concatenate([(rng.uniform(-104, 88.7, 4000) + center).astype("f") for center in around])
    x = np.concatenate([x, np.float32([0, -0.0, 1e-40, -1e-30, 3e38, -3e38, 1e9, -1e9, 2.0**18, -(2.0**18)])])
    got = exponentials(x, a, c, [len(x)])
    arguments = {"y": (x, -a), "z": (x, c), "w": (x, np.float32(0))}
    for (name, (first, second)), value in zip(arguments.items(), got, strict=True):
        kind = np.float64 if max(abs(a), abs(c)) <= 2.0**17 else np.float32
        with np.errstate(over="ignore"):
            argument = (first.astype(kind) + kind(second)).astype(np.float64)
        exact = np.exp(np.clip(argument, -800, 700))
        infinite = np.isposinf(value)
        assert (exact[infinite] > 2.0**128 * (1 - 2.0**-23)).all(), name
        assert (exact[~infinite] < 2.0**128 * (1 + 2.0**-23)).all(), name
        assert ulps(value[~infinite], exact[~infinite]).max() <= 2, name


@pytest.mark.parametrize(("a", "c"), [*NEAR, *FAR, (np.inf, 1.0), (np.nan, 0.0), (-np.inf, np.inf)])
def test_shifted_exponentials_have_equal_vector_and_scalar_bits(
    a: float, c: float, no_cache: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(1)
    x = (rng.uniform(-120, 95, 1500) + np.resize([0, *np.clip(np.nan_to_num([a, -c]), -1e30, 1e30)], 1500)).astype("f")
    x[::97] = np.resize(np.float32([np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-45, 3e38, -3e38]), x[::97].size)
    got = exponentials(x, np.float32(a), np.float32(c), [1500])
    parts = exponentials(x, np.float32(a), np.float32(c), [1, 15, 17, 255, 257, 955])
    monkeypatch.setattr(cpu_compiler, "FLAGS", (*cpu_compiler.FLAGS, cpu_compiler.NO_LANES))
    apart = exponentials(x, np.float32(a), np.float32(c), [1500])
    for one, other, third in zip(got, parts, apart, strict=True):
        nan = np.isnan(one)
        for b in (other, third):
            np.testing.assert_array_equal(np.isnan(b), nan)
            np.testing.assert_array_equal(one[~nan].view("u4"), b[~nan].view("u4"))
    if np.isfinite(c):  # for infinity the other side is taken
        assert np.isnan(got[1][np.isnan(x)]).all() and (got[1][np.isneginf(x)] == 0).all()


def test_single_exponential_is_not_shared() -> None:
    text = THREE.replace("LIMIT", "0.0").replace("Exp(%6)", "Tanh(%6)").replace("Exp(x)", "Tanh(x)")
    assert not any(
        "shifted_exp(og::exponential_of(" in k.split("struct Fused {")[1]
        for k in og.compile(og.parse(text)).kernels.values()
    )
