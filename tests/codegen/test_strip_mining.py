"""Large kernels run statement by statement, with one function for equal statements, and give the bits of one loop."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from agreement import agree
from emulator import FakeCupy
from mixed_graph import MIXED, bound, feeds
from schedules import in_order, pointwise

import opgraph as og
from opgraph.bench.large import large
from opgraph.codegen.kernel import cuda_source, host_source
from opgraph.codegen.outlining import OFTEN
from opgraph.partition.split import MAX_COST, STATEMENT_COST
from opgraph.partition.traits import cost_of
from opgraph.runtime.partition_cache import CACHE, DEFAULT_CAPACITY
from opgraph.schedule import cpu_body
from opgraph.schedule.cpu_body import WIDE_COST
from opgraph.schedule.cuda import SINGLES_COST
from opgraph.schedule.schedule import POINTWISE_SCALAR

#: In f64 and integers nothing is vectorized.
WIDE = """graph(x: f64[n,m], k: s32[n,m]) -> (y, n)
  %0 = Tanh(x)
  %1: f64[n,m] = TypeCast(k)
  y = Multiply(%0, %1)
  n = Multiply(k, 3)"""


@pytest.fixture
def no_cache() -> Iterator[None]:
    """Disables the cache, because the same partition may become another kernel."""
    CACHE.set_capacity(0)
    yield
    CACHE.set_capacity(DEFAULT_CAPACITY)


def by_strips(monkeypatch: pytest.MonkeyPatch, yes: bool) -> None:
    monkeypatch.setattr(cpu_body, "goes_by_strips", lambda values, by_lanes: yes)


def goes_by_strips(f: og.Executable) -> bool:
    return all("strip_length" in source.partition("struct Fused")[2] for source in f.kernels.values())


def functor(g: og.Graph) -> str:
    loop, layout = bound(g)
    return host_source(in_order(loop, layout.variant)).functor


@pytest.mark.parametrize(("dtype", "most"), [("f32", MAX_COST), ("bf16", MAX_COST), ("f64", WIDE_COST)])
def test_costly_kernel_is_strip_mined(dtype: str, most: int) -> None:
    for count in (45, 60, 75, 90, 105):
        g = large(count, inputs=8, outputs=1, dtype=dtype)
        (part,) = g.get_partitions()
        assert ("strip_length" in functor(g)) == (sum(cost_of(op) for op in part.ops) > most)


def test_kernel_of_cheap_statements_stays_one_loop() -> None:
    g = large(2 * MAX_COST, kinds=("Add", "Maximum"))
    loop, _ = bound(g)
    assert len(loop.statements) > MAX_COST and STATEMENT_COST > 1
    assert "strip_length" not in functor(g)


def test_equal_statements_share_a_function() -> None:
    text = functor(large(300))
    assert text.count("::over(s, ") == 300
    assert text.count("struct Op") == 8
    assert all(text.count(f"og::{name}(") == 1 for name in ("tanh", "sigmoid", "gelu_erf", "softplus"))


def test_statements_differing_only_in_constants_share_a_function() -> None:
    g = og.Graph()
    value = g.input("x", shape=(None,))
    for i in range(50):
        value = g.add_op("Clamp", g.add_op("GELU", g.add_op("Multiply", value, 1.0 + i)), min=-i - 1.0, max=i + 1.0)
    text = functor(g.finalize())
    assert text.count("struct Op") == 4  # Multiply, GELU, Clamp with the following Multiply, the last Clamp


def test_frequent_sequences_of_cheap_statements_are_one_function() -> None:
    g = og.Graph()
    x, r = g.input("x", shape=("n",)), g.input("r", shape=("n",))
    for _ in range(30):
        x = g.add_op("GELU", g.add_op("Add", g.add_op("Multiply", x, r), r))
    text = functor(g.finalize())
    assert OFTEN < 25 and "return og::add(F(og::mul(a0, a1)), a2);" in text


@pytest.mark.parametrize("shape", [(5, 16), (3, 300)], ids=str)
@pytest.mark.parametrize("text", [MIXED, WIDE], ids=["lanes", "wide"])
def test_strips_give_the_bits_of_one_loop(
    text: str, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch, no_cache: None
) -> None:
    g = og.parse(text).finalize()
    data = feeds(g, shape)
    turned = {name: a.T.copy().T for name, a in data.items()}
    inner = {name: a[1:, -1:] if a.shape[1:] == (1,) else a[1:, 3:] if a.ndim else a for name, a in data.items()}
    results = []
    for yes in (False, True):
        by_strips(monkeypatch, yes)
        f = og.compile(g)
        results.append([f(data), f(turned), f(inner)])
        assert goes_by_strips(f) == yes
    for loop, strips in zip(*results, strict=True):
        assert all(agree(strips[name], loop[name]) for name in loop)


def test_strip_mined_result_may_overwrite_an_operand(monkeypatch: pytest.MonkeyPatch, no_cache: None) -> None:
    """The last statement reads the operand as well."""
    by_strips(monkeypatch, True)
    g = og.parse("graph(x: f32[n]) -> (y, z)\n  y = Tanh(x)\n  %0 = Sigmoid(y)\n  z = Multiply(%0, x)").finalize()
    x = np.random.default_rng(0).normal(0, 2, 1000).astype(np.float32)
    expected = og.compile(g)(x=x)
    got = og.compile(g, donate=("x",))(x=x.copy())
    assert all(agree(got[name], expected[name]) for name in expected)


@pytest.mark.parametrize("axis", [0, 1])
def test_strip_mined_kernel_may_end_in_sums(axis: int, monkeypatch: pytest.MonkeyPatch, no_cache: None) -> None:
    like = "[1,m]" if axis == 0 else "[n,1]"
    text = f"graph(x: f32[n,m], w: f32{like}) -> (y, s)\n  y = Tanh(x)\n  %0 = Multiply(y, w)\n  s = SumTo(%0, w)"
    results = []
    for yes in (False, True):
        by_strips(monkeypatch, yes)
        results.append(og.compile(og.parse(text))(feeds(og.parse(text).finalize(), (37, 531))))
    assert all(agree(results[1][name], results[0][name]) for name in results[0])


def test_large_graph_and_its_gradient_agree_with_the_reference() -> None:
    g = large(150, inputs=12, outputs=3)
    back = og.gradient(g, wrt=("x0", "x1"))
    for graph in (g, back):
        f, data = og.compile(graph), feeds(graph, (3, 256))
        assert goes_by_strips(f)
        got, exact = f(data), og.evaluate(graph, data)
        for name, value in exact.items():
            np.testing.assert_allclose(got[name], value, rtol=1e-3, atol=1e-4)


# -- CUDA -------------------------------------------------------------------------------------------------------------


def test_large_cuda_kernel_is_scalar_and_shares_functions() -> None:
    loop, layout = bound(large(300))
    schedule = pointwise(loop, layout)
    assert schedule.name == POINTWISE_SCALAR and (schedule.vector, schedule.unroll) == (1, 1)
    text = cuda_source(schedule).functor
    assert text.count("static OG_SLOW") == 4
    assert all(text.count(f"og::{name}(") == 1 for name in ("tanh", "sigmoid", "gelu_erf", "softplus"))
    for count in (12, 24, 36, 48):
        g = large(count, inputs=3, outputs=1)
        is_scalar = pointwise(*bound(g)).name == POINTWISE_SCALAR
        assert is_scalar == (sum(cost_of(op) for op in g.ops) > SINGLES_COST)


@pytest.mark.parametrize("shape", [(5, 67), (0, 67)], ids=str)
def test_large_cuda_kernel_equals_the_cpu_kernel(cupy: FakeCupy, shape: tuple[int, int]) -> None:
    g = og.Graph()
    x, c = g.input("x", "f64", (None, None)), g.input("c", "f64", (None, 1))
    for k in range(60):
        x = g.add_op("Sigmoid", x) if k % 2 else g.add_op("Add", x, c)
    data = feeds(g.finalize(), shape)
    expected = og.compile(g)(data)
    got = og.compile(g, device="cuda")({name: cupy.asarray(a) for name, a in data.items()})
    assert agree(got.host, expected)
