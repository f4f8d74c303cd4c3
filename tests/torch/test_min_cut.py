"""The values a captured graph keeps: the fewest bytes, or slightly more if those values are in memory in any case."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

import opgraph.torch as ogt

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*fused partitions run op by op"),
    pytest.mark.usefixtures("interpreted_kernels"),
]
#: Bytes of an f32 and of an s64.
FLOAT, LONG = 4, 8


def kept(function: Callable[..., Any], *args: Any) -> int:
    """Bytes that a compiled function keeps for backward."""
    torch._dynamo.reset()
    return int(ogt.saved_tensors(torch.compile(function, backend="opgraph"), *args).totals.kept)


def test_loss_over_few_classes_saves_log_probabilities_only() -> None:
    """Torch's partitioner doubles the weight of values that need no write: it would keep logits and 2 numbers a row."""

    def loss(x: Any, w: Any, targets: Any) -> Any:
        return cross_entropy(x @ w, targets)

    x, w = torch.randn(6, 5, requires_grad=True), torch.randn(5, 8, requires_grad=True)
    operands, targets, count = x.nbytes + w.nbytes, 6 * LONG, FLOAT
    assert kept(loss, x, w, torch.randint(8, (6,))) == operands + targets + count + 6 * 8 * FLOAT


@pytest.mark.parametrize(("classes", "numbers"), [(8, 0), (1000, 2)])
def test_returned_logits_are_saved_if_that_costs_little(classes: int, numbers: int) -> None:
    """The caller holds the logits; keeping the logarithms would need the same number of bytes again."""

    def loss(x: Any, w: Any, targets: Any) -> Any:
        logits = x @ w
        return cross_entropy(logits, targets), logits.detach()

    x, w = torch.randn(6, 5, requires_grad=True), torch.randn(5, classes, requires_grad=True)
    operands, targets, count = x.nbytes + w.nbytes, 6 * LONG, FLOAT
    rows = 6 * (classes + numbers) * FLOAT
    assert kept(loss, x, w, torch.randint(classes, (6,))) == operands + targets + count + rows
