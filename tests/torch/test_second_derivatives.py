"""Second derivatives of fused models: gradient penalties, derivatives by inputs in a loss, differentiated steps.

Each equals eager's. Where a captured graph cannot run again, an error is raised.
"""

from __future__ import annotations

import copy

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402, N812
from torch import nn  # noqa: E402

import opgraph.torch as ogt  # noqa: E402
from opgraph.errors import Unimplemented  # noqa: E402
from opgraph.torch.graph.parameter_branches import draws_random_numbers  # noqa: E402


def network(inputs=3, outputs=1, act=nn.Tanh):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(inputs, 16), act(), nn.LayerNorm(16), nn.Linear(16, outputs))


def penalty(model, x):
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return model(x.detach()).mean() + (slope.norm(2, 1) - 1).square().mean()


def heat(model, x):
    """The residual of a partial differential equation; the parameters' gradients need third derivatives."""
    (first,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first[:, 0].sum(), x, create_graph=True)
    return (first[:, 1] - second[:, 0]).square().mean()


def inner_step(model, x):
    """MAML: the loss after a step of gradient descent."""
    parameters = dict(model.named_parameters())
    loss = (torch.func.functional_call(model, parameters, (x,)) - x[:, :1].sin()).square().mean()
    slopes = torch.autograd.grad(loss, list(parameters.values()), create_graph=True)
    moved = {name: p - 0.1 * slope for (name, p), slope in zip(parameters.items(), slopes, strict=True)}
    return (torch.func.functional_call(model, moved, (x,)) - x[:, :1].cos()).square().mean()


def forces(model, x):
    return (torch.autograd.grad(model(x).square().sum(), x, create_graph=True)[0] - x).square().sum()


def gradients(model, loss, x):
    model.zero_grad()
    x = x.clone().requires_grad_()
    value = loss(model, x)
    value.backward()
    return [value.detach(), x.grad, *(p.grad for p in model.parameters())]


@pytest.mark.slow
@pytest.mark.parametrize("wrap", [ogt.fuse, lambda m: torch.compile(m, backend="opgraph")], ids=["fuse", "compile"])
@pytest.mark.parametrize("loss", [penalty, heat, inner_step, forces], ids=lambda f: f.__name__)
def test_losses_of_gradients_agree_with_eager(loss, wrap):
    plain = network().double()
    fused = wrap(copy.deepcopy(plain))
    for rows in (4, 5, 7, 9):  # sizes are symbols from the second one on
        x = torch.randn(rows, 3, dtype=torch.float64)
        for ours, theirs in zip(gradients(fused, loss, x), gradients(plain, loss, x), strict=True):
            torch.testing.assert_close(ours, theirs)


