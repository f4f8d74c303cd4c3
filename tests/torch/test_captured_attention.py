"""Attention in captured graphs: scores, mask, softmax and dropout around the products are one kernel."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402, N812

import opgraph.torch as ogt  # noqa: E402
from opgraph.torch.dynamo import backend  # noqa: E402
from opgraph.torch.graph.backend import observed  # noqa: E402


@pytest.fixture(autouse=True)
def _no_graphs_of_other_tests():
    torch._dynamo.reset()


def attention(scores, mask, p):
    return F.dropout(torch.ops.aten._safe_softmax(scores * 0.5 + mask, -1), p)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_mask_softmax_and_dropout_are_one_forward_and_one_backward_kernel(dtype):
    """Random numbers are drawn before the kernel, in eager's order; a row that the mask hides is 0."""
    mask = torch.zeros(6, 8, dtype=dtype)
    mask[0, :5] = mask[3] = -torch.inf
    torch.manual_seed(0)
    x = torch.randn(2, 3, 6, 8, dtype=dtype)
    weights = torch.randn_like(x)
    captured, results = [], []
    for function in (attention, torch.compile(attention, backend=backend, fullgraph=True)):
        given = x.clone().requires_grad_()
        torch.manual_seed(1)
        with observed(captured.append):
            made = function(given, mask, 0.25)
        results.append((made, *torch.autograd.grad(made, given, weights)))
    for found, wanted in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(found, wanted)
        assert not found[:, :, 3].any()
    (graph,) = captured
    assert len(graph.forward.launches) == len(graph.backward.launches) == 1
    assert [str(n.target) for n in graph.forward.library_calls] == ["aten.bernoulli.p"]


class Attention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)

    def forward(self, x):
        h = F.silu(self.first(x))[:, None]
        return self.last(F.scaled_dot_product_attention(h, h, h)).sigmoid()


def test_small_budget_recomputes_attention_without_dropout():
    """torch marks attention as random at any dropout: its result and each row's logarithm would be kept."""
    torch.manual_seed(0)
    model, x = Attention(), torch.randn(2, 64, 16)
    model(x).sum().backward()
    truth = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    captured = []
    with observed(captured.append):
        ogt.fuse(model, memory=0.01)(x).sum().backward()
    again = [str(n.target) for n in captured[0].backward.library_calls if "attention" in str(n.target)]
    assert len(again) == 2 and sum("backward" in name for name in again) == 1
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, truth[name])
