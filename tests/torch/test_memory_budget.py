"""A memory budget limits the bytes actually kept, not an estimate of them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import opgraph.torch as ogt
from opgraph.torch.graph.min_cut import Memory


class Block(nn.Module):
    """A transformer block with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(64), nn.Linear(64, 192), nn.Linear(64, 64)
        self.mlp = nn.Sequential(
            nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 64)
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (4, 16)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.mlp(x)


def kept(memory: Memory) -> int:
    """Bytes that three blocks keep."""
    model = ogt.fuse(nn.Sequential(Block(), Block(), Block()), memory=memory)
    x = torch.zeros(4, 33, 64, requires_grad=True)
    found: int = ogt.saved_tensors(model, x, dry_run=True).to_dict()["totals"]["kept"]
    return found


@pytest.mark.slow
def test_saved_bytes_stay_within_the_budget() -> None:
    inputs, masks = 4 * 4 * 33 * 64, 3 * 4 * 33 * 256
    whole = kept("fast") - inputs - masks
    for budget in (0.75, 0.5, 0.25):
        assert kept(budget) <= inputs + budget * whole


@pytest.mark.parametrize("budget", [0.0, 0.25])
def test_gradients_and_random_numbers_agree_with_eager(budget: float) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block())
    x = torch.randn(4, 33, 64)
    found = []
    for way in (model, ogt.fuse(model, memory=budget)):
        torch.manual_seed(1)
        y = way(x)
        found.append([y, *torch.autograd.grad(y.square().sum(), list(model.parameters())), torch.rand(2)])
        ogt.unfuse(model)
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-3)
