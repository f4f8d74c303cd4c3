"""Every graph file of oneDNN runs on the CPU and agrees with float64 under benchdnn's rule.

Tensors are made smaller first (support/onednn_shrink.py), so that all of them take seconds; the sizes of the files
themselves are run by `tests/accuracy/onednn_full_size.py`.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
from onednn_files import RUNNABLE, needs_files
from onednn_fill import feeds_of
from onednn_rule import EPSILON, threshold, wrong
from onednn_run import executed, mistakes, prepared
from onednn_shrink import work_of

import opgraph as og
from opgraph.ir.logical_tensor import port_name

#: The largest work of a file: its elements, plus a hundredth of its products.
SMALL = 3e5


def whole(graph: og.Graph, feeds: Mapping[int, np.ndarray]) -> dict[int, np.ndarray]:
    """The outputs of the compiled graph, by tensor id."""
    made = og.compile(graph, device="cpu")(dict(feeds))
    by_name = made if isinstance(made, dict) else {port_name(graph.outputs[0]): made}
    return {t.id: by_name[port_name(t)] for t in graph.outputs}


@needs_files
@pytest.mark.parametrize("name", RUNNABLE)
def test_a_file_runs_and_agrees_with_float64(name: str) -> None:
    graph = prepared(name, SMALL)
    feeds = feeds_of(graph)
    assert mistakes(graph, feeds) == []
    parts = executed(graph, feeds)
    for id, array in whole(graph, feeds).items():
        np.testing.assert_array_equal(array, parts[id])
        # For a single op the attributes may leave only one value: a Clamp from 0 to 0.
        assert array.size < 16 or len(graph) == 1 or len(np.unique(array)) > 1, "one value says little"


@needs_files
@pytest.mark.parametrize("name", RUNNABLE)
def test_a_file_runs_without_torch(name: str) -> None:
    graph = prepared(name, SMALL)
    if all(part.provider != "native" for part in graph.get_partitions()):
        pytest.skip("no op of it runs in a library")
    assert mistakes(graph, feeds_of(graph), numpy=True) == []


@needs_files
def test_almost_every_file_is_reduced_to_the_requested_size() -> None:
    too_large = [name for name in RUNNABLE if work_of(prepared(name, SMALL)) > 2 * SMALL]
    assert len(too_large) < 0.05 * len(RUNNABLE), too_large


# -- the rule itself ------------------------------------------------------------------------------------------------


def one_op(kind: str, dtype: str = "f32", **attrs: float) -> og.Op:
    g = og.Graph()
    x = g.input("x", dtype=dtype, shape=(4096,))
    g.add_op(kind, *([x, x] if kind in ("Add", "MatMul") else [x]), **attrs)
    return g.finalize().ops[0]


CASES = [
    ("Abs", "f32", 4e-6),
    ("Tanh", "f32", 4e-5),
    ("Abs", "bf16", 2.0**-7),
    ("Abs", "f16", 2.0**-10),
    ("Add", "f32", 2.0**-23),
    ("SoftMax", "f32", 10 * 2.0**-23),
    ("LayerNorm", "f32", 5e-7),
    ("MatMul", "f32", 0.0),
]


@pytest.mark.parametrize(("kind", "dtype", "allowed"), CASES, ids=str)
def test_thresholds_equal_those_of_benchdnn(kind: str, dtype: str, allowed: float) -> None:
    op = og.Op(0, kind, [og.LogicalTensor(i, dtype, (4,)) for i in range(2 if kind in ("Add", "MatMul") else 1)])
    assert threshold(op, dtype) == pytest.approx(allowed)


@pytest.mark.parametrize("kind", ["Abs", "Add"])
def test_threshold_rule_accepts_small_and_refuses_large_errors(kind: str) -> None:
    op = one_op(kind)
    exact = np.linspace(1, 2, 4096)
    limit = max(threshold(op, "f32"), 2e-5 if kind == "Abs" else 0.0)  # elementwise ops: also by the absolute error
    for factor, right in ((0.4, True), (3.0, False)):
        got = (exact * (1 + factor * limit)).astype(np.float32)
        assert (wrong(got, exact, op, 0, [op]) == "") is right


def test_threshold_rule_detects_one_wrong_value_nan_and_shape() -> None:
    op = one_op("Add")
    exact = np.linspace(1, 2, 4096)
    got = exact.astype(np.float32)
    assert wrong(got, exact, op, 0, [op]) == ""
    for bad in (np.nan, np.inf, 100.0):
        other = got.copy()
        other[7] = bad
        assert "at (7,)" in wrong(other, exact, op, 0, [op])
    assert "shape" in wrong(got[:-1], exact, op, 0, [op])


def test_integer_rule_allows_only_rounding_of_halves() -> None:
    op = og.Op(0, "Quantize", [og.LogicalTensor(0, "f32", (3,))], [og.LogicalTensor(1, "u8", (3,))])
    exact = np.array([1.5, 2.0, 300.0])
    assert wrong(np.array([1, 2, 255], np.uint8), exact, op, 0, [op]) == ""
    assert wrong(np.array([2, 2, 255], np.uint8), exact, op, 0, [op]) == ""
    assert "at (1,)" in wrong(np.array([2, 3, 255], np.uint8), exact, op, 0, [op])


def test_epsilons_match_the_dtypes() -> None:
    for dtype, epsilon in EPSILON.items():
        numpy = og.ir.dtypes.get(dtype).numpy  # type: ignore[attr-defined]
        one = np.ones((), numpy)
        assert (np.float64(1 + epsilon)).astype(numpy) > one
        assert (np.float64(1 + epsilon / 4)).astype(numpy) == one
