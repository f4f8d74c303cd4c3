"""Nodes as they occur in real models: without axes, bounds or types, and with parameters that broadcast."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import opgraph as og

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")
helper, T = onnx.helper, onnx.TensorProto


def model(
    nodes: list[Any],
    x: np.ndarray,
    shape: tuple[int, ...],
    opset: int = 18,
    constants: dict[str, np.ndarray] | None = None,
) -> Any:
    """A model from an f32 x to a y of a given shape."""
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", T.FLOAT, x.shape)],
        [helper.make_tensor_value_info("y", T.FLOAT, shape)],
        [onnx.numpy_helper.from_array(a, n) for n, a in (constants or {}).items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


def in_onnxruntime(made: Any, x: np.ndarray) -> np.ndarray:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    result: np.ndarray = ort.InferenceSession(made.SerializeToString(), options).run(None, {"x": x})[0]
    return result


X = np.random.default_rng(0).standard_normal((2, 4, 3, 5)).astype(np.float32)


@pytest.mark.parametrize("kind", ["ReduceMean", "ReduceSum", "ReduceMax", "ReduceProd", "ReduceL2"])
@pytest.mark.parametrize("opset", [11, 13, 18])
def test_reduction_without_axes_reduces_all_axes(kind: str, opset: int) -> None:
    made = model([helper.make_node(kind, ["x"], ["y"])], X, (1, 1, 1, 1), opset)
    for library in (False, True):
        np.testing.assert_allclose(
            og.compile(og.onnx.load(made, library=library))(x=X), in_onnxruntime(made, X), rtol=1e-5
        )


@pytest.mark.parametrize("functions", [False, True])
def test_fusing_accepts_a_reduction_without_axes(functions: bool) -> None:
    nodes = [
        helper.make_node("ReduceMean", ["x", "last"], ["m"], keepdims=1),
        helper.make_node("Mul", ["x", "m"], ["t"]),
        helper.make_node("ReduceMax", ["t"], ["y"], keepdims=0),
    ]
    made = model(nodes, X, (), constants={"last": np.array([-1])})
    fused = og.onnx.fuse(made, functions=functions)
    np.testing.assert_allclose(in_onnxruntime(fused, X), in_onnxruntime(made, X))


def test_clip_of_opset_6_without_bounds_clips_to_the_f32_range() -> None:
    x = np.array([np.inf, -np.inf, 1.0], np.float32)
    made = model([helper.make_node("Clip", ["x"], ["y"])], x, (3,), opset=6)
    largest = np.finfo(np.float32).max
    for library in (False, True):
        graph = og.onnx.load(made, library=library)
        for got in og.compile(graph)(x=x), og.evaluate(graph, x=x):
            np.testing.assert_array_equal(got, np.array([largest, -largest, 1], np.float32))


@pytest.mark.parametrize(("kind", "opset"), [("LayerNormalization", 17), ("RMSNormalization", 23)])
def test_norm_with_a_broadcast_scale_stays_an_onnx_node(kind: str, opset: int) -> None:
    made = model([helper.make_node(kind, ["x", "s"], ["y"], axis=2)], X, X.shape, opset, {"s": X[0, 0, 0]})
    for library in (False, True):
        graph = og.onnx.load(made, library=library)
        assert [op.kind for op in graph.ops] == ["Wildcard"]
        np.testing.assert_array_equal(og.compile(graph)(x=X), in_onnxruntime(made, X))


@pytest.mark.parametrize("opset", [17, 20])
def test_untyped_gelu_between_matmuls_becomes_a_function(opset: int) -> None:
    """Before opset 20 its body calls com.microsoft's, for which onnx infers no type."""
    x = X[0, 0, :, :4].copy()
    one = {"half": 0.5, "one": 1.0, "root": np.sqrt(2.0)}
    nodes = [
        helper.make_node(kind, inputs.split(), [made])
        for made, kind, inputs in (
            ("p", "MatMul", "x w"), ("a", "Add", "p b"), ("d", "Div", "a root"), ("e", "Erf", "d"),
            ("o", "Add", "e one"), ("g", "Mul", "a o"), ("h", "Mul", "g half"), ("y", "MatMul", "h w"),
        )
    ]  # fmt: skip
    constants = {n: np.float32(v) for n, v in one.items()} | {
        "w": X[0, 1, :, :4].T @ X[0, 2, :, :4],
        "b": X[1, 0, 0, :4],
    }
    made = model(nodes, x, (3, 4), opset, {n: np.asarray(v) for n, v in constants.items()})
    fused = og.onnx.fuse(made, functions=True)
    assert [n.op_type for n in fused.graph.node if n.domain == ""] == ["MatMul", "MatMul"]
    np.testing.assert_allclose(in_onnxruntime(fused, x), in_onnxruntime(made, x), rtol=1e-5, atol=1e-6)
