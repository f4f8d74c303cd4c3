"""`evaluate`: any graph in NumPy, in float64 or as declared, on checked inputs."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from growth import growth

import opgraph as og
from opgraph import errors

BF16 = np.dtype(ml_dtypes.bfloat16)


def swish(dtype: str = "f32", shape: Any = ("n", 4)) -> og.Graph:
    g = og.Graph()
    x = g.input("x", dtype, shape)
    g.add_op("Multiply", x, g.add_op("Sigmoid", x), name="y")
    return g


def test_one_output_is_an_array_and_several_are_a_dict() -> None:
    x = np.linspace(-2, 2, 4, dtype=np.float32).reshape(1, 4)
    assert isinstance(og.evaluate(swish(), x=x), np.ndarray)
    g = og.Graph()
    a = g.input("a", shape=(4,))
    g.add_op("Exp", a, name="second")
    first = g.add_op("Abs", a, name="first")
    g.output(first)
    g.add_op("Neg", first)
    result = og.evaluate(g, a=x[0])
    assert list(result) == ["first", "second", f"t{g.ops[2].outputs[0].id}"]


def test_narrow_graph_is_evaluated_in_float64() -> None:
    x = np.array([[1.0, 2.5, -3.0, 100.0]], BF16)
    wide = x.astype(np.float64)
    np.testing.assert_allclose(og.evaluate(swish("bf16"), x=x), wide / (1 + np.exp(-wide)), rtol=1e-15)


def test_evaluation_in_declared_dtypes_rounds_after_each_op() -> None:
    x = np.array([[1.0, 2.5, -3.0, 100.0]], BF16)
    sigmoid = (1 / (1 + np.exp(-x.astype(np.float32)))).astype(BF16)
    expected = (x.astype(np.float32) * sigmoid.astype(np.float32)).astype(BF16)
    result = og.evaluate(swish("bf16"), x=x, dtype=None)
    assert result.dtype == BF16
    np.testing.assert_array_equal(result, expected)


def test_wider_declared_output_is_not_rounded_twice() -> None:
    g = og.Graph()
    h = g.input("h", "f16", (1,))
    g.add_op("Add", h, h, name="y", dtype="f32")
    x = np.array([40000.0], np.float16)
    assert og.evaluate(g, h=x, dtype=None) == 80000.0


def test_casts_between_floats_do_nothing_in_float64_and_round_as_declared() -> None:
    g = og.Graph()
    g.add_op("TypeCast", g.add_op("TypeCast", g.input("x", "f64", (1,)), dtype="f16"), name="y", dtype="f64")
    x = np.array([1.0 + 2.0**-30])
    assert og.evaluate(g, x=x) == x
    assert og.evaluate(g, x=x, dtype=None) == 1.0
    assert og.evaluate(g, x=x, dtype="f32").dtype == np.float32


def test_float_to_integer_casts_apply_in_float64() -> None:
    g = og.Graph()
    g.add_op("TypeCast", g.input("x", shape=(3,)), name="y", dtype="s8")
    result = og.evaluate(g, x=np.array([1.9, 300.0, np.nan], np.float32))
    assert result.dtype == np.int8
    assert result.tolist() == [1, 127, 0]


def test_constants_and_inputs_may_be_outputs() -> None:
    g = og.Graph()
    x, c = g.input("x", shape=(2,)), g.constant("c", np.array([1.5, 2.5], "f4"))
    g.output(x, c)
    result = og.evaluate(g, x=np.zeros(2, "f4"))
    assert result["c"].tolist() == [1.5, 2.5]
    assert result["x"].tolist() == [0, 0]


def test_inputs_are_found_by_name_or_id() -> None:
    g = og.Graph()
    a, b = og.LogicalTensor(5, "f32", (2,)), og.LogicalTensor(7, "f32", (2,), name="b b")
    g.add_op(og.Op(0, "Subtract", [a, b], [og.LogicalTensor(9, "f32", (2,))]))
    one, two = np.ones(2, "f4"), np.full(2, 2, "f4")
    for feeds in ({5: two, 7: one}, {"t5": two, "b b": one}, {"t5": two, 7: one}):
        assert og.evaluate(g, feeds).tolist() == [1, 1]
    assert og.evaluate(g, {"b b": one}, t5=two).tolist() == [1, 1]


def test_python_scalars_fit_only_zero_dimensional_inputs() -> None:
    g = og.Graph()
    g.add_op("Multiply", g.input("x", shape=(2,)), g.input("a"), name="y")
    assert og.evaluate(g, x=np.ones(2, "f4"), a=1.5).tolist() == [1.5, 1.5]
    assert og.evaluate(g, x=np.ones(2, "f4"), a=np.float32(1.5)).tolist() == [1.5, 1.5]
    with pytest.raises(errors.InvalidDataType):
        og.evaluate(g, x=np.ones(2, "f4"), a=np.float16(1.5))
    with pytest.raises(errors.InvalidArguments):
        og.evaluate(g, x=1.0, a=1.5)


X = np.zeros((3, 4), "f4")
BAD_FEEDS: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("missing", {}, errors.InvalidArguments, "missing inputs: x"),
    ("unknown", {"x": X, "z": X}, errors.InvalidArguments, "unknown inputs: 'z'"),
    ("misspelled", {"z": X}, errors.InvalidArguments, "missing inputs: x; unknown inputs: 'z'"),
    ("list", {"x": [[0.0] * 4]}, errors.InvalidArguments, "got list for f32[n,4]"),
    ("dtype", {"x": X.astype("f8")}, errors.InvalidDataType, "got an array of float64 for f32[n,4]"),
    ("rank", {"x": X[0]}, errors.InvalidShape, "got shape [4] for [n,4]"),
    ("size", {"x": X.T}, errors.InvalidShape, "got shape [4, 3] for [n,4]"),
]


@pytest.mark.parametrize(("feeds", "error", "what"), [b[1:] for b in BAD_FEEDS], ids=[b[0] for b in BAD_FEEDS])
def test_invalid_feed_raises_a_three_line_error(feeds: dict[str, Any], error: type[Exception], what: str) -> None:
    with pytest.raises(error) as caught:
        og.evaluate(swish(), feeds)
    lines = str(caught.value).split("\n")
    assert what in lines[0]
    assert lines[1].startswith("  where: ") and lines[2].startswith("  fix:   ") and len(lines) == 3


def test_equal_symbols_must_have_equal_sizes() -> None:
    g = og.Graph()
    g.add_op("Add", g.input("x", shape=("n", 4)), g.input("z", shape=("n", 1)), name="y")
    assert og.evaluate(g, x=X, z=X[:, :1]).shape == (3, 4)
    with pytest.raises(errors.InvalidShape, match='dimension "n" is 3 and 2'):
        og.evaluate(g, x=X, z=X[:2, :1])


@pytest.mark.parametrize(
    ("kind", "shapes", "attrs", "what"),
    [
        ("Add", [(3,), (4,)], {}, "do not broadcast"),
        ("Add", [(3,), (1,)], {"auto_broadcast": "none"}, "shapes differ and auto_broadcast is none"),
        ("BiasAdd", [(2, 3), (2,)], {}, "src has 3 channels and bias 2 elements"),
        ("PReLU", [(2, 1), (3,)], {}, "slope does not broadcast"),
    ],
)
def test_unknown_shapes_are_checked_at_evaluation(
    kind: str, shapes: list[tuple[int, ...]], attrs: dict[str, Any], what: str
) -> None:
    g = og.Graph()
    unknown = (None, None) if kind != "Add" else None
    ins = [g.input("a", shape=unknown), g.input("b", shape=None)]
    g.add_op(kind, *ins, name="y", **attrs)
    with pytest.raises(errors.InvalidShape, match=what) as caught:
        og.evaluate(g, {"a": np.zeros(shapes[0], "f4"), "b": np.zeros(shapes[1], "f4")})
    assert f'{kind} "y" (shapes: ' in caught.value.where


def test_declared_result_shape_is_checked() -> None:
    g = og.Graph()
    x = og.LogicalTensor(0, "f32", (None,), name="x")
    g.add_op(og.Op(0, "Exp", [x], [og.LogicalTensor(1, "f32", (5,), name="y")]))
    assert og.evaluate(g, x=np.zeros(5, "f4")).shape == (5,)
    with pytest.raises(errors.InvalidShape, match=r"is declared f32\[5\], but has shape \[3\]"):
        og.evaluate(g, x=np.zeros(3, "f4"))


def wildcard() -> og.Graph:
    g = og.Graph()
    x = g.input("x", shape=(2, 2))
    made = g.add_op("Wildcard", x, name="w", outputs=1, dtype="f32", op_type="MatMul")
    g.add_op("Abs", made, name="y")
    return g


def test_wildcard_runs_in_the_callers_function() -> None:
    seen = []

    def foreign(op: og.Op, arrays: tuple[np.ndarray, ...]) -> list[np.ndarray]:
        seen.append((op.attr("op_type"), arrays[0].dtype))
        return [-(arrays[0] @ arrays[0]).astype(np.float32)]

    x = np.array([[1, 2], [3, 4]], np.float32)
    result = og.evaluate(wildcard(), x=x, foreign=foreign)
    assert result.dtype == np.float64
    np.testing.assert_array_equal(result, x @ x)
    assert seen == [("MatMul", np.float64)]
    assert og.evaluate(wildcard(), x=x, foreign=foreign, dtype=None).dtype == np.float32


def test_wildcard_without_a_runner_is_refused_by_name() -> None:
    with pytest.raises(errors.Unimplemented, match="no formula for Wildcard") as caught:
        og.evaluate(wildcard(), x=np.zeros((2, 2), "f4"))
    assert 'Wildcard "w"' in caught.value.where
    assert "foreign=" in caught.value.fix


def test_runner_with_too_many_results_is_refused() -> None:
    with pytest.raises(errors.InvalidArguments, match="returned 2 arrays for 1 outputs"):
        og.evaluate(wildcard(), x=np.zeros((2, 2), "f4"), foreign=lambda op, arrays: [arrays[0], arrays[0]])


def test_end_ops_are_skipped() -> None:
    g = og.Graph()
    x = g.input("x", shape=(2,))
    y = g.add_op("Exp", x, name="y")
    g.add_op("End", y)
    g.add_op("Abs", y, name="z")
    assert list(og.evaluate(g, x=np.zeros(2, "f4"))) == ["y", "z"]


def test_an_unknown_working_dtype_is_refused() -> None:
    with pytest.raises(errors.InvalidArguments, match="cannot evaluate in 's32'"):
        og.evaluate(swish(), x=X, dtype="s32")


def test_special_values_raise_no_warnings() -> None:
    wild = np.array([[np.nan, np.inf, -np.inf, 3e38]], np.float32)
    signalling = np.array([[0x7F800001] * 4], np.uint32).view(np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for x in (wild, signalling):
            for dtype in ("f64", "bf16", None):
                og.evaluate(swish(), x=x, dtype=dtype)


def test_torch_inputs_give_torch_results() -> None:
    torch = pytest.importorskip("torch")
    result = og.evaluate(swish("bf16"), x=torch.ones(1, 4, dtype=torch.bfloat16))
    assert isinstance(result, torch.Tensor)
    assert result.dtype == torch.float64


def test_evaluation_time_is_linear_in_ops() -> None:
    def evaluation(length: int) -> Callable[[], object]:
        g = og.Graph()
        y = g.input("x", shape=(2,))
        for _ in range(length):
            y = g.add_op("Abs", y)
        g.finalize()
        return lambda: og.evaluate(g, x=np.ones(2, "f4"))

    assert growth(evaluation, 2_500) < 3


@pytest.mark.parametrize(
    "op",
    [
        "ReduceSum(x, axes=[0], keep_dims=true)",
        "ReduceSum(x, axes=[0,1])",
        "ReduceSum(x, axes=[-1,0])",
        "SumTo(x, like)",
        "ReduceL1(x, axes=[0,2])",
    ],
)
def test_column_sums_are_as_accurate_as_row_sums(op: str) -> None:
    """NumPy adds columns one element after the other; the f32 error is some 60 last places for 50,000 of them."""
    graph = og.parse(f"graph(x: f32[50000,2,3], like: f32[1,2,1]) -> (y)\n  y = {op}").finalize()
    x = np.random.default_rng(0).uniform(1, 2, (50_000, 2, 3)).astype(np.float32)
    got = og.evaluate(graph, {"x": x, "like": np.zeros((1, 2, 1), np.float32)}, dtype=None)
    axes = (0, 1) if "[0,1]" in op else (0,) if "[0]" in op else (0, 2)
    exact = x.sum(axis=axes, dtype=np.longdouble).astype(np.float64).ravel()
    assert np.abs(got.ravel() - exact).max() <= 4 * np.spacing(np.float32(exact.max()))