class Inside(nn.Module):
    """Computes a gradient in its own forward, which ends the graph; a tensor crosses the break."""

    def __init__(self):
        super().__init__()
        self.first, self.second = network(), network(1, 2)

    def forward(self, x):
        x = x.detach().requires_grad_()
        energy = self.first(x)
        (slope,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        return self.second(F.silu(energy)) + slope[:, :2]


def test_gradient_computed_inside_forward_agrees_with_eager():
    plain = Inside().double()
    fused = ogt.fuse(copy.deepcopy(plain))
    for _ in range(3):
        x = torch.randn(4, 3, dtype=torch.float64)
        for model in (plain, fused):
            model.zero_grad()
            model(x).square().sum().backward()
        for ours, theirs in zip(fused.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad)


class Shared(nn.Module):
    """Two results, one computed from the other, and both from one parameter."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 9, dtype=torch.float64).view(3, 3))

    def forward(self, x, y):
        hidden = torch.tanh(x @ self.weight)
        return hidden, (hidden * y) @ self.weight


@pytest.mark.parametrize("reads", [(0,), (1,), (0, 1)])
def test_second_derivatives_with_shared_inputs_and_some_results(reads):
    plain = Shared()
    fused = ogt.fuse(copy.deepcopy(plain))
    for _ in range(2):
        found = []
        x = torch.randn(4, 3, dtype=torch.float64)
        for model in (plain, fused):
            given = x.clone().requires_grad_()
            made = model(given, given)
            slopes = torch.autograd.grad(
                sum(made[i].square().sum() for i in reads), [given, model.weight], create_graph=True
            )
            found.append(torch.autograd.grad(sum(s.sin().sum() for s in slopes), [given, model.weight]))
        torch.testing.assert_close(*found)


def test_retained_graph_gives_the_same_gradients_again():
    plain = network().double()
    fused = ogt.fuse(copy.deepcopy(plain))
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    y = fused(x).sum()
    (first,) = torch.autograd.grad(y, x, create_graph=True)
    (again,) = torch.autograd.grad(y, x)
    torch.testing.assert_close(first, again)
    torch.autograd.grad(first.square().sum(), x)


def test_fused_network_passes_gradgradcheck():
    model = ogt.fuse(network(2, 2, nn.SiLU).double())
    x = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x, *parameters: model(x), (x, *model.parameters()))


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_hutchinson_curvature_optimizer_agrees_with_eager():
    """Hutchinson's estimate, as in AdaHessian and Sophia: products of the Hessian with random signs."""
    plain = network().double()
    fused = ogt.fuse(copy.deepcopy(plain))
    for _ in range(3):
        x, found = torch.randn(8, 3, dtype=torch.float64), []
        signs = [torch.randint(0, 2, p.shape) * 2.0 - 1 for p in plain.parameters()]
        for model in (plain, fused):
            model.zero_grad()
            model(x).square().mean().backward(create_graph=True)
            parameters = list(model.parameters())
            slopes = [p.grad for p in parameters]
            found.append(torch.autograd.grad(slopes, parameters, grad_outputs=signs))
            with torch.no_grad():
                for p, curvature in zip(parameters, found[-1], strict=True):
                    p.sub_(0.1 * p.grad / (curvature.abs() + 1))
                    p.grad = None
        torch.testing.assert_close(*found)


def drawn(model):
    return nn.Sequential(model, nn.Dropout(0.5))


def normed(model):
    return nn.Sequential(model, nn.BatchNorm1d(1))


class Applied(nn.Module):
    """A function of a model's result."""

    def __init__(self, function, model):
        super().__init__()
        self.function, self.model = function, model

    def forward(self, x):
        return self.function(self.model(x))


def attending(model):
    return Applied(lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=0.5), model)


def attending_with_heads(model):
    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.model, self.heads = model, nn.MultiheadAttention(1, 1, dropout=0.5)

        def forward(self, x):
            y = self.model(x)
            return self.heads(y, y, y)[0]

    return Heads()


def scaled_by(draw):
    return lambda model: Applied(lambda x: x * draw(torch.empty_like(x)), model)


DRAWING = {
    "attention": attending,
    "attention of heads": attending_with_heads,
    "exponential": scaled_by(lambda x: x.exponential_()),
    "geometric": scaled_by(lambda x: x.geometric_(0.5)),
    "cauchy": scaled_by(lambda x: x.cauchy_()),
    "gamma": scaled_by(lambda x: torch._standard_gamma(torch.ones_like(x))),
    "binomial": scaled_by(lambda x: torch.binomial(torch.full_like(x, 9), torch.full_like(x, 0.5))),
}


@pytest.mark.parametrize("of", DRAWING.values(), ids=DRAWING)
def test_create_graph_gradients_use_forwards_random_numbers(of):
    """With `create_graph=True` a graph may run again in backward, where it would draw other numbers."""
    plain = of(network())
    fused, x = ogt.fuse(copy.deepcopy(plain)), torch.randn(8, 3)
    found = []
    for model in (fused, plain):
        given = x.clone().requires_grad_()
        torch.manual_seed(3)
        y = model(given)
        (slope,) = torch.autograd.grad(y.square().sum(), given, create_graph=True)
        found.append((y, slope.detach(), torch.rand(1)))
    torch.testing.assert_close(*found)


#: Layers that Dynamo leaves to torch.
RECURRENT = {"gru", "lstm", "miopen_rnn", "rnn_relu", "rnn_tanh"}


def test_every_random_aten_op_is_recognised():
    graph, missing, known = torch.fx.Graph(), set(), 0
    for schema in torch._C._jit_get_all_schemas():
        library, _, name = schema.name.partition("::")
        if library != "aten" or name.startswith("_") or name in RECURRENT:
            continue
        op = getattr(getattr(torch.ops.aten, name), schema.overload_name or "default", None)
        if torch.Tag.nondeterministic_seeded in getattr(op, "tags", ()):
            node = graph.call_method(name, (), {"dropout_p": 0.5, "training": True})
            known += draws_random_numbers(node)
            missing |= set() if draws_random_numbers(node) else {name}
    assert not missing and known > 80


