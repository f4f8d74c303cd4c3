"""Random models, valid and damaged: round trips, and agreement with other tools on which models load and run.

`tests/fuzz/` holds the long runs: structure-aware over many seeds, coverage-guided over bytes.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import opgraph as og

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

import model_checks  # noqa: E402  # needs onnx
import random_models  # noqa: E402

SOURCE = st.randoms(use_true_random=False)


def examples(count: int) -> settings:
    return settings(
        max_examples=count, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
    )


@pytest.mark.slow
@examples(150)
@given(SOURCE)
def test_random_models_round_trip_in_every_form(rng: Any) -> None:
    model = random_models.random_model(rng)
    graph = model_checks.loaded(model)
    assert graph is not None
    model_checks.goes_back(graph, model)
    model_checks.emits(graph)
    model_checks.serves_a_library(graph, model)


@examples(40)
@given(SOURCE)
def test_random_models_keep_the_layout_of_their_data_files(rng: Any) -> None:
    model = random_models.random_model(rng)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        onnx.save(model, folder / "m.onnx", save_as_external_data=True, size_threshold=0, location="w.bin",
                  convert_attribute=False)  # fmt: skip
        source = onnx.load(folder / "m.onnx", load_external_data=False)
        graph = og.onnx.load(folder / "m.onnx")
        before = {p.name: p.read_bytes() for p in folder.iterdir()}
        swish = any(op.kind == "Swish" for op in graph.ops)  # it must be written as another op
        og.onnx.save(graph, folder / "beside.onnx", form="decomposed")
        assert {p.name: p.read_bytes() for p in folder.iterdir() if p.name in before} == before
        assert swish or onnx.load(folder / "beside.onnx", load_external_data=False) == source
        (folder / "other").mkdir()
        og.onnx.save(graph, folder / "other" / "m.onnx", form="decomposed")
        assert swish or og.onnx.load(folder / "other" / "m.onnx") == graph


@examples(100)
@given(SOURCE)
def test_random_models_agree_with_onnxruntime(rng: Any) -> None:
    assert_agrees(rng, compiled=False)


@examples(12)
@given(SOURCE)
def test_compiled_random_models_agree_with_onnxruntime(rng: Any) -> None:
    assert_agrees(rng, compiled=True)


def assert_agrees(rng: Any, *, compiled: bool) -> None:
    model = random_models.random_model(rng, longest=6)
    graph = model_checks.loaded(model)
    feeds = random_models.feeds_of(model, rng)
    assert graph is not None
    got, want = model_checks.computed(graph, feeds, compiled=compiled), model_checks.expected(model, feeds)
    if want is not None:  # a bf16 model may be one that no other tool runs
        assert got is not None
        model_checks.agrees(got, want, model)


@pytest.mark.slow
@examples(300)
@given(SOURCE)
def test_damaged_models_are_refused_or_mean_the_same_to_all_tools(rng: Any) -> None:
    model = random_models.damaged(random_models.random_model(rng, longest=6), rng, rng.choice((1, 1, 2, 4)))
    model_checks.survives(model, rng)


@pytest.mark.parametrize("path", sorted(model_checks.FINDINGS.glob("*.onnx")), ids=lambda p: p.stem)
def test_findings_of_long_fuzzing_runs_stay_fixed(path: Any) -> None:
    model_checks.survives_bytes(path.read_bytes(), random_models.seeded(0))
