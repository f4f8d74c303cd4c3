"""onnx's own backend suite through og.onnx.backend, and the interface itself.

`python tests/onnx_backend/run.py` prints the engine of each test, and compares with stock onnxruntime.
"""

from __future__ import annotations

import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import opgraph as og
from opgraph.errors import DeviceError, InvalidArguments, ModelError

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

import onnx_suite  # noqa: E402  # needs onnx

from opgraph.onnx import backend  # noqa: E402

helper, T = onnx.helper, onnx.TensorProto
SHARDS = 16

if onnx.__version__.rsplit(".", 1)[0] != "1.23":
    pytest.skip("the list of deviations is that of onnx 1.23", allow_module_level=True)


@pytest.mark.parametrize("shard", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, SHARDS))])
def test_onnx_backend_suite_passes_except_listed_deviations(
    shard: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONNX_HOME", str(tmp_path))  # the suite writes the data of its nine real models there
    names = [name for name in onnx_suite.tests() if zlib.crc32(name.encode()) % SHARDS == shard]
    outcomes = {name: onnx_suite.run(name) for name in names}
    listed = onnx_suite.deviations()
    failed = {n: o for n, o in outcomes.items() if o.status != "pass" and n not in listed["random"]}
    delegated = {n for n in names if n in listed["delegated"]}
    refused = {n for n in names if n in listed["refused"]}
    unexpected = {n: o for n, o in failed.items() if n not in delegated | refused}
    assert not unexpected
    assert failed.keys() == delegated | refused, "a listed test passes: take it off the list"
    for name in delegated:  # these wrong answers are not opgraph's own
        assert outcomes[name].status == "wrong"
        assert "onnxruntime" in outcomes[name].engines
    assert all(outcomes[name].status == "refused" for name in refused)
    for name in onnx_suite.pointwise().keys() & outcomes.keys():
        if onnx_suite.has_arithmetic_types(onnx_suite.pointwise()[name]):
            assert outcomes[name].engines == ("opgraph",), name


def test_suite_has_at_least_the_documented_count_of_pointwise_tests() -> None:
    pointwise = onnx_suite.pointwise()
    native = [n for n, m in pointwise.items() if onnx_suite.has_arithmetic_types(m)]
    assert len(pointwise) >= 430  # the number in onnx 1.23.2; a new record may add some
    assert len(native) >= 262


# -- the interface --------------------------------------------------------------------------------------------------


def swish_model() -> Any:
    nodes = [helper.make_node("Sigmoid", ["x"], ["s"]), helper.make_node("Mul", ["x", "s"], ["m"]),
             helper.make_node("MatMul", ["m", "w"], ["y"])]  # fmt: skip
    info = helper.make_tensor_value_info
    graph = helper.make_graph(nodes, "g", [info("x", T.FLOAT, ["n", 2]), info("w", T.FLOAT, [2, 2])],
                              [info("y", T.FLOAT, ["n", 2]), info("m", T.FLOAT, ["n", 2])],
                              [onnx.numpy_helper.from_array(np.eye(2, dtype=np.float32), "w")])  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def swish_alone() -> Any:
    info = helper.make_tensor_value_info
    nodes = [helper.make_node("Sigmoid", ["x"], ["s"]), helper.make_node("Mul", ["x", "s"], ["y"])]
    return helper.make_graph(nodes, "g", [info("x", T.FLOAT, ["n", 2])], [info("y", T.FLOAT, ["n", 2])])


def test_prepared_model_accepts_every_input_style_and_lists_engines() -> None:
    rep = backend.prepare(swish_model(), "CPU")
    x = np.float32([[1, -2], [0, 3]])
    expected = x / (1 + np.exp(-x))
    for inputs in ([x], (x, np.eye(2, dtype=np.float32)), {"x": x}, x):
        y, m = rep.run(inputs)
        np.testing.assert_allclose(y, expected, rtol=1e-6)
        np.testing.assert_array_equal(y, m)
    assert {engine: len(ops) for engine, ops in rep.engines.items()} == {"onnxruntime": 3}  # it fuses a swish itself
    alone = backend.prepare(helper.make_model(swish_alone(), ir_version=10), "CPU")
    alone.run([x])
    assert {engine: len(ops) for engine, ops in alone.engines.items()} == {"opgraph": 2}
    np.testing.assert_array_equal(backend.run_model(swish_model(), [x])[0], y)
    with pytest.raises(InvalidArguments, match="got 3 inputs, the model has 2"):
        rep.run([x, x, x])
    with pytest.raises(InvalidArguments, match="unknown option 'speed'"):
        rep.run([x], speed=2)


def test_run_node_runs_a_single_node() -> None:
    x = np.float64([[1, 2], [3, 4]])
    (y,) = backend.run_node(helper.make_node("Elu", ["x"], ["y"], alpha=0.5), [-x])
    np.testing.assert_allclose(y, 0.5 * np.expm1(-x), rtol=1e-14)
    (z,) = backend.run_node(helper.make_node("Add", ["x", "x"], ["y"]), x)
    assert z.tolist() == (2 * x).tolist()
    (s,) = backend.run_node(helper.make_node("Squeeze", ["x"], ["y"], axes=[0]), [x[:1]], opset_version=11)
    assert s.tolist() == [1, 2]
    (u,) = backend.run_node(
        helper.make_node("NonZero", ["x"], ["y"]), [np.float32(x)], outputs_info=[(np.int64, (2, 4))]
    )
    assert u.tolist() == [[0, 0, 1, 1], [0, 1, 0, 1]]
    with pytest.raises(InvalidArguments, match="got 1 inputs, the node reads 2"):
        backend.run_node(helper.make_node("Add", ["x", "z"], ["y"]), [x])


def test_backend_module_needs_no_explicit_import() -> None:
    code = "import opgraph as og; print(og.onnx.backend.supports_device('CPU'), hasattr(og.onnx, 'nothing'))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "False"]


def test_device_and_compatibility_queries_do_not_raise() -> None:
    assert backend.supports_device("CPU")
    assert not backend.supports_device("TPU")
    assert not backend.supports_device("CUDA:x")
    assert backend.is_compatible(swish_model())
    assert not backend.is_compatible(onnx.ModelProto())
    with pytest.raises(DeviceError, match="there is no device 'TPU'"):
        backend.prepare(swish_model(), "TPU")
    with pytest.raises(ModelError):
        backend.prepare(onnx.ModelProto())


def test_dtypes_that_only_onnx_has_are_accepted_and_returned() -> None:
    node = helper.make_node("Add", ["x", "z"], ["y"])
    (y,) = backend.run_node(node, [np.uint16([1, 2]), np.uint16([3, 4])])
    assert (y.dtype, y.tolist()) == (np.uint16, [4, 6])
    text = helper.make_model(
        helper.make_graph(
            [helper.make_node("Equal", ["a", "b"], ["y"])], "g",
            [helper.make_tensor_value_info(n, T.STRING, [2]) for n in "ab"],
            [helper.make_tensor_value_info("y", T.BOOL, [2])],
        ),
        opset_imports=[helper.make_opsetid("", 20)], ir_version=10,
    )  # fmt: skip
    (same,) = backend.run_model(text, [np.array(["a", "b"], object), np.array(["a", "c"], object)])
    assert same.tolist() == [True, False]
    assert og.onnx.load(text).inputs[0].dtype == "undef"