QUIET = {
    "normalize": F.normalize,
    "the loss of a Poisson distribution": lambda x: F.poisson_nll_loss(x, x.detach().abs(), reduction="none"),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x),
    "rrelu": lambda x: F.rrelu(x, training=False),
}


@pytest.mark.parametrize("function", QUIET.values(), ids=QUIET)
def test_deterministic_calls_of_random_ops_have_second_derivatives(function):
    plain = Applied(function, network(outputs=4)).double()
    fused, x = ogt.fuse(copy.deepcopy(plain)), torch.randn(4, 3, dtype=torch.float64)
    torch.testing.assert_close(gradients(fused, forces_of_all, x), gradients(plain, forces_of_all, x))


def forces_of_all(model, x):
    return torch.autograd.grad(model(x).square().sum(), x, create_graph=True)[0].square().sum()


@pytest.mark.parametrize("of", [drawn, normed], ids=lambda f: f.__name__)
def test_second_derivative_of_a_random_graph_is_refused(of):
    model, x = ogt.fuse(of(network())), torch.randn(4, 3, requires_grad=True)
    (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    with pytest.raises(Unimplemented, match="first derivatives alone"):
        slope.sum().backward()


class Square(torch.autograd.Function):
    """A function whose backward reads its saved tensors."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * 2 * x


class Straight(torch.autograd.Function):
    """A function whose backward computes nothing."""

    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Between(nn.Module):
    """A custom autograd function after a network; `whole` runs both, in a checkpoint or directly."""

    def __init__(self, function, whole):
        super().__init__()
        self.inner, self.function, self.whole = network(outputs=3), function, whole

    def forward(self, x):
        return self.whole(lambda x: self.function(self.inner(x)).square(), x)


def as_they_are(f, x):
    return f(x)


def in_a_checkpoint(f, x):
    return torch.utils.checkpoint.checkpoint(f, x, use_reentrant=False)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")
@pytest.mark.parametrize("whole", [as_they_are, in_a_checkpoint], ids=lambda f: f.__name__)
def test_second_derivative_of_custom_backward_with_ops_is_refused(whole):
    """Dynamo's graph does not show which part of it is under `no_grad`."""
    model, x = Between(lambda x: Square.apply(x), whole), torch.randn(4, 3, requires_grad=True)
    want = torch.autograd.grad(model(x).sum(), x)[0]
    (slope,) = torch.autograd.grad(ogt.fuse(model)(x).sum(), x, create_graph=True)
    torch.testing.assert_close(slope, want)
    with pytest.raises(Unimplemented, match="first derivatives alone"):
        slope.sum().backward()


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")
def test_custom_backward_without_ops_has_second_derivatives():
    model, x = Between(lambda x: Straight.apply(x), as_they_are), torch.randn(4, 3, requires_grad=True)
    want = gradients(copy.deepcopy(model), forces, x)
    for got, right in zip(gradients(ogt.fuse(model), forces, x), want, strict=True):
        torch.testing.assert_close(got, right)


@pytest.mark.parametrize("is_attribute", [False, True], ids=["an argument", "an attribute"])
def test_changing_float_arguments_allow_second_derivatives(is_attribute):
    """Dynamo passes a float that changes as a tensor, which is freed after the call."""

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.factor = network(), 1.0

        def forward(self, x, factor):
            return self.inner(x) * (self.factor if is_attribute else factor)

    model, x = Scaled().double(), torch.randn(4, 3, dtype=torch.float64)
    eager, fused = copy.deepcopy(model), ogt.fuse(model)
    for factor in (1.0, 1.5, 2.0):
        eager.factor = fused.factor = factor
        want, got = (
            gradients(m, lambda m, x, factor=factor: forces(lambda x: m(x, factor), x), x) for m in (eager, fused)
        )
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b)


def test_second_derivative_after_write_into_an_input_is_refused():
    model, x = ogt.fuse(network()), torch.randn(4, 3, requires_grad=True)
    y = model(x).sum()
    with torch.no_grad():
        model[3].bias.add_(1)  # no backward pass reads it
    (slope,) = torch.autograd.grad(y, x, create_graph=True)
    with pytest.raises(Unimplemented, match="first derivatives alone"):
        slope.sum().backward()


