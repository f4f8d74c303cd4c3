"""Large models: weights are mapped and not read, files over 2 GiB load and save, many nodes take seconds."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from growth import growth

import opgraph as og

onnx = pytest.importorskip("onnx")
if not Path("/proc/self/status").exists():
    pytest.skip("memory is read from /proc", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "onnx_exports"))
import large  # noqa: E402  # found by the line above


@pytest.fixture(scope="module")
def two_gib(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return large.sparse_model(tmp_path_factory.mktemp("large"), 2.2)


def test_model_over_2_gib_loads_and_saves_without_reading_its_weights(two_gib: Path) -> None:
    og.onnx.load(large.chain(3))  # so that all imports are done
    before = large.memory()
    graph = og.onnx.load(two_gib)
    graph.get_partitions()
    og.onnx.save(graph, two_gib.with_name("again.onnx"), form="decomposed")
    assert large.memory() - before < 100 << 20
    assert sum(t.data.nbytes for t in graph.constants) > 1 << 31
    assert onnx.load(two_gib.with_name("again.onnx"), load_external_data=False) == onnx.load(
        two_gib, load_external_data=False
    )
    assert sorted(p.name for p in two_gib.parent.iterdir()) == ["again.onnx", "m.onnx", "w.data"]


def test_weights_of_a_large_model_are_read_lazily(two_gib: Path) -> None:
    graph = og.onnx.load(two_gib)
    with open(two_gib.with_name("w.data"), "r+b") as file:
        file.seek((1 << 31) + 4)
        file.write(np.float32(7).tobytes())
    place = ((1 << 31) + 4) // 4
    sizes = np.cumsum([t.data.size for t in graph.constants])
    which = int(np.searchsorted(sizes, place, side="right"))
    weight = graph.constants[which].data.reshape(-1)
    assert weight[place - (int(sizes[which - 1]) if which else 0)] == 7


def test_weights_too_large_for_protobuf_go_to_a_data_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("opgraph.onnx.write._INLINE_BYTES", 1 << 16)  # instead of 1 GiB
    weight = np.arange(1 << 15, dtype=np.float32).reshape(-1, 1)
    graph = og.Graph()
    x = graph.input("x", "f32", (1 << 15, 1))
    graph.output(graph.add_op("Add", x, graph.constant("c", weight), name="y"))
    og.onnx.save(graph, tmp_path / "m.onnx")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.onnx", "m.onnx.data"]
    assert (tmp_path / "m.onnx").stat().st_size < 1 << 12
    assert og.onnx.load(tmp_path / "m.onnx") == graph


def test_many_nodes_load_and_save_in_linear_time() -> None:
    from opgraph.onnx.save import to_model

    def round_trip(length: int) -> Callable[[], object]:
        model = large.chain(length)

        def run() -> None:
            graph = og.onnx.load(model)
            assert to_model(graph, form="decomposed") == model
            assert len(graph) == length

        return run

    assert growth(round_trip, 1_000) < 3
