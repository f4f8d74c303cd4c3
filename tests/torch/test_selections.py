"""Comparisons of values with elements selected from them, in fused models: some element equals the largest."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

import opgraph.torch as ogt
from opgraph.torch.graph.min_cut import Memory


class Largest(nn.Module):
    """A hand-written RMSNorm, and a use of its largest elements.

    Args:
        how: the use.
        axis: the axis along which they are the largest.
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
def test_some_element_equals_its_maximum(how: str, axis: int, memory: Memory) -> None:
    torch.manual_seed(0)
    model = Largest(how, axis)
    x = torch.randn(33, 48, requires_grad=True)
    fused = ogt.fuse(Largest(how, axis), memory=memory)
    y, got = model(x), fused(x)
    torch.testing.assert_close(got, y)
    want = torch.autograd.grad(y.sum(), (x, model.weight))
    found = torch.autograd.grad(got.sum(), (x, fused.weight))
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-4)


def test_comparison_with_maximum_saves_one_byte_per_element() -> None:
    x = torch.randn(32, 48, requires_grad=True)
    kept = ogt.saved_tensors(ogt.fuse(Largest("added", -1)), x).to_dict()["totals"]["kept"]
    assert kept == x.numel() * (4 + 1) + 4 * len(x)  # the input, a mask, one number for each row


def _largest(v: torch.Tensor) -> torch.Tensor:
    return v.amax(-1, keepdim=True)


def _column_largest(v: torch.Tensor) -> torch.Tensor:
    return v.amax(0, keepdim=True)


#: Comparisons with selected elements, where the value, the selection or both go through other ops first.
_WAYS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "difference": lambda v, x: torch.where(v - _largest(v) == 0, x.sin(), v),
    "difference of columns": lambda v, x: torch.where(v - _column_largest(v) == 0, x.sin(), v),
    "sign": lambda v, x: torch.sign(v - _largest(v)) * x + v,
    "root": lambda v, x: (_column_largest(v) - v).sqrt().detach() + v,
    "angle": lambda v, x: torch.acos(v / torch.linalg.vector_norm(v, float("inf"), -1, keepdim=True)).detach() + v,
    "both scaled": lambda v, x: torch.where(v * 2 == _largest(v) * 2, x.sin(), v),
    "both moved": lambda v, x: torch.where(v + 1 >= _column_largest(v) + 1, x.sin(), v),
    "of positive ones": lambda v, x: torch.where(v == _largest(v.relu()), x.sin(), v),
    "of some": lambda v, x: torch.where(v == _largest(v.masked_fill(x < 0, -1e9)), x.sin(), v),
    "of a join": lambda v, x: torch.where(torch.cat([v, x], -1).amax(-1, keepdim=True) == v, x.sin(), v),
    "of a stack": lambda v, x: torch.where(torch.stack([v, x]).amax(0) == v, x.sin(), v),
    "of both axes": lambda v, x: torch.where(v == _largest(v).amax(0, keepdim=True), x.sin(), v),
    "of two": lambda v, x: torch.where(v == torch.maximum(v.amax(), v.amin()), x.sin(), v),
    "of each place and another": lambda v, x: torch.where(torch.maximum(v, v.flip(0)) == v, x.sin(), v),
    "quantile": lambda v, x: torch.where(v >= torch.quantile(v, 1.0, dim=-1, keepdim=True), x, -x) + v,
    "neighbours": lambda v, x: torch.where(v == functional.max_pool1d(v, 3, 1, 1), x, v),
    "adaptive": lambda v, x: torch.where(v == functional.adaptive_max_pool1d(v, 1), x, v),
    "a row": lambda v, x: torch.where(v >= v[:1], x.sin(), v),
    "a column of another shape": lambda v, x: torch.where(
        v.view(33, 24, 2) >= v.view(33, 24, 2)[:, :, :1], x.sin().view(33, 24, 2), v.view(33, 24, 2)
    ).view(33, 48),
    "share": lambda v, x: (1 - v / _column_largest(v.abs())).sqrt().detach() + v,
    "quotient of a row": lambda v, x: torch.where(v / _largest(v) == 1, x.sin(), v),
    "floor of a row": lambda v, x: torch.floor(v / _largest(v)) * x + v,
    "whole number": lambda v, x: (v / _column_largest(v)).long() * x + v,
    "power": lambda v, x: ((_column_largest(v) - v) ** 0.5).detach() + v,
    "remainder": lambda v, x: torch.fmod(v, _column_largest(v.abs())) * x,
    "scattered": lambda v, x: torch.where(
        v == torch.zeros(33, 48).scatter_reduce(1, torch.zeros(33, 48).long(), v, "amax", include_self=False)[:, :1],
        x.sin(),
        v,
    ),
}


class Compared(nn.Module):
    """A hand-written RMSNorm, and a comparison of it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.weight = nn.Parameter(torch.linspace(0.5, 2.0, 48))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        v = x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-5) * self.weight
        return _WAYS[self.how](v, x)


@pytest.mark.slow
@pytest.mark.parametrize("how", _WAYS)
def test_value_and_its_selection_come_from_one_computation(how: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(33, 48)
    model, fused = Compared(how), ogt.fuse(Compared(how))
    with torch.no_grad():
        torch.testing.assert_close(fused(x), model(x))
    results = []
    for m in (model, fused):
        given = x.clone().requires_grad_()
        y = m(given)
        y.backward(torch.linspace(-1, 1, y.numel()).reshape(y.shape))
        results.append((y.detach(), given.grad, m.weight.grad))
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-4)


class Maxout(nn.Module):
    """The elementwise maximum of two halves."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = functional.gelu(x).chunk(2, -1)
        return torch.maximum(first, second)


def test_maxout_saves_only_its_input() -> None:
    x = torch.randn(32, 48, requires_grad=True)
    assert ogt.saved_tensors(ogt.fuse(Maxout()), x).to_dict()["totals"]["kept"] == 4 * x.numel()


class SpelledTwice(nn.Module):
    """A comparison of squares with the largest one in their column; the squares are written twice."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        v = x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-5)
        found = v * v == (v * v).amax(0, keepdim=True)
        return torch.where(found, x.sin(), v), found


def test_repeated_expression_is_computed_once_in_inference() -> None:
    torch.manual_seed(1)
    x = torch.randn(33, 48, dtype=torch.bfloat16)
    with torch.no_grad():
        _, found = ogt.fuse(SpelledTwice())(x)
    assert found.any(0).all()
