"""Memory that kernels of captured models read: what a call finds may differ from what its program was compiled for."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

import opgraph as og  # noqa: E402
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
def test_saved_tensor_with_changed_dtype_or_shape_raises(change):
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
def test_convolution_layout_may_change_between_calls():
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
def test_as_strided_offset_counts_from_storage_start(function):
    fused = torch.compile(function, backend="opgraph")
    memory = torch.arange(24.0)
    for offset in (0, 4, 2, 0):
        x = memory[offset : offset + 8]
        torch.testing.assert_close(fused(x), function(x))


PRODUCT = "graph(x: f32[n], y: f32[n]) -> (z)\n  a = Multiply(x, y)\n  z = Add(a, x)"


def test_memory_moved_between_forward_and_pullback_raises():
    f = og.compile(og.parse(PRODUCT), wrt=("x", "y"))
    x, y = torch.ones(1 << 16), torch.full((1 << 16,), 2.0)
    _, pullback = f.vjp(x=x, y=y)
    torch.testing.assert_close(pullback(torch.ones(1 << 16))["x"], y + 1)
    _, pullback = f.vjp(x=x, y=y)
    y.share_memory_()
    with pytest.raises(InvalidArguments, match='the memory of "y" was moved'):
        pullback(torch.ones(1 << 16))


@pytest.mark.parametrize("moved", ["x", "out"])
def test_moved_memory_of_a_bound_call_raises(moved):
    f = og.compile(og.parse(PRODUCT))
    given = {"x": torch.ones(1 << 16), "y": torch.full((1 << 16,), 2.0), "out": torch.zeros(1 << 16)}
    bound = f.bind(**given)
    torch.testing.assert_close(bound(), torch.full((1 << 16,), 3.0))
    given[moved].share_memory_()
    with pytest.raises(InvalidArguments, match=f'the memory of "{moved}" was moved'):
        bound()


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_zero_tensor_without_storage_may_be_an_operand():
    def function(x, s):
        return torch.tanh(x) * s + x

    fused, x = ogt.fuse(function), torch.linspace(-1, 1, 64)
    _, (zero, _) = torch.func.jvp(torch.linalg.slogdet, (torch.eye(3),), (torch.ones(3, 3),))
    for s in (torch.tensor(2.0), torch.tensor(2.0), zero):
        torch.testing.assert_close(fused(x, s), function(x, s))


@pytest.mark.parametrize("module", [ogt.Activation(torch.relu, inplace=True), ogt.Swish(inplace=True)])
def test_in_place_modules_obey_allow_mutation_on_saved_tensors(module):
    found = []
    for act in (nn.ReLU(inplace=True) if isinstance(module, ogt.Activation) else nn.SiLU(inplace=True), module):
        x = torch.tensor([-2.0, 3.0], requires_grad=True)
        with torch.autograd.graph.allow_mutation_on_saved_tensors():
            h = x * 1
            s = h * h
            with torch.no_grad():
                act(h)
            s.sum().backward()
        found.append(x.grad)
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("module", [ogt.Activation(torch.relu, inplace=True), ogt.Swish(inplace=True)])
def test_in_place_modules_accept_meta_and_fake_tensors(module):
    assert module(torch.randn(4, 5, device="meta")).shape == (4, 5)
    with FakeTensorMode():
        assert module(torch.randn(4, 5)).shape == (4, 5)


@pytest.mark.parametrize(
    ("feeds", "named"),
    [(5, {}), ([torch.ones(4)] * 2, {}), (None, {"x": torch.ones(4, device="meta"), "y": torch.ones(4)}),
     (None, {"x": torch.ones(4).to_sparse(), "y": torch.ones(4)})],
    ids=["a number", "a list", "meta", "sparse"],
)  # fmt: skip
def test_bound_call_raises_the_errors_of_a_plain_call(feeds, named):
    f, messages = og.compile(og.parse(PRODUCT)), []
    for call in (f, f.bind):
        with pytest.raises(InvalidArguments) as error:
            call(feeds, out=torch.zeros(4), **named)
        messages.append(str(error.value))
    assert messages[0] == messages[1]
