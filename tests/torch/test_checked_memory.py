"""Memory that kernels of captured models read: what a call finds may differ from what its program was compiled for."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import opgraph.torch as ogt  # noqa: E402
from opgraph.errors import InvalidArguments  # noqa: E402


class Weighted(nn.Module):
    """A convolution whose weight is computed: backward reads both parameters in a kernel."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.mask = nn.Conv2d(3, 4, 3), nn.Parameter(torch.rand(4, 3, 3, 3))

    def forward(self, x):
        return nn.functional.conv2d(x, self.layer.weight * self.mask.sigmoid(), self.layer.bias)


@pytest.mark.parametrize("hooks", ["none", "later ones"])
def test_saved_tensors_may_have_other_strides_in_backward(hooks):
    found = []
    for model in (Weighted(), ogt.fuse(Weighted())):
        for _ in range(2):
            model.zero_grad()
            model.to(memory_format=torch.contiguous_format)
            x = torch.linspace(-1, 1, 2 * 3 * 64).view(2, 3, 8, 8).requires_grad_()
            y = model(x)
            if hooks == "none":
                model.to(memory_format=torch.channels_last)
            elif hasattr(y.grad_fn, "_raw_saved_tensors"):
                for saved in y.grad_fn._raw_saved_tensors:
                    saved.register_hooks(lambda t: t, lambda t: t.mT.contiguous().mT if t.dim() > 1 else t)
            y.sum().backward()
            found.append([x.grad, *(p.grad.contiguous() for p in model.parameters())])
    torch.testing.assert_close(found[2:], found[:2])


@pytest.mark.parametrize("change", [lambda t: t.double(), lambda t: torch.empty(0)], ids=["dtype", "shape"])
def test_a_saved_tensor_of_another_dtype_or_shape_is_an_error(change):
    model = ogt.fuse(Weighted())
    y = model(torch.ones(1, 3, 8, 8, requires_grad=True)).sum()
    model.mask.data = change(model.mask.data)
    with pytest.raises(InvalidArguments, match="that a captured graph kept for backward"):
        y.backward()


class Scored(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.k = nn.Parameter(torch.randn(6, 6))

    def forward(self, x):
        return (x.sin() @ self.k).cos().sum()


def test_a_negated_view_may_be_a_gradient():
    """The imaginary part of a conjugated value is one."""
    found = []
    for model in (Scored(), ogt.fuse(Scored())):
        x = torch.linspace(-1, 1, 24).view(4, 6).requires_grad_()
        z = torch.complex(torch.ones(()), model(x)).conj()
        (z * (2 + 1j)).real.backward()
        found.append([x.grad, model.k.grad])
    torch.testing.assert_close(*found)


@pytest.mark.filterwarnings("ignore:TF32 acceleration")
def test_the_layout_of_convolutions_may_change_between_calls():
    class Volumes(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.layer = nn.Conv3d(3, 4, 3)

        def forward(self, x):
            return self.layer(x.sin()).cos()

    plain, fused = Volumes(), ogt.fuse(Volumes())
    for enabled in (True, False, True):
        found = []
        with torch.backends.mkldnn.flags(enabled=enabled):
            for model in (plain, fused):
                model.zero_grad()
                x = torch.linspace(-1, 1, 2 * 3 * 216).view(2, 3, 6, 6, 6).to(memory_format=torch.channels_last_3d)
                y = model(x.requires_grad_())
                y.square().sum().backward()
                found.append([y, x.grad, model.layer.weight.grad])
        torch.testing.assert_close(*found)


def read_as_integers(x):
    return torch.as_strided(x.view(torch.int32), (4,), (1,), 1) + 0


def read_as_complex(x):
    return torch.view_as_real(torch.as_strided(torch.view_as_complex(x.view(-1, 2)), (3,), (1,), 1)) * 2


@pytest.mark.parametrize("function", [read_as_integers, read_as_complex])
def test_as_strided_counts_from_the_beginning_of_the_storage(function):
    fused = torch.compile(function, backend="opgraph")
    memory = torch.arange(24.0)
    for offset in (0, 4, 2, 0):
        x = memory[offset : offset + 8]
        torch.testing.assert_close(fused(x), function(x))
