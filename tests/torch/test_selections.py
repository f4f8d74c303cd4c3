"""Comparisons of values with elements of their own, in fused models: some element equals the largest."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import opgraph.torch as ogt
from opgraph.torch.graph.saved import Memory


class Largest(nn.Module):
    """An RMSNorm as people write it, and what is done with its largest elements.

    Args:
        how: what is done.
        axis: along which they are the largest.
    """

    def __init__(self, how: str, axis: int) -> None:
        super().__init__()
        self.how, self.axis = how, axis
        self.weight = nn.Parameter(torch.linspace(0.5, 2.0, 48))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        v = x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-5) * self.weight
        if self.how == "added":
            return v + v.amax(self.axis, keepdim=True)
        if self.how == "of all":
            return v / v.max()
        if self.how == "of sizes":
            return v * torch.linalg.vector_norm(v, float("inf"), self.axis, keepdim=True)
        if self.how == "compared":
            return torch.where(v == v.amax(self.axis, keepdim=True), x.sin(), v)
        return torch.where(v >= v.max(self.axis, keepdim=True).values, x.sin(), v)


@pytest.mark.parametrize("memory", ["least", "fast", 0.5])
@pytest.mark.parametrize("axis", [0, -1])
@pytest.mark.parametrize("how", ["added", "of all", "of sizes", "compared", "by index"])
def test_some_element_is_the_largest(how: str, axis: int, memory: Memory) -> None:
    torch.manual_seed(0)
    model = Largest(how, axis)
    x = torch.randn(33, 48, requires_grad=True)
    fused = ogt.fuse(Largest(how, axis), memory=memory)
    y, got = model(x), fused(x)
    torch.testing.assert_close(got, y)
    want = torch.autograd.grad(y.sum(), (x, model.weight))
    found = torch.autograd.grad(got.sum(), (x, fused.weight))
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-4)


def test_a_byte_of_each_element_is_kept_for_it() -> None:
    x = torch.randn(32, 48, requires_grad=True)
    kept = ogt.saved_tensors(ogt.fuse(Largest("added", -1)), x).to_dict()["totals"]["kept"]
    assert kept == x.numel() * (4 + 1) + 4 * len(x)  # the input, a mask, a number of each row
