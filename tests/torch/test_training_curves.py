"""A CNN and a Llama-like model reach the same losses fused as in eager torch: equally near to a run in float64.

tests/benchmarks/curves.py prints the whole curves, and their distance at each step.
"""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("sklearn")

import torch
from digits_training import BATCH, CASES, EAGER, EXACT, FUSED, Curve, descent, digits, trained

import opgraph.torch as ogt

STEPS = 6
#: The error of an f32 loss by rounding alone.
RESOLUTION = 2.0**-24


@pytest.fixture(scope="module", params=CASES)
def curves(request: pytest.FixtureRequest) -> dict[str, Curve]:
    """One run for each way."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the models are small, and other tests run at the same time
    try:
        return {way: trained(CASES[request.param], way, STEPS, descent) for way in (EXACT, EAGER, FUSED)}
    finally:
        torch.set_num_threads(threads)


def test_fused_losses_are_as_near_to_float64_as_eagers(curves: dict[str, Curve]) -> None:
    def farthest(way: str) -> float:
        pairs = zip(curves[way].losses, curves[EXACT].losses, strict=True)
        return max(abs(loss - exact) / exact for loss, exact in pairs)

    assert len(curves[FUSED].losses) == STEPS
    assert farthest(FUSED) <= 2 * farthest(EAGER) + 2 * RESOLUTION


def test_trained_parameters_are_as_near_to_float64_as_eagers(curves: dict[str, Curve]) -> None:
    def distance(way: str) -> float:
        return float((curves[way].end - curves[EXACT].end).norm())

    moved = float((curves[EXACT].end - curves[EXACT].start).norm())
    assert 0 < distance(FUSED) <= 1.25 * distance(EAGER) < 1e-3 * moved


def test_fusing_changes_trained_parameters_less_than_f32_rounding(curves: dict[str, Curve]) -> None:
    by_fusing = float((curves[FUSED].end - curves[EAGER].end).norm())
    by_rounding = float((curves[EAGER].end - curves[EXACT].end).norm())
    assert by_fusing <= by_rounding


@pytest.mark.parametrize(
    ("name", "unit"), [("CNN, swish trained per channel", "swish"), ("Llama-like, SwiGLU", "swiglu")]
)
def test_trained_models_are_fused(name: str, unit: str) -> None:
    case = CASES[name]
    pixels, labels = digits()
    model = ogt.fuse(case.make(False))
    report = ogt.explain(model, case.inputs(pixels[:BATCH], labels[:BATCH])[0])
    assert report.units[unit] == (3 if unit == "swish" else 2)
    assert report.eager_kept is not None and report.kept < report.eager_kept
