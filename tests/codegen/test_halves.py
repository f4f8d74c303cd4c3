"""f16 on the CPU: contiguous operands are converted a strip at a time, others one by one; the bits are the same."""

from __future__ import annotations

import numpy as np
import pytest

import opgraph as og
from opgraph.runtime import cpu_compiler

pytestmark = pytest.mark.skipif(not cpu_compiler.is_available(), reason="there is no C++ compiler")

EVERY = np.arange(65536, dtype=np.uint16).view(np.float16)


def graph() -> og.Graph:
    """An f16 and an f32 operand, an f16 result, an f32 one and a truth value."""
    g = og.Graph()
    x, w = g.input("x", "f16", ("n",)), g.input("w", "f32", ("n",))
    y = g.add_op("Multiply", g.add_op("TypeCast", x, dtype="f32"), w)
    g.output(g.add_op("TypeCast", y, dtype="f16", name="narrow"))
    g.output(g.add_op("Add", y, 1.0, name="wide"))
    g.output(g.add_op("Greater", x, 0.0, name="positive"))
    return g


@pytest.fixture(scope="module")
def run() -> og.Executable:
    return og.compile(graph())


def spread(array: np.ndarray) -> np.ndarray:
    """The same values in a non-contiguous array."""
    room = np.zeros((len(array), 2), array.dtype)
    room[:, 0] = array
    return room[:, 0]


def same(a: np.ndarray, b: np.ndarray) -> None:
    nan = np.isnan(a) if a.dtype.kind == "f" else np.zeros(a.shape, bool)
    np.testing.assert_array_equal(nan, np.isnan(b) if b.dtype.kind == "f" else nan)
    bits = f"u{a.itemsize}"
    np.testing.assert_array_equal(a.view(bits)[~nan], np.ascontiguousarray(b).view(bits)[~nan])


def test_strip_conversion_equals_single_conversion_for_every_value(run: og.Executable) -> None:
    w = np.linspace(-2, 2, len(EVERY), dtype=np.float32)
    strips, singly = run(x=EVERY, w=w), run(x=spread(EVERY), w=spread(w))
    for name in strips:
        same(strips[name], singly[name])


@pytest.mark.parametrize("n", [1, 7, 8, 9, 255, 256, 257, 519])
def test_strips_of_any_length_write_only_their_elements(run: og.Executable, n: int) -> None:
    x, w = EVERY[3000 : 3000 + n], np.full(n, 1.5, np.float32)
    room = np.full(n + 2, np.float16(7))
    whole = run(x=x, w=w)
    run(x=x, w=w, out={**whole, "narrow": room[1:-1]})
    same(room[1:-1], (x.astype(np.float32) * w).astype(np.float16))
    assert room[0] == room[-1] == 7


def test_in_place_f16_kernel_reads_before_it_writes() -> None:
    g = og.Graph()
    x = g.input("x", "f16", (None,))
    g.add_op("Sigmoid", g.add_op("Square", x), name="y")
    x = np.linspace(-3, 3, 600).astype(np.float16)
    expected = og.compile(g)(x=x.copy())
    same(og.compile(g)(x=x, out=x), expected)


@pytest.mark.parametrize("shape", [(5, 4, 70), (5, 4, 3, 3)], ids=["rows", "short rows"])
def test_sums_and_short_rows_by_strips_have_the_same_bits(shape: tuple[int, ...]) -> None:
    g = og.Graph()
    x, a = g.input("x", "f16", (None,) * len(shape)), g.input("a", "f16", (4, *[1] * (len(shape) - 2)))
    g.add_op("Multiply", x, g.add_op("Sigmoid", g.add_op("Multiply", a, x)), name="y")
    rng = np.random.default_rng(0)
    x = rng.standard_normal(shape).astype(np.float16)
    a = rng.standard_normal((4, *[1] * (len(shape) - 2))).astype(np.float16)
    apart = np.lib.stride_tricks.as_strided(spread(x.ravel()), shape, [2 * s for s in x.strides])
    same(og.compile(g)(x=x, a=a), og.compile(g)(x=apart, a=a))
    backward = og.compile(og.gradient(g, ["x", "a"]))
    strips, singly = backward(x=x, a=a, d_y=x), backward(x=apart, a=a, d_y=apart)
    for name in strips:
        same(strips[name], singly[name])


def test_kernel_source_converts_by_strips() -> None:
    (source,) = og.compile(graph()).kernels.values()
    assert "og::widen(room[0], x0 + first, n)" in source and "og::narrow(y0 + first, room[1], n)" in source
