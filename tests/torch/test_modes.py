"""Gradients and autocast, turned on and off inside of fused models and around them."""

from __future__ import annotations

import copy

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import opgraph.torch as ogt  # noqa: E402


class Codes(nn.Module):
    """Statistics of a result, without gradients, between results that are computed from it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.encoder, self.decoder, self.other = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x, picked):
        z = torch.tanh(self.encoder(x))
        with torch.no_grad():
            self.mean.lerp_(z.view(-1, 3).index_select(0, picked).mean(0), 0.1)
        return z, self.decoder(z), torch.tanh(self.other(x)) * self.mean


@pytest.fixture(params=["eager", "fused"])
def codes(request):
    return Codes() if request.param == "eager" else ogt.fuse(Codes())


def test_error_inside_no_grad_restores_grad_mode(codes):
    x = torch.ones(4, 3)
    codes(x, torch.tensor([0, 1]))
    with pytest.raises((IndexError, RuntimeError)):
        codes(x, torch.tensor([0, 99]))
    assert torch.is_grad_enabled()
    assert codes(x, torch.tensor([1, 2]))[1].requires_grad


def test_parameters_unused_by_the_loss_have_undefined_gradients_after_no_grad(codes):
    x = torch.full((4, 3), 0.5, requires_grad=True)
    z, decoded, _ = codes(x, torch.tensor([0, 1]))
    (of_z,) = torch.autograd.grad(decoded.sum(), z, retain_graph=True)
    torch.testing.assert_close(of_z, codes.decoder.weight.sum(0).expand(4, 3))
    decoded.sum().backward()
    assert codes.other.weight.grad is None
    assert codes.encoder.weight.grad is not None


def test_second_derivatives_after_no_grad_agree_with_eager():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.w, self.v = nn.Parameter(torch.randn(3, 3)), nn.Parameter(torch.randn(3, 3))

        def forward(self, x):
            z = torch.tanh(x @ self.w)
            with torch.no_grad():
                z[0].mean()
            return z, torch.tanh(z) @ self.v

    found = []
    for model in (Twice(), ogt.fuse(Twice())):
        x = torch.linspace(-1, 1, 6).view(2, 3).requires_grad_()
        _z, result = model(x)  # _z is the second part's input: backward runs that part again while it exists
        (slope,) = torch.autograd.grad(result.sum(), model.v, create_graph=True)
        found.append(torch.autograd.grad(slope.square().sum() + x.square().sum(), x)[0])
    torch.testing.assert_close(*found)


def test_enable_grad_inside_model_records_gradients():
    class Enables(Codes):
        def forward(self, x):
            with torch.enable_grad():
                z = torch.tanh(self.encoder(x))
                return z, self.decoder(z), self.other(x)

    found = []
    for model in (Enables(), ogt.fuse(Enables())):
        with torch.no_grad():
            z, decoded, _ = model(torch.ones(2, 3))
            assert not torch.is_grad_enabled()
        z.sum().backward(retain_graph=True)
        assert model.other.weight.grad is None and model.decoder.weight.grad is None
        found.append([model.encoder.weight.grad, *torch.autograd.grad(decoded.sum(), z)])
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("leaves", ["autocast", "no_grad"])
def test_unfused_graph_restores_modes_after_an_error(leaves):
    """A write into an expanded tensor makes the graph run as it is."""

    class Written(nn.Module):
        def forward(self, x, picked):
            y = torch.zeros(1, 3).expand(4, 3)
            with torch.no_grad() if leaves == "no_grad" else torch.autocast("cpu", torch.bfloat16):
                y[:, 0].fill_(1)
                y = y + x.index_select(0, picked)
            return y.sin()

    model, x = ogt.fuse(Written()), torch.ones(8, 3)
    with pytest.warns(UserWarning, match="an expanded tensor"):
        model(x, torch.arange(4))
    nesting = torch.autocast_increment_nesting(), torch.autocast_decrement_nesting()
    with pytest.raises((IndexError, RuntimeError)):
        model(x, torch.arange(4) + 90)
    assert torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")
    assert nesting == (torch.autocast_increment_nesting(), torch.autocast_decrement_nesting())


def test_backward_ignores_the_callers_autocast():
    """Library calls would give kernels 16 bits where these read 32."""
    torch.manual_seed(0)
    eager = nn.Sequential(nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU())
    fused = ogt.fuse(copy.deepcopy(eager))
    found = []
    for model in (eager, fused):
        x = torch.linspace(-1, 1, 64 * 64).view(64, 64).requires_grad_()
        y = (model(x) + x).square().sum()
        with torch.autocast("cpu", torch.bfloat16, enabled=model is fused):
            y.backward()
        found.append([x.grad, *(p.grad for p in model.parameters())])
    torch.testing.assert_close(*found)


class Ranges(nn.Module):
    """Constants without a dtype of their own."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.full((6,), 0.5))

    def forward(self, x):
        return (x * torch.arange(0.0, x.shape[1]) * self.w[:1]).sin() * torch.arange(1.0, x.shape[1] + 1)


def test_backward_uses_default_dtype_of_forward():
    model = ogt.fuse(Ranges())
    for size in (4, 5, 7, 9):  # from the second one on, constants are computed for each set of sizes
        x, y = (torch.linspace(-1, 1, size * (size + 1)).view(size, size + 1).requires_grad_() for _ in range(2))
        result = model(x).sum()
        torch.set_default_dtype(torch.float64)
        try:
            result.backward()
        finally:
            torch.set_default_dtype(torch.float32)
        Ranges.forward(model, y).sum().backward()
        torch.testing.assert_close(x.grad, y.grad)
