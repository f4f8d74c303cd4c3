"""Backward from some results of a fused model: gradients are None where eager has None, and optimizers do the same."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402, N812
from torch import nn  # noqa: E402

import opgraph.torch as ogt  # noqa: E402
from opgraph.torch.graph.backend import observed  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:there is no C")


@pytest.fixture(autouse=True)
def without_a_compiler(monkeypatch):
    """These tests are about autograd, not about kernels."""
    monkeypatch.setattr("opgraph.runtime.cpu_compiler.is_available", lambda: False)


class Parts(nn.Module):
    """Three layers, and a buffer that is written to."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.register_buffer("calls", torch.zeros(6))


def two_heads(self, x):
    self.calls.add_(1)
    h = F.silu(self.a(x))
    return F.silu(self.b(h)), F.silu(self.c(h)), x * 2, h.detach().round()


def a_result_of_results(self, x):
    h = F.silu(self.a(x))
    p = F.silu(self.b(h))
    return h, p, F.silu(self.c(h)) * p, F.silu(self.c(x))


def one_that_reads_no_data(self, x):
    return F.silu(self.a(x)), torch.tanh(self.b.weight).sum() + self.c.bias.floor().sum(), self.c.weight


def views_of_one_value(self, x):
    h, g = F.silu(self.a(x)), F.silu(self.b(x))
    return h.view(-1), h[0], h.t(), g[1:], F.silu(self.c(x)).expand(2, *x.shape)


def results_of_a_view_without_a_gradient(self, x):
    """Under `no_grad` eager torch makes a view that requires a gradient but passes none on."""
    h = F.silu(self.a(x))
    with torch.no_grad():
        view = h.t()
    return F.mse_loss(view, view), F.silu(self.b(h)), view.exp() * self.c.bias.sum()


def a_write_into_what_dropout_gives_back(self, x):
    """Dropout that drops nothing returns its argument, which AOTAutograd copies."""
    h = self.a(x)
    p = h.softmax(-1)
    kept = F.dropout(F.dropout(h, 0.3, training=False)[:3], 0.3, training=False)
    kept[0].add_(1)
    return kept, p, F.silu(self.b(x)), h


def a_result_beside_a_write_to_the_input(self, x):
    x.mul_(2)
    return F.silu(self.a.weight), F.silu(self.b(x))


def one_result_beside_a_write_to_the_input(self, x):
    x.mul_(2)
    return (F.silu(self.a.weight),)


FORWARDS = (
    two_heads,
    a_result_of_results,
    one_that_reads_no_data,
    views_of_one_value,
    results_of_a_view_without_a_gradient,
    a_write_into_what_dropout_gives_back,
)
X = torch.linspace(-2, 2, 24).reshape(4, 6)


def passes(forward, wrap, leaf):
    """For every result, the gradients of parameters, input and results, by a pass from it; then by one from all."""
    model = type("Model", (Parts,), {"forward": forward})()
    call, found = wrap(model), []
    for chosen in (*range(len(model(X.clone()))), slice(None)):
        x = X.clone().requires_grad_()
        results = call(x if leaf else x * 1)
        picked = [r for r in (results[chosen] if isinstance(chosen, slice) else [results[chosen]]) if r.requires_grad]
        if picked:
            wrt = [x, *model.parameters(), *(r for r in results if r.requires_grad)]
            found.append(torch.autograd.grad(sum(r.square().sum() for r in picked), wrt, allow_unused=True))
    return found


def compiled(model):
    return torch.compile(model, backend="opgraph")


