"""1x1 convolutions as matrix products: which ones are, and that values, gradients and strides are eager's."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from math import sqrt

import pytest
import torch
from torch import nn
from torch.nn import functional

import opgraph.torch as ogt
from opgraph.torch.graph.backend import Captured, observed
from opgraph.torch.graph.program import Program
from opgraph.torch.graph.program_text import same_strides

aten = torch.ops.aten
LAST = torch.channels_last


class Inverted(nn.Module):
    """An inverted bottleneck, as in EfficientNet: channels, single channels, channels."""

    def __init__(self, stride: int = 1, bias: bool = False) -> None:
        super().__init__()
        self.expand = nn.Conv2d(8, 32, 1, bias=bias)
        self.norm = nn.BatchNorm2d(32)
        self.depthwise = nn.Conv2d(32, 32, 3, padding=1, stride=stride, groups=32, bias=bias)
        self.squeeze = nn.Conv2d(32, 4, 1)
        self.excite = nn.Conv2d(4, 32, 1)
        self.project = nn.Conv2d(32, 8, 1, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(N, 8, H, W) -> (N, 8, H / stride, W / stride)."""
        y = functional.silu(self.depthwise(functional.silu(self.norm(self.expand(x)))))
        gate = self.excite(functional.silu(self.squeeze(y.mean((2, 3), keepdim=True))))
        return self.project(y * torch.sigmoid(gate))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "inverted": lambda: nn.Sequential(Inverted(), Inverted()),
    "with bias": lambda: nn.Sequential(Inverted(bias=True), nn.SiLU(), Inverted(bias=True)),
    "strides": lambda: nn.Sequential(Inverted(2), Inverted(2)),
    "wide in between": lambda: nn.Sequential(Inverted(), nn.Conv2d(8, 8, 3, padding=1), nn.SiLU(), Inverted()),
    "large weights": lambda: nn.Sequential(
        Inverted(2), Inverted(2), nn.Conv2d(8, 64, 1), nn.SiLU(), nn.Conv2d(64, 64, 3, padding=1), nn.SiLU(),
        nn.Conv2d(64, 8, 1),
    ),
    "a head": lambda: nn.Sequential(Inverted(), nn.AdaptiveAvgPool2d(1), nn.Conv2d(8, 5, 1), nn.Flatten()),
    "one channel": lambda: nn.Sequential(nn.Conv2d(8, 1, 1), nn.SiLU(), nn.Conv2d(1, 8, 1)),
    "one pixel": lambda: nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(8, 32, 1), nn.SiLU(), nn.Conv2d(32, 8, 1)),
}  # fmt: skip


def targets(program: object) -> list[object]:
    """The ops that a program leaves to torch."""
    assert isinstance(program, Program)
    return [node.target for node in program.library_calls]


def results(model: nn.Module, x: torch.Tensor, direction: torch.Tensor) -> dict[str, torch.Tensor]:
    """The result of a model on images, and the gradients, by name."""
    x = x.clone().requires_grad_()
    y = model(x)
    y.backward(direction.to(y.dtype))
    assert x.grad is not None
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"result": y.detach(), "images": x.grad, **gradients}


#: All but "one channel" with channels-last images, where oneDNN's own sums have larger rounding errors.
CASES = [(n, i) for n in MODELS for i in ("contiguous", "channels last") if (n, i) != ("one channel", "channels last")]


@pytest.mark.parametrize(("name", "images"), CASES)
def test_training_agrees_with_eager(name: str, images: str) -> None:
    """Compares the errors of six steps together: those of one step, in a sum of four elements, differ by chance."""
    torch.manual_seed(0)
    model = MODELS[name]()
    fused = ogt.fuse(copy.deepcopy(model))
    layout = LAST if images == "channels last" else torch.contiguous_format
    ours, theirs, roundings = Counter[str](), Counter[str](), Counter[str]()
    for _ in range(6):
        x = torch.randn(4, 8, 8, 8).contiguous(memory_format=layout)
        direction = torch.randn_like(copy.deepcopy(model)(x))
        exact = results(copy.deepcopy(model).double(), x.double(), direction)
        wanted = results(copy.deepcopy(model), x, direction)
        fused.zero_grad()
        found = results(fused, x, direction)
        assert found.keys() == wanted.keys()
        for key, truth in exact.items():
            ours[key] += float((found[key] - truth).square().sum())
            theirs[key] += float((wanted[key] - truth).square().sum())
            # Each result is the end of a chain of roundings.
            roundings[key] += float((4 * torch.finfo(torch.float32).eps * truth).square().sum())
            if images == "contiguous":
                assert same_strides(found[key], wanted[key].stride()), key
    for key in ours:
        assert sqrt(ours[key]) <= max(2 * sqrt(theirs[key]), sqrt(roundings[key])), key


def test_pointwise_convolutions_become_matrix_products() -> None:
    captured: list[Captured] = []
    with observed(captured.append):
        ogt.fuse(nn.Sequential(Inverted(), Inverted()))(torch.randn(4, 8, 8, 8)).sum().backward()
    (one,) = captured
    forward, backward = targets(one.forward), targets(one.backward)
    assert [forward.count(t) for t in (aten.convolution.default, aten.mm.default, aten.addmm.default)] == [2, 4, 4]
    # Two gradients each, except for the convolution that reads the images.
    assert [backward.count(t) for t in (aten.convolution_backward.default, aten.mm.default)] == [2, 15]


def test_repeated_steps_give_the_same_bits() -> None:
    torch.manual_seed(0)
    model = ogt.fuse(nn.Sequential(Inverted(), Inverted()))
    x = torch.randn(4, 8, 8, 8)
    found = []
    for _ in range(2):
        model.zero_grad()
        y = model(x)
        y.square().sum().backward()
        found.append([y.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
    assert all(map(torch.equal, *found))


def test_networks_of_wide_convolutions_stay_contiguous_in_training() -> None:
    captured: list[Captured] = []
    model = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.SiLU(), nn.Conv2d(8, 8, 3, padding=1))
    with observed(captured.append):
        ogt.fuse(model)(torch.randn(4, 8, 8, 8)).sum().backward()
    assert isinstance(captured[0].forward, Program)
    images = [n.all_input_nodes[0].meta["val"] for n in captured[0].forward.library_calls]
    assert all(image.is_contiguous() for image in images)
