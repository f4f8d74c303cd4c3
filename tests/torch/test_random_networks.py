"""Random networks: a few that nobody chose, and a planted fault that they find."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import random_networks  # noqa: E402
from random_networks import drawn, problems, shrunk  # noqa: E402

import opgraph.torch.graph.saved as saved  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def without_a_compiler(monkeypatch):
    """What is captured and planned counts here; `python tests/accuracy/random_networks.py` compiles kernels."""
    monkeypatch.setattr("opgraph.runtime.host.is_available", lambda: False)


@pytest.mark.parametrize("seed", range(4))
def test_a_random_network_does_what_it_does_in_eager_torch(seed) -> None:
    assert list(problems(drawn(seed), seed)) == []


@pytest.mark.sweep
@pytest.mark.parametrize("first", range(100, 140, 10))
def test_random_networks_do_what_they_do_in_eager_torch(first) -> None:
    assert {seed: list(problems(drawn(seed), seed)) for seed in range(first, first + 10)} == {
        seed: [] for seed in range(first, first + 10)
    }


def test_a_planted_fault_is_found_and_made_small(monkeypatch) -> None:
    lines = ["v0 = torch.tanh(y)", "F.silu(x, inplace=True)", "v1 = x * self.weight", "v2 = y.abs()"]
    text = random_networks.Text(image=False, lines=lines, outputs=["v1", "v2"])
    assert list(problems(text, 0)) == []
    monkeypatch.setattr(saved, "_read_a_copy", lambda joint, given: None)
    assert any("inplace operation" in problem for problem in problems(text, 0))
    small = shrunk(text, 0)
    assert small.lines == lines[1:3] and small.outputs == ["v1"]


def test_a_result_that_is_a_jump_at_a_rounding_error_shows_no_fault() -> None:
    """The divergence of a distribution from itself is 0, or has the sign of a rounding error."""
    divergence = "F.kl_div(F.log_softmax(y, -1), F.softmax(y, -1), reduction='batchmean')"
    text = random_networks.Text(image=False, lines=[f"v0 = {divergence}", "v1 = torch.atan2(v0, v0)"], outputs=["v1"])
    assert list(problems(text, 10282)) == []
