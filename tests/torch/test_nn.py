"""Swish, SwiGLU, Activation: values, gradients, saved tensors, in-place use; and state_dict, copy and pickle."""

from __future__ import annotations

import copy
import io

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402, N812
from torch import nn  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

import opgraph.torch as ogt  # noqa: E402
from opgraph.errors import InvalidArguments, InvalidShape  # noqa: E402


class Allocations(TorchDispatchMode):
    """Counts the bytes of tensors that torch allocates."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        known = {t.untyped_storage()._cdata for t in args if isinstance(t, torch.Tensor)}
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and made.untyped_storage()._cdata not in known:
            self.bytes += made.untyped_storage().nbytes()
        return made


def assert_as_exact(module, formula, *inputs):
    """Checks that errors of outputs and gradients against float64 are at most twice those of the formula in torch."""
    results = []
    for kind in (torch.float64, torch.float32):
        twin = copy.deepcopy(module).to(kind)
        leaves = [t.to(kind).requires_grad_() for t in inputs]
        parameters = list(twin.parameters())
        y = formula(*leaves, *parameters)
        results.append([y, *torch.autograd.grad(y.square().sum(), [*leaves, *parameters])])
    leaves = [t.clone().requires_grad_() for t in inputs]
    y = module(*leaves)
    own = [y, *torch.autograd.grad(y.square().sum(), [*leaves, *module.parameters()])]
    for exact, eager, ours in zip(*results, own, strict=True):
        assert ours.dtype == eager.dtype and ours.shape == eager.shape
        size = exact.abs().max()
        theirs = (eager - exact).abs().max() / size
        assert (ours - exact).abs().max() / size <= 2 * max(theirs, torch.finfo(torch.float32).eps)


CHANNELS = torch.linspace(0.5, 2, 6)


@pytest.mark.parametrize(
    "module, formula",
    [
        (ogt.Swish(), lambda x: F.silu(x)),
        (ogt.Swish(1.7), lambda x: x * torch.sigmoid(1.7 * x)),
        (ogt.Swish(1.3, trainable=True), lambda x, a: x * torch.sigmoid(a * x)),
        (ogt.Swish(1.3, trainable=True, num_parameters=6), lambda x, a: x * torch.sigmoid(a.view(6, 1, 1) * x)),
        (ogt.SwiGLU(1), lambda x: F.silu(x[:, :3]) * x[:, 3:]),
        (ogt.SwiGLU(1, "second"), lambda x: F.silu(x[:, 3:]) * x[:, :3]),
        (
            ogt.SwiGLU(1, alpha=1.702, limit=1.0, offset=1.0),
            lambda x: (
                x[:, :3].clamp(max=1) * torch.sigmoid(1.702 * x[:, :3].clamp(max=1)) * (x[:, 3:].clamp(-1, 1) + 1)
            ),
        ),
        (
            ogt.Activation(lambda x, a, b: x * torch.tanh(a * F.softplus(x)) + b, a=1.0, b=CHANNELS.view(6, 1, 1)),
            lambda x, a, b: x * torch.tanh(a * F.softplus(x)) + b,
        ),
    ],
    ids=["swish", "swish-1.7", "trainable", "per-channel", "swiglu", "second", "clamped", "activation"],
)
def test_values_and_gradients_are_as_accurate_as_torchs(module, formula):
    torch.manual_seed(0)
    assert_as_exact(module, formula, torch.randn(4, 6, 5, 3))


def test_swiglu_with_separate_gate_and_up_tensors():
    gate, up = torch.randn(2, 3, 4)
    torch.testing.assert_close(ogt.SwiGLU()(gate, up), F.silu(gate) * up)
    assert_as_exact(ogt.SwiGLU(), lambda g, u: F.silu(g) * u, gate, up)


@pytest.mark.parametrize("module", [ogt.Swish(trainable=True), ogt.Swish(trainable=True, num_parameters=4)])
def test_trainable_swish_saves_only_its_input(module):
    x = torch.randn(8, 4, 16, 16, requires_grad=True)
    seen = {}

    def pack(tensor):
        seen[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        module(x)
    large = [t for t in seen.values() if t.numel() > 4]
    assert [t.data_ptr() for t in large] == [x.data_ptr()]


def test_f16_and_bf16_inputs_keep_their_dtype_and_alpha_keeps_its_own():
    for dtype in (torch.float16, torch.bfloat16):
        module = ogt.Swish(1.3, trainable=True)
        x = torch.randn(32, dtype=dtype, requires_grad=True)
        y = module(x)
        y.sum().backward()
        assert (y.dtype, x.grad.dtype, module.alpha.grad.dtype) == (dtype, dtype, torch.float32)
        exact = x.double() * torch.sigmoid(module.alpha.double() * x.double())
        assert (y - exact).abs().max() <= 0.51 * torch.finfo(dtype).eps * exact.abs().max() * 1.01


def test_double_backward_works():
    module = ogt.Swish(1.3, trainable=True).double()
    x = torch.randn(5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(module, x)


def test_swish_of_integers_is_a_float():
    x = torch.arange(-3, 4)
    for module in (ogt.Swish(), ogt.Swish(trainable=True), ogt.Swish(trainable=True, num_parameters=7)):
        rows = x.expand(2, 7)
        torch.testing.assert_close(module(rows), F.silu(rows.float()))


@pytest.mark.parametrize("dim, shape", [(3, (2, 4)), (-3, (2, 4)), (-1, ())])
def test_swiglu_refuses_a_missing_dimension(dim, shape):
    with pytest.raises(InvalidShape, match=f"(?s)has no dimension {dim}.*where:.*fix:"):
        ogt.SwiGLU(dim)(torch.ones(shape))


# Module attributes and methods


@pytest.mark.parametrize("first", [False, True])
def test_attribute_trainable_does_not_change_the_result(first):
    x = torch.linspace(-1, 1, 5)
    module = ogt.Swish(1.3, trainable=first)
    expected = module(x)
    module.trainable = not first
    assert torch.equal(module(x), expected)
    assert ("trainable=True" in repr(module)) == first


def test_state_dict_repr_copy_and_pickle():
    module = ogt.Swish(1.3, trainable=True, num_parameters=4)
    x = torch.randn(2, 4, 3)
    module(x)
    assert list(module.state_dict()) == ["alpha"] and module.alpha.shape == (4,)
    assert repr(module) == "Swish(num_parameters=4, trainable=True)"
    assert repr(ogt.Swish(1.5, inplace=True)) == "Swish(alpha=1.5, inplace=True)"
    assert list(ogt.Swish().state_dict()) == []
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    for twin in (copy.deepcopy(module), torch.load(file, weights_only=False)):
        assert torch.equal(twin(x), module(x)) and twin.alpha is not module.alpha
    activation = ogt.Activation(torch.nn.functional.leaky_relu, negative_slope=1.0)
    assert list(activation.state_dict()) == ["negative_slope"] and "leaky_relu, negative_slope=1" in repr(activation)


def test_invalid_module_arguments_are_refused():
    with pytest.raises(InvalidArguments, match="trainable=True for one alpha per channel"):
        ogt.Swish(num_parameters=3)
    with pytest.raises(InvalidArguments, match="dimension 1"):
        ogt.Swish(trainable=True, num_parameters=3)(torch.randn(2, 4))
    with pytest.raises(InvalidArguments, match="num_parameters is True"):
        ogt.Swish(num_parameters=True)
    with pytest.raises(InvalidArguments, match="gate"):
        ogt.SwiGLU(gate="third")
    with pytest.raises(InvalidArguments, match="cut in two"):
        ogt.SwiGLU()(torch.randn(2, 3))
    with pytest.raises(InvalidArguments, match="cannot be called 'training'"):
        ogt.Activation(torch.relu, training=1.0)
    with pytest.raises(InvalidArguments, match="number or a float tensor"):
        ogt.Activation(torch.relu, a=torch.ones(3, dtype=torch.int64))
    with pytest.raises(InvalidArguments, match=r"a is a tensor of torch\.int64"):
        ogt.Activation(torch.relu, a=torch.ones(3, dtype=torch.int64))
    with pytest.raises(InvalidArguments, match="a is of type list"):
        ogt.Activation(torch.relu, a=[1.0])
    for params in ({}, {"b": 1.0}, {"a": 1.0, "b": 1.0}):
        with pytest.raises(InvalidArguments, match="<lambda> cannot be called with x and"):
            ogt.Activation(lambda x, a: x * a, **params)
    with pytest.raises(InvalidArguments, match="not a callable"):
        ogt.Activation("relu")
    ogt.Activation(torch.nn.functional.leaky_relu, negative_slope=0.1)
    ogt.Activation(ogt.fuse(lambda x, a, k=1.0: x * a * k), a=1.0)


def test_modules_fuse_with_neighbours_in_a_fused_model():
    model = nn.Sequential(nn.Linear(4, 8), ogt.SwiGLU(), ogt.Swish(trainable=True))
    report = ogt.explain(model, torch.randn(2, 4))
    (kernel,) = [fused for fused in report.fused if fused.phase == "forward"]
    assert sorted(kernel.units) == ["swiglu", "swish", "swish"]


def test_modules_compile_and_export():
    model = nn.Sequential(nn.Linear(4, 4), ogt.Swish(1.3, trainable=True), ogt.Swish(inplace=True))
    x = torch.randn(2, 4)
    expected = model(x)
    torch.testing.assert_close(torch.compile(model, backend="eager", fullgraph=True)(x), expected)
    torch.testing.assert_close(torch.export.export(model, (x,)).module()(x), expected)


# In place


LIKE_RELU = [torch.relu, torch.tanh, torch.sigmoid, lambda x: F.leaky_relu(x, 0.2)]


@pytest.mark.parametrize("function", LIKE_RELU)
def test_in_place_training_keeps_the_result_and_allocates_nothing(function):
    module = ogt.Activation(function, inplace=True)
    x, weight = torch.randn(2, 100, requires_grad=True), torch.randn(2, 100)
    module(x * 1)
    h = x * 1
    address, version = h.data_ptr(), h._version
    with Allocations() as seen:
        y = module(h)
    assert seen.bytes == 0
    assert y is h and h.data_ptr() == address and h._version > version
    (y * weight).sum().backward()
    twin = x.detach().requires_grad_()
    expected = function(twin * 1)
    (expected * weight).sum().backward()
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(x.grad, twin.grad)


@pytest.mark.parametrize("module", [ogt.Swish(inplace=True), ogt.Swish(1.3, trainable=True, inplace=True)])
def test_in_place_swish_has_right_gradients_in_training(module):
    x, weight = torch.randn(2, 100, requires_grad=True), torch.randn(2, 100)
    h = x * 1
    before = h.detach().clone()
    y = module(h)
    alpha = module.alpha if isinstance(module.alpha, torch.Tensor) else torch.tensor(1.0)
    assert y is h
    torch.testing.assert_close(h.detach(), before * torch.sigmoid(alpha.detach() * before))
    (y * weight).sum().backward()
    twin = x.detach().requires_grad_()
    (twin * torch.sigmoid(alpha.detach() * twin) * weight).sum().backward()
    torch.testing.assert_close(x.grad, twin.grad)


@pytest.mark.parametrize("module", [ogt.Swish(inplace=True), ogt.Activation(torch.relu, inplace=True)])
def test_in_place_inference_allocates_nothing(module):
    x = torch.randn(1000, 1000)
    expected = copy.deepcopy(module)
    expected.inplace = False
    expected = expected(x)
    with torch.no_grad():
        module(torch.randn(2, 2))
        version = x._version
        with Allocations() as seen:
            y = module(x)
    assert seen.bytes == 0 and y is x and x._version > version
    torch.testing.assert_close(x, expected)


def test_in_place_write_of_value_saved_elsewhere_raises():
    x = torch.randn(3, requires_grad=True)
    h = x.exp()
    y = ogt.Activation(torch.relu, inplace=True)(h)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_in_place_module_refuses_a_leaf_and_leaves_it_unchanged():
    x = torch.randn(3, requires_grad=True)
    before = x.detach().clone()
    with pytest.raises(InvalidArguments, match="leaf"):
        ogt.Swish(inplace=True)(x)
    assert torch.equal(x, before)


@pytest.mark.parametrize("view", [lambda t: t[:, 1:3], lambda t: t.t(), lambda t: t[::2], lambda t: t[1:3]])
@pytest.mark.parametrize("grad", [False, True])
def test_in_place_module_writes_through_views(view, grad):
    base = torch.randn(4, 6, requires_grad=grad)
    h, twin = base * 1, base.detach() * 1
    ogt.Activation(torch.relu, inplace=True)(view(h))
    torch.relu_(view(twin))
    torch.testing.assert_close(h.detach(), twin)
    if grad:
        h.sum().backward()
        view(base.detach()).relu_()
        assert base.grad.eq(0).sum() == base.detach().eq(0).sum()


def test_in_place_module_refuses_views_that_torch_protects():
    h = torch.randn(2, 6, requires_grad=True) * 1
    before = h.detach().clone()
    with pytest.raises(RuntimeError, match="multiple views"):
        ogt.Activation(torch.relu, inplace=True)(h.unbind(0)[0])
    assert torch.equal(h, before)


def test_in_place_modules_in_a_fused_model_have_right_gradients():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(4, 8), ogt.Swish(inplace=True), nn.Linear(8, 8), ogt.Activation(torch.relu, inplace=True)
    )
    x = torch.randn(5, 4)
    grads = []
    for each in (model, ogt.fuse(copy.deepcopy(model))):
        each(x).square().sum().backward()
        grads.append([p.grad for p in each.parameters()])
    torch.testing.assert_close(*grads)


def test_activation_uses_rounding_of_its_fused_function():
    def fn(x, a):
        return (x * a + 1) * x - x * a

    fused, x, a = ogt.fuse(fn, rounding="each"), torch.randn(1000).bfloat16(), torch.tensor(1.3, dtype=torch.bfloat16)
    for inplace in (False, True):
        with torch.no_grad():
            assert torch.equal(ogt.Activation(fused, inplace=inplace, a=a)(x.clone()), fn(x, a))


@pytest.mark.parametrize("fn", [lambda x: torch.relu(x) + x[:, :1], lambda x: x * 2 + x.t()])
def test_in_place_activation_reads_views_before_the_write(fn):
    x = torch.linspace(-1, 1, 9).view(3, 3)
    torch.testing.assert_close(ogt.Activation(fn, inplace=True)(x.clone()), fn(x))


@pytest.mark.parametrize("inplace", [False, True])
def test_trainable_swish_of_a_scalar_tensor_is_a_scalar(inplace):
    x = torch.tensor(0.5)
    with torch.no_grad():
        torch.testing.assert_close(ogt.Swish(trainable=True, inplace=inplace)(x.clone()), torch.nn.functional.silu(x))
