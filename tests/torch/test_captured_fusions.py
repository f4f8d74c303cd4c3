"""The number of kernels of captured graphs where a loss, a cast, a pad or column sums are among other ops."""

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


def counted(function, *given):
    """Compares values and gradients with eager torch's; returns the kernels and library calls of both graphs."""
    captured, results = [], []
    for call in (function, torch.compile(function, backend=backend, fullgraph=True)):
        inputs = [x.detach().requires_grad_(x.is_floating_point()) for x in given]
        with observed(captured.append):
            made = call(*inputs)
        torch.manual_seed(1)
        gradients = torch.autograd.grad(made, [x for x in inputs if x.requires_grad], torch.randn_like(made))
        results.append((made, *gradients))
    for found, expected in zip(results[1], results[0], strict=True):
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found, expected)
    (graph,) = captured
    parts = graph.forward, graph.backward
    return [len(p.launches) for p in parts], [str(n.target) for p in parts for n in p.library_calls]


def test_cross_entropy_is_fused_with_its_producers():
    """Softmax's statistics and logarithms are one kernel with the arithmetic before them. The sum over rows after the
    gather is another; the count of labels (a number) and the division by it are one each. Backward has one kernel that
    fills the memory that the labels are scattered to, and one for the rest."""

    def function(x, bias, labels):
        return F.cross_entropy(torch.tanh(x) + bias, labels)

    kernels, calls = counted(function, torch.randn(24, 40), torch.randn(40), torch.arange(24))
    assert kernels == [4, 2]
    assert "aten.full_like.default" not in calls


def test_mean_loss_is_one_forward_and_one_backward_kernel():
    kernels, calls = counted(
        lambda x, y: (torch.sigmoid(x) - y).square().mean(), torch.randn(6, 40), torch.randn(6, 40)
    )
    assert kernels == [1, 1]
    assert not calls


def test_casts_are_fused_with_neighbouring_kernels():
    """The computation of one number for each column (a sigmoid, and its derivative) is a separate kernel."""

    def function(x, scale):
        y = F.rms_norm(x.float() * 2, (32,)).to(torch.bfloat16)
        return (y.float() * torch.sigmoid(scale)).half()

    kernels, calls = counted(function, torch.randn(4, 6, 32).bfloat16(), torch.randn(32))
    assert kernels == [2, 2]
    assert not calls


def test_pad_is_fused_with_neighbouring_ops():
    """The gradient of the padded part runs over fewer elements, in a separate kernel."""

    def function(x, y):
        return F.pad(torch.sin(x) * 2, (8, 0)) + torch.cos(y)

    kernels, calls = counted(function, torch.randn(6, 8), torch.randn(6, 16))
    assert kernels == [1, 2]
    assert not calls


def test_column_sums_are_fused_with_neighbouring_ops():
    def function(x, weight, bias):
        return torch.sigmoid(x * weight + bias) * x

    kernels, calls = counted(function, torch.randn(48, 32), torch.randn(32), torch.randn(32))
    assert kernels == [1, 1]
    assert not calls
