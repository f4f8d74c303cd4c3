"""An op decomposed into smaller ones equals the op: the same float64 numbers, equally accurate f32, for all calls."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from library_calls import CALLS, LIBRARY, Call, arrays_of, feeds, graph_of, listed, spelled

import opgraph as og
from opgraph import errors
from opgraph.ir import dtypes, opdef
from opgraph.ir.opdef import OpDef

SPELLED = [r for r in LIBRARY if r.spelled is not None]
KINDS = pytest.mark.parametrize("record", SPELLED, ids=lambda r: r.kind)
#: Ops that a decomposed form may contain besides pointwise ops and SumTo.
ROWS = {"ReduceSum", "ReduceMean", "ReduceMax", "Squeeze", "Unsqueeze"}
RESHAPING = {"GroupNorm": {"StaticReshape", "ReshapeTo"}}


def spelled_values(graph: og.Graph, arrays: list[np.ndarray], dtype: str | None) -> list[np.ndarray]:
    small = spelled(graph)
    given = feeds(arrays)
    return listed(og.evaluate(small, {t.name: given[t.name] for t in small.inputs}, dtype=dtype))


def calls(record: OpDef, dtype: str) -> Iterator[tuple[Call, og.Graph, list[np.ndarray]]]:
    for call in CALLS[record.kind]:
        yield call, graph_of(record, call, dtype), arrays_of(call, dtype, record)


@KINDS
def test_decomposition_equals_the_op_in_float64(record: OpDef) -> None:
    for call, graph, arrays in calls(record, "f64"):
        whole = listed(og.evaluate(graph, feeds(arrays)))
        for got, expected in zip(spelled_values(graph, arrays, "f64"), whole, strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-13, atol=1e-13, err_msg=str(call))


@KINDS
@pytest.mark.parametrize("unknown", ["sizes", "symbols"])
def test_decomposition_works_with_unknown_sizes(record: OpDef, unknown: str) -> None:
    for call in CALLS[record.kind]:
        graph, arrays = graph_of(record, call, "f64", unknown), arrays_of(call, "f64", record)
        whole = listed(og.evaluate(graph, feeds(arrays)))
        try:
            made = spelled_values(graph, arrays, "f64")
        except errors.Unimplemented as error:
            assert record.kind == "GroupNorm" and "how many channels" in error.what
            continue
        for got, expected in zip(made, whole, strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-13, atol=1e-13, err_msg=f"{call} {unknown}")


@KINDS
def test_decomposition_consists_of_fusible_ops(record: OpDef) -> None:
    for _, graph, _ in calls(record, "bf16"):
        for op in spelled(graph).ops:
            small = opdef.get(op.kind, where="test")
            fits = small.is_pointwise or small.family == "sum"
            assert fits or op.kind in ROWS | RESHAPING.get(record.kind, set()), op.kind
            assert small.family != "reduction" or (op.attrs["keep_dims"] and op.attrs["axes"])
            # Rounded once: only inputs and outputs are narrow.
            narrow = [t for t in op.outputs if t.dtype == "bf16"]
            assert not narrow or op.kind == "TypeCast" or small.family == "shape", op.kind


@KINDS
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_decomposition_is_as_accurate_as_the_op(record: OpDef, dtype: str) -> None:
    for call, graph, arrays in calls(record, dtype):
        truths = listed(og.evaluate(graph, feeds(arrays)))
        whole = listed(og.evaluate(graph, feeds(arrays), dtype=None))
        for got, other, truth in zip(spelled_values(graph, arrays, None), whole, truths, strict=True):
            assert got.dtype == other.dtype
            finite = np.isfinite(truth)
            np.testing.assert_array_equal(got[~finite], other[~finite], err_msg=str(call))
            eps = float(ml_dtypes.finfo(got.dtype).eps)

            def error(values: np.ndarray, truth: np.ndarray = truth, finite: np.ndarray = finite) -> float:
                size = np.maximum(np.abs(truth[finite]), 1)
                return float(np.max(np.abs(values[finite].astype(np.float64) - truth[finite]) / size, initial=0))

            assert error(got) <= 2 * error(other) + 4 * eps, f"{call}: {error(got) / eps} and {error(other) / eps} ulp"


SHIFTED: dict[str, dict[str, Any]] = {
    "LayerNorm": {"keep_stats": False, "use_affine": False},
    "GroupNorm": {"keep_stats": False, "use_affine": False, "groups": 2, "data_format": "NCX"},
    "SoftMax": {"axis": 2},
    "LogSoftmax": {"axis": 2},
}


@pytest.mark.parametrize("kind", SHIFTED)
def test_f32_norm_far_from_zero_does_not_cancel(kind: str) -> None:
    record = opdef.get(kind, where="test")
    x = (np.random.default_rng(0).normal(size=(2, 4, 256)) + 1000).astype(np.float32)
    call = Call([x.shape], SHIFTED[kind])
    graph = graph_of(record, call, "f32")
    (got,), truth = spelled_values(graph, [x], None), og.evaluate(graph, x0=x)
    assert np.max(np.abs(got - truth) / np.maximum(np.abs(truth), 1)) < 2e-4  # 0.06 with a variance by squares


def test_pointwise_op_may_not_be_decomposed() -> None:
    fields = {n: getattr(opdef.get("Exp", where="test"), n) for n in OpDef.__slots__}
    with pytest.raises(ValueError, match="only what a library runs is spelled"):
        OpDef(**{**fields, "spelled": lambda build, op: ()})


def test_decomposition_needing_an_unknown_rank_is_refused() -> None:
    graph = og.parse("graph(x: f32[*]) -> (y)\n  y = RMSNorm(x, begin_norm_axis=1)")
    with pytest.raises(errors.Unimplemented, match="number of dimensions") as caught:
        spelled(graph)
    assert len(str(caught.value).split("\n")) == 3
    assert spelled(og.parse("graph(x: f32[*]) -> (y)\n  y = RMSNorm(x)")).ops


def test_norm_statistics_take_the_parameter_dtype_or_f32() -> None:
    for src, affine, stats in (
        ("f32", "", "f32"),
        ("bf16", "", "f32"),
        ("f16", "", "f32"),
        ("f64", "", "f64"),
        ("bf16", "bf16", "bf16"),
    ):
        extra = f", g: {affine}[4], b: {affine}[4]" if affine else ""
        g = og.Graph()
        x = g.input("x", src, (3, 4))
        given = [g.input(n, affine, (4,)) for n in ("g", "b")] if extra else []
        made = g.add_op("LayerNorm", x, *given, use_affine=bool(extra), outputs=3)
        assert [t.dtype for t in made] == [src, stats, stats]
        assert dtypes.get(stats).is_float


@pytest.mark.parametrize("layout", ["NCX", "NXC"])
@pytest.mark.parametrize("declared", ["sizes", "unknown samples"])
@pytest.mark.parametrize("shape", [(3, 0), (3, 4, 0), (3, 0, 4), (0, 4, 4), (0, 0)])
def test_group_norm_of_no_elements_has_a_gradient(shape: tuple[int, ...], declared: str, layout: str) -> None:
    graph = og.Graph()
    x = graph.input("x", "f64", shape if declared == "sizes" else (None, *shape[1:]))
    graph.output(graph.add_op("GroupNorm", x, groups=4, use_affine=False, keep_stats=False, data_format=layout))
    slope = og.gradient(graph.finalize(), ("x",))
    empty = np.zeros(shape)
    for g in graph, slope:
        given = {str(t.name): empty for t in g.inputs}
        assert og.evaluate(g, given).shape == og.compile(g)(given).shape == shape


def test_group_norm_gradient_of_unknown_empty_batch_is_refused() -> None:
    text = 'GroupNorm(x, groups=4, use_affine=false, keep_stats=false, data_format="NXC")'
    graph = og.parse(f"graph(x: f32[?,0,0]) -> (y)\n  y = {text}")
    with pytest.raises(errors.Unimplemented, match="declare the size of the first axis"):
        og.gradient(graph, ("x",))


@pytest.mark.parametrize("shape", [(4, 3, 3), (2, 3, 5, 3)], ids=str)
@pytest.mark.parametrize(
    "body",
    [
        "n, m, v = GroupNorm(x, w, b, groups=3, data_format=NCX)\n  y = Add(w, n)",
        "n, m, v = GroupNorm(x, w, b, groups=3, data_format=NCX)\n  y = Less(n, b)",
        "n, m, v = GroupNorm(x, w, b, groups=3, data_format=NCX)\n  t = Tanh(n)\n  y = Multiply(t, w)",
        "u = Exp(w)\n  n, m, v = GroupNorm(x, u, b, groups=3, data_format=NCX)\n  y = Add(u, n)",
    ],
    ids=["weight", "bias", "weight after an op", "made"],
)
def test_group_norm_parameter_may_also_be_read_along_the_last_axis(body: str, shape: tuple[int, ...]) -> None:
    """With as many channels as elements along the last axis, both ways to read the parameter have the same shape."""
    sizes = ",".join(map(str, shape))
    text = body.replace("NCX", '"NCX"')
    graph = og.parse(f"graph(x: f32[{sizes}], w: f32[3], b: f32[3]) -> (y)\n  {text}\n")
    rng = np.random.default_rng(0)
    given = {"x": rng.normal(size=shape), "w": rng.normal(size=3), "b": rng.normal(size=3)}
    given = {name: array.astype(np.float32) for name, array in given.items()}
    (got,), (want,) = listed(og.compile(graph, device="cpu")(given)), listed(og.evaluate(graph, given))
    np.testing.assert_allclose(got.astype(np.float64), want.astype(np.float64), rtol=1e-5, atol=1e-5)
    assert "along different axes" in str(graph.explain())


def test_sum_takes_the_shape_of_a_value_derived_from_row_values() -> None:
    """`d` has the shape [1], like no array of the loop over [5]; because of `a`, it is no row value of that loop."""
    text = """graph(x: f32[1,1,3], z: f32[5], w: f32[5]) -> (y)
      a = BiasAddBackward(x, data_format="NCX")
      c = ReduceMax(z, axes=[-1], keep_dims=true)
      d = Subtract(c, a)
      m = Less(z, d)
      t = Select(m, z, w)
      y = SumTo(t, d)
    """
    graph, rng = og.parse(text), np.random.default_rng(0)
    given = {t.name: rng.normal(size=t.shape).astype(np.float32) for t in graph.inputs}
    (got,), (want,) = listed(og.compile(graph, device="cpu")(given)), listed(og.evaluate(graph, given))
    assert got.shape == want.shape == (1,)
    np.testing.assert_allclose(got, want, rtol=1e-5)


@pytest.mark.parametrize("body", ["a = Minimum(x, z)", "e = Exp(x)\n  a = Minimum(e, z)"], ids=["read", "made"])
def test_group_norm_statistics_follow_the_broadcast_shape(body: str) -> None:
    graph = og.parse(
        f"graph(x: f32[1,1], z: f32[3]) -> (n, m, v)\n  {body}\n  n, m, v = GroupNorm(a, groups=3, use_affine=false)\n"
    )
    given = {"x": np.array([[0.5]], np.float32), "z": np.array([-1, 0, 2], np.float32)}
    got, want = og.compile(graph, device="cpu")(given), og.evaluate(graph, given)
    assert [a.shape for a in listed(got)] == [a.shape for a in listed(want)] == [(1, 3)] * 3
    for one, other in zip(listed(got), listed(want), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


@pytest.mark.parametrize(
    "body",
    [
        "s = Multiply(z, x)\n  t = Multiply(x, d)\n  n = GROUPS(s)\n"
        "  y, g, h = BatchNormTrainingBackward(x, d, m, v, w, epsilon=0.25, data_format=NCX)",
        "n = GROUPS(z)\n  s = Multiply(n, x)\n  p = PReLU(x, w, data_format=NCX)\n"
        "  y = ReduceMean(p, axes=[0])\n  g = Neg(p)\n  h = SumTo(p, w, data_format=NCX)",
    ],
    ids=["batch norm", "a sum"],
)
def test_channel_op_of_lower_rank_beside_a_group_norm(body: str) -> None:
    """`x` of three axes broadcasts to the GroupNorm's input of four axes: its channels are that input's axis 2."""
    norm = "groups=3, use_affine=false, keep_stats=false, data_format=NCX)"
    body = body.replace("GROUPS(z)", f"GroupNorm(z, {norm}").replace("GROUPS(s)", f"GroupNorm(s, {norm}")
    body = body.replace("NCX", '"NCX"')
    inputs = "z: f32[2,3,3,3], x: f32[3,3,3], d: f32[3,3,3], m: f32[3], v: f32[3], w: f32[3]"
    graph, rng = og.parse(f"graph({inputs}) -> (n, y, g, h)\n  {body}\n"), np.random.default_rng(0)
    given = {t.name: rng.uniform(0.5, 2, t.shape).astype(np.float32) for t in graph.inputs}
    got, want = og.compile(graph, device="cpu")(given), og.evaluate(graph, given)
    for one, other in zip(listed(got), listed(want), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


def test_value_of_two_row_loops_keeps_its_axes() -> None:
    """`d` depends on the rows of two loops, so it is a row value of neither, and it has one element in one axis."""
    text = """graph(a: f64[1,?], b: f64[1,1]) -> (y)
      m = ReduceMin(a, axes=[1])
      s = ReduceSum(b, axes=[1])
      d = Subtract(s, m)
      y = StaticReshape(d, shape=[-1,1], special_zero=false)
    """
    given = {"a": np.array([[3.0, 1.0, 2.0]]), "b": np.array([[5.0]])}
    got = og.compile(og.parse(text), device="cpu")(given)
    assert got.tolist() == [[4.0]]


def test_one_element_operand_has_the_rank_its_reader_expects() -> None:
    """`x` has three axes in the loop of `b`, where `a` is made from three axes, and two axes in that of `f`."""
    text = """graph(z: f32[1,1,1], x: f32[1,1], w: f32[1,1], v: f32[1,1]) -> (b, f, h)
      a = StaticReshape(z, shape=[1,1], special_zero=false)
      b = LogSoftmaxBackward(a, x, axis=0)
      c = Subtract(x, v)
      d = ReduceMean(w, axes=[0], keep_dims=true)
      e = Sigmoid(d)
      f = Multiply(c, e)
      h = Subtract(e, z)
    """
    graph, rng = og.parse(text), np.random.default_rng(0)
    given = {t.name: rng.normal(size=t.shape).astype(np.float32) for t in graph.inputs}
    got, want = og.compile(graph, device="cpu")(given), og.evaluate(graph, given)
    for one, other in zip(listed(got), listed(want), strict=True):
        assert one.shape == other.shape
        np.testing.assert_allclose(one, other, rtol=1e-5)


@pytest.mark.parametrize(
    "text",
    [
        "graph(c: boolean[1,1], x: f32[1,1], z: f32[3]) -> (n, m, v)\n  a = Select(c, x, z)\n"
        "  n, m, v = GroupNorm(a, groups=3, use_affine=false)",
        "graph(c: f32[2,2,4], x: f32[1,1], z: f32[4]) -> (n, t)\n  a = Add(x, z)\n"
        "  n = GroupNorm(c, groups=2, use_affine=false, keep_stats=false)\n  u = Multiply(n, a)\n  t = SumTo(u, a)",
    ],
    ids=["two of them", "of fewer than the norm's"],
)
def test_one_element_operands_determine_the_rank_of_the_result(text: str) -> None:
    graph, rng = og.parse(text), np.random.default_rng(0)
    given = {t.name: rng.normal(size=t.shape).astype("?" if t.dtype == "boolean" else "f") for t in graph.inputs}
    got, want = og.compile(graph, device="cpu")(given), og.evaluate(graph, given)
    assert [a.shape for a in listed(got)] == [a.shape for a in listed(want)]
    for one, other in zip(listed(got), listed(want), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["BiasAdd(z, w", "PReLU(z, w", "BroadcastTo(w, z"])
def test_group_norm_parameter_is_also_a_channel_operand_of_another_op(kind: str) -> None:
    """That op is not moved into a larger loop, whose second axis is another one."""
    graph = og.parse(
        f"""graph(x: f32[2,3,3], w: f32[3], z: f32[3,3,3], u: f32[2,3,3,3]) -> (n, y)
      n = GroupNorm(x, w, w, groups=3, keep_stats=false, data_format="NCX")
      e = {kind}, data_format="NCX")
      y = Multiply(e, u)
    """
    )
    rng = np.random.default_rng(0)
    given = {t.name: rng.normal(size=t.shape).astype(np.float32) for t in graph.inputs}
    got, want = og.compile(graph, device="cpu")(given), og.evaluate(graph, given)
    for one, other in zip(listed(got), listed(want), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
