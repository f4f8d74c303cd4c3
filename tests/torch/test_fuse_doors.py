"""Operations in a fused model's forward, besides arithmetic, that no mode sees: values are eager's all the same."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402

import opgraph.torch as ogt  # noqa: E402


def swish(t: Tensor) -> Tensor:
    return t * torch.sigmoid(t)


class Model(nn.Module):
    """A module that applies a function to x and a parameter."""

    def __init__(self, body: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.body = body
        self.a = nn.Parameter(torch.full((6,), 0.7))

    def forward(self, x: Any) -> Any:
        return self.body(x, self.a)


def results(body: Callable[[Any, Any], Any], *, fused: bool) -> list[Any]:
    """The output, and gradients of input and parameter."""
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0)).requires_grad_()
    model = Model(body)
    y = (ogt.fuse(model) if fused else model)(x)
    return [y, *torch.autograd.grad((y * torch.arange(y.numel()).reshape(y.shape)).sum(), [x, model.a])]


def outside(x: Any, a: Any) -> tuple[Any, Any]:
    """A transform's input, and a value that its function reads from outside; both are deferred."""
    return x * 2 + a, torch.tanh(x * a)


def grad(x: Any, a: Any) -> Any:
    y, z = outside(x, a)
    return torch.func.grad(lambda t: (swish(t) * z).sum())(y) * 2 + y


def vmap(x: Any, a: Any) -> Any:
    y, z = outside(x, a)
    return torch.vmap(lambda t: t * z.sum(0) + swish(t))(y) * 2


def vmap_of_integers(x: Any, a: Any) -> Any:
    return torch.vmap(lambda t: t * 2)(torch.arange(6) * 1.0 + 1) + x * a


def jvp(x: Any, a: Any) -> Any:
    y, z = outside(x, a)
    return torch.func.jvp(lambda t: (t @ z.t()).sin(), (y,), (torch.ones_like(y),))[1]


def functional_call(x: Any, a: Any) -> Any:
    linear = nn.Linear(6, 6)
    return torch.func.functional_call(linear, {"weight": torch.eye(6) * 2 + a, "bias": a * 3 + 1}, x * 2)


def script(x: Any, a: Any) -> Any:
    return torch.jit.script(swish)(x * a + 1) * 2


@pytest.mark.parametrize("body", [grad, vmap, vmap_of_integers, jvp, functional_call, script], ids=lambda f: f.__name__)
@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_transforms_and_torchscript_accept_deferred_values(body: Callable[[Any, Any], Any]) -> None:
    torch.testing.assert_close(results(body, fused=True), results(body, fused=False))


WRITERS: dict[str, Callable[[Any], Any]] = {
    "numpy": lambda x: x.numpy().fill(9),
    "asarray": lambda x: np.asarray(x).fill(9),
    "dlpack": lambda x: torch.from_dlpack(x).fill_(9),
    "storage": lambda x: x.untyped_storage().fill_(0),
    "storage_copy": lambda x: x.untyped_storage().copy_(torch.full((3,), 9.0).untyped_storage()),
    "storage_resize": lambda x: x.untyped_storage().resize_(0),
    "address": lambda x: ctypes.memset(x.data_ptr(), 1, 12),
}


@pytest.mark.parametrize("name", WRITERS)
def test_memory_exported_from_a_tensor_may_be_written(name: str) -> None:
    def body(x: Any, a: Any) -> Any:
        y = x * 2 + 1
        WRITERS[name](x)
        return y

    got = ogt.fuse(Model(body))(torch.tensor([1.0, 2.0, 3.0]))
    assert got.tolist() == [3.0, 5.0, 7.0]


@pytest.mark.parametrize("grad_mode", [contextlib.nullcontext, torch.no_grad])
def test_detached_deferred_value_requires_no_grad(grad_mode: Callable[[], Any]) -> None:
    seen: list[bool] = []

    def body(x: Any, a: Any) -> Any:
        with grad_mode():
            y = x * a + 1
            z = y.detach()
            seen.extend((y.requires_grad, z.requires_grad, (z * 2 + 1).requires_grad))
        return y * z

    for fused in (False, True):
        x = torch.ones(6, requires_grad=True)
        model = Model(body)
        (ogt.fuse(model) if fused else model)(x)
    assert seen[:3] == seen[3:] == [grad_mode is contextlib.nullcontext, False, False]


def test_lazy_module_initializes_inside_fused_forward() -> None:
    class Lazily(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.LazyLinear(5)

        def forward(self, x: Any) -> Any:
            return swish(self.layer(x * 2 + 1)) * 2

    torch.manual_seed(0)
    model = ogt.fuse(Lazily())
    x = torch.ones(2, 3)
    got = model(x)
    torch.testing.assert_close(
        got, swish(torch.nn.functional.linear(x * 2 + 1, model.layer.weight, model.layer.bias)) * 2
    )
