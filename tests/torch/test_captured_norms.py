"""Norms in captured graphs: one kernel forward, one backward, sums down columns included."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402, N812

from opgraph.torch.dynamo import backend  # noqa: E402
from opgraph.torch.graph.backend import observed  # noqa: E402


@pytest.fixture(autouse=True)
def _no_graphs_of_other_tests():
    torch._dynamo.reset()
    torch.manual_seed(0)


def layer_norm(x, weight, bias):
    return F.layer_norm(x, (x.shape[-1],), weight, bias)


def rms_norm(x, weight, bias):
    return weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)) + bias


def results(function, given):
    given = [x.detach().requires_grad_() for x in given]
    made = function(*given)
    made = made if isinstance(made, tuple) else (made,)
    torch.manual_seed(1)
    return (*made, *torch.autograd.grad(made, given, [torch.randn_like(y) for y in made]))


@pytest.mark.parametrize(("norm", "added"), [(layer_norm, 1), (layer_norm, 5), (rms_norm, 1)])
def test_a_norm_of_a_sum_is_one_kernel_each_way(norm, added):
    """The gradients of weight and bias are summed down columns in the kernel of the rows."""

    def function(x, residual, weight, bias):
        x = x + residual
        y = norm(x, weight, bias)
        return x.roll(1, 0), *(y.roll(i, 0) for i in range(added))  # library calls: each has a gradient of its own

    given = [torch.randn(4, 6, 32), torch.randn(4, 6, 32), torch.randn(32), torch.randn(32)]
    captured = []
    with observed(captured.append):
        found = results(torch.compile(function, backend=backend, fullgraph=True), given)
    for y, expected in zip(found, results(function, given), strict=True):
        torch.testing.assert_close(y, expected)
    (graph,) = captured
    assert len(graph.forward.launches) == 1
    assert len(graph.backward.launches) == 1
