"""The demo: its models are like those of exporters, and the main command succeeds on them."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnx
import pytest

import opgraph as og
from opgraph.cli import demo, demo_torch, main
from opgraph.onnx import samples

MODELS = list(demo.MODELS)


@pytest.fixture
def without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the demo run as if PyTorch were not installed."""
    monkeypatch.setattr(demo_torch, "find_spec", lambda name: None)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Runs the demo's PyTorch part on a few numbers."""
    pytest.importorskip("torch")
    from opgraph.bench import side_by_side

    monkeypatch.setattr(demo_torch, "TIMING_BUDGET", 0.0)
    monkeypatch.setattr(side_by_side, "TENSOR", (4, 8, 16, 16))
    monkeypatch.setattr(side_by_side, "IMAGES", (4, 3, 8, 8))
    return side_by_side


@pytest.fixture(params=MODELS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def op_types(model: onnx.ModelProto) -> Counter[str]:
    return Counter(node.op_type for node in model.graph.node)


def test_demo_models_are_deterministic_with_exporter_versions(name: str) -> None:
    model, again = getattr(samples, name)(), getattr(samples, name)()
    assert (model.ir_version, model.opset_import[0].version) == (10, 20)
    assert model.SerializeToString(deterministic=True) == again.SerializeToString(deterministic=True)
    names = [node.name for node in model.graph.node]
    assert all(names) and len(set(names)) == len(names)
    assert not {"Swish", "QuickGelu"} & set(op_types(model))


def test_efficientnet_has_five_op_types_and_gates_that_are_not_swish() -> None:
    model = samples.efficientnet()
    counts = op_types(model)
    assert set(counts) == {"Conv", "Sigmoid", "Mul", "ReduceMean", "Add"}
    units = Counter(u for p in og.onnx.load(model).get_partitions() for u in p.units)
    gates = counts["ReduceMean"] - 1
    assert gates == 7 and units == {"swish": counts["Sigmoid"] - gates}


def test_llama_has_symbolic_dimensions_external_weights_and_two_swiglus(tmp_path: Path) -> None:
    model = samples.llama()
    samples.write(model, tmp_path / "llama.onnx")
    written = onnx.load(str(tmp_path / "llama.onnx"), load_external_data=False)
    outside = [t for t in written.graph.initializer if t.data_location == onnx.TensorProto.EXTERNAL]
    assert len(outside) > 10 and (tmp_path / "llama.onnx.data").stat().st_mode & 0o444 == 0o444
    graph = og.onnx.load(tmp_path / "llama.onnx")
    assert graph.inputs[0].dims == ("batch", "seq")
    assert Counter(u for p in graph.get_partitions() for u in p.units) == {"swish": 2, "swiglu": 2}
    assert {"Pow", "Reciprocal", "Cos", "IsNaN", "Softmax", "Expand"} <= set(op_types(model))


def test_llama_attention_is_causal(tmp_path: Path) -> None:
    from opgraph.cli.onnx_file import OnnxFile

    samples.write(samples.llama(), tmp_path / "llama.onnx")
    session = OnnxFile(str(tmp_path / "llama.onnx"))
    ids = np.arange(12).reshape(1, 12)
    logits = session.run({"input_ids": ids})["logits"]
    changed = ids.copy()
    changed[0, 8] = 99
    other = session.run({"input_ids": changed})["logits"]
    assert np.array_equal(logits[0, :8], other[0, :8]) and not np.allclose(logits[0, 8:], other[0, 8:])
    assert np.abs(logits).max() > 0.5 and np.isfinite(logits).all()


def test_pointwise_demo_models_are_one_kernel_each() -> None:
    for make in (samples.own_activation, samples.gated_f16):
        (part,) = og.onnx.load(make()).get_partitions()
        assert part.kind == "fused"


@pytest.mark.slow
def test_demo_succeeds_and_prints_its_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "TIMING_BUDGET", 0.1)
    monkeypatch.setattr(demo_torch, "TIMING_BUDGET", 0.1)
    assert main(["demo", "--folder", str(tmp_path / "demo")]) == 0
    out = capsys.readouterr().out
    for text in (*MODELS, "nodes in the file", "units found", "farthest from float64", "compiled by opgraph"):
        assert text in out
    written = {p.name for p in (tmp_path / "demo").iterdir()}
    assert written >= {f"{name}{end}" for name in MODELS for end in (".onnx", ".fused.onnx")}


