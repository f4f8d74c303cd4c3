"""The gradient of log softmax where most of it cancels: where one class is certain."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import opgraph as og

torch = pytest.importorskip("torch", reason="no farther off than torch")

from opgraph.runtime.providers.torch import from_numpy  # noqa: E402

DTYPES = {"f32": np.float32, "f64": np.float64, "bf16": ml_dtypes.bfloat16}


def certain(dtype: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Gradients, log softmax values for which 1 - p keeps all digits, and the truth for the certain class."""
    y = np.full((400, 3), -14.0)
    y[:, 0] = -np.arange(1, 401) * np.finfo(np.float64 if dtype == "f64" else np.float32).eps
    y[:, 2] = -np.inf
    g = np.zeros_like(y)
    g[:, 0] = np.linspace(-1, -0.01, 400)
    g, y = g.astype(DTYPES[dtype]), y.astype(DTYPES[dtype])
    return g, y, -g[:, 0].astype(float) * np.expm1(y[:, 0].astype(float))


def native(dtype: str, g: np.ndarray, y: np.ndarray) -> Any:
    graph = og.parse(f"graph(g: {dtype}[n,c], y: {dtype}[n,c]) -> (dx)\n  dx = LogSoftmaxBackward(g, y, axis=-1)")
    return og.compile(graph, device="cpu")(g=g, y=y)


def of_a_node(dtype: str, g: np.ndarray, y: np.ndarray) -> Any:
    node = 'Wildcard(x, onnx_op="LogSoftmax", onnx_domain="", onnx_opset=20, axis=-1)'
    whole = og.gradient(og.parse(f"graph(x: {dtype}[400,3]) -> (y)\n  y: {dtype}[400,3] = {node}"), ["x"])
    rule = og.Graph()  # the ops after the node, whose result is an input
    values: dict[int, Any] = {t.id: float(np.asarray(t.data)) for t in whole.constants}
    values[whole.inputs[1].id] = rule.input("g", dtype, (400, 3))
    for op in whole.ops:
        if op.kind == "Wildcard":
            values[op.outputs[0].id] = rule.input("y", dtype, (400, 3))
        else:
            values[op.outputs[0].id] = rule.add_op(op.kind, *[values[t.id] for t in op.inputs], **op.attrs)
    rule.set_outputs([values[whole.outputs[0].id]])
    return og.compile(rule, device="cpu")(g=g, y=y)


@pytest.mark.parametrize("how,dtype", [(native, "f32"), (native, "f64"), (native, "bf16"), (of_a_node, "f32")])
def test_log_softmax_gradient_is_exact_near_probability_one(how: Callable[..., Any], dtype: str) -> None:
    g, y, truth = certain(dtype)
    found = np.asarray(how(dtype, g, y)).astype(float)
    tensors = [from_numpy(a.copy()) for a in (g, y)]
    eager = torch.ops.aten._log_softmax_backward_data(*tensors, 1, tensors[0].dtype).double().numpy()
    mine, other = (np.abs((made[:, 0] - truth) / truth).max() for made in (found, eager))
    assert mine <= 2 * other
    np.testing.assert_allclose(found[:, 1:], eager[:, 1:], rtol=1e-6)


@pytest.mark.parametrize("mode", ["none", "inf_as_zero"])
@pytest.mark.parametrize("dtype", ["f32", "f64"])
def test_softmax_statistics_of_infinities_agree_in_kernel_and_library(mode: str, dtype: str) -> None:
    """For unknown sizes, the forward pass with a gradient is a library op."""
    graph = og.parse(f'graph(x: {dtype}[?,?]) -> (s)\n  y, s = SoftMax(x, axis=0, mode="{mode}")')
    inf, nan = float("inf"), float("nan")
    x = np.array([[1, inf, -inf, nan, inf], [2, 3, -inf, 1, -inf]]).astype(og.ir.dtypes.get(dtype).numpy)
    wanted = og.evaluate(graph, {"x": x}, dtype=None)
    results, _ = og.compile(graph, wrt=("x",)).vjp({"x": x})
    for got in (results, og.compile(graph)(x=x)):
        np.testing.assert_allclose(got, wanted, rtol=1e-6)
