"""Models with data files, written to unusual places: the result can be read, and the source is unchanged."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import opgraph as og
from opgraph.errors import ModelError

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")
ir = pytest.importorskip("onnx_ir")

helper, T = onnx.helper, onnx.TensorProto
RNG = np.random.default_rng(0)
X, A, B = (RNG.normal(size=shape).astype(np.float32) for shape in ((3, 400), (400,), (400,)))
Y = (X / (1 + np.exp(-X)) + A) * B


def source(folder: Path, data: str = "w.bin", location: str = "") -> Path:
    """A model with a swish and two weights in one data file."""
    folder.mkdir(exist_ok=True)
    (folder / data).write_bytes(A.tobytes() + b"gap." + B.tobytes())
    weights = []
    for name, offset in (("a", 0), ("b", 1604)):
        weights.append(onnx.TensorProto(name=name, data_type=T.FLOAT, dims=[400], data_location=T.EXTERNAL))
        for key, value in (("location", location or data), ("offset", str(offset)), ("length", "1600")):
            weights[-1].external_data.add(key=key, value=value)
    nodes = [helper.make_node("Sigmoid", ["x"], ["s"]), helper.make_node("Mul", ["x", "s"], ["m"]),
             helper.make_node("Add", ["m", "a"], ["p"]), helper.make_node("Mul", ["p", "b"], ["y"])]  # fmt: skip
    x, y = (helper.make_tensor_value_info(name, T.FLOAT, ["n", 400]) for name in "xy")
    made = helper.make_model(
        helper.make_graph(nodes, "g", [x], [y], weights), opset_imports=[helper.make_opsetid("", 21)], ir_version=10
    )
    (folder / "m.onnx").write_bytes(made.SerializeToString())
    return folder / "m.onnx"


def assert_computes(path: Path) -> None:
    """Checks the model's result in onnxruntime and in opgraph."""
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    for y in (session.run(None, {"x": X})[0], og.evaluate(og.onnx.load(path), x=X)):
        np.testing.assert_allclose(y, Y, rtol=1e-4, atol=1e-5)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize(
    ("data", "write"),
    [
        ("w.bin", lambda model: og.onnx.save(og.onnx.load(model), model.with_name("w.bin"))),
        ("w.bin", lambda model: og.onnx.fuse(model, model.with_name("w.bin"))),
        ("n.onnx.data", lambda m: og.onnx.save(og.onnx.load(m), m.with_name("n.onnx"), weights={"a": B})),
        (
            "n.onnx.data",
            lambda m: og.onnx.fuse(ir.load(m)) and og.onnx.save(og.onnx.load(m), m.with_name("n.onnx.data")),
        ),
    ],
    ids=["save", "fuse", "new weights", "its data file"],
)
def test_overwriting_a_file_of_the_source_model_is_refused(
    data: str, write: Callable[[Path], Any], tmp_path: Path
) -> None:
    model = source(tmp_path, data)
    before = contents(tmp_path)
    with pytest.raises(ModelError, match="would take the place of") as raised:
        write(model)
    assert str(raised.value).count("\n") == 2
    assert contents(tmp_path) == before
    assert_computes(model)


def test_model_with_symlinked_data_file_is_saved_over_itself(tmp_path: Path) -> None:
    model = source(tmp_path, "m.onnx.data", "link.bin")
    (tmp_path / "link.bin").symlink_to("m.onnx.data")
    og.onnx.save(og.onnx.load(model), model, weights={"a": A.copy()})
    assert_computes(model)


@pytest.mark.parametrize("name", ["m.onnx", "n.onnx"])
@pytest.mark.parametrize("writer", ["save", "another writer"])
def test_graph_keeps_its_weights_after_its_data_file_is_replaced(writer: str, name: str, tmp_path: Path) -> None:
    model = source(tmp_path, "m.onnx.data")
    graph = og.onnx.load(model)
    if writer == "save":
        og.onnx.save(graph, model, weights={"a": A * 5})
    else:
        (tmp_path / "new").write_bytes(bytes(3204))
        os.replace(tmp_path / "new", tmp_path / "m.onnx.data")
    og.onnx.save(graph, tmp_path / name)
    assert_computes(tmp_path / name)
    og.onnx.save(graph, tmp_path / name, weights={"a": A.copy()})
    assert_computes(tmp_path / name)


