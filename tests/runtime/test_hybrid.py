"""Imported graphs on a CPU: the pointwise parts that a region of onnxruntime includes, and prepared calls."""

from __future__ import annotations

import subprocess
import sys
import threading
import weakref
from typing import Any

import numpy as np
import pytest

import opgraph as og
from opgraph.runtime import cpu_compiler, executor

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnx_ir")
pytest.importorskip("onnx.parser")
pytest.importorskip("onnxruntime")

from opgraph.runtime.providers import onnxruntime as provider  # noqa: E402  # needs onnx

rng = np.random.default_rng(3)
NODE = 'onnx_domain="", onnx_opset=21'


def between(middle: str, dtype: str = "f32") -> og.Graph:
    """Two matrix products with pointwise ops from `a` to `b` between them."""
    return og.parse(
        f"graph(x: {dtype}[n,64], w: {dtype}[64,64]) -> (y)\n"
        f'  a: {dtype}[n,64] = Wildcard(x, w, onnx_op="MatMul", {NODE})\n'
        f"{middle}"
        f'  y: {dtype}[n,64] = Wildcard(b, w, onnx_op="MatMul", {NODE})'
    )


def feeds(n: int = 5) -> dict[str, np.ndarray]:
    return {"x": rng.standard_normal((n, 64), np.float32), "w": rng.standard_normal((64, 64), np.float32) / 8}


def assert_right(f: og.Executable, given: dict[str, np.ndarray], got: Any = None) -> None:
    np.testing.assert_allclose(f(given) if got is None else got, og.evaluate(f.graph, given), rtol=2e-4, atol=1e-5)


LONE = "  b = Neg(a)\n"
SWISH = "  s = Sigmoid(a)\n  b = Multiply(a, s)\n"
LONG = "".join(
    f"  t{i} = {kind}({f't{i - 1}' if i else 'a'})\n"
    for i, kind in enumerate(["Tanh", "Exp", "Neg", "Sigmoid", "Abs", "Sqrt", "Sinh", "Cos", "Sin"] * 2)
).replace("t17", "b")


@pytest.mark.parametrize("middle", [LONE, SWISH], ids=["one op", "a unit that onnxruntime fuses"])
def test_cheap_pointwise_ops_join_the_onnxruntime_region(middle: str) -> None:
    f = og.compile(between(middle))
    assert [(p.kind, len(p.ops)) for p in f.partitions] == [("library", 2 + middle.count("\n"))]
    assert len(f.graph.get_partitions()) == 3  # the graph itself keeps its partitions
    native = [row for row in f.explain().ops if row.kind != "Wildcard"]
    assert native and all(
        row.why == "in onnxruntime's region: 1 node there, and a kernel would cost a seam" for row in native
    )
    assert_right(f, feeds())


@pytest.fixture(scope="module")
def three() -> og.Executable:
    """An executable with a region, a kernel and a region."""
    return og.compile(between(LONG))


@pytest.mark.parametrize("axes", [0, 1, 2])
def test_pow_exponent_may_have_axes_of_size_one(axes: int) -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 21]> g (float[n,64] x, float[64,64] w) => (float[n,64] y) {
        a = MatMul(x, w) b = Pow(a, power) y = MatMul(b, w) }"""
    )
    model.graph.initializer.append(onnx.helper.make_tensor("power", onnx.TensorProto.FLOAT, (1,) * axes, [3.0]))
    f = og.compile(og.onnx.load(model))
    assert_right(f, feeds())


def test_op_that_needs_many_onnx_nodes_stays_a_kernel(three: og.Executable) -> None:
    assert [p.kind for p in three.partitions] == ["library", "fused", "library"]
    row = next(r for r in three.explain().ops if r.kind == "Tanh")
    assert "a kernel of its own: onnxruntime would run 18 nodes, some" in row.why
    assert_right(three, feeds())


def test_op_without_an_onnxruntime_kernel_stays_a_kernel() -> None:
    graph = between("  h: bf16[n,64] = TypeCast(a)\n  n = Neg(h)\n  b: f32[n,64] = TypeCast(n)\n")
    f = og.compile(graph)
    assert [p.kind for p in f.partitions] == ["library", "fused", "library"]
    assert "onnxruntime has none for it" in next(r for r in f.explain().ops if r.kind == "Neg").why


def test_fused_units_are_reported_inside_regions() -> None:
    (part,) = og.compile(between(SWISH)).partitions
    assert part.units == ("swish",)


# -- prepared calls -------------------------------------------------------------------------------------------------


def no_more_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on, a region must run on bound buffers; otherwise the test fails."""

    def refuse(*_: Any) -> Any:
        raise AssertionError("a region ran on buffers of its own")

    monkeypatch.setattr(provider.OnnxRuntimeRegion, "run", refuse)


