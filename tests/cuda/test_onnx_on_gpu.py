"""Imported ONNX models on a GPU, emulated: the engine of each part, and copies between the GPU and the host."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
from cuda_calls import moved, random
from emulator import FakeArray, FakeCupy

import opgraph as og
from opgraph.errors import DeviceError
from opgraph.runtime.compiled_partition import runner

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")

#: Convolutions, an activation, sizes computed from Shape, a reshape to them, a product, padding by constants.
NET = """
<ir_version: 10, opset_import: ["" : 21]>
net (float[n, 3, 8, 8] x, float[4, 3, 3, 3] w, float[256, 5] v) => (float[n, 5] y, int64[2] s) {
  pads = Constant <value_ints: ints = [0, 0, 1, 1, 0, 0, 1, 1]> ()
  fill = Constant <value_float: float = 0.5> ()
  last = Constant <value_ints: ints = [-1]> ()
  zero = Constant <value_ints: ints = [0]> ()
  one = Constant <value_ints: ints = [1]> ()
  p = Pad (x, pads, fill)
  c = Conv (p, w)
  g = Sigmoid (c)
  a = Mul (c, g)
  t = Tanh (a)
  u = Add (t, a)
  shape = Shape (u)
  n0 = Gather (shape, zero)
  n1 = Mul (n0, one)
  to = Concat <axis = 0> (n1, last)
  flat = Reshape (u, to)
  m = MatMul (flat, v)
  e = Exp (m)
  y = Mul (e, m)
  s = Shape (flat)
}
"""


#: The text of `explain` for ops that torch runs.
TORCH = "runs in torch on the GPU, on the memory of the call"


@pytest.fixture(scope="module")
def graph() -> og.Graph:
    return og.onnx.load(onnx.parser.parse_model(NET))


@pytest.fixture(scope="module")
def arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = {"x": (2, 3, 8, 8), "w": (4, 3, 3, 3), "v": (256, 5)}
    return {name: rng.normal(0, 0.2, shape).astype(np.float32) for name, shape in shapes.items()}


@pytest.fixture(scope="module")
def truth(arrays: dict[str, np.ndarray]) -> list[np.ndarray]:
    session = ort.InferenceSession(onnx.parser.parse_model(NET).SerializeToString(), providers=["CPUExecutionProvider"])
    return list(session.run(None, arrays))


def plan(f: og.Executable) -> list[tuple[str, tuple[str, ...]]]:
    """The engine and the ops of each partition."""
    kinds = [tuple(str(op.attrs.get("onnx_op", op.kind)) for op in p.ops) for p in f.partitions]
    return list(zip(f.engines, kinds))


class TestTorch:
    """Torch is installed, and supports the GPU."""

    @pytest.fixture(autouse=True)
    def gpu(self, cupy: FakeCupy, monkeypatch: pytest.MonkeyPatch) -> Any:
        pytest.importorskip("torch")
        from fake_torch_gpu import torch_gpu

        with torch_gpu(cupy, monkeypatch) as gpu:
            yield gpu

    def test_nothing_is_copied_to_the_host(
        self, gpu: Any, cupy: FakeCupy, graph: og.Graph, arrays: dict[str, np.ndarray], truth: list[np.ndarray]
    ) -> None:
        given = {name: moved(cupy, a) for name, a in arrays.items()}
        f = og.compile(graph, device="cuda")
        f(given)  # uploads constants of kernels
        gpu.copies.clear()
        cupy.copies.clear()
        got = f(given)
        # The output that is a shape is the only value that is on the host but must be returned on the GPU.
        assert gpu.copies == [("to device", 16)] and cupy.copies == []
        assert isinstance(got["y"], FakeArray)
        np.testing.assert_allclose(got["y"].host, truth[0], rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(got["s"].host, truth[1])

    def test_plan_names_the_engine_of_each_part(self, graph: og.Graph) -> None:
        f = og.compile(graph, device="cuda")
        sizes = ("Shape", "Gather", "Multiply", "Concat", "Reshape", "MatMul", "Shape")
        assert plan(f) == [
            ("torch", ("Pad", "Conv")),
            ("opgraph", ("Sigmoid", "Multiply", "Tanh", "Add")),
            ("torch", sizes),
            ("opgraph", ("Exp", "Multiply")),
        ]
        assert {row.why for row in f.explain().ops if row.kind != "Wildcard"} == {
            "part of swish; fused with 3 more",
            "fused with 3 more",
            "fused with 1 more",
            "library op Multiply: carries sizes: runs on the host",
        }
        told = {row.why for row in f.explain().ops if row.partition == 0}
        assert told == {f"foreign op {kind}; {TORCH}" for kind in ("Pad", "Conv")}

    def test_torch_inputs_give_torch_results_without_copies(
        self, gpu: Any, cupy: FakeCupy, graph: og.Graph, arrays: dict[str, np.ndarray], truth: list[np.ndarray]
    ) -> None:
        import torch

        given = {name: gpu.put(torch.from_numpy(a)) for name, a in arrays.items()}
        f = og.compile(graph, device="cuda")
        before = cupy.allocated
        got = f(given)
        assert type(got["y"]) is type(got["s"]) is type(given["x"]) and cupy.allocated == before
        assert not [c for c in [*gpu.copies, *cupy.copies] if c[0] == "to host"]
        np.testing.assert_allclose(got["y"].host.numpy(), truth[0], rtol=1e-5, atol=1e-6)

    def test_ops_unsupported_by_torch_run_on_the_host(self, gpu: Any, cupy: FakeCupy) -> None:
        model = onnx.parser.parse_model(
            '<ir_version: 10, opset_import: ["" : 21]> net (float[4, 4] x) => (float[4, 4] y) '
            "{ a = MatMul (x, x)  d = Det (a)  i = Transpose (a)  y = Mul (i, d) }"
        )
        with pytest.warns(RuntimeWarning, match=r"1 op of this graph \(Det\) left to the CPU") as caught:
            f = og.compile(og.onnx.load(model), device="cuda")
        assert len(caught) == 1
        assert sorted(plan(f)) == [
            ("onnxruntime", ("Det",)), ("opgraph", ("Multiply",)), ("torch", ("MatMul", "Transpose"))
        ]  # fmt: skip
        assert "foreign op Det: runs in onnxruntime; torch has no form for it; runs in onnxruntime on the CPU" in str(
            f.explain()
        )
        x = np.random.default_rng(0).normal(size=(4, 4)).astype(np.float32)
        array = moved(cupy, x)
        cupy.copies.clear()
        np.testing.assert_allclose(f(x=array).host, (x @ x).T * np.linalg.det(x @ x), rtol=1e-4)
        assert cupy.copies == [("to host", 64), ("to device", 4)]

    def test_positions_are_created_on_the_device_that_reads_them(self, gpu: Any, cupy: FakeCupy) -> None:
        """They are computed from host sizes passed as numbers: a copy to the device would break a graph's capture."""
        model = onnx.parser.parse_model(
            '<ir_version: 10, opset_import: ["" : 21]> net (float[b, t] x) => (float[b, t] y, float[t, b] z) {'
            " zero = Constant <value_int: int = 0> ()  one = Constant <value_int: int = 1> ()  s = Shape (x)"
            " n = Gather (s, one)  r = Range (zero, n, one)  p = Cast <to = 1> (r)  e = Exp (p)  y = Mul (e, x)"
            " k = Shape (r)  both = Constant <value_ints: ints = [-1]> ()  to = Concat <axis = 0> (k, both)"
            " z = Reshape (x, to) }"
        )
        f, x = og.compile(og.onnx.load(model), device="cuda"), random((2, 5), "f32")
        given = moved(cupy, x)
        f(x=given)
        gpu.copies.clear(), cupy.copies.clear()
        got = f(x=given)
        assert gpu.copies == cupy.copies == []
        np.testing.assert_allclose(got["y"].host, np.exp(np.arange(5, dtype=np.float32)) * x, rtol=1e-6)
        np.testing.assert_array_equal(got["z"].host, x.reshape(5, 2))

    def test_shape_saved_for_backward_holds_one_element(self, gpu: Any, cupy: FakeCupy) -> None:
        """One element, expanded to the shape, replaces them: a ReshapeTo reads only the shape."""
        text = "graph(x: f32[n,m]) -> (y)\n  y = StaticReshape(x, shape=[-1], special_zero=false)"
        f = og.compile(og.parse(text), device="cuda", wrt=("x",))
        x = random((3, 4), "f32")
        y, pull = f.vjp(x=moved(cupy, x))
        assert y.shape == (12,)
        np.testing.assert_array_equal(pull(moved(cupy, x.reshape(-1)))["x"].host, x)

    @pytest.mark.parametrize("torchs", [False, True])
    def test_torch_views_are_returned_as_copies(self, gpu: Any, cupy: FakeCupy, torchs: bool) -> None:
        import torch

        model = onnx.parser.parse_model(
            '<ir_version: 10, opset_import: ["" : 21]> net (float[2, 6] x) => (float[1, 12] y, float[1, 1, 12] z) {'
            " y = Flatten <axis = 0> (x)"
            " zero = Constant <value_ints: ints = [0]> ()  z = Unsqueeze (y, zero) }"
        )
        array = random((2, 6), "f32")
        x = gpu.put(torch.from_numpy(array.copy())) if torchs else moved(cupy, array)
        got = og.compile(og.onnx.load(model), device="cuda")(x=x)
        memory = [np.asarray(value.host) for value in (x, *got.values())]
        assert not any(np.shares_memory(a, b) for i, a in enumerate(memory) for b in memory[:i])

    def test_node_refused_by_torch_raises_device_error(self, gpu: Any, cupy: FakeCupy) -> None:
        model = onnx.parser.parse_model(
            '<ir_version: 10, opset_import: ["" : 21]> net (float[a, b] x, float[c, d] w) => (float[a, d] y) '
            "{ y = MatMul (x, w) }"
        )
        f = og.compile(og.onnx.load(model), device="cuda")
        with pytest.raises(DeviceError, match=r"torch cannot run it: .*2x3 and 4x2.*\n  where: MatMul .*\n  fix: "):
            f(x=moved(cupy, random((2, 3), "f32")), w=moved(cupy, random((4, 2), "f32")))

    def test_region_compiled_without_a_graph_runs(self, gpu: Any, cupy: FakeCupy) -> None:
        """Without a plan of a whole graph, the region does not know which values are sizes."""
        node = 'onnx_domain="", onnx_opset=21'
        g = og.parse(
            f'graph(x: f32[2,6], z: f32[12]) -> (y)\n  s: s64[2] = Wildcard(x, onnx_op="Shape", {node})\n'
            f'  y: f32[2,6] = Wildcard(z, s, onnx_op="Reshape", {node})'
        )
        (part,) = g.finalize().get_partitions()
        run = runner(part, og.Engine("cuda"))
        arrays = {"x": moved(cupy, random((2, 6), "f32")), "z": moved(cupy, random((12,), "f32"))}
        cupy.copies.clear()
        (y,) = run([arrays[t.name] for t in part.input_ports])
        assert run.runs_in == "torch" and gpu.copies == cupy.copies == []
        np.testing.assert_array_equal(y.host, arrays["z"].host.reshape(2, 6))