def test_demo_with_wrong_results_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], without_torch: None
) -> None:
    monkeypatch.setattr(demo, "TIMING_BUDGET", 0.01)
    monkeypatch.setattr(demo, "MODELS", {"gated_f16": ("batch=2", "")})
    honest = og.compile

    class Wrong:
        def __init__(self, graph: og.Graph) -> None:
            self.run = honest(graph)
            self.partitions, self.bind, self.spins = self.run.partitions, self.run.bind, self.run.spins

        def __call__(self, feeds: dict[str, np.ndarray]) -> np.ndarray:
            return self.run(feeds) * np.float16(1.01)

    monkeypatch.setattr(og, "compile", Wrong)
    assert main(["demo", "--folder", str(tmp_path)]) == 1
    assert "gated_f16 computes something else" in capsys.readouterr().err


# -- the PyTorch part --


def rows(text: str, name: str) -> list[list[float]]:
    """The numbers of every line that starts with a name."""
    lines = [line for line in text.splitlines() if re.match(rf"\s*{re.escape(name)}\s+\d", line)]
    return [[float(n) for n in re.findall(r"\d+\.?\d*(?:e[-+]\d+)?", line.split(name)[1])] for line in lines]


@pytest.mark.slow
def test_fused_naf1_saves_no_more_than_checkpoint_and_peaks_below_eager(
    tmp_path: Path, quick: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    demo_torch.run(tmp_path, torch_compile=False)
    out = capsys.readouterr().out
    eager, checkpoint, fused = (rows(out, name) for name in ("eager", "torch.utils.checkpoint", "opgraph"))
    for table in range(2):
        kept, peak = 0, 1
        assert fused[table][kept] <= checkpoint[table][kept] < eager[table][kept] / 3
        assert fused[table][peak] < eager[table][peak]
    assert len(rows(out, "torch.compile")) == 0 and "--torch-compile` includes it" in out


@pytest.mark.slow
def test_naf1_source_is_written_and_can_be_measured(
    tmp_path: Path, quick: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    demo_torch.run(tmp_path, torch_compile=False)
    assert f"opgraph memory {tmp_path / 'naf1.py'}:NAF1" in capsys.readouterr().out
    assert main(["memory", f"{tmp_path / 'naf1.py'}:NAF1", "--input", "4,8,16,16", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["totals"]["kept"] > 0


@pytest.mark.slow
def test_torch_compile_is_included_on_request(
    tmp_path: Path, quick: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    demo_torch.run(tmp_path, torch_compile=True)
    out = capsys.readouterr().out
    assert len(rows(out, "torch.compile")) == 2 and "--torch-compile" not in out


def test_fused_naf1_with_wrong_results_fails(
    tmp_path: Path, quick: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(model: Any, activation: type) -> Any:
        honest = model.forward
        model.forward = lambda x: honest(x) * 1.0001
        return model

    monkeypatch.setitem(quick.WAYS, quick.FUSED, wrong)
    with pytest.raises(og.errors.OpGraphError, match="NAF1 computes something else"):
        demo_torch.run(tmp_path, torch_compile=False)


def test_missing_torch_is_reported_in_one_line(
    tmp_path: Path, without_torch: None, capsys: pytest.CaptureFixture[str]
) -> None:
    demo_torch.run(tmp_path, torch_compile=False)
    (line,) = capsys.readouterr().out.strip().splitlines()
    assert "PyTorch is not installed" in line and "pip install 'opgraph[torch]'" in line
    assert list(tmp_path.iterdir()) == []


def test_torch_that_cannot_be_imported_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "opgraph.torch", None)
    monkeypatch.setattr(demo_torch, "find_spec", lambda name: object())
    demo_torch.run(tmp_path, torch_compile=False)
    assert "PyTorch cannot be imported" in capsys.readouterr().out
