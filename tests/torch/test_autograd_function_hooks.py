"""Custom autograd functions are followed under any name of `apply`, and left alone outside `functions_on_stack`."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.function import FunctionMeta

import opgraph.torch as ogt
from opgraph.torch.autograd_function_hooks import RUN, functions_on_stack
from opgraph.torch.inplace.source_position import frames_of

#: Dynamo instantiates torch.autograd.Function when it traces one, which torch deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated")


class Scaled(torch.autograd.Function):
    """x * y * factor, with a context made by setup_context."""

    @staticmethod
    def forward(x: torch.Tensor, y: torch.Tensor, factor: float = 3.0) -> torch.Tensor:
        note()
        return torch.sigmoid(x) * y * factor

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        x, y, ctx.factor = inputs
        gate = torch.sigmoid(x) * 1.0
        ctx.save_for_backward(gate, y)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        gate, y = ctx.saved_tensors
        (d,) = grads
        return d * y * ctx.factor * gate * (1 - gate), d * gate * ctx.factor, None


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        note()
        return x * 2 + 0

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * 2


seen: list[list[Any]] = []


def note() -> None:
    if not torch.compiler.is_compiling():
        seen.append([(f.f_locals["function"], f.f_locals["given"]) for f in frames_of(RUN)])


scaled, doubled = Scaled.apply, Doubled.apply


class Model(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = torch.sigmoid(x) * x
        result: torch.Tensor = scaled(gate + 1, x * 0.5) * torch.tanh(doubled(gate)) + Scaled.apply(gate, x, 2.0)
        return result


def test_custom_function_with_own_context_has_gradient_in_fused_module() -> None:
    grads = []
    for model in (Model(), ogt.fuse(Model())):
        x = torch.linspace(-2, 2, 9, dtype=torch.float64, requires_grad=True)
        y = model(x)
        y.backward(torch.ones_like(y))
        grads.append((y.detach(), x.grad))
    torch.testing.assert_close(grads[1], grads[0])
    assert not any(type(t) is not torch.Tensor for pair in grads for t in pair)


def test_stack_lists_running_function_and_its_arguments() -> None:
    x, y = torch.ones(2), torch.ones(2)
    seen.clear()
    with functions_on_stack():
        scaled(x, y)
        doubled(x)
    scaled(x, y)
    (first,), (second,), after = seen
    assert first[0] is Scaled and first[1][0] is x and first[1][1] is y
    assert second[0] is Doubled and len(second[1]) == 1 and second[1][0] is x
    assert after == []


def test_function_stack_is_per_thread_and_leaves_no_hook() -> None:
    seen.clear()
    with functions_on_stack():
        other = threading.Thread(target=doubled, args=(torch.ones(2),))
        other.start()
        other.join()
        assert seen.pop() == []
        with functions_on_stack():
            pass
        doubled(torch.ones(2))
        assert len(seen.pop()) == 1
    assert "__getattribute__" not in vars(FunctionMeta)


def test_ops_beside_a_failing_custom_function_are_fused() -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            raise ValueError("no")

    class Tries(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with contextlib.suppress(ValueError):
                Fails.apply(x + 1)
            return torch.sigmoid(x) * x

    report = ogt.explain(ogt.fuse(Tries()), torch.ones(3))
    assert report.units["swish"] == 1


def test_nested_fused_modules_pass_gradients_under_saved_tensor_hooks() -> None:

    class Inner(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = doubled(x) * torch.tanh(x)
            return result

    class Outer(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.sigmoid(x) * x
            with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
                result: torch.Tensor = self.inner(y)
            return result + 1

    grads = []
    for model in (Outer(Inner()), ogt.fuse(Outer(ogt.fuse(Inner())))):
        x = torch.linspace(-2, 2, 9, dtype=torch.float64, requires_grad=True)
        model(x).sum().backward()
        grads.append(x.grad)
    torch.testing.assert_close(grads[1], grads[0])