@pytest.mark.parametrize(
    "fn",
    [lambda x: F.gumbel_softmax(x * 2).sin(), lambda x: F.dropout((x * 2).sin(), 0.5).exp()],
    ids=["gumbel softmax", "dropout"],
)
@pytest.mark.parametrize("is_leaf", [True, False])
def test_second_derivative_of_detached_random_graph_is_refused(fn, is_leaf):
    """AOTAutograd's gradient depends on no input then, and `allow_unused` would give None."""
    leaf = torch.rand(2, 4, 8, requires_grad=True)
    x = leaf if is_leaf else leaf * 3
    y = torch.compile(fn, backend="opgraph", fullgraph=True)(x)
    (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    with pytest.raises(Unimplemented, match="first derivatives alone"):
        torch.autograd.grad(slope.square().sum(), leaf, allow_unused=True)


def test_constant_gradient_may_be_differentiated():
    """Example: dropout alone keeps no tensor that depends on its inputs."""
    x = torch.rand(2, 4, 8, requires_grad=True)
    y = torch.compile(lambda x: x * 2 + F.dropout(x, 0.5), backend="opgraph", fullgraph=True)(x)
    (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    assert slope.requires_grad or torch.__version__ < (2, 13)  # in 2.11 as in eager torch
    if slope.requires_grad:
        assert torch.autograd.grad(slope.sum(), x, allow_unused=True) == (None,)


class Heads(nn.Module):
    """Results of which each reads other parameters, and one that is detached."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x):
        h = torch.tanh(self.a(x))
        return h, x @ self.b.weight, h.detach().mean()


def test_unused_result_leaves_second_gradients_undefined():
    found = []
    for model in (Heads(), ogt.fuse(Heads())):
        x = torch.ones(2, 3, requires_grad=True)
        (slope,) = torch.autograd.grad(model(x)[0].sum(), x, create_graph=True)
        slope.square().sum().backward()
        assert model.b.weight.grad is None
        found.append([slope, x.grad, model.a.weight.grad])
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("frozen", ["parameters", "nothing"])
def test_parameters_may_be_frozen_between_forward_and_backward(frozen):
    found = []
    for model in (network(), ogt.fuse(network())):
        x = torch.full((2, 3), 0.5, requires_grad=True)
        y = model(x).sum()
        model.requires_grad_(frozen == "nothing")
        (slope,) = torch.autograd.grad(y, x, create_graph=True)
        slope.square().sum().backward()
        found.append(x.grad)
    torch.testing.assert_close(*found)


def test_recomputed_graph_ignores_the_callers_autocast():
    class Steep(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.w = nn.Parameter(torch.randn(3, 3))

        def forward(self, x):
            return torch.sin(100 * (x @ self.w)) + x

    found = []
    for model in (Steep(), ogt.fuse(Steep())):
        x = torch.linspace(-1, 1, 6).view(2, 3).requires_grad_()
        y = model(x).sum()
        with torch.autocast("cpu", torch.bfloat16):
            found.append(torch.autograd.grad(y, x, create_graph=True)[0])
    torch.testing.assert_close(*found, rtol=0.02, atol=1.0)  # eager's products are in bf16


def test_second_derivative_through_a_freed_argument_is_refused():
    """Backward may start at gradients of the leaves alone, which no parameter of the model leads to."""
    before, model = nn.Linear(3, 3), ogt.fuse(nn.Sequential(nn.Tanh(), nn.Linear(3, 1, bias=False)))
    (slope,) = torch.autograd.grad(model(before(torch.ones(4, 3))).sum(), model[1].weight, create_graph=True)
    with pytest.raises(Unimplemented, match="first derivatives alone"):
        torch.autograd.grad(slope.square().sum(), list(before.parameters()))


def test_second_derivative_of_a_write_into_an_input_is_refused():
    class Adds(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(3, 3))

        def forward(self, h, x):
            h.add_(torch.tanh(x) @ self.w)

    model, h, x = ogt.fuse(Adds()), torch.zeros(2, 3), torch.ones(2, 3, requires_grad=True)
    model(h, x)
    (slope,) = torch.autograd.grad(h.sum(), model.w, create_graph=True)
    with pytest.raises(Unimplemented, match="first derivatives alone"):
        torch.autograd.grad(slope.square().sum(), x)
