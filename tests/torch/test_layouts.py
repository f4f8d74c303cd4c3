"""Channels-last images inside a captured graph: which images are, and that values and strides are eager's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import opgraph.torch as ogt
from opgraph.torch.graph import layouts
from opgraph.torch.graph.backend import Captured, observed
from opgraph.torch.graph.program import Program

LAST = torch.channels_last


@pytest.fixture(autouse=True)
def no_fast_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Applies the rule of processors without AVX-512 on every machine."""
    monkeypatch.setattr(layouts, "HAS_FAST_BLOCKS", False)


class Block(nn.Module):
    """A residual block with squeeze and excitation, as in EfficientNet."""

    def __init__(self, channels: int = 16) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.squeeze = nn.Conv2d(channels, 4, 1)
        self.excite = nn.Conv2d(4, channels, 1)
        self.last = nn.Conv2d(channels, channels, 3, padding=1, groups=channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(N, C, H, W) -> the same."""
        y = functional.silu(self.norm(self.first(x)))
        y = y * torch.sigmoid(self.excite(functional.silu(self.squeeze(y.mean((2, 3), keepdim=True)))))
        return functional.silu(self.last(y) + x)


def convolved(after: Callable[[torch.Tensor], torch.Tensor]) -> nn.Module:
    """A convolution and a function of its result."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convolution = nn.Conv2d(16, 16, 3, padding=1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return after(self.convolution(x))

    return Model()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "blocks": lambda: nn.Sequential(Block(), Block()),
    "pools": lambda: nn.Sequential(
        Block(), nn.MaxPool2d(2), Block(), nn.AvgPool2d(2), nn.Conv2d(16, 8, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(8, 3),
    ),
    "flattened": lambda: nn.Sequential(Block(), nn.Flatten(), nn.Linear(16 * 64, 3)),
    "group norm": lambda: nn.Sequential(Block(), nn.GroupNorm(4, 16), Block()),
    "permuted": lambda: convolved(lambda y: functional.layer_norm(y.permute(0, 2, 3, 1), (16,)).permute(0, 3, 1, 2)),
    "a view": lambda: convolved(lambda y: y.reshape(y.shape[0], 4, -1).softmax(-1)),
    "memory order": lambda: convolved(lambda y: torch.as_strided(y.exp(), (2, 8), (8, 1))),
    "other strides": lambda: convolved(lambda y: y.transpose(1, 2)[:, ::2]),
    "a copy": lambda: convolved(lambda y: (y + 1).contiguous(memory_format=LAST)),
    "positions": lambda: convolved(lambda y: functional.max_pool2d(y, 2, return_indices=True)[1].float()),
    "dropout": lambda: convolved(lambda y: functional.dropout(functional.silu(y), 0.5, training=True)),
    "drawn like it": lambda: convolved(lambda y: y + torch.rand_like(y)),
    "joined": lambda: convolved(lambda y: torch.cat([y, y.sin()], 1)),
    "upsampled": lambda: convolved(lambda y: functional.interpolate(y, scale_factor=2)),
    "one channel": lambda: nn.Sequential(nn.Conv2d(16, 1, 3, padding=1), nn.SiLU(), nn.Conv2d(1, 16, 3, padding=1)),
}  # fmt: skip


def operands(captured: list[Captured]) -> list[torch.Tensor]:
    """The images that convolutions read."""
    found = []
    for one in captured:
        assert isinstance(one.inference, Program)
        for node in one.inference.library_calls:
            if node.target is torch.ops.aten.convolution.default:
                found.append(node.all_input_nodes[0].meta["val"])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_channels_last_results_agree_with_eager(name: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    captured: list[Captured] = []
    with torch.no_grad(), observed(captured.append):
        for x in (torch.randn(3, 16, 8, 8), torch.randn(3, 16, 8, 8).contiguous(memory_format=LAST)):
            torch.manual_seed(1)
            wanted = model(x)
            torch.manual_seed(1)
            found = ogt.fuse(copy.deepcopy(model))(x)
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
            if x.is_contiguous():
                assert found.stride() == wanted.stride()
    images = operands(captured)
    assert images
    assert all(image.is_contiguous(memory_format=LAST) for image in images)


def test_other_batch_sizes_agree_with_eager() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block()).eval()
    fused = ogt.fuse(nn.Sequential(Block(), Block()).eval())
    fused.load_state_dict(model.state_dict())
    with torch.no_grad():
        for batch in (2, 3, 5, 1):
            x = torch.randn(batch, 16, 8, 8)
            torch.testing.assert_close(fused(x), model(x), rtol=1e-5, atol=1e-5)


def test_images_smaller_than_the_weights_keep_their_layout() -> None:
    model = ogt.fuse(nn.Sequential(nn.Conv2d(64, 64, 3), nn.SiLU(), nn.Conv2d(64, 64, 3)).eval())
    captured: list[Captured] = []
    with torch.no_grad(), observed(captured.append):
        model(torch.randn(1, 64, 5, 5))
    assert not any(image.is_contiguous(memory_format=LAST) for image in operands(captured))


@pytest.mark.parametrize(("groups", "size", "moves"), [(1, 3, False), (16, 3, True), (1, 1, True)])
def test_wide_convolutions_stay_contiguous_on_cpus_with_fast_blocks(
    groups: int, size: int, moves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layouts, "HAS_FAST_BLOCKS", True)
    first, second = (nn.Conv2d(16, 16, size, padding=size // 2, groups=groups) for _ in range(2))
    model = nn.Sequential(first, nn.SiLU(), nn.MaxPool2d(2), second).eval()
    x = torch.randn(4, 16, 16, 16)
    captured: list[Captured] = []
    with torch.no_grad(), observed(captured.append):
        torch.testing.assert_close(ogt.fuse(copy.deepcopy(model))(x), model(x), rtol=1e-5, atol=1e-5)
    (graph,) = captured
    program = graph.inference
    assert isinstance(program, Program)
    pooled = [n for n in program.module.graph.nodes if "max_pool" in str(n.target)]
    assert pooled and all(n.args[0].meta["val"].is_contiguous(memory_format=LAST) is moves for n in pooled)


class CopiedLast(nn.Module):
    """A value of three axes that is copied as a channels-last image of batch size 1."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = (functional.hardswish((x < 0.5).to(x.dtype)).unsqueeze(0) > 0).to(x.dtype)
        result: torch.Tensor = self.norm(mask.contiguous(memory_format=torch.channels_last) + x)
        return result


@pytest.mark.filterwarnings("ignore:there is no C")
def test_channels_last_copy_is_right_in_another_axis_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arithmetic in the order of three axes includes the copy, whose memory format is for four axes."""
    monkeypatch.setattr("opgraph.runtime.cpu_compiler.is_available", lambda: False)
    model = CopiedLast()
    x = torch.linspace(-1, 1, 144).reshape(3, 6, 8)
    torch.testing.assert_close(ogt.fuse(copy.deepcopy(model))(x), model(x))


@pytest.mark.parametrize("requires_grad", [False, True])
def test_channel_shuffle_keeps_channels_last(requires_grad: bool) -> None:
    def function(x):
        return functional.channel_shuffle(functional.silu(x), 2) * 2

    x = torch.randn(2, 4, 6, 5).to(memory_format=torch.channels_last).requires_grad_(requires_grad)
    got, wanted = torch.compile(function, backend="opgraph")(x), function(x)
    assert got.stride() == wanted.stride()
    torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("where", [((1,), (1,)), ((-2, 3), (2, 3)), ((0,), (0,)), ((5,), ())])
def test_roll_keeps_channels_last(where: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        return functional.silu(x).roll(*where) * 2

    x, y = (torch.randn(3, 4, 6, 5).contiguous(memory_format=LAST).requires_grad_() for _ in range(2))
    y.data.copy_(x)
    expected, got = forward(x), ogt.fuse(type("Model", (nn.Module,), {"forward": lambda self, x: forward(x)})())(y)
    assert got.stride() == expected.stride()
    torch.testing.assert_close(got, expected)
    expected.square().sum().backward()
    got.square().sum().backward()
    torch.testing.assert_close(y.grad, x.grad)


class OfSeveralOrders(nn.Module):
    """Ops on operands with different axis orders, one of them expanded."""

    def forward(self, a: torch.Tensor, turned: torch.Tensor, row: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """(N, C, L), the same with its axes turned, (C, L) -> results of the first shape."""
        binary = (
            torch.copysign,
            torch.logaddexp,
            torch.logaddexp2,
            torch.xlogy,
            torch.special.xlog1py,
            torch.heaviside,
            torch.logical_and,
        )
        pairs = (
            (a, turned),
            (turned, a),
            (row.expand_as(a), turned),
            (row[:, :1], turned),
            (turned, a.sum()),
            (a.sum(), turned),
        )
        made = [op(x + 1, y * 2) for op in binary for x, y in pairs]
        return (
            *made,
            torch.logical_or(a > 0, turned > 1),
            2**turned,
            functional.logsigmoid(turned),
            torch.isin(turned, a),
            torch.isin(turned, 0.5),
        )


@pytest.mark.filterwarnings("ignore:there is no C")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_operands_of_mixed_layouts_give_eagers_strides(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("opgraph.runtime.cpu_compiler.is_available", lambda: False)
    a, row = torch.rand(3, 16, 25, dtype=dtype) - 0.2, torch.rand(16, 25, dtype=dtype)
    turned = torch.rand(16, 3, 25, dtype=dtype).transpose(0, 1)
    model = OfSeveralOrders()
    expected, got = model(a, turned, row), ogt.fuse(copy.deepcopy(model))(a, turned, row)
    assert [t.stride() for t in got] == [t.stride() for t in expected]
    torch.testing.assert_close(got, expected, equal_nan=True)


_TURNED_INDEX = torch.tensor([[0, 1, 1], [1, 0, 0]]).t()
#: Sizes and strides of the indexed tensor, and the indices. These determine the order of the result's axes, and so do
#: axes of one element.
INDEXED = {
    "before": ((1, 3, 6), (1, 1, 3), (None, [1, 0])),
    "two before": ((1, 1, 3, 6), (1, 3, 1, 3), (None, None, [1, 0])),
    "after": ((3, 6, 1, 5), (5, 15, 1, 1), ([1, 0],)),
    "between two": ((2, 1, 3, 6), (3, 6, 1, 6), (None, None, [1, 0])),
    "behind another one, before the index": ((2, 1, 3, 6), (3, 1, 1, 6), (None, None, [1, 0])),
    "after, indices of three axes": ((2, 2, 4, 1), (1, 8, 2, 2), (None, None, [[[1, 0]], [[2, 3]], [[0, 1]]])),
    "a turned index": ((2, 3), (3, 1), (_TURNED_INDEX,)),
    "a turned index in the middle": ((5, 2, 3), (1, 15, 5), (None, _TURNED_INDEX)),
    "a turned index beside another": ((2, 3), (3, 1), (_TURNED_INDEX, [[1], [0], [2]])),
    "turned indices apart": ((2, 3, 2), (6, 1, 3), (_TURNED_INDEX, None, _TURNED_INDEX)),
    "a turned index around another axis": ((3, 3, 1), (1, 3, 9), (None, torch.tensor([[0, 1], [2, 2]]).t())),
    "indices of two axes": ((1, 3, 6, 5), (1, 1, 15, 3), (None, [[1, 0], [2, 2]])),
    "two indices": ((4, 1, 3, 6), (3, 1, 1, 12), (None, None, [1, 0], [5, 2])),
    "apart": ((3, 1, 6, 4), (1, 1, 3, 18), ([1, 0], None, [5, 2])),
    "of the largest stride": ((2, 3, 6, 1), (1, 2, 6, 36), (None, [1, 0])),
    "indexed": ((1, 3, 6), (1, 1, 3), ([0, 0], None)),
    "a mask": ((1, 3, 6), (1, 1, 3), (None, [True, False, True])),
}


class Indexed(nn.Module):
    def __init__(self, indices: tuple[Any, ...]) -> None:
        super().__init__()
        self.indices = [slice(None) if i is None else torch.as_tensor(i) for i in indices]

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found = x[tuple(self.indices)]
        return found, torch.exp(found) * 2


@pytest.mark.parametrize(("sizes", "strides", "indices"), INDEXED.values(), ids=INDEXED)
def test_indexing_gives_eagers_strides(
    sizes: tuple[int, ...], strides: tuple[int, ...], indices: tuple[Any, ...]
) -> None:
    found = []
    for model in (Indexed(indices), ogt.fuse(Indexed(indices))):
        torch.manual_seed(0)
        memory = torch.randn(400, requires_grad=True)
        results = model(memory.as_strided(sizes, strides))
        (grad,) = torch.autograd.grad(sum(r.square().sum() for r in results), memory)
        found.append((*results, grad))
    plain, fused = found
    assert [[a for s, a in zip(t.shape, t.stride(), strict=True) if s > 1] for t in fused] == [
        [a for s, a in zip(t.shape, t.stride(), strict=True) if s > 1] for t in plain
    ]
    torch.testing.assert_close(fused, plain)
