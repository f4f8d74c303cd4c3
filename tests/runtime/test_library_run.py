"""Graphs that mix kernels and library ops: partitions, torch and NumPy, memory, ONNX."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from library_calls import CALLS, LIBRARY, Call, arrays_of, feeds, graph_of, reference_of

import opgraph as og
from opgraph import errors
from opgraph.ir.opdef import OpDef
from opgraph.partition.partition import NATIVE
from opgraph.runtime.compiled_partition import runner
from opgraph.runtime.library_partition import NativePartition, NumpyOps, Program

MLP = """\
graph(x: f32[batch,3], w: f32[5,3], b: f32[5], v: f32[5,2]) -> (y, norm)
  %0 = MatMul(x, w, b, transpose_b=true)
  %1 = Swish(%0)
  %2 = MatMul(%1, v)
  %3 = Concat(%2, x, axis=-1)
  %4 = ReduceMean(%3, axes=[1], keep_dims=true)
  y = Subtract(%3, %4)
  %5 = StaticTranspose(y, order=[1, 0])
  norm = ReduceL2(%5, axes=[0])"""


def mlp_arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = {"x": (4, 3), "w": (5, 3), "b": (5,), "v": (5, 2)}
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def assert_mlp(result: dict[str, Any]) -> None:
    for name, truth in og.evaluate(og.parse(MLP), mlp_arrays()).items():
        np.testing.assert_allclose(np.asarray(result[name]), truth, rtol=1e-5, atol=1e-6)


# -- partitions -------------------------------------------------------------------------------------------------------


def test_neighbouring_library_ops_form_one_partition() -> None:
    parts = og.parse(MLP).finalize().get_partitions()
    assert [(p.kind, p.provider, [op.kind for op in p.ops]) for p in parts] == [
        ("library", NATIVE, ["MatMul"]),
        ("fused", "opgraph", ["Swish"]),
        ("library", NATIVE, ["MatMul", "Concat"]),
        ("fused", "opgraph", ["ReduceMean", "Subtract"]),
        ("library", NATIVE, ["StaticTranspose"]),
        ("fused", "opgraph", ["ReduceL2"]),
    ]


def test_explain_names_the_library_of_an_op() -> None:
    rows = og.parse(MLP).explain().ops
    told = {row.kind: row.why for row in rows}
    assert told["MatMul"] == "library op MatMul: runs in torch, or in NumPy where torch is not installed"


def test_native_and_foreign_ops_are_in_separate_regions() -> None:
    g = og.parse(
        "graph(x: f32[2,2]) -> (y)\n"
        '  a: f32[2,2] = Wildcard(x, onnx_op="Transpose", onnx_domain="", onnx_opset=20)\n  y = MatMul(a, x)'
    )
    assert [p.provider for p in g.finalize().get_partitions()] == ["onnxruntime", NATIVE]
    x = np.array([[1, 2], [3, 4]], np.float32)
    np.testing.assert_array_equal(og.compile(g)(x=x), x.T @ x)


# -- torch and NumPy --------------------------------------------------------------------------------------------------


def test_graph_of_kernels_and_library_ops_agrees_with_reference() -> None:
    assert_mlp(og.compile(og.parse(MLP))(mlp_arrays()))


def test_torch_tensors_in_and_out_under_autocast() -> None:
    torch = pytest.importorskip("torch")
    tensors = {name: torch.from_numpy(a).requires_grad_(name == "w") for name, a in mlp_arrays().items()}
    with torch.autocast("cpu", dtype=torch.bfloat16):  # the context must not change the meaning of an op
        result = og.compile(og.parse(MLP))(tensors)
    assert all(isinstance(t, torch.Tensor) and not t.requires_grad for t in result.values())
    assert_mlp(result)


def test_numpy_runs_library_ops_without_torch() -> None:
    folder = Path(__file__).parent
    code = (
        f"import sys; sys.path[:] = {[str(folder), *sys.path]}; sys.modules['torch'] = None\n"
        "import opgraph as og\n"
        "from test_library_run import MLP, assert_mlp, mlp_arrays\n"
        "f = og.compile(og.parse(MLP))\n"
        "assert_mlp(f(mlp_arrays()))\n"
        "print(sorted({type(s.run._library).__name__ for s in f._steps if hasattr(s.run, '_library')}))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "['NumpyOps']\n", done.stderr


def test_torch_runs_library_ops_if_installed() -> None:
    pytest.importorskip("torch")
    (part,) = og.parse("graph(x: f32[2,2]) -> (y)\n  y = MatMul(x, x)").finalize().get_partitions()
    run = runner(part, og.Engine("cpu"))
    assert isinstance(run, NativePartition) and type(run._library).__name__ == "TorchOps"


@pytest.mark.parametrize("record", LIBRARY, ids=lambda r: r.kind)
def test_numpy_library_ops_equal_the_reference(record: OpDef) -> None:
    for call in CALLS[record.kind]:
        for dtype in record.types[record.inputs[0].type]:
            arrays = arrays_of(call, dtype, record)
            (part,) = graph_of(record, call, dtype, "sizes").get_partitions()
            order = {t.name: t for t in part.input_ports}
            run = NativePartition(Program(part), NumpyOps())
            made = run([feeds(arrays)[name] for name in order])
            for got, expected in zip(made, reference_of(record, call, arrays), strict=True):
                np.testing.assert_array_equal(got, expected, strict=True)


def test_unknown_shapes_are_checked_at_the_call() -> None:
    f = og.compile(og.parse("graph(x: f32[?,?], w: f32[?,?]) -> (y)\n  y = MatMul(x, w)"))
    w = np.ones((3, 2), np.float32)
    for rows in (4, 5):
        assert f(x=np.ones((rows, 3), np.float32), w=w).shape == (rows, 2)
    with pytest.raises(errors.InvalidShape, match="no common inner size: 4 and 3") as caught:
        f(x=np.ones((3, 4), np.float32), w=w)
    assert "MatMul" in caught.value.where


def test_constant_axes_are_checked_once_rank_is_known() -> None:
    g = og.Graph()
    g.add_op("ReduceSum", g.input("x", shape=None), g.constant("a", np.array([2], np.int32)), name="y")
    x = np.ones((2, 3), np.float32)
    for run in (og.compile(g.finalize()), lambda x: og.evaluate(g, x=x)):
        with pytest.raises(errors.InvalidShape, match="there is no axis 2 in 2 dimensions"):
            run(x=x)


# -- memory -----------------------------------------------------------------------------------------------------------

VIEWS = "graph(x: f32[2,3], w: f32[3,4]) -> (a, b, c, d)\n" + "".join(
    f"  {name} = StaticReshape(x, shape={shape}, special_zero=false)\n"
    for name, shape in (("a", [6]), ("b", [3, 2]), ("c", [2, 3]))
)
VIEWS += "  %0 = MatMul(x, w)\n  d = StaticTranspose(%0, order=[1, 0])"


@pytest.mark.parametrize("library", ["torch", "numpy"])
def test_results_share_no_memory(library: str) -> None:
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    (part,) = og.parse(VIEWS).finalize().get_partitions()
    if library == "torch":
        pytest.importorskip("torch")
        run: Any = runner(part, og.Engine("cpu"))
    else:
        run = NativePartition(Program(part), NumpyOps())
    w = np.ones((3, 4), np.float32)
    results = [x, w, *run([x, w])]
    for i, one in enumerate(results):
        assert one.flags.c_contiguous
        assert not any(np.may_share_memory(one, other) for other in results[:i])
    np.testing.assert_array_equal(results[2], np.arange(6, dtype=np.float32))


def test_reshaped_constant_is_returned_as_a_copy() -> None:
    g = og.Graph()
    g.add_op("StaticReshape", g.constant("c", np.zeros((2, 3), np.float32)), name="y", shape=(6,), special_zero=False)
    f = og.compile(g.finalize())
    f()[:] = 7
    assert not f().any()


@pytest.mark.parametrize(
    "given",
    [
        lambda x: x[::-1],
        lambda x: np.asfortranarray(x),
        lambda x: np.broadcast_to(x[:1], x.shape),
        lambda x: np.frombuffer(x.tobytes(), x.dtype).reshape(x.shape),
    ],
    ids=["backwards", "column-major", "broadcast", "read-only"],
)
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_arrays_of_any_layout_are_read_and_not_written(given: Callable[[Any], Any], dtype: str) -> None:
    x = given(arrays_of(Call([(3, 4)]), dtype)[0])
    before = x.copy()
    f = og.compile(og.parse(f"graph(x: {dtype}[3,4]) -> (y)\n  y = ReduceSum(x, axes=[0])"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = f(x=x)
    np.testing.assert_array_equal(result, before.astype(np.float32).sum(0).astype(x.dtype))
    np.testing.assert_array_equal(x, before)


def test_library_results_are_written_into_out() -> None:
    f = og.compile(og.parse("graph(x: f32[2,3]) -> (y)\n  y = StaticTranspose(x, order=[1, 0])"))
    x, out = np.arange(6, dtype=np.float32).reshape(2, 3), np.zeros((3, 2), np.float32)
    assert f(x=x, out=out) is out
    np.testing.assert_array_equal(out, x.T)
    bound = f.bind(x=x, out=out)
    x += 1
    assert bound() is out
    np.testing.assert_array_equal(out, x.T)
    g = og.compile(og.parse("graph(x: f32[?,?]) -> (y)\n  y = StaticTranspose(x, order=[1, 0])"))
    with pytest.raises(errors.InvalidShape, match=r"an output array has shape \(2, 3\), the result \(3, 2\)"):
        g(x=x, out=np.zeros((2, 3), np.float32))


def test_donated_array_is_not_overwritten_while_its_reshape_is_read() -> None:
    g = og.parse(
        "graph(x: f32[4]) -> (y, z)\n  a = StaticReshape(x, shape=[2, 2], special_zero=false)\n  y = Exp(x)\n"
        "  z = ReduceSum(a, axes=[0])"
    )
    x = np.arange(4, dtype=np.float32)
    result = og.compile(g, donate=("x",))(x=x.copy())
    np.testing.assert_array_equal(result["z"], [2, 4])


def test_library_partition_is_compiled_and_executed_alone() -> None:
    (part,) = og.parse("graph(x: f32[?,3]) -> (y)\n  y = ReduceSum(x, axes=[1])").finalize().get_partitions()
    x, y = part.input_ports[0].with_(dims=(2, 3)), part.output_ports[0]
    engine = og.Engine("cpu")
    compiled = part.compile([x], [y], engine)
    assert compiled.query_logical_tensor(y.id).dims == (2,)
    out = np.zeros(2, np.float32)
    compiled.execute(og.Stream(engine), {x.id: np.ones((2, 3), np.float32)}, {y.id: out})
    assert out.tolist() == [3, 3]


# -- ONNX -------------------------------------------------------------------------------------------------------------


def in_words(record: OpDef, call: Call) -> bool | None:
    """True if ai.onnx can express a call; None where that depends on more than attributes."""
    if isinstance(record.onnx, str) or call.outputs > 1:
        return False
    attrs = {**record.default_attrs(), **call.attrs}
    ndims = {n: len(s) for n, s in zip(record.input_names(len(call.shapes)), call.shapes)}
    fits = [
        all(attrs.get(k) == v for k, v in f.when.items()) and (f.applies is None or f.applies(attrs, ndims))
        for f in record.onnx
    ]
    newer = any(f.since > 22 for f in record.onnx)  # that opset is chosen where a target is known to run it
    return None if record.decomposition is not None or newer else any(fits)


@pytest.mark.parametrize("record", LIBRARY, ids=lambda r: r.kind)
def test_onnx_round_trip_keeps_graph_and_results(record: OpDef, tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    path = tmp_path / "m.onnx"
    for call in CALLS[record.kind]:
        for dtype in ("f32", "f64"):
            g = graph_of(record, call, dtype)
            try:
                og.onnx.save(g, path, target="onnxruntime==1.31")
            except errors.Unimplemented as error:
                assert any(t in error.what for t in ("be written to ONNX", "ai.onnx has no such", "has no form"))
                assert in_words(record, call) is not True, f"{call} has a form: {error}"
                continue
            assert in_words(record, call) is not False, f"{call} has no form"
            assert og.onnx.load(path) == g, str(g)
            arrays = arrays_of(call, dtype, record)
            try:
                session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
            except Exception as error:  # onnxruntime has no kernel for it
                assert dtype == "f64" and "Could not find an implementation" in str(error)
                continue
            (got,) = session.run(None, feeds(arrays))
            np.testing.assert_allclose(got, og.evaluate(g, feeds(arrays)), rtol=1e-6, atol=1e-6, strict=False)


@pytest.mark.parametrize("opset", [13, 17, 18, 22])
@pytest.mark.parametrize("kind", [r.kind for r in LIBRARY if r.family == "reduction"])
def test_reduction_axes_are_exported_for_each_opset(kind: str, opset: int, tmp_path: Path) -> None:
    g = og.parse(f"graph(x: f32[2,3,4]) -> (y)\n  y = {kind}(x, axes=[0, -1])")
    og.onnx.save(g, tmp_path / "m.onnx", opset=opset)
    assert og.onnx.load(tmp_path / "m.onnx") == g


def test_onnx_round_trip_of_an_mlp(tmp_path: Path) -> None:
    g = og.parse(MLP)
    og.onnx.save(g, tmp_path / "m.onnx", form="decomposed")
    again = og.onnx.load(tmp_path / "m.onnx")
    assert sorted(op.kind for op in again.ops if op.kind not in ("Multiply", "Sigmoid")) == sorted(
        op.kind for op in g.ops if op.kind != "Swish"
    )
    assert_mlp(og.compile(again)(mlp_arrays()))


def foreign_model() -> Any:
    onnx = pytest.importorskip("onnx")
    text = """\
