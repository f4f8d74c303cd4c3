"""Random functions on tensors of several shapes: a few that nobody chose, and planted faults that they find."""

from __future__ import annotations

import pytest
import torch
from random_functions import problems

from opgraph.torch.tracing.session import Session

#: What is traced counts here; kernels have tests of their own.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("interpreted_kernels")]


def test_random_functions_do_what_they_do_unfused() -> None:
    assert problems(range(40)) == []


def test_a_random_function_as_a_module_does_what_it_does_unfused() -> None:
    """Backward of a graph whose inputs get no gradient, in a call in which no result shows its node."""
    torch._dynamo.reset()
    assert problems([53], "module") == []


@pytest.mark.sweep
@pytest.mark.parametrize("first", range(1000, 3000, 200))
def test_many_random_functions_do_what_they_do_unfused(first: int) -> None:
    assert problems(range(first, first + 200)) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["keep_values", "check_kept_shape"])
def test_a_planted_fault_is_found(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Values of tensors that are written later are read late; a plan grows what is written in place."""
    monkeypatch.setattr(Session, name, lambda self, *given: None)
    assert problems(range(300))
