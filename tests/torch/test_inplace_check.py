"""Every silent in-place mistake is found at its line, and correct in-place code is not reported."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402, N812

import opgraph.torch as ogt  # noqa: E402


class KeepsOnContext(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.mark_dirty(x)
        ctx.x = x
        x.mul_(torch.sigmoid(x))  # planted
        return x

    @staticmethod
    def backward(ctx: Any, d: Any) -> Any:
        s = torch.sigmoid(ctx.x)
        return d * s * (1 + ctx.x * (1 - s))


class SavesAndDirties(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.save_for_backward(x)
        ctx.mark_dirty(x)
        x.mul_(torch.sigmoid(x))  # planted
        return x

    @staticmethod
    def backward(ctx: Any, d: Any) -> Any:
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(x)
        return d * s * (1 + x * (1 - s))


class NotDirtied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        x.mul_(3)  # planted
        return x * 1

    @staticmethod
    def backward(ctx: Any, d: Any) -> Any:
        return d * 3


class Overwriting(torch.autograd.Function):
    """A gated product whose backward writes the gradients to the saved inputs."""

    @staticmethod
    def forward(ctx: Any, a: Any, b: Any) -> Any:
        ctx.save_for_backward(a, b)
        return F.silu(a) * b

    @staticmethod
    def backward(ctx: Any, d: Any) -> Any:
        a, b = ctx.saved_tensors
        s = torch.sigmoid(a)
        db = d * a * s
        a.copy_(d * b * s * (1 + a * (1 - s)))  # planted
        b.copy_(db)
        return a, b


class RightInplaceReLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        x.relu_()
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx: Any, d: Any) -> Any:
        (y,) = ctx.saved_tensors
        return d * (y > 0)


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        x.round_()
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, d: Any) -> Any:
        return d


def sigmoid_squared(input: Any) -> Any:
    return input * torch.sigmoid_(input)  # planted


def fresh_sigmoid_squared(x: Any) -> Any:
    h = x * 2
    return h * h.sigmoid_()  # planted


def written_first(x: Any) -> Any:
    h = x * 2
    return torch.sigmoid_(h) + h * 2  # planted


def by_a_call(x: Any) -> Any:
    h = x * 2
    return torch.mul(
        h,
        h.tanh_(),  # planted
    )


def by_a_method(x: Any) -> Any:
    h = x * 2
    return h.mul_(h.sigmoid_())  # planted


def augmented(x: Any) -> Any:
    h = x * 2
    h *= h.sigmoid_()  # planted
    return h


def by_a_module(x: Any) -> Any:
    h = x * 2
    act = nn.Hardsigmoid(inplace=True)
    return h * act(h)  # planted


def through_a_function(x: Any) -> Any:
    def product(a: Any, b: Any) -> Any:
        return a * b

    h = x * 2
    return product(h, h.sigmoid_())  # planted


def in_two_statements(x: Any) -> Any:
    h = x * 2
    gate = h.sigmoid_()  # planted
    return h * gate


def residual_overwritten(x: Any) -> Any:
    h = x * 2
    identity = h
    h += 1  # planted
    return h.tanh() + identity * 0 + torch.add(h, identity)


def residual_and_relu(x: Any) -> Any:
    h = x * 2
    return F.relu(h, inplace=True) + torch.tanh(h)  # planted


def data_after_save(x: Any) -> Any:
    h = torch.sigmoid(x)
    y = h * h
    h.data.mul_(2)  # planted
    return y


def detached_after_save(x: Any) -> Any:
    h = torch.exp(x)
    y = h.sin()
    h.detach().mul_(2)  # planted
    return y


def no_grad_after_save(x: Any) -> Any:
    h = torch.exp(x)
    y = h.sin()
    with torch.no_grad():
        h.mul_(2)  # planted
    return y


def relu_then_dropout(x: Any) -> Any:
    h = F.relu_(x * 2)
    return F.dropout(h, 0.5, inplace=True)  # planted


def relu_then_added(x: Any) -> Any:
    h = F.relu(x * 2)
    h += 1
    return h


def times_its_data(x: Any) -> Any:
    h = x * 2
    h.mul_(h.data)  # planted
    return h


def augmented_with_its_data(x: Any) -> Any:
    h = x * 2
    h *= h.data  # planted
    return h


def interpolated_to_its_data(x: Any) -> Any:
    h = x * 2
    h.lerp_(x * 3, h.data)  # planted
    return h


def relu_of_a_sigmoid(x: Any) -> Any:
    return x.sigmoid().relu_()  # planted


def row_from_another_row(x: Any) -> Any:
    h = torch.stack([x, x])
    h[1] = h[0].sin()  # planted
    return h.sum(0)


def kept_constant_by_swish(x: Any) -> Any:
    factor = torch.full((4,), 2.0)
    y = x * factor
    ogt.Swish(inplace=True)(factor)  # planted
    return y


def unseen_swish(x: Any) -> Any:
    h = x * 2
    with torch.no_grad():
        ogt.Swish(inplace=True)(h)  # planted
    return h * 3


def one_of_several_views(x: Any) -> Any:
    h = (x * 2).unbind(0)
    h[0].mul_(2)  # planted
    return h[0] + h[1]


def view_made_without_gradients(x: Any) -> Any:
    h = x * 2
    with torch.no_grad():
        row = h[0]
    row.mul_(2)  # planted
    return h


def after_a_backward_of_its_own(x: Any) -> Any:
    h = x * 3
    torch.autograd.grad((h * h).sum(), h)
    factor = torch.ones(4)
    y = torch.exp(x) * factor
    factor.data.zero_()  # planted
    return y


def beside_a_freed_graph(x: Any) -> Any:
    loss = torch.sin(x * 3).sum()
    torch.autograd.grad(loss, x)
    factor = torch.ones(4)
    y = torch.exp(x) * factor
    factor.data.zero_()  # planted
    return loss, y


def unseen(x: Any) -> Any:
    h = x + 1
    h.data.mul_(2)  # planted
    return h + 1


def unseen_gate(x: Any) -> Any:
    h = x * 2
    h.data.mul_(h.sigmoid())  # planted
    return h * h


def unseen_copy(x: Any) -> Any:
    h = x * 2
    gate = h.sigmoid()
    h.data.copy_(gate)  # planted
    return h * gate


def kept_on_context(x: Any) -> Any:
    return KeepsOnContext.apply(x * 1)


def saved_and_dirtied(x: Any) -> Any:
    return SavesAndDirties.apply(x * 1)


def not_dirtied(x: Any) -> Any:
    return NotDirtied.apply(x * 1)


def overwritten_in_backward(x: Any) -> Any:
    return Overwriting.apply(x * 2, x + 1)


def overwritten_under_its_producer(x: Any) -> Any:
    return Overwriting.apply(x * 2, torch.exp(x))


def argument_changed(x: Any) -> Any:
    x += 1  # planted
    return x * 2


MISTAKES = [
    (sigmoid_squared, "operand", None),
    (fresh_sigmoid_squared, "operand", None),
    (written_first, "operand", None),
    (by_a_call, "operand", None),
    (by_a_method, "operand", None),
    (augmented, "operand", None),
    (by_a_module, "operand", None),
    (through_a_function, "operand", None),
    (in_two_statements, "operand", None),
    (residual_overwritten, "operand", None),
    (residual_and_relu, "operand", None),
    (data_after_save, "saved", None),
    (detached_after_save, "saved", None),
    (no_grad_after_save, "saved", None),
    (relu_then_dropout, "saved", None),
    (times_its_data, "saved", None),
    (augmented_with_its_data, "saved", None),
    (interpolated_to_its_data, "saved", None),
    (relu_of_a_sigmoid, "saved", None),
    (row_from_another_row, "saved", None),
    (kept_constant_by_swish, "saved", None),
    (unseen_swish, "hidden", None),
    (one_of_several_views, "refused", None),
    (view_made_without_gradients, "refused", None),
    (after_a_backward_of_its_own, "saved", None),
    (beside_a_freed_graph, "saved", None),
    (unseen, "hidden", None),
    (unseen_gate, "hidden", None),
    (unseen_copy, "hidden", None),
    (kept_on_context, "function", KeepsOnContext),
    (saved_and_dirtied, "function", SavesAndDirties),
    (not_dirtied, "function", NotDirtied),
    (overwritten_in_backward, "backward", Overwriting),
    (overwritten_under_its_producer, "backward", Overwriting),
    (argument_changed, "argument", None),
]


@pytest.fixture(params=MISTAKES, ids=lambda m: m[0].__name__)
def mistake(request: Any) -> Any:
    return request.param


def planted_line(thing: Any) -> int:
    lines, first = inspect.getsourcelines(thing)
    return next(first + i for i, line in enumerate(lines) if "# planted" in line)


def values() -> Any:
    return torch.linspace(-2, 2, 12).reshape(3, 4)


def test_in_place_mistake_is_reported_at_its_line(mistake: tuple[Callable[[Any], Any], str, Any]) -> None:
    function, kind, where = mistake
    report = ogt.check_inplace(function, values())
    found = [f for f in report if f.kind == kind]
    assert found, f"{report}"
    assert {f.line for f in found} >= {planted_line(where or function)}, f"{report}"
    assert found[0].file == __file__
    assert "planted" in found[0].code
    assert found[0].fix and found[0].value and found[0].what


class Float32Alone(SavesAndDirties):
    """A float32-only function with a further float32 argument, and one of integers."""

    @staticmethod
    def forward(ctx: Any, x: Any, scale: Any, places: Any) -> Any:
        if x.dtype is not torch.float32 or places.dtype is not torch.int64:
            raise TypeError(x.dtype)
        return SavesAndDirties.forward(ctx, x)

    @staticmethod
    def backward(ctx: Any, d: Any) -> Any:
        return SavesAndDirties.backward(ctx, d), None, None


@pytest.mark.filterwarnings("error")
def test_float32_only_function_is_checked_in_float32() -> None:
    scale, places = torch.ones(4), torch.arange(4)
    (found,) = ogt.check_inplace(lambda x: Float32Alone.apply(x * 1, scale, places), values())
    assert found.kind == "function" and found.line == planted_line(SavesAndDirties)


def test_in_place_mistake_is_found_in_non_contiguous_tensor() -> None:
    assert {f.kind for f in ogt.check_inplace(fresh_sigmoid_squared, values().t()[1:])} == {"operand"}


# -- correct forms ----------------------------------------------------------------------------------------------------


def out_of_place(x: Any) -> Any:
    return x * torch.sigmoid(x)


def silu_on_a_fresh_value(x: Any) -> Any:
    return F.silu(x * 2, inplace=True)


def relu_on_a_fresh_value(x: Any) -> Any:
    h = x * 2
    h.relu_()
    return h


def plus_one(x: Any) -> Any:
    h = x * 2
    h += 1
    return h * h


def swish_in_place(x: Any) -> Any:
    h = x * 2
    return h.mul_(torch.sigmoid(h))


def squared_after(x: Any) -> Any:
    h = x * 2
    h.sigmoid_()
    return h * h


def chained(x: Any) -> Any:
    h = x * 2
    return h.mul_(2).add_(1).view(h.size(0), -1).relu_()


def consumed_before(x: Any) -> Any:
    h = x * 2
    return (h + 1) * torch.sigmoid_(h)


def filled(x: Any) -> Any:
    y = torch.zeros(3, 8)
    y[:, :4] = x
    y[:, 4:] = x * 2
    return y


def accumulated(x: Any) -> Any:
    total = torch.zeros_like(x)
    for k in range(3):
        total += x**k
    return total


def into_a_buffer(x: Any) -> Any:
    buffer = torch.empty_like(x)
    with torch.no_grad():
        torch.sigmoid(x, out=buffer)
    return x * buffer


def own_copy(x: Any) -> Any:
    x = x.clone()
    x.clamp_(min=0)
    return x.sum()


def attended(x: Any) -> Any:
    def attention(q: Any, k: Any, v: Any) -> Any:
        return torch.softmax(q @ k.transpose(0, 1), -1) @ v

    h = (x * 2).relu_()
    return attention(h, h, h)


def times_its_relu(x: Any) -> Any:
    h = x * 2
    return h * h.relu_()  # relu(h) squared, whichever value is read


def side_by_side(x: Any) -> Any:
    h = x * 2
    return h.relu_(), h.mean()


def right_function(x: Any) -> Any:
    return RightInplaceReLU.apply(x * 1)


def straight_through(x: Any) -> Any:
    return StraightThrough.apply(x * 1)


def step_of_an_optimizer(x: Any) -> Any:
    weight = torch.ones(4, requires_grad=True)
    for _ in range(3):
        loss = (torch.tanh(x.detach() * weight) ** 2).sum()
        loss.backward()
        with torch.no_grad():
            weight -= 0.1 * weight.grad
            weight.grad.zero_()
    return loss


def several_losses(x: Any) -> Any:
    weight = torch.ones(4, requires_grad=True)
    ema = torch.ones(4)
    losses = []
    for _ in range(2):
        y = torch.tanh(x * weight)
        losses.append((y * y).sum())
        losses[-1].backward(retain_graph=False)
        with torch.no_grad():
            weight -= 0.1 * weight.grad
            weight.grad.zero_()
            ema.lerp_(weight, 0.1)
        x = x.detach().requires_grad_()
    return losses, torch.sin(x * weight)


def gradient_penalty(x: Any) -> Any:
    y = torch.tanh(x * 2)
    (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    slope += 1
    return y + slope.pow(2)


def scaled_(x: Any) -> Any:
    return x.mul_(2)


def randomly_leaky(x: Any) -> Any:
    return F.rrelu(x, training=True)


def randomly_leaky_in_place(x: Any) -> Any:
    return torch.rrelu_(x * 2, training=True)


def times_its_opgraph_relu(x: Any) -> Any:
    h = x * 2
    return h * ogt.Activation(torch.relu, inplace=True)(h)


def opgraph_modules_in_place(x: Any) -> Any:
    factor = ogt.Swish(inplace=True)(torch.full((4,), 2.0))
    return ogt.Swish(inplace=True)(x * factor) + ogt.Activation(torch.relu, inplace=True)(x + 1)


def fills(x: Any) -> None:
    x.zero_()


RIGHT = [
    out_of_place,
    silu_on_a_fresh_value,
    relu_on_a_fresh_value,
    plus_one,
    swish_in_place,
    squared_after,
    chained,
    consumed_before,
    filled,
    accumulated,
    into_a_buffer,
    own_copy,
    attended,
    times_its_relu,
    side_by_side,
    right_function,
    straight_through,
    step_of_an_optimizer,
    several_losses,
    gradient_penalty,
    scaled_,
    fills,
    randomly_leaky,
    randomly_leaky_in_place,
    times_its_opgraph_relu,
    opgraph_modules_in_place,
]


@pytest.fixture(params=RIGHT, ids=lambda f: f.__name__)
def right(request: Any) -> Any:
    return request.param


def test_correct_in_place_code_is_not_reported(right: Callable[[Any], Any]) -> None:
    report = ogt.check_inplace(right, values())
    assert report.ok, f"{report}"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)
        self.norm = nn.BatchNorm2d(3)
        self.act = nn.ReLU(inplace=True)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Any) -> Any:
        identity = x
        out = self.act(self.norm(self.conv(x)))
        out = self.norm(self.conv(out))
        out += identity
        return self.drop(self.act(out))


def test_correct_residual_block_is_not_reported_and_its_state_restored() -> None:
    block = Block().train()
    before = {k: v.clone() for k, v in block.state_dict().items()}
    report = ogt.check_inplace(block, torch.randn(2, 3, 8, 8))
    assert report.ok, f"{report}"
    assert all(torch.equal(v, before[k]) for k, v in block.state_dict().items())
    assert all(p.grad is None for p in block.parameters())
    torch.manual_seed(0)
    random = torch.get_rng_state()
    ogt.check_inplace(block, torch.ones(2, 3, 8, 8))
    assert torch.equal(random, torch.get_rng_state())


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))
        self.register_buffer("cache", None)
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Any) -> Any:
        self.calls = self.calls + 1
        self.cache = x.detach()
        self.weight = nn.Parameter(self.weight.detach() * 2)
        return x * self.weight


def test_replaced_buffers_and_parameters_are_restored() -> None:
    module = Counting()
    calls, weight = module.calls, module.weight
    assert ogt.check_inplace(module, values()).ok
    assert module.calls is calls and module.cache is None and module.weight is weight
    assert torch.equal(calls, torch.zeros(1)) and torch.equal(weight, torch.ones(4)) and weight.grad is None


class BlockWithAMistake(Block):
    def forward(self, x: Any) -> Any:
        h = self.norm(self.conv(x))
        return self.act(h) + self.conv(h)  # planted


def test_in_place_mistake_inside_a_module_is_found() -> None:
    (found,) = ogt.check_inplace(BlockWithAMistake().train(), torch.randn(2, 3, 8, 8))
    assert (found.kind, found.line) == ("operand", planted_line(BlockWithAMistake))


def test_check_inplace_leaves_arguments_unchanged() -> None:
    x = values()
    kept, version = x.clone(), x._version
    ogt.check_inplace(sigmoid_squared, x)
    assert torch.equal(x, kept)
    assert x._version == version
    assert not x.requires_grad


def test_may_change_allows_writes_into_an_argument() -> None:
    assert not ogt.check_inplace(argument_changed, values()).ok
    assert ogt.check_inplace(argument_changed, values(), may_change=(0,)).ok


def test_inplace_module_may_change_its_argument() -> None:
    assert ogt.check_inplace(nn.SiLU(inplace=True), values()).ok


def test_mistakes_that_torch_reports_are_not_marked_silent() -> None:
    silent = {f.silent for f in ogt.check_inplace(data_after_save, values())}
    loud = {f.silent for f in ogt.check_inplace(no_grad_after_save, values())}
    assert (silent, loud) == ({True}, {False})
    (found,) = ogt.check_inplace(relu_then_added, values())
    assert not found.silent and found.fix == "use add instead of add_ here, or write into a clone"


@pytest.mark.parametrize("function", [relu_of_a_sigmoid, row_from_another_row, kept_constant_by_swish])
def test_write_that_makes_torch_raise_in_backward_is_reported(function: Any) -> None:
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        function(values().requires_grad_()).sum().backward()
    (found,) = ogt.check_inplace(function, values())
    assert not found.silent and "torch raises in backward" in found.what


@pytest.mark.parametrize("function", [one_of_several_views, view_made_without_gradients])
def test_write_that_torch_refuses_in_forward_is_reported_with_its_error(function: Any) -> None:
    with pytest.raises(RuntimeError) as error:
        function(values().requires_grad_())
    for x in (values(), values().requires_grad_()):
        (found,) = ogt.check_inplace(function, x)
        assert not found.silent and str(error.value)[-60:] in found.what


def test_function_with_an_op_without_a_derivative_is_checked_without_gradients() -> None:
    assert ogt.check_inplace(lambda x: torch.sigmoid(x, out=torch.empty(3, 4)), values()).ok
    (found,) = ogt.check_inplace(lambda x: torch.sigmoid(x, out=x), values())
    assert found.kind == "argument"
    with pytest.raises(RuntimeError, match="must match the size"):
        ogt.check_inplace(lambda x: x.mul_(torch.ones(5)), values())


def test_report_has_text_and_dict_forms() -> None:
    report = ogt.check_inplace(sigmoid_squared, values())
    assert f"{__file__}:{planted_line(sigmoid_squared)}" in str(report)
    assert "sigmoid instead of sigmoid_" in str(report)
    assert report.to_dict()["findings"][0]["line"] == planted_line(sigmoid_squared)
    assert str(ogt.check_inplace(out_of_place, values())) == "no in-place mistake was found"


class Masked(nn.Module):
    def __init__(self, mistaken: bool) -> None:
        super().__init__()
        self.linear, self.dropout, self.mistaken = nn.Linear(8, 8), nn.Dropout(0.2), mistaken

    def forward(self, x: Any) -> Any:
        x = self.dropout(F.gelu(self.linear(x)))
        if self.mistaken:
            x = x * torch.sigmoid_(x)  # planted
        return x.masked_fill(torch.ones(3, 8, dtype=torch.bool).triu(1), -9.0).softmax(-1).mean()


@pytest.mark.parametrize("mistaken", [False, True])
@pytest.mark.parametrize("compiled", [ogt.fuse, lambda model: torch.compile(model, backend="opgraph")])
def test_fused_model_is_checked_in_its_eager_form(compiled: Any, mistaken: bool) -> None:
    torch._dynamo.reset()
    x = torch.randn(2, 3, 8)
    wanted = {f.line for f in ogt.check_inplace(Masked(mistaken), x)}
    model = compiled(Masked(mistaken))
    for _ in range(2):
        assert {f.line for f in ogt.check_inplace(model, x)} == wanted
        model(x)
    assert bool(wanted) == mistaken


def test_check_inplace_refuses_non_callables() -> None:
    with pytest.raises(ogt_error(), match=r"(?s)no function.*where:.*fix:"):
        ogt.check_inplace(3, values())  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["nested", "sparse coo", "meta"])
def test_nested_sparse_and_meta_tensors_are_refused(kind: str) -> None:
    rows = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    x = {"nested": rows, "sparse coo": torch.eye(3).to_sparse(), "meta": torch.ones(3, device="meta")}[kind]
    with pytest.raises(ogt_error(), match=f"(?s)argument 1 is a {kind} tensor.*where:.*fix:"):
        ogt.check_inplace(torch.add, torch.ones(1), x)
    with pytest.raises(ogt_error(), match=f"(?s)argument 'other' is a {kind} tensor"):
        ogt.check_inplace(torch.add, torch.ones(1), other=[x])


def ogt_error() -> type[Exception]:
    from opgraph.errors import InvalidArguments

    return InvalidArguments