@pytest.mark.parametrize(
    "forward, wrap, leaf",
    [
        *((forward, ogt.fuse, True) for forward in FORWARDS),
        (two_heads, compiled, False),
        (a_result_beside_a_write_to_the_input, ogt.fuse, False),
        (one_result_beside_a_write_to_the_input, ogt.fuse, False),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_same_gradients_are_undefined_as_in_eager(forward, wrap, leaf, capfd) -> None:
    got, expected = passes(forward, wrap, leaf), passes(forward, lambda model: model, leaf)
    assert [[g is None for g in found] for found in got] == [[g is None for g in found] for found in expected]
    torch.testing.assert_close(got, expected)
    assert "Traceback" not in capfd.readouterr().err


def test_optimizer_skips_parameters_with_undefined_gradients() -> None:
    states = []
    for wrap in (ogt.fuse, lambda model: model):
        model = wrap(type("Model", (Parts,), {"forward": two_heads})())
        optimizer = torch.optim.AdamW(model.parameters(), 0.1, weight_decay=0.5)
        for step in range(4):
            optimizer.zero_grad()
            model(X)[step % 2].square().mean().backward()
            optimizer.step()
        states.append([*model.parameters(), [list(s) for s in optimizer.state_dict()["state"].values()]])
    assert states[0].pop() == states[1].pop()
    torch.testing.assert_close(states[0], states[1], rtol=1e-3, atol=1e-5)


def test_undefined_gradients_pass_through_chained_fused_models() -> None:
    """One fused model reads another's result, and a pass starts from a result that does not use it."""
    first = ogt.fuse(nn.Sequential(nn.Linear(6, 6), nn.SiLU()))
    second = ogt.fuse(type("Model", (Parts,), {"forward": one_that_reads_no_data})())
    second(first(X))[1].backward()
    assert first[0].weight.grad is None and second.a.weight.grad is None and second.b.weight.grad is not None


def test_undefined_gradients_with_a_view_result_after_a_graph_break() -> None:
    def forward(self, x):
        h = self.a(x)
        torch._dynamo.graph_break()
        return h.flatten(), self.b(x), F.silu(self.c(x))

    model = ogt.fuse(type("Model", (Parts,), {"forward": forward})())
    for _ in range(2):
        model.zero_grad()
        flat, b, c = model(X)
        b.sum().backward(retain_graph=True)
        assert model.a.weight.grad is None and model.b.weight.grad is not None and model.c.weight.grad is None
        (flat.sum() + c.sum()).backward()
        assert model.a.weight.grad is not None and model.c.weight.grad is not None


def test_hooks_are_never_called_with_none() -> None:
    """Autograd calls a tensor's hook with None where a node gives it no gradient."""
    model, seen = ogt.fuse(type("Model", (Parts,), {"forward": two_heads})()), []
    model.c.weight.register_hook(seen.append)
    model.c.bias.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad))
    for _ in range(2):
        x = X.clone().requires_grad_() * 1
        x.register_hook(seen.append)
        results = model(x)
        results[0].sum().backward(retain_graph=True)
        results[2].sum().backward()
    assert all(isinstance(g, torch.Tensor) for g in seen)
    assert model.a.weight.grad is not None


class ReadsViewWithoutHistory(nn.Module):
    def forward(self, x):
        with torch.no_grad():
            turned = x.transpose(-2, -1)
        w = torch.exp(-turned.abs())
        return w.clamp(max=turned), w


def test_view_made_under_no_grad_has_no_grad_in_the_next_graph_part():
    """The graph is cut after `w`. The view, a result of the first part, used to be made again with a gradient."""
    x = torch.randn(3, 3, requires_grad=True)
    results = ogt.fuse(ReadsViewWithoutHistory())(x)
    torch.testing.assert_close(results, ReadsViewWithoutHistory()(x))
    assert torch.autograd.grad(sum(r.sum() for r in results), x, allow_unused=True) == (None,)


class ReturnsViews(nn.Module):
    def forward(self, x):
        y = x.sin()
        with torch.no_grad():
            y.mul_(2)
            views = y[1:], x.t(), y.exp()
        return x, y, *views


def test_returned_view_made_under_no_grad_passes_no_gradient():
    """AOTAutograd makes the view again, with a gradient."""
    found = []
    for model in (ReturnsViews(), ogt.fuse(ReturnsViews())):
        x = torch.linspace(-1, 1, 12).view(3, 4).clone().requires_grad_()
        results = model(x)
        assert [r.requires_grad for r in results] == [True, True, True, True, False]
        assert results[0] is x
        (results[1][:-1] * results[2] * results[3][0, :1]).sum().backward()
        found.append([x.grad, *results])
    torch.testing.assert_close(*found)


def test_hooks_of_unused_parameters_get_zeros() -> None:
    class Stops(Parts):
        def forward(self, x):
            return self.b(F.silu(self.a(x)).detach())

    model, x = ogt.fuse(Stops()), torch.ones(2, 6)
    model(x).sum().backward()
    assert model.a.weight.grad is None
    seen = []
    model.a.weight.register_hook(lambda g: seen.append(g) or g * 2)
    model.a.bias.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad))
    model(x).sum().backward()
    assert len(seen) == 2 and not any(g.any() for g in seen)
    assert model.c.weight.grad is None and model.b.weight.grad.any()