def test_regions_and_kernels_share_buffers(three: og.Executable, monkeypatch: pytest.MonkeyPatch) -> None:
    given, out = feeds(6), np.empty((6, 64), np.float32)
    wanted = three(given)
    no_more_runs(monkeypatch)
    np.testing.assert_array_equal(three(given), wanted)
    assert three(given, out=out) is out
    np.testing.assert_array_equal(out, wanted)
    plan = three.memory_plan(given)
    assert [b.over for b in plan.buffers] == [None, plan.buffers[0].value.id]  # the kernel works in place
    assert plan.size == 6 * 64 * 4


def test_results_are_not_overwritten_by_the_next_call(three: og.Executable) -> None:
    one, two = feeds(7), feeds(7)
    three(one)
    first = three(one)
    kept = first.copy()
    second = three(two)
    assert not np.shares_memory(first, second)
    np.testing.assert_array_equal(first, kept)
    assert_right(three, two, second)


def test_shapes_may_change_without_new_sessions_or_kernels(
    three: og.Executable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(provider, "session_of", None)
    monkeypatch.setattr(cpu_compiler, "_compiled", None)
    for n in (8, 9, 0, 1, 8, 9, 0, 1, *range(10, 40)):
        assert_right(three, feeds(n))
    assert len(three._chain._sets) == executor.MAX_SHAPE_SETS


def test_views_are_accepted_by_regions(three: og.Executable) -> None:
    given = feeds(64)
    given["x"] = given["x"].T
    given["w"] = given["w"][::-1]
    for _ in range(3):
        assert_right(three, given)


@pytest.mark.parametrize("order", ["C", "F"])
def test_bound_call_reads_its_arrays_at_each_call(
    three: og.Executable, monkeypatch: pytest.MonkeyPatch, order: str
) -> None:
    """onnxruntime takes only row-major arrays; each call copies others."""
    given, out = feeds(5), np.empty((5, 64), np.float32)
    given = {name: np.array(a, order=order) for name, a in given.items()}
    call = three.bind(given, out=out)
    no_more_runs(monkeypatch)
    for scale in (1, 2, 3):
        given["x"][:] = scale
        assert call() is out
        assert_right(three, given, out)


def test_threads_may_call_concurrently(three: og.Executable) -> None:
    given = [feeds(33) for _ in range(4)]
    wanted = [three(g) for g in given]
    wrong: list[int] = []

    def work(index: int) -> None:
        for _ in range(50):
            if not np.array_equal(three(given[index]), wanted[index]):
                wrong.append(index)

    workers = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for w in workers:
        w.start()
    for w in workers:
        w.join()
    assert not wrong


def test_arrays_of_a_call_are_not_kept_alive(three: og.Executable) -> None:
    given = feeds(21)
    for _ in range(3):
        result = three(given)
    watched = [weakref.ref(a) for a in (*given.values(), result)]
    del given, result
    assert [w() for w in watched] == [None] * 3


# -- values that depend only on shapes --------------------------------------------------------------------------------

BY_SHAPE = (
    "graph(x: f32[n,3]) -> (y, p, x, c)\n"
    "  const c: f32[1] = [2.0]\n"
    f'  s: s64[2] = Wildcard(x, onnx_op="Shape", {NODE})\n'
    f'  o: f32[?,?] = Wildcard(s, onnx_op="ConstantOfShape", {NODE})\n'
    f'  p: f32[?,?] = Wildcard(o, onnx_op="CumSum2", {NODE})\n'
    f'  q: f32[?,?] = Wildcard(p, onnx_op="Softmax", {NODE})\n'
    f'  z: f32[?,?] = Wildcard(x, onnx_op="Softmax", {NODE})\n'
    "  y = Add(q, z)"
).replace("CumSum2", "Softmax")


def test_shape_only_values_are_computed_once_per_shape_set(monkeypatch: pytest.MonkeyPatch) -> None:
    f = og.compile(og.parse(BY_SHAPE))
    ran: list[tuple[str, ...]] = []
    real = provider.OnnxRuntimeRegion.run
    monkeypatch.setattr(
        provider.OnnxRuntimeRegion, "run", lambda self, arrays: (ran.append(self._where), real(self, arrays))[1]
    )
    x = rng.standard_normal((4, 3), np.float32)
    results = [f(x=x) for _ in range(4)] + [f(x=x[:2])]
    assert len(ran) == 4  # the first part and the rest, for two sets of shapes; bound after that
    first, *_ = [r for r in f.explain().ops if r.name == "s" or "Shape" in r.why]
    assert "computed once for each set of shapes" in first.why
    for got, given in zip(results, [x] * 4 + [x[:2]], strict=True):
        exact = og.evaluate(f.graph, x=given)
        for name in ("y", "p"):
            np.testing.assert_allclose(got[name], exact[name], rtol=1e-5)
        np.testing.assert_array_equal(got["x"], given)
        np.testing.assert_array_equal(got["c"], [2.0])
    for result in results[:2]:  # the caller owns results both of single steps and of prepared launches
        result["p"][:] = 0
    np.testing.assert_array_equal(f(x=x)["p"], results[2]["p"])


def test_random_numbers_are_drawn_in_every_call() -> None:
    f = og.compile(
        og.parse(
            "graph(x: f32[n,3]) -> (y)\n"
            f'  r: f32[1,3] = Wildcard(onnx_op="RandomUniform", shape=[1, 3], {NODE})\n'
            f'  s: f32[n,3] = Wildcard(x, onnx_op="Softmax", {NODE})\n'
            "  y = Add(r, s)"
        )
    )
    x = np.zeros((4, 3), np.float32)
    assert len({f(x=x).tobytes() for _ in range(4)}) == 4


def test_data_dependent_shapes_are_supported() -> None:
    f = og.compile(
        og.parse(
            "graph(x: f32[n]) -> (y, x)\n"  # an input among the outputs prevents a single region
            f'  i: s64[1,?] = Wildcard(x, onnx_op="NonZero", {NODE})\n'
            f'  t: s64[?,1] = Wildcard(i, onnx_op="Transpose", {NODE})\n'
            "  y = Multiply(t, t)"
        )
    )
    for count in (3, 3, 5, 0, 3, 7):
        x = np.zeros(9, np.float32)
        x[:count] = 1
        np.testing.assert_array_equal(f(x=x)["y"][:, 0], np.arange(count) ** 2)
    assert [known.is_fixed for known in f._chain._sets.values()] == [False]


def test_data_error_raises_and_later_calls_work(monkeypatch: pytest.MonkeyPatch) -> None:
    f = og.compile(
        og.parse(
            "graph(x: f32[4], i: s64[n]) -> (y)\n"
            f'  g: f32[n] = Wildcard(x, i, onnx_op="Gather", {NODE})\n'
            f'  y: f32[n] = Wildcard(g, onnx_op="Identity", {NODE})'
        )
    )
    x, good = np.arange(4, dtype=np.float32), np.int64([0, 3])
    for _ in range(2):
        f(x=x, i=good)
        with pytest.raises(og.errors.DeviceError, match="Gather"):
            f(x=x, i=np.int64([0, 9]))
    f(x=x, i=good)
    no_more_runs(monkeypatch)
    np.testing.assert_array_equal(f(x=x, i=good), [0, 3])


def test_a_forked_child_runs_regions_too() -> None:
    code = f"""
import os, warnings, numpy as np, opgraph as og
f = og.compile(og.parse({str(between(LONG))!r}))
x, w = np.ones((300, 64), np.float32), np.eye(64, dtype=np.float32)
wanted = f(x=x, w=w); f(x=x, w=w)
warnings.simplefilter("ignore")
child = os.fork()
if child == 0:
    os._exit(0 if all(np.allclose(f(x=x, w=w), wanted) for _ in range(3)) else 3)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "0"
