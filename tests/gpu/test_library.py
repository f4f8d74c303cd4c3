"""Library ops on a GPU: they run in torch, on the caller's memory and stream."""

from __future__ import annotations

import warnings
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import opgraph as og

MLP = (
    "graph(x: f32[?,64], w: f32[32,64]) -> (y, z)\n  %0 = MatMul(x, w, transpose_b=true)\n"
    "  %1 = Swish(%0)\n  y = ReduceMean(%1, axes=[0])\n  z = StaticReshape(x, shape=[-1], special_zero=false)"
)


@pytest.fixture
def arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = {"x": (128, 64), "w": (32, 64)}
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


@pytest.fixture
def graph() -> og.Graph:
    return og.parse(MLP).finalize()


def test_results_have_the_array_type_of_the_inputs(memory: Any, graph: og.Graph, arrays: dict[str, np.ndarray]) -> None:
    given = {name: memory.put(a) for name, a in arrays.items()}
    f = og.compile(graph, device="cuda")
    result, truth = f(given), og.evaluate(graph, arrays)
    for name in ("y", "z"):
        assert type(result[name]) is type(given["x"])
        np.testing.assert_allclose(memory.get(result[name]), truth[name], rtol=1e-4, atol=1e-5)
    result["z"][:] = 0
    np.testing.assert_array_equal(memory.get(given["x"]), arrays["x"])
    out = {"y": memory.empty((32,), np.dtype("f4")), "z": memory.empty((128 * 64,), np.dtype("f4"))}
    assert f(given, out=out) is out
    np.testing.assert_allclose(memory.get(out["y"]), truth["y"], rtol=1e-4, atol=1e-5)


def test_torch_runs_library_ops_without_a_host_copy(torch: Any, graph: og.Graph, arrays: dict[str, np.ndarray]) -> None:
    given = {name: torch.from_numpy(a).cuda() for name, a in arrays.items()}
    f = og.compile(graph, device="cuda")
    f(given)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        f(given)  # set-up on first use must not be captured
    torch.cuda.synchronize()
    with torch.cuda.graph(captured, stream=stream):
        result = f(given)  # a copy to the host, or another stream, breaks a capture
    given["x"].mul_(2)
    captured.replay()
    torch.cuda.synchronize()
    truth = og.evaluate(graph, x=arrays["x"] * 2, w=arrays["w"])
    np.testing.assert_allclose(result["y"].cpu().numpy(), truth["y"], rtol=1e-4, atol=1e-5)


def test_cupy_arrays_use_cupys_current_stream(
    cupy: Any, torch: Any, graph: og.Graph, arrays: dict[str, np.ndarray]
) -> None:
    f = og.compile(graph, device="cuda")
    with cupy.cuda.Stream(non_blocking=True) as stream:
        given = {name: cupy.asarray(a) for name, a in arrays.items()}
        for _ in range(20):
            given["x"] *= 1.01  # the next call reads it, if it is on the same stream
            result = f(given)
        stream.synchronize()
    expected = og.evaluate(graph, x=cupy.asnumpy(given["x"]), w=arrays["w"])
    np.testing.assert_allclose(cupy.asnumpy(result["y"]), expected["y"], rtol=1e-4, atol=1e-5)


def test_cupy_bf16_arrays_give_bf16_results(cupy: Any, torch: Any, graph: og.Graph) -> None:
    """Through torch: its bf16 tensors reach CuPy only by DLPack."""
    narrow = og.parse(str(graph).replace("f32", "bf16"))
    rng = np.random.default_rng(0)
    given = {name: rng.normal(size=s).astype(ml_dtypes.bfloat16) for name, s in (("x", (128, 64)), ("w", (32, 64)))}
    got, truth = (
        og.compile(narrow, device="cuda")({k: cupy.asarray(v) for k, v in given.items()}),
        og.evaluate(narrow, given),
    )
    for name in ("y", "z"):
        assert got[name].dtype == ml_dtypes.bfloat16
        wide = cupy.asnumpy(got[name]).astype(np.float64)
        np.testing.assert_allclose(wide, truth[name], rtol=2.0**-6, atol=2.0**-6)


def test_explicit_cupy_stream_raises_no_warning(cupy: Any, torch: Any) -> None:
    """CuPy 14 deprecates ExternalStream in favor of the stream protocol."""
    g = og.Graph(engine="cuda")
    x = g.input("x", dtype="f32", shape=(1 << 16,))
    y = g.add_op("Swish", x, name="y")
    g.finalize()
    engine, side = og.Engine("cuda", 0), cupy.cuda.Stream(non_blocking=True)
    compiled = g.get_partitions()[0].compile([x], [y], engine)
    with side:
        given, out = cupy.full(1 << 16, 2.0, "f4"), cupy.empty(1 << 16, "f4")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compiled.execute(og.Stream(engine, side), {x.id: given}, {y.id: out})
    side.synchronize()
    np.testing.assert_allclose(cupy.asnumpy(out), 2.0 / (1 + np.exp(-2.0)), rtol=1e-6)


def test_imported_model_stays_on_the_gpu(torch: Any) -> None:
    """A copy to the host, a synchronization or another stream would break the capture."""
    onnx = pytest.importorskip("onnx")
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 21]> net (float[n, 3, 8, 8] x, float[4, 3, 3, 3] w) => (float[n, m] y) {'
        " last = Constant <value_ints: ints = [-1]> ()  zero = Constant <value_ints: ints = [0]> ()"
        " c = Conv (x, w)  g = Sigmoid (c)  a = Mul (c, g)  t = Tanh (a)  u = Add (t, a)"
        " s = Shape (u)  n0 = Gather (s, zero)  to = Concat <axis = 0> (n0, last)  y = Reshape (u, to) }"
    )
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(2, 3, 8, 8)).astype(np.float32), rng.normal(size=(4, 3, 3, 3)).astype(np.float32)
    f = og.compile(og.onnx.load(model), device="cuda")
    assert set(f.engines) == {"opgraph", "torch"}
    given = {"x": torch.from_numpy(x).cuda(), "w": torch.from_numpy(w).cuda()}
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        f(given)
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured, stream=stream):
        result = f(given)
    given["x"].mul_(2)
    captured.replay()
    torch.cuda.synchronize()
    np.testing.assert_allclose(result.cpu().numpy(), og.evaluate(f.graph, x=x * 2, w=w), rtol=1e-4, atol=1e-5)