@pytest.mark.parametrize("kind", ["path", "onnx_ir"])
def test_working_directory_may_change_between_load_and_save(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source(tmp_path / "here")
    source(tmp_path / "there")
    (tmp_path / "there" / "w.bin").write_bytes(bytes(3204))  # data of another model
    monkeypatch.chdir(tmp_path / "here")
    graph = og.onnx.load("m.onnx" if kind == "path" else ir.load("m.onnx"))
    monkeypatch.chdir(tmp_path / "there")
    og.onnx.save(graph, "new.onnx")
    assert_computes(tmp_path / "there" / "new.onnx")
    monkeypatch.chdir(tmp_path / "here")
    og.onnx.save(graph, "new.onnx")
    assert_computes(tmp_path / "here" / "new.onnx")
    assert not (tmp_path / "here" / "new.onnx.data").exists()


def test_missing_or_symlinked_data_files_are_written_again(tmp_path: Path) -> None:
    """In the cache of a model hub the files next to a model are links; data that are written there are no links."""
    model = source(tmp_path / "store")
    cache = tmp_path / "cache"
    cache.mkdir()
    for name in ("m.onnx", "w.bin"):
        (cache / name).symlink_to(tmp_path / "store" / name)
    og.onnx.save(og.onnx.load(cache / "m.onnx"), cache / "new.onnx")
    assert_computes(cache / "new.onnx")
    og.onnx.save(og.onnx.load(cache / "m.onnx"), cache / "m.onnx")  # the link stays, and points to the data
    assert_computes(model)
    assert (cache / "m.onnx").is_symlink() and not (cache / "m.onnx.data").exists()
    graph = og.onnx.load(model)
    os.unlink(tmp_path / "store" / "w.bin")
    og.onnx.save(graph, model)
    assert_computes(model)


@pytest.mark.parametrize("place", ["initializer", "node", "file"])
@pytest.mark.parametrize("dtype", [ml_dtypes.int4, ml_dtypes.uint4, ml_dtypes.float8_e5m2, ml_dtypes.bfloat16])
def test_new_weights_of_narrow_dtypes_are_packed_as_onnx_specifies(dtype: Any, place: str, tmp_path: Path) -> None:
    old, new = np.asarray([1, 0, 1]).astype(dtype), np.asarray([3, 2, 7]).astype(dtype)
    w = onnx.numpy_helper.from_array(old, "w")
    nodes = [helper.make_node("Cast", ["w"], ["c"], to=T.FLOAT), helper.make_node("Add", ["x", "c"], ["y"])]
    if place == "node":
        nodes.insert(0, helper.make_node("Constant", [], ["w"], value=w))
    x, y = (helper.make_tensor_value_info(name, T.FLOAT, [3]) for name in "xy")
    graph = helper.make_graph(nodes, "g", [x], [y], [] if place == "node" else [w])
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    path = tmp_path / "m.onnx"
    onnx.save(made, path, save_as_external_data=place == "file", size_threshold=0)
    og.onnx.save(og.onnx.load(path), tmp_path / "n.onnx", weights={"w": new})
    feeds = {"x": np.zeros(3, np.float32)}
    session = ort.InferenceSession(str(tmp_path / "n.onnx"), providers=["CPUExecutionProvider"])
    for result in (session.run(None, feeds)[0], og.evaluate(og.onnx.load(tmp_path / "n.onnx"), feeds)):
        np.testing.assert_array_equal(result, [3, 2, 7])


@pytest.mark.parametrize("dtype", [np.uint16, np.uint64, np.complex64, ml_dtypes.float4_e2m1fn])
def test_input_default_in_a_data_file_keeps_its_dtype(dtype: Any, tmp_path: Path) -> None:
    value = np.arange(6).reshape(2, 3).astype(dtype)
    default = onnx.numpy_helper.from_array(value, "x")
    ports = [helper.make_tensor_value_info(n, default.data_type, [2, 3]) for n in "xy"]
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "g", [ports[0]], [ports[1]], [default])
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=11)
    onnx.save(made, tmp_path / "m.onnx", save_as_external_data=True, size_threshold=0)
    found = og.onnx.load(tmp_path / "m.onnx").defaults["x"]
    assert found.dtype == dtype and np.array_equal(found, value)
