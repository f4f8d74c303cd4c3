"""Dtypes, numbers and sizes that eager torch refuses raise its error when fused, too; others are computed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

import opgraph.torch as ogt
from opgraph.torch.graph.backend import Captured, observed
from opgraph.torch.graph.program import Program

aten = torch.ops.aten


class Behind(nn.Module):
    """A layer, and a function of its values and of the mask of the positive ones."""

    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(N, 3) -> the layer's values h times the function of h and its mask."""
        h = self.linear(x)
        return self.function(h, h > 0) * h


def double(x: torch.Tensor) -> torch.Tensor:
    """Weights of another dtype, float64."""
    return x.detach().double()[0]


REFUSED: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "1.0 - mask": lambda x, m: 1.0 - m,
    "x - mask": lambda x, m: x - m,
    "0-dim - mask": lambda x, m: torch.tensor(1.5) - m,
    "rsub": lambda x, m: torch.rsub(x, m),
    "abs of a mask": lambda x, m: m.abs(),
    "remainder of a mask": lambda x, m: m % m,
    "relu of a mask": lambda x, m: m.relu(),
    "threshold of a mask": lambda x, m: functional.threshold(m, 0, 1),
    "alpha": lambda x, m: torch.add(m, m, alpha=2.0),
    "alpha is a truth value": lambda x, m: torch.sub(x, x, alpha=True),
    "softmax of integers": lambda x, m: m.long().softmax(0),
    "log_softmax of integers": lambda x, m: m.long().log_softmax(0),
    "logsigmoid of integers": lambda x, m: functional.logsigmoid(m.long()),
    "smooth_l1_loss of integers": lambda x, m: functional.smooth_l1_loss(m.long(), m.long()),
    "cross_entropy of integers": lambda x, m: functional.cross_entropy(m.long(), m.sum(1).clamp(max=2)),
    "classes in int32": lambda x, m: functional.cross_entropy(x, m.sum(1).clamp(max=2).int()),
    "layer_norm": lambda x, m: functional.layer_norm(x, (3,), double(x)),
    "group_norm": lambda x, m: functional.group_norm(x, 1, double(x)),
    "batch_norm": lambda x, m: functional.batch_norm(x, None, None, double(x), None, True),
    "a fill that f16 has not": lambda x, m: x.half().masked_fill(m, -1e9),
    "a bound that f32 has not": lambda x, m: x.clamp(-1e300, 1e300),
    "full": lambda x, m: torch.full((3,), 1e300) + x,
    "full_like": lambda x, m: torch.full_like(x.half(), 1e5),
    "where": lambda x, m: torch.where(m, x, -1e300),
    "addcmul": lambda x, m: torch.addcmul(x, x, x, value=1e300),
    "a large alpha": lambda x, m: torch.add(x, x, alpha=1e300),
    "celu of alpha 0": lambda x, m: functional.celu(x, 0.0),
    "smooth_l1_loss below 0": lambda x, m: functional.smooth_l1_loss(x, x, beta=-1.0),
    "one class for an image": lambda x, m: functional.cross_entropy(x.view(1, 3, 2, 1), m[:1, :1, None].long()),
    "a view beyond its memory": lambda x, m: (x * 2).as_strided((2, 3), (4, 1)),
}


@pytest.mark.filterwarnings("ignore:a graph of .* runs unfused")  # torch's tracer refuses some, too
@pytest.mark.parametrize("name", REFUSED)
def test_operands_refused_by_eager_raise_its_error(name: str) -> None:
    x = torch.randn(2, 3)
    model = Behind(REFUSED[name])
    with pytest.raises(RuntimeError) as eager:
        model(x)
    for gradients, fused in ((False, torch.compile(model, backend="opgraph")), (True, ogt.fuse(model))):
        with torch.set_grad_enabled(gradients), pytest.raises(RuntimeError) as found:
            fused(x)
        assert found.type is eager.type and str(found.value) == str(eager.value)


