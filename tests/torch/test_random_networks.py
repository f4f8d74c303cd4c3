"""Random networks: a few fixed seeds, and a planted fault that they find."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import network_calls  # noqa: E402
from network_calls import CASES  # noqa: E402
from random_networks import Text, drawn, problems, recaptures, shrunk  # noqa: E402

from opgraph.torch.graph import backend, min_cut  # noqa: E402

#: These tests are about capture and planning; `python tests/accuracy/random_networks.py` compiles kernels.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("interpreted_kernels")]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_random_network_agrees_with_eager(seed) -> None:
    assert list(problems(drawn(seed), seed)) == []


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_other_batch_sizes_of_random_network_are_not_recaptured(seed) -> None:
    assert list(recaptures(drawn(seed), seed)) == []


@pytest.mark.sweep
@pytest.mark.parametrize("first", range(100, 140, 10))
def test_many_random_networks_agree_with_eager(first) -> None:
    assert {seed: list(problems(drawn(seed), seed)) for seed in range(first, first + 10)} == {
        seed: [] for seed in range(first, first + 10)
    }


def test_planted_fault_is_found_and_shrunk(monkeypatch) -> None:
    lines = ["v0 = torch.tanh(y)", "F.silu(x, inplace=True)", "v1 = x * self.weight", "v2 = y.abs()"]
    text = Text(image=False, lines=lines, outputs=["v1", "v2"], cases=CASES[:2])
    assert list(problems(text, 0)) == []
    monkeypatch.setattr(min_cut, "inputs_written_afterwards", lambda joint, places: [])
    monkeypatch.setattr(min_cut, "clones_of_inputs", lambda joint: set())
    assert any("inplace operation" in problem for problem in problems(text, 0))
    small = shrunk(text, 0)
    assert small.lines == lines[1:3] and small.outputs == ["v1"] and small.cases == CASES[:1]


def test_planted_size_specialization_is_found(monkeypatch) -> None:
    """The size is a number from then on, and each batch size is captured again."""
    lines = ["v0 = torch.tanh(x) * self.weight", "v1 = y.abs()", "v2 = v0.cumsum(-1)"]
    text = Text(image=False, lines=lines, outputs=["v2", "v1"], cases=CASES[:1])
    assert list(recaptures(text, 0)) == []

    def asking(graph, inputs):
        for place in graph.graph.find_nodes(op="placeholder"):
            for size in getattr(place.meta["example_value"], "shape", ()):
                int(size)
        return ()

    monkeypatch.setattr(backend, "dependencies", asking)
    assert [problem.partition(":")[0] for problem in recaptures(text, 0)] == [
        "graphs captured after batches of (3, 5, 7, 9)"
    ]
    assert shrunk(text, 0, recaptures).outputs == ["v1"]


def test_jump_caused_by_rounding_is_no_fault() -> None:
    """The divergence of a distribution from itself is 0, or has the sign of a rounding error."""
    divergence = "F.kl_div(F.log_softmax(y, -1), F.softmax(y, -1), reduction='batchmean')"
    lines = [f"v0 = {divergence}", "v1 = torch.atan2(v0, v0)"]
    text = Text(image=False, lines=lines, outputs=["v1"], cases=CASES[:4])
    assert list(problems(text, 10282)) == []


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_rounding_tolerance_does_not_hide_wrong_gradient(monkeypatch, dtype) -> None:
    """A gradient that is 1.5 times the right one is found in any dtype."""
    lines = ["v0 = torch.tanh(x) * self.weight", "v1 = v0.cumsum(-1)"]  # more than a single activation
    text = Text(image=False, lines=lines, outputs=["v1"], cases=CASES[:1], dtype=dtype)
    assert list(problems(text, 0)) == []
    plain = network_calls.torch.autograd.backward
    monkeypatch.setattr(
        network_calls.torch.autograd,
        "backward",
        lambda passed, cotangents, **how: plain(
            passed,
            [c * (1.5 if "Compiled" in str(p.grad_fn) else 1) for c, p in zip(cotangents, passed, strict=True)],
            **how,
        ),
    )
    assert any("gradient of x" in problem for problem in problems(text, 0))
