"""The memory saved by in-place activations, as the benchmark counts it."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="needs torch")

from inplace import MIB, classifier, relu  # noqa: E402


def test_in_place_relu_allocates_nothing() -> None:
    allocated = relu()
    assert allocated == {"out of place": 400_000_000, "in place": 0}
    assert -(-allocated["out of place"] // (2 * MIB)) * 2 == 382


def test_in_place_classifier_trains_equally_with_less_memory() -> None:
    outside, inside = classifier(inplace=False), classifier(inplace=True)
    assert inside.losses == outside.losses
    assert outside.losses[-1] < outside.losses[0]
    # One f32 value per unit of the three hidden layers.
    assert outside.allocated - inside.allocated == 1024 * (256 + 128 + 64) * 4
    assert inside.forward_peak < outside.forward_peak