@pytest.mark.parametrize(
    "function",
    [lambda x, m: functional.elu(x, -0.5, inplace=True), lambda x, m: functional.leaky_relu(x, -0.5, inplace=True)],
)
def test_gradient_refused_by_eager_raises_its_error(
    function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> None:
    x = torch.randn(2, 3)
    model = Behind(function)
    with pytest.raises(RuntimeError, match="negative slope"):
        model(x).sum().backward()
    fused = ogt.fuse(model)
    with pytest.raises(RuntimeError, match="negative slope"):
        fused(x).sum().backward()


TAKEN: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "a product with a mask": lambda x, m: x * m,
    "where": lambda x, m: torch.where(m, x, 0.0),
    "a mask as numbers": lambda x, m: 1.0 - m.float(),
    "masked_fill": lambda x, m: x.masked_fill(m, 1.5),
    "masked_fill by an infinity": lambda x, m: x.masked_fill(m, float("-inf")).exp(),
    "a factor that overflows": lambda x, m: x * 1e300,
    "a view of overlapping elements": lambda x, m: (x * 2).as_strided((2, 3), (2, 1)),
    "one less a number": lambda x, m: x + (m & ~m),
}


@pytest.mark.parametrize("name", TAKEN)
def test_operands_accepted_by_eager_stay_in_kernels(name: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3)
    model = Behind(TAKEN[name])
    wanted = model(x)
    captured: list[Captured] = []
    with observed(captured.append):
        torch.testing.assert_close(ogt.fuse(model)(x), wanted)
    (one,) = captured
    assert isinstance(one.forward, Program)
    assert {n.target for n in one.forward.library_calls} <= {aten.addmm.default}


def doubled_in_place(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    h = x.exp()
    h *= y
    return h


@pytest.mark.parametrize(
    "function",
    [
        doubled_in_place,
        lambda x, y: x.exp().add_(y),
        lambda x, y: x.exp().addcmul_(tensor1=y, tensor2=y),
        lambda x, y: x.exp().masked_fill_(y > 0, 2.0),
        lambda x, y: (y * 2).expand_as(x),
    ],
)
def test_in_place_operand_that_would_grow_raises_on_later_calls(function: Callable[..., torch.Tensor]) -> None:
    """A plan for the first call's shapes would serve all calls."""
    whole, row = torch.randn(2, 3), torch.randn(3)
    fused = ogt.fuse(function)
    torch.testing.assert_close(fused(whole, row), function(whole, row))
    for _ in range(2):
        with pytest.raises(RuntimeError) as eager:
            function(row, whole)
        with pytest.raises(RuntimeError) as found:
            fused(row, whole)
        assert str(found.value).startswith(str(eager.value))
    torch.testing.assert_close(fused(row, row), function(row, row))
    torch.testing.assert_close(fused(whole, whole), function(whole, whole))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.full_like(x, 1e300) * x,
        lambda x: functional.dropout(x, 1.5, training=False) * 2,
        lambda x: (x * 2).expand(3),
        lambda x: torch.broadcast_to(x * 2, (1, 3)),
    ],
)
def test_fused_function_raises_eagers_error(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = torch.randn(2, 3)
    with pytest.raises((RuntimeError, ValueError)) as eager:
        function(x)
    with pytest.raises(eager.type) as found:
        ogt.fuse(function)(x)
    assert str(found.value) == str(eager.value)


def test_norm_weights_may_be_f32_with_16_bit_input() -> None:
    torch.manual_seed(0)
    norm = nn.LayerNorm(8)
    model, x = nn.Sequential(norm, nn.SiLU()), torch.randn(4, 8, dtype=torch.bfloat16)
    wanted = model(x)
    captured: list[Captured] = []
    with observed(captured.append):
        torch.testing.assert_close(ogt.fuse(model)(x), wanted, rtol=2e-2, atol=2e-2)
    (one,) = captured
    assert isinstance(one.forward, Program) and not one.forward.library_calls


def test_loss_miscompiled_by_torch_compile_runs_unfused() -> None:
    torch.manual_seed(0)
    x, classes = torch.randn(2, 5), torch.tensor([[3, 0, -1, 1, 1], [2, -1, -1, -1, -1]])
    model = nn.MultiLabelMarginLoss()
    wanted = model(x * 2, classes)

    class Loss(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            loss: torch.Tensor = model(x * 2, classes)
            return loss

    with pytest.warns(UserWarning, match="multilabel_margin_loss"):
        found = ogt.fuse(Loss())(x)
    torch.testing.assert_close(found, wanted)
