"""Random programs that change between calls: a few fixed seeds, and a planted fault that they find."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from random_programs import problem  # noqa: E402

from opgraph.torch.tracing.guard_discovery import _Walk  # noqa: E402

#: These tests are about tracing and guards; `random_programs.py --compiled` compiles kernels.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("interpreted_kernels")]


@pytest.mark.slow
@pytest.mark.parametrize("way", ["function", "helpers"])
@pytest.mark.parametrize("first", range(0, 60, 20))
def test_random_programs_agree_with_eager(first, way) -> None:
    assert [problem(seed, way) for seed in range(first, first + 20)] == [""] * 20


def test_random_program_as_module_agrees_with_eager() -> None:
    torch._dynamo.reset()
    assert problem(1, "module") == ""


@pytest.mark.sweep
@pytest.mark.parametrize("way", ["function", "helpers"])
@pytest.mark.parametrize("first", range(1000, 2000, 100))
def test_many_random_programs_agree_with_eager(first, way) -> None:
    assert [found for seed in range(first, first + 100) if (found := problem(seed, way))] == []


@pytest.mark.slow
def test_planted_fault_is_found_by_random_programs(monkeypatch) -> None:
    """A plan that does not compare lists and dicts is stale after one changes."""
    monkeypatch.setattr(_Walk, "_container", lambda self, value, place: None)
    found = [found for seed in range(60) if (found := problem(seed, "function"))]
    assert found and all("the result" in text for text in found)
