"""Random functions on tensors of several shapes: a few fixed seeds, and planted faults that they find."""

from __future__ import annotations

import pytest
import torch
from random_functions import problems

from opgraph.torch.tracing.session import Session

#: These tests are about tracing; kernels have their own tests.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("interpreted_kernels")]


def test_random_functions_agree_with_eager() -> None:
    assert problems(range(40)) == []


def test_random_function_as_module_agrees_with_eager() -> None:
    """The graph's inputs get no gradient in this backward, in a call whose results do not show their node."""
    torch._dynamo.reset()
    assert problems([53], "module") == []


@pytest.mark.sweep
@pytest.mark.parametrize("first", range(1000, 3000, 200))
def test_many_random_functions_agree_with_eager(first: int) -> None:
    assert problems(range(first, first + 200)) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["keep_values", "check_kept_shape"])
def test_planted_fault_is_found_by_random_functions(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The faults: values of tensors are read late, after a write; a plan enlarges a tensor that is written in place."""
    monkeypatch.setattr(Session, name, lambda self, *given: None)
    assert problems(range(300))