<ir_version: 10, opset_import: ["" : 20]>
g (float[n,4] x, float[4,3] w) => (float[n] y)
<int64[1] axes = {1}> {
  a = MatMul(x, w)
  b = Relu(a)
  c = Softmax <axis = 1> (b)
  y = ReduceSum <keepdims = 0> (c, axes)
}"""
    return onnx.parser.parse_model(text)


def test_imported_library_nodes_stay_foreign_unless_library_is_set() -> None:
    model = foreign_model()
    kept = og.onnx.load(model)
    assert [op.attrs.get("onnx_op", op.kind) for op in kept.ops] == ["MatMul", "ReLU", "Softmax", "ReduceSum"]
    assert [op.kind for op in kept.ops] == ["Wildcard", "ReLU", "Wildcard", "Wildcard"]
    assert [p.provider for p in kept.get_partitions()] == ["onnxruntime", "opgraph", "onnxruntime"]
    native = og.onnx.load(model, library=True)
    assert [op.kind for op in native.ops] == ["MatMul", "ReLU", "SoftMax", "ReduceSum"]
    rng = np.random.default_rng(0)
    given = {"x": rng.normal(size=(2, 4)).astype(np.float32), "w": rng.normal(size=(4, 3)).astype(np.float32)}
    np.testing.assert_allclose(og.compile(native)(given), og.compile(kept)(given), rtol=1e-6)


def test_convolutional_network_is_imported_as_native_ops() -> None:
    onnx, onnxruntime = pytest.importorskip("onnx"), pytest.importorskip("onnxruntime")
    model = onnx.parser.parse_model("""\
