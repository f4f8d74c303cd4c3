"""Long chains of ops, as Python loops make them: they are compiled, in kernels of bounded size."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import opgraph.torch as ogt  # noqa: E402
from opgraph.torch.graph.aten import is_reduction  # noqa: E402
from opgraph.torch.graph.backend import Captured, observed  # noqa: E402
from opgraph.torch.graph.kernel_groups import MAX_REDUCTION_DEPTH, MAX_REDUCTIONS  # noqa: E402

pytestmark = pytest.mark.filterwarnings("error:.*runs unfused")


class Repeated(nn.Module):
    """A matrix product, and then a function of (value, weight) that is applied `turns` times."""

    def __init__(self, turn, turns: int) -> None:
        super().__init__()
        self.turn, self.turns = turn, turns
        self.first = nn.Linear(20, 20)
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 20))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for _ in range(self.turns):
            x = self.turn(x, self.weight)
        return x


def compared(model: nn.Module, **how) -> Captured:
    """Compares values and gradients with eager torch's in float64; returns the captured graph."""
    torch.manual_seed(0)
    x = torch.randn(3, 20)
    captured: list[Captured] = []
    with observed(captured.append):
        fused = ogt.fuse(model, **how)
        made = fused(x)
        (gradient,) = torch.autograd.grad(made.sum(), [fused.weight])
    exact = model.double()
    expected = exact(x.double())
    (expected_gradient,) = torch.autograd.grad(expected.sum(), [exact.weight])
    torch.testing.assert_close(made.double(), expected, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(gradient.double(), expected_gradient, rtol=2e-4, atol=2e-4)
    (graph,) = captured
    return graph


@pytest.mark.slow
def test_a_chain_of_hundreds_of_ops_is_fused():
    graph = compared(Repeated(lambda x, w: torch.sin(x * w), MAX_REDUCTIONS + 5))
    sums = [sum(map(is_reduction, launch.nodes)) for launch in graph.backward.launches]
    assert len(sums) > 1
    assert max(sums) <= MAX_REDUCTIONS


def test_chain_deeper_than_pythons_recursion_limit_is_fused():
    model = Repeated(lambda x, w: torch.sin(x * w), 600)
    captured: list[Captured] = []
    x = torch.randn(3, 20)
    with torch.no_grad(), observed(captured.append):
        torch.testing.assert_close(ogt.fuse(model)(x), model(x), rtol=2e-5, atol=2e-5)
    assert captured[0].inference.launches


@pytest.mark.slow
def test_chained_norms_are_split_into_several_kernels():
    graph = compared(Repeated(lambda x, w: x + nn.functional.layer_norm(x * w, (20,)), 12))
    assert len(graph.forward.launches) == 24 // MAX_REDUCTION_DEPTH


def test_memory_budget_search_is_linear_in_random_chains():
    """Each value of the chain reads the previous one twice."""

    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(20))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            noise = torch.randn_like(x)
            for _ in range(40):
                noise = noise + noise.sin()
            return (x * self.weight).exp() * noise

    model = ogt.fuse(Noisy(), memory=0.5)
    model(torch.randn(3, 20)).sum().backward()
    assert model.weight.grad.isfinite().all()
