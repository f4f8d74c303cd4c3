"""Branches on parameters and buffers that a captured graph follows: each takes the side of the present values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import opgraph.torch as ogt
from opgraph.torch.graph.parameter_branches import BranchCheck
from opgraph.torch.naf1 import NAF1

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*fused partitions run op by op"),
    pytest.mark.usefixtures("interpreted_kernels"),
]


class Program(nn.Module):
    """A function of a matrix product and of the module; tensors that are no parameters are buffers."""

    def __init__(self, function: Callable[..., Any], values: dict[str, Any]) -> None:
        super().__init__()
        self.function = function
        for name, value in values.items():
            if isinstance(value, (nn.Parameter, nn.Module)):
                setattr(self, name, value)
            else:
                self.register_buffer(name, value)

    def forward(self, x: Any) -> Any:
        return self.function(self, x @ torch.eye(2))


def results(function: Callable[..., Any], values: Callable[[], dict[str, Any]], writes: list[Any], wrap: Any) -> list:
    """The results of calls, each after a write of (name, value); None writes nothing."""
    torch._dynamo.reset()
    model = wrap(Program(function, values()))
    found = []
    for write in writes:
        if write is not None:
            with torch.no_grad():
                getattr(model, write[0]).copy_(torch.as_tensor(write[1]))
        found.append(model(torch.ones(2, 2))[0, 0].item())
    return found


def parameter(value: Any, **kwargs: Any) -> nn.Parameter:
    return nn.Parameter(torch.tensor(value, **kwargs))


def reads_what_a_condition_reads(m, x):
    frozen = m.steps > 3
    if frozen | (m.p > 2):
        x = x * 2
    return x * 10 if frozen else x


def within_autocast(m, x):
    with torch.autocast("cpu", torch.bfloat16):
        is_large = m.a @ m.b > 1.001
    return x * 2 if is_large else x * 3


def of_two(m, x):
    _, place = m.w.max(0)
    return x * 2 if place else x * 3


HALF = {"dtype": torch.float16}
PROGRAMS: dict[str, tuple[Callable[..., Any], Callable[[], dict[str, Any]], list[Any]]] = {
    "a condition that another one reads": (
        reads_what_a_condition_reads, lambda: {"steps": torch.tensor(0), "p": parameter(3.0)}, [None, ("steps", 5)],
    ),
    "or": (
        lambda m, x: x * (m.p or m.q), lambda: {"p": parameter(3.0), "q": parameter(5.0)},
        [None, ("p", 0.0), ("p", 2.0)],
    ),
    "or, a number": (
        lambda m, x: x + (m.p or 1.5), lambda: {"p": parameter(3.0)}, [None, ("p", 0.0), ("p", 2.0)],
    ),
    "and": (
        lambda m, x: x + (m.p and m.q), lambda: {"p": parameter(3.0), "q": parameter(4.0)},
        [None, ("p", 0.0), ("p", 2.0)],
    ),
    "autocast inside": (
        within_autocast, lambda: {"a": parameter([1.002, 0.0]), "b": parameter([1.0, 0.0])},
        [None, ("a", [1.0011, 0.0]), ("a", [1.01, 0.0]), ("a", [1.002, 0.0])],
    ),
    "an element": (
        lambda m, x: x * 2 if m.w[0] else x * 3, lambda: {"w": parameter([1.0, 0.0])}, [None, ("w", [0.0, 1.0])],
    ),
    "the second result": (of_two, lambda: {"w": parameter([1.0, 0.0])}, [None, ("w", [0.0, 1.0])]),
    "f16, rounded on the way": (
        lambda m, x: x * 2 if m.p * 3.3 - m.q > 0 else x * 3,
        lambda: {"p": parameter(0.333, **HALF), "q": torch.tensor(0.333, **HALF) * 3.3},
        [None, ("p", 0.5), ("p", 0.333)],
    ),
    "f16 that overflows on the way": (
        lambda m, x: x * 2 if m.p * m.p - m.p * m.p == 0 else x * 3, lambda: {"p": parameter(1.0, **HALF)},
        [None, ("p", 1000.0), ("p", 1.0)],
    ),
    "a gradient inside": (
        lambda m, x: x * torch.func.grad(lambda w: (w * w if w > 1 else w * 3).sum())(m.p),
        lambda: {"p": parameter(2.0)}, [None, ("p", 0.5)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", PROGRAMS)
def test_branch_follows_current_parameter_values(what) -> None:
    assert results(*PROGRAMS[what], ogt.fuse) == results(*PROGRAMS[what], lambda model: model)


def test_branch_on_a_sum_adds_in_torchs_order() -> None:
    def function(m, x):
        return x * 2 if (m.w * m.w.flip(0)).sum() > m.known else x * 3

    for seed in range(4):
        torch.manual_seed(seed)
        w = torch.randn(8)
        total = (w * w.flip(0)).sum()
        given = (
            function,
            lambda w=w: {"w": nn.Parameter(w.clone()), "known": torch.tensor(-99.0)},
            [None, ("known", total)],
        )
        assert results(*given, ogt.fuse) == results(*given, lambda model: model)


def looked_up(m, x):
    m.e(torch.tensor([[0, 1]]))
    return x * 2 if m.e.weight.norm() > 2 else x * 10


def table(kind: type[nn.Module]) -> dict[str, Any]:
    made = kind(2, 2, max_norm=1.0)
    nn.init.constant_(made.weight, 5.0)
    return {"e": made}


def by_position(call: Callable[[Any], Any]) -> Callable[..., Any]:
    def function(m, x):
        value = m.b.clone()
        call(value)
        return x * 2 if value.sum() > -3 else x * 3

    return function


def through_numpy(m, x):
    array = m.b.numpy()
    array[0] = 5.0
    return x * 2 if m.b.sum() > 1 else x * 3


def statistics(m, x):
    torch.instance_norm((x + 5).reshape(1, 2, 2), None, None, m.mean, m.var, True, 1.0, 1e-5, False)
    return x * 2 if m.mean.sum() > 1 else x * 3


def two() -> dict[str, Any]:
    return {"b": torch.tensor([-4.0, 0.5])}


WRITING: dict[str, tuple[Callable[..., Any], Callable[[], dict[str, Any]], list[Any]]] = {
    "Embedding(max_norm=)": (looked_up, lambda: table(nn.Embedding), [None]),
    "EmbeddingBag(max_norm=)": (looked_up, lambda: table(nn.EmbeddingBag), [None]),
    "relu(x, True)": (by_position(lambda t: functional.relu(t, True)), two, [None]),
    "silu(x, True)": (by_position(lambda t: functional.silu(t, True)), two, [None]),
    "leaky_relu(x, 0.1, True)": (by_position(lambda t: functional.leaky_relu(t, 0.1, True)), two, [None]),
    "hardtanh(x, -1, 1, True)": (by_position(lambda t: functional.hardtanh(t, -1.0, 1.0, True)), two, [None]),
    "dropout(x, 1, True, True)": (by_position(lambda t: functional.dropout(t, 1.0, True, True)), two, [None]),
    "torch.instance_norm": (statistics, lambda: {"mean": torch.zeros(2), "var": torch.ones(2)}, [None]),
    "NumPy": (through_numpy, lambda: {"b": torch.zeros(2)}, [None, ("b", [0.0, 0.0]), ("b", [0.0, -9.0])]),
}  # fmt: skip


@pytest.mark.parametrize("what", WRITING)
def test_branch_sees_writes_of_the_same_forward(what) -> None:
    assert results(*WRITING[what], ogt.fuse) == results(*WRITING[what], lambda model: model)


def test_branch_does_not_call_a_custom_op_twice() -> None:
    @torch.library.custom_op("opgraph_tests::noisy", mutates_args=())
    def noisy(t: torch.Tensor) -> torch.Tensor:
        return t + torch.rand(())

    noisy.register_fake(torch.empty_like)
    found = []
    for wrap in (ogt.fuse, lambda model: model):
        torch.manual_seed(7)
        given = lambda m, x: x * 2 if noisy(m.p) > 0.5 else x * 3, lambda: {"p": parameter(0.0)}, [None] * 6
        found.append(results(*given, wrap))
    assert found[0] == found[1]


def test_branch_conditions_of_naf1_are_one_kernel(monkeypatch) -> None:
    """torch's own ops take a millisecond for the branches of one NAF1."""
    checks = []

    class Noted(BranchCheck):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            checks.append(self)

    monkeypatch.setattr("opgraph.torch.graph.parameter_branches.BranchCheck", Noted)
    torch._dynamo.reset()
    ogt.fuse(nn.Sequential(nn.Linear(3, 3), NAF1()))(torch.ones(2, 3))
    (check,) = checks
    assert check._program is not None and len(check._program.launches) == 1
