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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_gradient_of_a_certain_log_softmax_keeps_its_digits(dtype):
    """g - p sum(g) cancels where p is near 1: torch's kernel contracts it, which loses nothing."""

    def function(g, y):
        return torch.ops.aten._log_softmax_backward_data(g, y, 1, dtype) * 2

    y = torch.full((1000, 3), -14.0, dtype=dtype)
    y[:, 0] = -torch.arange(1, 1001) * torch.finfo(dtype).eps  # whose exponentials are numbers of the dtype
    g = torch.zeros_like(y)
    g[:, 0] = torch.linspace(-1, -0.01, 1000)
    found = torch.compile(function, backend=backend, fullgraph=True)(g, y)
    eager = function(g, y)
    truth = -2 * g[:, 0] * y[:, 0].expm1()
    mine, other = (((x[:, 0] - truth) / truth).abs().max() for x in (found, eager))
    assert mine <= 2 * other
    torch.testing.assert_close(found, eager)
    infinite = g.index_put((torch.tensor([0]), torch.tensor([2])), g.new_tensor(torch.inf))
    torch.testing.assert_close(
        torch.compile(function, backend=backend)(infinite, y), function(infinite, y), equal_nan=True
    )
