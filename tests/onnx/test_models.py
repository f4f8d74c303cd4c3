"""Real exports: efficientnet, gpt2, llama and qwen3 as torch writes them, with stored outputs."""

from __future__ import annotations

import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import opgraph as og
from opgraph.ir.opdef import all_ops
from opgraph.partition.rules import find_units

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")

from opgraph.onnx.request import Request  # noqa: E402  # needs onnx
from opgraph.onnx.save import written  # noqa: E402

FOLDER = Path(__file__).resolve().parents[3] / "shared" / "data" / "onnx-models"
pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="the exported models are not beside this checkout")

SWISHES = {"efficientnet": 31, "gpt2": 0, "llama": 2, "llama_op20_bf16": 2, "llama_op23": 2, "qwen3": 2}
#: Models that stock onnxruntime cannot run at all, because of bf16 kernels or RotaryEmbedding of opset 23.
NOT_IN_ONNXRUNTIME = ("llama_op20_bf16", "llama_op23")
LEVELS = ("ORT_DISABLE_ALL", "ORT_ENABLE_BASIC", "ORT_ENABLE_EXTENDED", "ORT_ENABLE_ALL")
#: The rounding error of the dtype, times its growth in these networks (2 layers or 51 convolutions deep).
TOLERANCE = {"efficientnet": 1e-5, "llama_op20_bf16": 2.0**-6}


@pytest.fixture(scope="module", params=SWISHES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def path(name: str) -> Path:
    return FOLDER / f"{name}.onnx"


def stored(name: str) -> tuple[np.ndarray, np.ndarray]:
    with np.load(FOLDER / f"{name}_io.npz") as arrays:
        return arrays["x"], arrays["y"]


def assert_agrees(name: str, got: Any, expected: np.ndarray) -> None:
    scale = np.abs(expected).max()
    error = np.abs(np.asarray(got, np.float64) - expected).max() / scale
    assert error <= TOLERANCE.get(name, 2e-6), (name, error)


def session(file: Path, level: str = LEVELS[-1]) -> Any:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, level)
    return ort.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])


def test_every_swish_and_gelu_is_found_without_false_matches(name: str) -> None:
    units = Counter(unit.name for unit in find_units(og.onnx.load(path(name))))
    assert units["swish"] == SWISHES[name]
    assert units["gelu"] == (2 if name == "gpt2" else 0)


def test_every_pointwise_node_loads_as_a_native_op(name: str) -> None:
    foreign = {op.attrs["onnx_op"] for op in og.onnx.load(path(name)).ops if op.kind == "Wildcard"}
    forms = (
        form for record in all_ops() if record.is_pointwise and not isinstance(record.onnx, str) for form in record.onnx
    )
    assert not foreign & {form.op_type for form in forms}


def test_text_form_round_trips(name: str) -> None:
    graph = og.onnx.load(path(name))
    constants = {t.name: t.data for t in graph.constants if t.data.size > 64}
    assert og.parse(str(graph), constants=constants) == graph


@pytest.mark.slow
@pytest.mark.parametrize("functions", [False, True])
@pytest.mark.parametrize("form", ["decomposed", "function", "standard", "contrib", "auto"])
def test_every_form_is_valid_agrees_and_saves_again_unchanged(
    name: str, form: str, functions: bool, tmp_path: Path
) -> None:
    graph = og.onnx.load(path(name))
    summary = written(graph, tmp_path / "m.onnx", Request(form=form, functions=functions))
    onnx.checker.check_model(str(tmp_path / "m.onnx"), full_check=True)
    again = og.onnx.load(tmp_path / "m.onnx")
    if form != "decomposed":
        assert summary.units["swish"] == SWISHES[name]
        assert sum(op.kind == "Swish" for op in again.ops) == SWISHES[name]
    elif not functions:  # the exporter's shapes of values inside a function are lost
        assert again == graph
    og.onnx.save(again, tmp_path / "again.onnx", form=form, functions=functions)
    assert og.onnx.load(tmp_path / "again.onnx") == again
    if name in NOT_IN_ONNXRUNTIME:
        return
    x, y = stored(name)
    for level in LEVELS if not functions else LEVELS[-1:]:
        run = session(tmp_path / "m.onnx", level)
        assert_agrees(name, run.run(None, {run.get_inputs()[0].name: x})[0], y)


def test_fused_model_agrees_with_the_original_in_onnxruntime(name: str, tmp_path: Path) -> None:
    if name in NOT_IN_ONNXRUNTIME:
        pytest.skip("stock onnxruntime does not run this model")
    og.onnx.fuse(path(name), tmp_path / "m.onnx")
    before, after = session(path(name)), session(tmp_path / "m.onnx")
    feeds = {before.get_inputs()[0].name: stored(name)[0]}
    expected = before.run(None, feeds)[0]
    assert_agrees(name, after.run(None, feeds)[0], expected)


def test_compiled_and_evaluated_results_agree_with_stored_outputs(name: str) -> None:
    graph = og.onnx.load(path(name))
    x, y = stored(name)
    truth = og.evaluate(graph, {graph.inputs[0].name: x})
    assert_agrees(name, truth, y)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # the warning that onnx's evaluator runs the model
        got = og.compile(graph)({graph.inputs[0].name: x})
    assert_agrees(name, got, y)
    assert_agrees(name, got, truth)


def test_fused_model_in_the_same_folder_shares_the_data_file(tmp_path: Path) -> None:
    for file in ("llama.onnx", "llama.onnx.data"):
        (tmp_path / file).write_bytes((FOLDER / file).read_bytes())
    og.onnx.fuse(tmp_path / "llama.onnx")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["llama.fused.onnx", "llama.onnx", "llama.onnx.data"]
    session(tmp_path / "llama.fused.onnx")
