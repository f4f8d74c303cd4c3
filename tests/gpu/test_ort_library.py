"""A library of custom ops in sessions of a real onnxruntime-gpu."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import opgraph as og
from opgraph.ir import dtypes

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")
if "CUDAExecutionProvider" not in ort.get_available_providers():
    pytest.skip("this onnxruntime has no CUDA: pip install onnxruntime-gpu", allow_module_level=True)

#: A bias, a factor for each channel, rows that are not multiples of a pack, an alpha attribute.
MODELS = {
    "bias": ("graph(x: f32[n,m], a: f32[m]) -> (y)\n t = Exp(x)\n y = Add(t, a)", {"x": (300, 400), "a": (400,)}),
    "odd rows": ("graph(x: f32[n,m], a: f32[m]) -> (y)\n t = Exp(x)\n y = Add(t, a)", {"x": (300, 33), "a": (33,)}),
    "channels": (
        "graph(x: f16[n,6,h,w], p: f16[6,1,1]) -> (y)\n c = GreaterEqual(x, 0.0)\n g = Multiply(x, p)\n"
        " y = Select(c, x, g)",
        {"x": (2, 6, 16, 16), "p": (6, 1, 1)},
    ),
    "swish": ("graph(x: f16[n]) -> (y)\n y = Swish(x, alpha=1.5)", {"x": (100_003,)}),
}


@pytest.mark.parametrize("name", MODELS)
def test_both_providers_run_one_file(name: str, tmp_path: Path, torch: Any) -> None:
    text, shapes = MODELS[name]
    graph = og.parse(text)
    og.onnx.save(graph, tmp_path / "m.onnx", ort_library=tmp_path / "m.so", cuda=True)
    rng = np.random.default_rng(0)
    feeds = {t.name: rng.normal(size=shapes[t.name]).astype(dtypes.get(t.dtype).numpy) for t in graph.inputs}
    results = []
    for providers in (["CUDAExecutionProvider", "CPUExecutionProvider"], ["CPUExecutionProvider"]):
        options = ort.SessionOptions()
        options.register_custom_ops_library(str(tmp_path / "m.so"))
        options.enable_profiling = True
        options.profile_file_prefix = str(tmp_path / providers[0])
        session = ort.InferenceSession(str(tmp_path / "m.onnx"), options, providers=providers)
        assert session.get_providers() == providers
        results.append(session.run(None, feeds)[0])
        events = json.loads(Path(session.end_profiling()).read_text())
        ran = {(e["args"]["op_name"], e["args"]["provider"]) for e in events if "provider" in e.get("args", {})}
        nodes = [node.op_type for node in onnx.load(str(tmp_path / "m.onnx")).graph.node]
        assert {pair for pair in ran if pair[0] in nodes} == {(node, providers[0]) for node in nodes}
    np.testing.assert_allclose(results[0], results[1], rtol=2e-3 if results[0].dtype == np.float16 else 1e-5)
