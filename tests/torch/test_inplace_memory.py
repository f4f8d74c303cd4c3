"""The memory saved by in-place activations, as the benchmark counts it."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="needs torch")

from inplace import MIB, classifier, relu  # noqa: E402


def test_relu_on_a_large_tensor_allocates_it_again_or_nothing() -> None:
    allocated = relu()
    assert allocated == {"out of place": 400_000_000, "in place": 0}
    assert -(-allocated["out of place"] // (2 * MIB)) * 2 == 382


def test_a_classifier_trains_the_same_either_way_and_allocates_less_in_place() -> None:
    outside, inside = classifier(inplace=False), classifier(inplace=True)
    assert inside.losses == outside.losses
    assert outside.losses[-1] < outside.losses[0]
    # One f32 value per unit of the three hidden layers.
    assert outside.allocated - inside.allocated == 1024 * (256 + 128 + 64) * 4
    assert inside.forward_peak < outside.forward_peak