class TestOnnxruntime:
    """Torch has no CUDA, and onnxruntime has: its sessions run here, on the host memory of the emulated GPU."""

    @pytest.fixture(autouse=True)
    def bound(self, cupy: FakeCupy, monkeypatch: pytest.MonkeyPatch) -> None:
        from opgraph.runtime.providers import onnx_device

        monkeypatch.setattr(onnx_device, "MEMORY", "cpu")
        monkeypatch.setattr(onnx_device.OnnxRuntimeRegion, "is_on_gpu", True)

    def test_regions_bind_gpu_memory_without_copies(
        self, cupy: FakeCupy, graph: og.Graph, arrays: dict[str, np.ndarray], truth: list[np.ndarray]
    ) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            f = og.compile(graph, device="cuda")
        assert {engine for engine, _ in plan(f)} == {"opgraph", "onnxruntime"}
        assert "foreign op Conv: runs in onnxruntime; runs in onnxruntime on the GPU" in str(f.explain())
        given = {name: moved(cupy, a) for name, a in arrays.items()}
        given["v"] = moved(cupy, np.ascontiguousarray(arrays["v"].T)).T  # not row-major
        f(given)
        cupy.copies.clear()
        got = f(given)
        assert cupy.copies == []
        np.testing.assert_allclose(got["y"].host, truth[0], rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(got["s"].host, truth[1])
        out = {"y": cupy.empty((2, 5), "f4"), "s": cupy.empty((2,), "i8")}
        assert f(given, out=out) is out
        np.testing.assert_array_equal(out["y"].host, got["y"].host)
        np.testing.assert_array_equal(out["s"].host, got["s"].host)

    def test_bf16_values_pass_through_onnxruntime(self, cupy: FakeCupy) -> None:
        """NumPy has no name for bf16, and neither has `__cuda_array_interface__`."""
        model = onnx.parser.parse_model(
            '<ir_version: 10, opset_import: ["" : 21]> net (bfloat16[2, 3] x) => (bfloat16[3, 2] y) '
            "{ y = Transpose (x) }"
        )
        x = random((2, 3), "bf16")
        got = og.compile(og.onnx.load(model), device="cuda")(x=moved(cupy, x))
        assert got.dtype == x.dtype
        np.testing.assert_array_equal(got.host, x.T)

    def test_failing_onnxruntime_node_raises_device_error(self, cupy: FakeCupy) -> None:
        model = onnx.parser.parse_model(
            '<ir_version: 10, opset_import: ["" : 21]> net (float[3] x, int64[1] i) => (float[1] y) '
            "{ y = Gather (x, i) }"
        )
        f = og.compile(og.onnx.load(model), device="cuda")
        with pytest.raises(
            DeviceError, match=r"onnxruntime failed: .*indices.*\n  where: region of 1 ONNX nodes.*\n  fix: "
        ):
            f(x=moved(cupy, random((3,), "f32")), i=moved(cupy, np.array([7])))


def test_one_warning_lists_cost_without_torch_or_onnxruntime(
    cupy: FakeCupy, graph: og.Graph, arrays: dict[str, np.ndarray], truth: list[np.ndarray]
) -> None:
    with pytest.warns(RuntimeWarning) as caught:
        f = og.compile(graph, device="cuda")
    (warning,) = [str(w.message) for w in caught]
    assert warning.startswith("8 ops of this graph (Pad, Conv, Shape, Gather, Concat, Reshape, MatMul) left to the CPU")
    assert "each call waits for the GPU in 3 places, copies 5.4 KiB and what has no known size to the host" in warning
    assert "Install torch for this GPU, or onnxruntime-gpu" in warning
    given = {name: moved(cupy, a) for name, a in arrays.items()}
    cupy.copies.clear()
    got = f(given)
    assert len([c for c in cupy.copies if c[0] == "to host"]) == sum(
        len(p.input_ports) for p in f.partitions if p.kind == "library"
    )
    np.testing.assert_allclose(got["y"].host, truth[0], rtol=1e-5, atol=1e-6)
