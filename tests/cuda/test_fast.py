"""f16 and bf16 on a GPU: the approximate functions stay within the bounds of the exact ones, for any result of each
instruction within its own bound; and they are used only where their errors stay small.

The bound of each instruction is in kernels/cuda/approx.h, from the PTX ISA.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import approximate
import measure
import numpy as np
import pytest
from approximate_cases import cases, columns_of, judged, loop_of, positive_powers
from expressions import COMPOSED, peers
from ulp import assert_as_accurate_as, errors

import opgraph as og
from opgraph.ir import dtypes
from opgraph.loops.layout import UNIFORM, Variant
from opgraph.loops.lower import lower
from opgraph.partition.examples import graph_of
from opgraph.schedule import fast_math

needs_compiler = pytest.mark.skipif(not approximate.is_possible, reason="needs a C++ compiler and x86-64")
CHAIN = ("Exp", "Tanh", "Abs", "Sqrt", "Sigmoid", "GELU", "Log", "Square", "Mish", "SoftPlus", "HardSwish", "ReLU")


@pytest.fixture(autouse=True)
def _no_warnings_of_floats() -> Iterator[None]:
    with np.errstate(all="ignore"):
        yield


@functools.cache
def run_graphs() -> dict[tuple[str, str], og.Graph]:
    chain = "a"
    for kind in CHAIN:
        chain = f"{kind}({chain})"
    texts = {**COMPOSED, "a chain of 12": chain}
    return {
        (name, d): og.parse(graph_of(t, dtype=d, shape="[n]")).finalize()
        for name, t in texts.items()
        for d in measure.NARROW
    }


@functools.cache
def library() -> approximate.Library:
    """All functions compiled together, which costs little more than one of them."""
    return approximate.Library([*(loop for _, loop in cases()), *(loop_of(g) for g in run_graphs().values())])


@needs_compiler
@pytest.mark.parametrize("index", range(len(cases())), ids=[f"{c.label} {c.dtype}" for c, _ in cases()])
def test_approximate_function_stays_within_the_exact_error_bound(index: int) -> None:
    case = cases()[index][0]
    columns = columns_of(case)
    truth = og.evaluate(case.graph(), case.feeds(columns)).ravel()
    scale, kept = measure.condition(case, columns), judged(case.dtype, columns, truth)
    assert kept.mean() > 0.7
    for name, (got,) in library().results(index, columns):
        found = np.where(kept, errors(got, truth, 0.0, scale), 0.0)
        at = int(np.argmax(found))
        assert found[at] <= measure.BOUNDS[case.dtype], (name, [c[at] for c in columns], got[at], truth[at], found[at])


@needs_compiler
@pytest.mark.parametrize("key", run_graphs(), ids=lambda key: " ".join(key))
def test_fused_approximate_ops_are_as_accurate_as_numpy(key: tuple[str, str]) -> None:
    graph = run_graphs()[key]
    rng = np.random.default_rng(11)
    feeds = {n: rng.uniform(-4, 4, 20_000).astype(dtypes.get(key[1]).numpy) for n in "abc"}
    feeds = {str(t.name): feeds[str(t.name)] for t in graph.inputs}
    exact, peer = np.asarray(og.evaluate(graph, feeds)), peers(graph, feeds)
    (partition,) = graph.get_partitions()
    arrays = [feeds[str(t.name)] for t in lower(partition).loads if t is not None]
    index = len(cases()) + list(run_graphs()).index(key)
    for name, (got,) in library().results(index, arrays):
        assert_as_accurate_as(got, peer, exact, floor=measure.BOUNDS[key[1]], label=f"{key}, {name}")


@needs_compiler
@pytest.mark.parametrize("dtype", measure.NARROW)
def test_positive_base_power_equals_general_power(dtype: str) -> None:
    """Checks the form without a sign over all values; the other form is compared with the truth above."""
    texts, (line, b, d), plain = positive_powers(dtype)
    loops = [loop_of(og.parse(text)) for text in texts]
    assert ["fast::positive::pow" in approximate.functor(loop) for loop in loops] == [True, False]
    made = approximate.Library(loops)
    pairs = zip(made.results(0, [line, b, d]), made.results(1, [plain, b, d]), strict=True)
    for (name, got), (_, want) in pairs:
        if "random" not in name:  # with one instruction less, other numbers are drawn
            for mine, other in zip(got, want, strict=True):
                same = (mine == other) | ((mine != mine) & (other != other))
                at = int(np.argmin(same))
                assert same.all(), (name, line[at], b[at], d[at], mine[at], other[at])


@needs_compiler
def test_excessive_instruction_error_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shows that the perturbation reaches the result: 40 times the bound of ex2 is too much for f16."""
    monkeypatch.setattr(approximate, "ERRORS", (("too much", (40.0, 0.0, 0.0, 0.0, 0.0), 0),))
    index = next(i for i, (c, _) in enumerate(cases()) if (c.label, c.dtype) == ("Sigmoid", "f16"))
    with pytest.raises(AssertionError, match="too much"):
        test_approximate_function_stays_within_the_exact_error_bound(index)


def test_every_approximate_function_is_used() -> None:
    inner = {"power_slope", "sigmoid_slope", "gated_slope", "gate", "gate_any", "tail_ratio", "log1p_ratio"}
    text = "".join(approximate.functor(loop) for _, loop in cases())
    assert {n for n in approximate.names() - inner if f"og::fast::{n}(" not in text} == set()


# -- uses of the approximation ----------------------------------------------------------------------------------------


def approximated(text: str, wide: str = "c") -> list[str]:
    """Kinds that a loop computes approximately; `wide`: the layout of f32 operands."""
    loop = loop_of(og.parse(text))
    kinds = "".join(wide if x.dtype == "f32" else "c" for x in loop.loads) + "c" * len(loop.stores)
    chosen = fast_math.approximate(loop, Variant(kinds, True))
    return [s.kind for s in loop.statements if s.result in chosen]


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ("graph(x: bf16[n]) -> (y)\n  y = Sigmoid(x)", ["Sigmoid"]),
        ("graph(x: f32[n]) -> (y)\n  y = Sigmoid(x)", []),
        ("graph(x: f16[n], z: f32[n]) -> (y)\n  %0 = Sigmoid(x)\n  %1: f32[n] = TypeCast(%0)\n  y = Add(%1, z)", []),
        ("graph(x: bf16[n]) -> (y)\n  %0 = Exp(x)\n  y: f32[n] = TypeCast(%0)", []),
        (
            "graph(x: bf16[n]) -> (y)\n  %0 = Exp(x)\n  %1 = Exp(%0)\n  %2 = Floor(%1)\n  y = Sigmoid(%2)",
            ["Floor", "Sigmoid"],
        ),
        (
            "graph(x: bf16[n]) -> (y)\n  %0 = Exp(x)\n  %1 = Greater(%0, 1)\n  %2 = Tanh(x)\n  y = Select(%1, %2, x)",
            ["Tanh", "Select"],
        ),
    ],
    ids=["bf16", "f32", "f32 is loaded", "f32 is stored", "before a jump", "before a comparison"],
)
def test_comparisons_and_wide_results_use_exact_functions(text: str, kinds: list[str]) -> None:
    assert approximated(text) == kinds


def test_uniform_f32_operand_allows_approximate_functions() -> None:
    text = (
        "graph(x: bf16[n], a: f32[n]) -> (y)\n  %0: f32[n] = Exp(a)\n  %1: bf16[n] = TypeCast(%0)\n  y = Swish(x, %1)"
    )
    assert approximated(text) == [] and approximated(text, UNIFORM) == ["Exp", "TypeCast", "Swish"]
