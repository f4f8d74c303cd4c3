"""Compares with oneDNN's real library (3.2, the wheel of the extra `onednn`): same f32 results, no more partitions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onednn_files import RUNNABLE, content_of, needs_files
from onednn_fill import feeds_of
from onednn_rule import wrong
from onednn_run import executed, prepared

import opgraph as og
from opgraph.errors import DeviceError, InvalidArguments, InvalidGraph, InvalidGraphOp, Unimplemented
from opgraph.ir import dtypes
from opgraph.ir.opdef import find
from opgraph.onednn.library import Library, load

try:
    load()
except DeviceError as missing:
    pytest.skip(f"oneDNN's library is not usable here: {missing.what}", allow_module_level=True)

#: Features that this old version of the library lacks, or has wrong.
NOT_IN_3_2 = {
    "op/f32/gelu.json": "no attribute mode",
    "op/f32/genindex.json": "no kind GenIndex",
    "op/f32/greaterequal.json": "no kind GreaterEqual",
    "op/f32/reciprocal.json": "no kernel for Reciprocal alone",
    "op/f32/rmsnorm.json": "no kind RMSNorm",
    "op/f32/select.json": "no kind Select",
    "op/f32/softmax_w_stats.json": "no second output of SoftMax",
    "op/f32/prelu_bwd_dw_5d.json": "an input that is not row-major",
    "pattern/f32/matmul_dropout.json": "no kind Dropout",
    "pattern/f32/matmul_select.json": "no kind Select",
    "pattern/f32/reduction_post_ops_l2_fusion.json": "an output that is not row-major",
    "pattern/f32/reduction_post_ops_min_chain_fusion.json": "an output that is not row-major",
    "pattern/f32/unary_dropout_fusion.json": "no kind Dropout",
}
_FAMILIES = {"pointwise", "linear", "convolution", "norm", "reduction", "parameter_gradient"}


def is_of(name: str) -> bool:
    records = [find(entry["kind"]) for entry in content_of(name)["graph"]]
    return "/f32/" in name and all(record is not None and record.family in _FAMILIES for record in records)


FILES = [name for name in RUNNABLE if is_of(name) and name not in NOT_IN_3_2]


@pytest.fixture(scope="module")
def library() -> Iterator[Library]:
    yield load()


@needs_files
def test_corpus_has_f32_files_to_compare() -> None:
    assert len(FILES) >= 50


@needs_files
@pytest.mark.parametrize("name", FILES)
def test_f32_files_agree_with_the_real_library(name: str, library: Library) -> None:
    graph = prepared(name, 3e5)
    feeds = feeds_of(graph)
    with library.build(graph) as real:
        theirs = real(feeds)
    ours = executed(graph, feeds)
    for tensor in graph.outputs:
        op = graph.producer(tensor.id)
        assert op is not None
        index = [t.id for t in op.outputs].index(tensor.id)
        expected = theirs[str(tensor.name)].astype(np.float64)
        assert wrong(ours[tensor.id], expected, op, index, graph.ops, graph.ops) == ""


# -- patterns, with the partitions of both ----------------------------------------------------------------------------


def graph(*steps: tuple[Any, ...], dims: tuple[int, ...] = (4, 8)) -> og.Graph:
    """A graph of ops by kind and inputs; values are x, z, u (inputs) and the numbers of the steps."""
    g = og.Graph()
    values: dict[Any, og.LogicalTensor] = {}
    for index, (kind, *inputs) in enumerate(steps):
        for value in inputs:
            if isinstance(value, str):
                values.setdefault(value, g.input(value, shape=dims) if value not in values else values[value])
        values[index] = g.add_op(kind, *[values[value] for value in inputs], name=f"v{index}")
    return g.finalize()


SWISH = (("Sigmoid", "x"), ("Multiply", "x", 0))
#: Steps, partitions of the real library, partitions here. 3.14 makes fewer of two of them: 1 of the five ops, 2 of the
#: 25 Adds.
PATTERNS: dict[str, tuple[tuple[tuple[Any, ...], ...], int, int]] = {
    "swish": (SWISH, 1, 1),
    "swish, the other way round": ((("Sigmoid", "x"), ("Multiply", 0, "x")), 1, 1),
    "a gate": ((("Sigmoid", "x"), ("Multiply", 0, "z")), 1, 1),
    "swish, ReLU": ((*SWISH, ("ReLU", 1)), 2, 1),
    "swish, Add": ((*SWISH, ("Add", 1, "z")), 2, 1),
    "SwiGLU": ((*SWISH, ("Multiply", 1, "u")), 2, 1),
    "ReLU, Sigmoid": ((("ReLU", "x"), ("Sigmoid", 0)), 2, 1),
    "four unary ops": ((("Exp", "x"), ("Log", 0), ("Tanh", 1), ("Abs", 2)), 4, 1),
    "Add, ReLU, Sigmoid, Multiply, Tanh": (
        (("Add", "x", "z"), ("ReLU", 0), ("Sigmoid", 1), ("Multiply", 2, "u"), ("Tanh", 3)), 2, 1),
    "25 Adds": ((("Add", "x", "z"), *[("Add", i, "z") for i in range(24)]), 7, 1),
    "two branches": ((("ReLU", "x"), ("Tanh", "x"), ("Add", 0, 1)), 2, 1),
    "the gradient of swish": (
        (("Sigmoid", "x"), ("Multiply", "z", "x"), ("SigmoidBackward", 0, 1), ("Multiply", "z", 0), ("Add", 2, 3)),
        4, 1),
    "SigmoidBackward, Multiply": ((("SigmoidBackward", "x", "z"), ("Multiply", 0, "u")), 2, 1),
}  # fmt: skip


@pytest.mark.parametrize("case", PATTERNS)
def test_pointwise_patterns_are_one_kernel_and_agree(case: str, library: Library) -> None:
    steps, theirs, ours = PATTERNS[case]
    g = graph(*steps)
    with library.build(g) as real:
        assert (len(real.partitions), len(g.get_partitions())) == (theirs, ours)
        assert sorted(id for p in real.partitions for id in p.ops) == sorted(op.id for op in g.ops)
        feeds = feeds_of(g)
        expected = real(feeds)
    for tensor in g.outputs:
        op = g.producer(tensor.id)
        assert op is not None
        got = executed(g, feeds)[tensor.id]
        assert wrong(got, expected[str(tensor.name)].astype(np.float64), op, 0, g.ops, g.ops) == ""


def test_matmul_with_bias_and_swish_agrees(library: Library) -> None:
    g = og.Graph()
    x, w, b = g.input("x", shape=(8, 16)), g.input("w", shape=(16, 4)), g.input("b", shape=(4,))
    y = g.add_op("MatMul", x, w, b)
    g.add_op("Multiply", y, g.add_op("Sigmoid", y), name="y")
    feeds = feeds_of(g.finalize())
    with library.build(g) as real:
        assert len(real.partitions) == 1
        np.testing.assert_allclose(og.compile(g)(feeds), real(feeds)["y"], rtol=4e-5, atol=2e-5)


def test_real_librarys_eltwise_kernels_report_no_in_place_pair(library: Library) -> None:
    with library.build(graph(("ReLU", "x"))) as relu, library.build(graph(("Add", "x", "z"))) as add:
        assert [p.inplace for p in relu.compile()] == [()] and [p.inplace for p in add.compile()] == [((0, 2),)]


# -- the driver itself ------------------------------------------------------------------------------------------------


def test_real_library_reports_its_version(library: Library) -> None:
    assert library.version == "3.2.0" and library.path.name == "libdnnl.so.3"


def test_real_librarys_debug_policy_separates_every_op(library: Library) -> None:
    with library.build(graph(*SWISH), policy="debug") as real:
        assert [p.ops for p in real.partitions] == [(0,), (1,)]


def test_bound_library_call_reads_current_array_contents(library: Library) -> None:
    g = graph(*SWISH)
    x, y = np.ones((4, 8), np.float32), np.zeros((4, 8), np.float32)
    with library.build(g) as real:
        call = real.bind({"x": x}, {"v1": y})
        for value in (1.0, 2.0):
            x[...] = value
            call()
            np.testing.assert_allclose(y, value / (1 + np.exp(-value)), rtol=1e-5)


def test_graphs_unsupported_by_the_real_library_are_refused_by_name(library: Library) -> None:
    g = og.Graph()
    g.add_op("Swish", g.input("x", shape=(4,)))
    with pytest.raises(Unimplemented, match="no kind Swish"):
        library.build(g)
    g = og.Graph()
    g.add_op("Abs", g.input("x", dtype="f64", shape=(4,)))
    with pytest.raises(Unimplemented, match="f64"):
        library.build(g)
    g = og.Graph()
    g.add_op("Sigmoid", g.input("x", shape=(4,)), alpha=2.0)
    with pytest.raises((Unimplemented, InvalidGraphOp)):
        library.build(g)
    g = og.Graph()
    g.add_op(og.Op(0, "Wildcard", *[[og.LogicalTensor(i, "f32", (4,))] for i in (0, 1)]).set_attr("axis", 1))
    with pytest.raises(Unimplemented, match="Wildcard takes no attributes"):
        library.build(g)
    with library.build(graph(*SWISH)) as real, pytest.raises(InvalidArguments, match="laid out"):
        real.bind({"x": np.ones((8, 4), np.float32).T}, {"v1": np.ones((4, 8), np.float32)})
    for call in (real.compile, lambda: real({"x": np.ones((4, 8), np.float32)})):
        with pytest.raises(InvalidGraph, match="closed"):
            call()


def test_real_library_and_torch_share_one_openmp_runtime(library: Library) -> None:
    """Two runtimes would both spin. The library loads libgomp.so.1 by its name, and gets the one that is loaded."""
    pytest.importorskip("torch")
    maps = Path("/proc/self/maps").read_text().splitlines()
    assert len({line.split()[-1] for line in maps if line.endswith(("libgomp.so.1", "libgomp.so.1.0.0"))}) == 1


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
def test_real_library_computes_or_refuses_a_dtype(library: Library, dtype: str) -> None:
    g = og.Graph("cpu")
    x = g.input("x", dtype, (64,))
    g.output(g.add_op("Abs", x, name="y"))
    x = np.linspace(-2, 2, 64).astype(dtypes.get(dtype).numpy)
    with library.build(g) as real:
        if library.computes(dtype):
            (y,) = real({"x": x}).values()
            np.testing.assert_array_equal(np.float32(y), np.abs(np.float32(x)))
        else:
            with pytest.raises(Unimplemented, match=f"does not compute in {dtype} on this processor"):
                real.compile()
