"""flip, roll and half turns of computed values in fused functions: values, layout, gradients, plans, errors."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import opgraph.torch as ogt  # noqa: E402
from opgraph.errors import Unimplemented  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:.*fused partitions run op by op")

A, B, C, W = (torch.randn(size, dtype=torch.float64) for size in ((4, 5), (5,), (4, 1), (1, 5)))

FUNCTIONS = {
    "flip": lambda a, b, c: (a * b + c).flip(0),
    "both axes, and the value itself": lambda a, b, c: torch.flip((a * b + c).sigmoid(), (0, -1)) * (a * b + c),
    "fliplr": lambda a, b, c: torch.fliplr(a * b - c),
    "flipud": lambda a, b, c: torch.flipud(a * b - c) + b,
    "a row that is broadcast afterwards": lambda a, b, c: (b * 2).flip(0) * a,
    "roll": lambda a, b, c: (a * b + c * W).roll(2, 0),
    "rolls": lambda a, b, c: torch.roll(a * b + c * 2, (1, -2), (0, 1)) + a,
    "roll in the order of memory": lambda a, b, c: torch.roll(a * b + c * W, 3),
    "again": lambda a, b, c: ((a * b).flip(0) + c).roll(1, 1).exp(),
    "detached": lambda a, b, c: (a * b).detach().flip(1) * c,
    "expanded": lambda a, b, c: (c * 2).expand(4, 5).flip(1) * a,
    "filled": lambda a, b, c: (torch.ones_like(a) * b).flip(1) * a,
    "written": lambda a, b, c: (a * b).add_(c).flip(0) + 1,
    "transposed": lambda a, b, c: (a.t() * 2).flip(0) + c.t(),
    "half a turn": lambda a, b, c: torch.rot90(a * b + c, 2) * a,
    "half a turn back": lambda a, b, c: (a * b + c).rot90(k=-2, dims=(1, 0)) + b,
    "a whole turn": lambda a, b, c: torch.rot90(a * b, 4, (0, 1)) * c,
    "a quarter of an argument": lambda a, b, c: a.rot90() * 2 + b[:, None] * c.rot90(3),
    "by name": lambda a, b, c: torch.flip(input=a * b, dims=[1]) + c,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_flip_and_roll_values_strides_and_gradients_agree_with_eager(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "opgraph.runtime.cpu_compiler.find_compiler", lambda: None
    )  # loops run op by op: this test is about tracing
    function = FUNCTIONS[name]
    fused = ogt.fuse(function)
    leaves = [t.clone().requires_grad_() for t in (A, B, C)]
    expected, found = function(*leaves), fused(*leaves)
    assert found.stride() == expected.stride()
    torch.testing.assert_close(found, expected)
    cotangent = torch.rand_like(expected)
    for mine, eager in zip(
        torch.autograd.grad(found, leaves, cotangent, allow_unused=True),
        torch.autograd.grad(expected, leaves, cotangent, allow_unused=True),
        strict=True,
    ):
        assert (mine is None) == (eager is None)
        if eager is not None:
            torch.testing.assert_close(mine, eager)
    later = [-t for t in (A, B, C)]  # uses the plan of the first call
    torch.testing.assert_close(fused(*later), function(*later))
    assert not fused.why_rerun


def test_roll_follows_each_calls_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("opgraph.runtime.cpu_compiler.find_compiler", lambda: None)
    fused = ogt.fuse(lambda x, y: (x * y).roll(3, -1).flip(0))
    for size in ((4, 5), (7, 2), (1, 5), (5, 1), (3,)):
        x, y = torch.randn(size), torch.randn(size[-1])
        assert torch.equal(fused(x, y), (x * y).roll(3, -1).flip(0))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x * 2).flip(5),
        lambda x: (x * 2).roll((1, 2), (0,)),
        lambda x: torch.fliplr(x[0] * 2),
        lambda x: torch.rot90(x * 2, 2, (0, 0)),
    ],
)
def test_invalid_flip_and_roll_raise_torchs_errors(function) -> None:
    with pytest.raises((IndexError, RuntimeError)) as eager:
        function(A)
    with pytest.raises(type(eager.value)) as fused:
        ogt.fuse(function)(A)
    assert str(fused.value) == str(eager.value)


def test_rot90_of_a_computed_value_is_refused() -> None:
    with pytest.raises(Unimplemented, match="rot90 cannot be fused: it is applied to a computed value"):
        ogt.fuse(lambda x: torch.rot90(x * 2))(A)
