"""Deep copies of a fused model: each computes with its own parameters, and all use the same compiled code."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import opgraph.torch as ogt  # noqa: E402
from opgraph.torch.graph.backend import observed  # noqa: E402


class Scaled(nn.Module):
    def __init__(self, scale=2.0):
        super().__init__()
        self.first, self.second, self.scale = nn.Linear(4, 8), nn.Linear(8, 4), scale

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)) * self.scale)


@pytest.fixture
def graphs():
    """The graphs that Dynamo captures while the test runs."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    found = []
    with observed(found.append):
        yield found


def check(model, x):
    """Compares a step of a fused model with the same step in eager: results, gradients."""
    plain = ogt.unfuse(copy.deepcopy(model))
    results = []
    for each in (plain, model):
        each.zero_grad()
        y = each(x)
        y.square().sum().backward()
        results.append([y.detach(), *(p.grad for p in each.parameters())])
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("is_called", [False, True])
def test_copies_reuse_compiled_code(graphs, is_called):
    """First-order MAML and federated learning copy a model at each step like this."""
    model, x = ogt.fuse(Scaled()), torch.randn(3, 4)
    if is_called:
        check(model, x)
    for _ in range(12):
        twin = copy.deepcopy(model)
        with torch.no_grad():
            for p in twin.parameters():
                p.add_(torch.randn_like(p))
        check(twin, x)
        check(copy.deepcopy(twin), x)
    check(model, x)
    assert len(graphs) == 1


def test_copies_whose_attributes_diverge_stay_fused(graphs):
    """Each copy compiles separately once the shared cache of compiled code is full."""
    model, x = ogt.fuse(Scaled()), torch.randn(3, 4)
    twins = [copy.deepcopy(model) for _ in range(6)]
    with torch._dynamo.config.patch(recompile_limit=3):
        for place, twin in enumerate(twins):
            twin.scale = 3.0 + place
            for _ in range(2):
                check(twin, x)
        before = len(graphs)
        for twin in twins:
            check(twin, x)
        assert len(graphs) == before
    assert [len(twin.forward.limits) for twin in twins] == [0] * 6


def test_a_model_may_be_deleted_while_copies_run(graphs):
    model, x = ogt.fuse(Scaled()), torch.randn(3, 4)
    model(x)
    twin, gone = copy.deepcopy(model), weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    check(twin, x)
    twin.scale = 5.0
    check(twin, x)


def test_copies_of_one_activation_have_second_derivatives(graphs):
    class Swish(nn.Module):
        def forward(self, x):
            return x * torch.sigmoid(x)

    model, x = ogt.fuse(Swish()), torch.randn(3, 4)
    for twin in (copy.deepcopy(model), copy.deepcopy(model)):
        y = x.clone().requires_grad_()
        (first,) = torch.autograd.grad(twin(y).sum(), y, create_graph=True)
        first.sum().backward()
        assert y.grad is not None


def test_copy_of_model_that_cannot_be_captured_runs_eagerly():
    class Odd(nn.Module):
        def forward(self, x):
            return torch.where(x > 0)[0].sum() * x.sum().item()

    model, x = ogt.fuse(Odd()), torch.randn(3, 4)
    for each in (model, copy.deepcopy(model)):
        assert torch.equal(each(x), ogt.unfuse(copy.deepcopy(each))(x))


def test_parameters_of_a_fused_model_can_be_swapped():
    """`load_state_dict` does this with `torch.__future__.set_swap_module_params_on_conversion(True)`."""
    model, x = nn.Sequential(nn.Linear(3, 3), nn.SiLU(), nn.Linear(3, 2)), torch.randn(2, 3)
    fused = ogt.fuse(copy.deepcopy(model))
    fused(x).sum().backward()
    for m in (model, fused):
        other = nn.Parameter(torch.full((2, 3), 0.5))
        torch.utils.swap_tensors(m[2].weight, other)
    torch.testing.assert_close(fused(x), model(x))
