"""One memory under several names in a captured graph: views in another dtype, views by strides, views of views."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from opgraph.torch.graph.backend import Captured, observed

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*fused partitions run op by op"),
    pytest.mark.usefixtures("interpreted_kernels"),
]


@pytest.fixture(autouse=True)
def _anew() -> None:
    torch._dynamo.reset()


def by_strides(x: Any) -> Any:
    return x.as_strided((3, 3), (1, 3))


def as_integers(x: Any) -> Any:
    return x.view(torch.int64)


def tensors() -> list[Any]:
    torch.manual_seed(0)
    return [torch.randn(3, 3, dtype=torch.float64) for _ in range(2)]


@pytest.mark.parametrize("read", [by_strides, as_integers])
@pytest.mark.parametrize("dynamic", [False, True])
def test_input_is_written_after_its_views_are_read(read: Any, dynamic: bool) -> None:
    def function(x: Any, w: Any) -> Any:
        a = read(x)
        late = (w.sin() @ w).cos() @ w
        made = a * late if a.is_floating_point() else a ^ late.view(torch.int64)
        x.mul_(2)
        return made

    def called(run: Any) -> list[Any]:
        x, w = tensors()
        return [run(x, w), x]

    expected = called(function)
    got = called(torch.compile(function, backend="opgraph", dynamic=dynamic))
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("read", [by_strides, as_integers])
@pytest.mark.parametrize("memory", ["least", "fast", 0.5])
def test_backward_sees_view_values_from_before_the_write(read: Any, memory: Any) -> None:
    def function(x: Any, w: Any) -> Any:
        a = read(x)
        made = (a if a.is_floating_point() else (a % 7).double()).sigmoid() * w
        x.mul_(2)
        return made

    def gradient(run: Any) -> Any:
        x, w = tensors()
        run(x, w.requires_grad_()).sum().backward()
        return w.grad

    got = gradient(torch.compile(function, backend="opgraph", options={"memory": memory}))
    torch.testing.assert_close(got, gradient(function))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("memory", ["least", "fast", 0.5, 0.0])
def test_graph_part_saves_no_input_that_a_later_part_writes(dtype: Any, memory: Any) -> None:
    """A result that another one is computed from ends a part. An input may have fewer bytes than the value to keep."""

    def function(x: Any, w: Any) -> Any:
        a = x.float().cos() * w
        b = a.sin() @ w.mT
        x.add_(b.detach()[:, :1].to(x.dtype))
        return a, b

    def gradient(run: Any) -> Any:
        x, w = (t.float() for t in tensors())
        a, b = run(x.to(dtype), w.requires_grad_())
        (a.sum() + b.sum()).backward()
        return w.grad

    got = gradient(torch.compile(function, backend="opgraph", options={"memory": memory}))
    torch.testing.assert_close(got, gradient(function))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (a := x.sin().unsqueeze(0)) * a.transpose(1, 2),
        lambda x: (a := x.sin().t()) * a.unsqueeze(0),
        lambda x: (a := x.sin().t()) * a.detach(),
    ],
)
@pytest.mark.parametrize("dynamic", [False, True])
def test_value_is_combined_with_views_of_its_views(function: Any, dynamic: bool) -> None:
    found: list[Captured] = []
    x = torch.randn(3, 3, dtype=torch.float64)
    with observed(found.append):
        got = torch.compile(function, backend="opgraph", dynamic=dynamic)(x)
    torch.testing.assert_close(got, function(x))
    assert [captured.inference is not None for captured in found] == [True]


def part_of_axis(x: Any) -> Any:
    return x.sin()[:, 1]


def detached(x: Any) -> tuple[Any, Any]:
    seen = part_of_axis(x)
    return (seen.detach() * seen).sum(0), seen


def detached_on_both_sides(x: Any) -> tuple[Any, Any, Any]:
    seen = part_of_axis(x)
    held = seen.detach()
    first = held * seen
    return first, (held * first).sum(0), seen


@pytest.mark.parametrize("function", [detached, detached_on_both_sides])
def test_result_reads_detached_view_that_is_also_a_result(function: Any) -> None:
    def called(run: Any) -> list[Any]:
        x = torch.linspace(-1, 2, 24, dtype=torch.float64).view(2, 3, 4).requires_grad_()
        first, *_, seen = results = run(x)
        return [*results, *torch.autograd.grad(first.sum(), (seen, x))]

    got = called(torch.compile(function, backend="opgraph"))
    torch.testing.assert_close(got, called(function))