<ir_version: 10, opset_import: ["" : 20]>
g (float[n,3,9,8] x, float[4,3,3,2] w, float[4] b, float[4,2,2,2] u) => (float[n,2,d,e] y) {
  a = Conv <kernel_shape = [3, 2], strides = [2, 1], pads = [1, 0, 1, 1], dilations = [1, 1], group = 1> (x, w, b)
  c = MaxPool <kernel_shape = [2, 2], strides = [1, 1], pads = [0, 0, 0, 0], dilations = [1, 1], ceil_mode = 0> (a)
  e = AveragePool <kernel_shape = [3, 2], strides = [1, 2], pads = [1, 1, 1, 1], count_include_pad = 1> (c)
  y = ConvTranspose <strides = [2, 2], pads = [0, 0, 0, 0], dilations = [1, 1], output_padding = [1, 0]> (e, u)
}""")
    native = og.onnx.load(model, library=True)
    assert [op.kind for op in native.ops] == ["Convolution", "MaxPool", "AvgPool", "ConvTranspose"]
    assert native.ops[0].attr("pads_begin") == (1, 0) and native.ops[0].attr("pads_end") == (1, 1)
    rng = np.random.default_rng(0)
    shapes = {"x": (2, 3, 9, 8), "w": (4, 3, 3, 2), "b": (4,), "u": (4, 2, 2, 2)}
    given = {n: rng.normal(size=s).astype(np.float32) for n, s in shapes.items()}
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (expected,) = session.run(None, given)
    np.testing.assert_allclose(og.compile(native)(given), expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(og.evaluate(native, given), expected, rtol=1e-5, atol=1e-5)


def test_node_with_other_semantics_stays_a_wildcard() -> None:
    onnx = pytest.importorskip("onnx")
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 20]>\n'
        "g (float[2,4] x) => (float y) <int64[0] axes = {}> { y = ReduceSum <keepdims = 0> (x, axes) }"
    )
    (op,) = og.onnx.load(model, library=True).ops
    assert op.kind == "Wildcard", "ONNX reduces over all axes here, ours over none"


def test_model_loaded_with_native_ops_is_saved_unchanged(tmp_path: Path) -> None:
    model = foreign_model()
    for library in (False, True):
        og.onnx.save(og.onnx.load(model, library=library), tmp_path / f"{library}.onnx")
    assert (tmp_path / "True.onnx").read_bytes() == (tmp_path / "False.onnx").read_bytes()