def test_fused_function_gives_none_for_independent_inputs() -> None:
    f = ogt.fuse(lambda x, y: (x * y, y.exp(), x + 2))
    x, y = (torch.ones(3, requires_grad=True) for _ in range(2))
    results = f(x, y)
    for result, reached in zip(results, [(True, True), (False, True), (True, False)], strict=True):
        found = torch.autograd.grad(result.sum(), [x, y], allow_unused=True, retain_graph=True)
        assert tuple(g is not None for g in found) == reached
    both = torch.autograd.grad(results[1].sum() + results[2].sum(), [x, y], create_graph=True)
    (second,) = torch.autograd.grad(both[1].sum(), [y])
    torch.testing.assert_close(second, y.exp())


def test_weight_decay_skips_parameter_that_no_loss_reads() -> None:
    parameter = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.AdamW([parameter], lr=0.1, weight_decay=0.1)
    f = ogt.fuse(lambda x: (x.exp(), x * parameter))
    f(torch.ones(4, requires_grad=True))[0].sum().backward()
    optimizer.step()
    assert torch.equal(parameter, torch.ones(4))


def by_the_parameter(value, y, p):
    value.addcmul_(y, p)
    return (value,)


def by_what_is_returned(value, y, p):
    h = y * p
    value.mul_(h)
    return h, value


def through_a_view(value, y, p):
    view = value.view(3, 1)
    view.mul_(p[0])
    return view, value


def one_element(value, y, p):
    value[0] = p[1]
    return value, y * p


@pytest.mark.parametrize("write", [by_the_parameter, by_what_is_returned, through_a_view, one_element])
def test_value_made_under_no_grad_gets_gradient_of_later_writes(write):
    p, y = torch.tensor([1.0, 2.0, 3.0], requires_grad=True), torch.tensor([0.5, 1.0, 2.0])

    def f(y, p):
        with torch.no_grad():
            value = y * 2 + p
        return write(value, y, p)

    found = []
    for call in (f, torch.compile(f, backend="opgraph", fullgraph=True)):
        found.append(torch.autograd.grad(sum(r.square().sum() for r in call(y, p)), p)[0])
    torch.testing.assert_close(*found)


class Distances(nn.Module):
    """`sqrt` has an infinite derivative where a distance is 0."""

    def __init__(self):
        super().__init__()
        self.b = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return torch.exp(x * self.b), torch.sqrt(x), (x * self.b).sum()


def test_infinite_derivative_of_unused_result_has_no_effect():
    """AOTAutograd's backward multiplies it by zeros, which gives NaN."""
    found = []
    for model in (Distances(), ogt.fuse(Distances())):
        for losses in ((0,), (1,), (2,), (0, 2), (0, 1, 2), (2,)):
            x = torch.tensor([0.0, 1.0, 2.0], requires_grad=True)
            results = model(x)
            found.append(torch.autograd.grad(sum(results[i].sum() for i in losses), x)[0])
    torch.testing.assert_close(found[6:], found[:6])


@pytest.mark.parametrize("dynamic", [False, True])
def test_backward_skips_results_without_a_gradient(dynamic):
    plain = Parts()
    plain.forward = lambda x: (torch.tanh(plain.a(x)), torch.exp(plain.b(x)) + plain.c(x))
    with observed((graphs := []).append):
        fused = torch.compile(plain.forward, backend="opgraph", dynamic=dynamic)
        products = []
        for losses in ((0,), (1,), (0, 1), (0,)):
            found = []
            for call in (plain.forward, fused):
                plain.zero_grad()
                x = torch.linspace(-1, 1, 12).view(2, 6).requires_grad_()
                results = call(x)
                sum(results[i].sum() for i in losses).backward()
                found.append([x.grad, *(p.grad for p in plain.parameters())])
            torch.testing.assert_close(*found)
            (captured,) = graphs
            calls = captured.backward.module.graph.nodes
            products.append(sum(getattr(n.target, "__name__", "").startswith("mm") for n in calls))
    # For each layer, the gradients of its weight and of x. (The last pass runs what the first one compiled.)
    assert products == [2, 4, 6, 6]


class Nonlinear(torch.autograd.Function):
    """A backward that need not be linear: of zeros it is not zero."""

    @staticmethod
    def forward(ctx, x):
        return x * 2, x * 3

    @staticmethod
    def backward(ctx, first, second):
        return first + (second + 1).sign()


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")
def test_a_custom_backward_gets_zeros_for_results_without_a_gradient():
    def function(x):
        first, second = Nonlinear.apply(x)
        return first.sin(), second.cos()

    found = []
    for call in (function, torch.compile(function, backend="opgraph")):
        x = torch.ones(3, requires_grad=True)
        call(x)[0].sum().backward()
        found.append(x.grad)
    torch.testing.assert_close(*found)
