"""Norms in captured graphs: one kernel forward and one backward, column sums included."""

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
    gradients = [torch.randn(y.shape).bfloat16().to(y.dtype) for y in made]  # the same numbers in every dtype
    return (*made, *torch.autograd.grad(made, given, gradients))


@pytest.mark.parametrize(("norm", "added"), [(layer_norm, 1), (layer_norm, 5), (rms_norm, 1)])
def test_norm_of_a_sum_is_one_forward_and_one_backward_kernel(norm, added):
    """The gradients of weight and bias are column sums inside the kernel over rows."""

    def function(x, residual, weight, bias):
        x = x + residual
        y = norm(x, weight, bias)
        return x.roll(1, 0), *(y.roll(i, 0) for i in range(added))  # each library call has its own gradient

    given = [torch.randn(4, 6, 32), torch.randn(4, 6, 32), torch.randn(32), torch.randn(32)]
    captured = []
    with observed(captured.append):
        found = results(torch.compile(function, backend=backend, fullgraph=True), given)
    for y, expected in zip(found, results(function, given), strict=True):
        torch.testing.assert_close(y, expected)
    (graph,) = captured
    assert len(graph.forward.launches) == 1
    assert len(graph.backward.launches) == 1


def layer_group_and_batch_norms(*given):
    """Four norms of three tensors each: an input, a weight and a bias."""
    return (
        F.layer_norm(given[0], (6,), *given[1:3]),
        F.group_norm(given[3], 2, *given[4:6]),
        F.batch_norm(given[6], None, None, *given[7:9], training=True),
        F.batch_norm(given[9], given[9].new_zeros(6), given[9].new_ones(6), *given[10:], training=True),
    )


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("parameters", ["f32", "alike"])
def test_norm_statistics_for_backward_are_not_rounded_to_16_bits(parameters, dtype):
    """Near 10, rounding to bf16 changes a mean by up to 0.03."""
    own = torch.float32 if parameters == "f32" else dtype
    given = [t for _ in range(4) for t in ((torch.randn(8, 6, 6) + 10).to(dtype), *torch.randn(2, 6).to(own))]
    arriving = torch.randn(4, 8, 6, 6).to(dtype)

    def gradients(norms, given):
        given = [t.detach().requires_grad_() for t in given]
        made = norms(*given)
        return torch.autograd.grad(made, given, [d.to(y.dtype) for d, y in zip(arriving, made, strict=True)])

    fused = gradients(torch.compile(layer_group_and_batch_norms, backend=backend, fullgraph=True), given)
    truth = gradients(layer_group_and_batch_norms, [t.double() for t in given])
    for found, tensor, exact in zip(fused, given, truth, strict=True):
        assert found.dtype == tensor.dtype
        off, allowed = ((t.double() - exact).norm() for t in (found, exact.to(dtype)))
        assert off <= 2 * allowed


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("axis", [0, -1])
def test_a_variance_of_16_bits_is_computed_with_an_unrounded_mean(axis, dtype):
    """Near 100, the mean rounded to bf16 is up to 0.25 off, as much as the standard deviation."""
    torch.manual_seed(0)
    x = (torch.randn(64, 64, dtype=torch.float64) * 0.3 + 100).to(dtype)

    def both(x):
        return torch.var_mean(x, dim=axis)

    for found, eager, exact in zip(torch.compile(both, backend=backend)(x), both(x), both(x.double()), strict=True):
        assert found.dtype is dtype
        assert (found.double() - exact).abs().max() <= 2 * (eager.double() - exact).abs().max()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_forward_norm_reads_its_input_rounded_as_backward_does(dtype):
    """Backward subtracts the mean from the stored input. Rows of one number show this: the gradient of their weight is
    0, and the rounding error of the input in 16 bits is multiplied by 1 / sqrt(eps)."""

    def function(x, weight, bias):
        return F.layer_norm(x * 1.3, (32,), weight, bias) * 2

    rows = torch.tensor([0.7, 3.1, 40.3, -7.7]).to(dtype)[:, None].repeat(1, 32)
    given = [rows, torch.linspace(0.5, 1.5, 32).to(dtype), torch.linspace(-1, 1, 32).to(dtype)]
    arriving = torch.randn(4, 32).to(dtype)

    def gradients(function, given):
        given = [t.detach().requires_grad_() for t in given]
        made = function(*given)
        return torch.autograd.grad(made, given, arriving.to(made.dtype))

    found = gradients(torch.compile(function, backend=backend, fullgraph=True), given)
    exact = gradients(function, [t.double() for t in given])
    for mine, eager, truth in zip(found, gradients(function, given), exact, strict=True):
        allowed = torch.finfo(dtype).eps * truth.abs().max() + 1e-6  # eager torch's error is 0 for the weight
        assert (mine - truth).abs().max() <= 2 * (eager - truth).abs().max() + allowed


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_returned_norm_statistics_have_eagers_dtype(weight_dtype):
    x, weight = torch.randn(8, 6, dtype=torch.bfloat16), torch.ones(6, dtype=weight_dtype)

    def function(x, weight):
        return torch.native_layer_norm(x, (6,), weight, None, 1e-5)

    for found, expected in zip(torch.compile(function, backend=backend)(x, weight), function(x, weight), strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_log_softmax_gradient_is_exact_near_probability_one(dtype):
    """g - p sum(g) cancels where p is near 1. torch's kernel contracts it to an FMA, which loses no digits."""

    def function(g, y):
        return torch.ops.aten._log_softmax_backward_data(g, y, 1, dtype) * 2

    y = torch.full((1000, 3), -14.0, dtype=dtype)
    y[:, 0] = -torch.arange(1, 1001) * torch.finfo(dtype).eps  # the exponentials are exact in the dtype
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


@pytest.mark.parametrize("training", [False, True], ids=["evaluation", "training"])
def test_batch_norm_result_has_eagers_strides(training):
    def function(x):
        x = x * 1.5
        return F.batch_norm(x, x.new_zeros(6), x.new_ones(6), training=training)

    turned = torch.randn(4, 5, 6).transpose(1, 2)
    for x in (torch.randn(6, 4).t(), turned, torch.randn(4, 6, 5, 3).to(memory_format=torch.channels_last)):
        if training:
            x = x.requires_grad_()
        torch._dynamo.reset()
        found, expected = torch.compile(function, backend=backend, fullgraph=True)(x), function(x)
        assert found.stride() == expected.stride()
        torch.testing.assert_close(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("affine", [False, True], ids=["plain", "affine"])
def test_instance_norm_with_eps_0_of_constant_channel_agrees_with_eager(affine, dtype):
    """Its inverse deviation is 0 in torch's kernels; 1 / sqrt(0) would give NaN."""

    def function(x, *parameters):
        return F.instance_norm(x * 2, None, None, *parameters, eps=0.0) + 1

    x = torch.linspace(-1, 3, 30).view(2, 3, 5)
    x[:, 1] = 0.5
    given = [x.to(dtype), *(torch.tensor([[0.5, 2.0, 3.0], [1.0, -1.0, 0.25]]).to(dtype) if affine else ())]
    found = results(torch.compile(function, backend=backend, fullgraph=True), given)
    # Eager torch's gradient in bf16 is far from the truth.
    wanted = results(function, [x.double() for x in given] if dtype == torch.bfloat16 else given)
    eps = torch.finfo(dtype).eps
    for mine, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, other.to(dtype), rtol=16 * eps, atol=16 * eps)
