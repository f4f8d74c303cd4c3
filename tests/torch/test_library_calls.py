"""The gradients of convolutions as programs compute them through torch: eager's bits, and their peak memory."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import opgraph.torch as ogt
from opgraph.torch import zoo
from opgraph.torch.graph import program


def allocated(call: Callable[[], object]) -> int:
    """The peak number of bytes that torch's allocator holds during a call, including those inside library ops."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as seen:
        call()
    events = [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


def fused(conv: nn.Module, monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    """A model of this module that is captured in the same way as a large one."""
    monkeypatch.setattr(program, "_GATHERED", 0)
    model = nn.Sequential(conv)
    ogt.fuse(model)
    return model


STRIDED = {
    "3x3": (nn.Conv2d(16, 32, 3, stride=2, padding=1), (8, 16, 64, 64)),
    "1x1": (nn.Conv2d(16, 32, 1, stride=2, bias=False), (8, 16, 64, 64)),
    "odd": (nn.Conv2d(24, 17, 3, stride=(2, 3), padding=1), (8, 24, 65, 47)),
    "patches": (nn.Conv2d(16, 64, 4, stride=4), (8, 16, 64, 64)),
    "dilated": (nn.Conv2d(16, 32, 3, stride=2, padding=2, dilation=2), (8, 16, 64, 64)),
    "groups": (nn.Conv2d(16, 32, 3, stride=2, padding=1, groups=4), (8, 16, 64, 64)),
    "depthwise": (nn.Conv2d(32, 32, 5, stride=2, padding=2, groups=32), (4, 32, 64, 64)),
    "one channel": (nn.Conv2d(1, 8, 3, stride=2, padding=1), (8, 1, 256, 256)),
}
OTHER = {
    "stride 1": (nn.Conv2d(16, 16, 3, padding=1), (8, 16, 64, 64)),
    "one axis": (nn.Conv1d(16, 32, 3, stride=2), (8, 16, 4096)),
    "three axes": (nn.Conv3d(8, 16, 3, stride=2), (2, 8, 32, 32, 32)),
    "transposed": (nn.ConvTranspose2d(16, 8, 3, stride=2), (8, 16, 64, 64)),
}


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        *((name, layout) for name in (*STRIDED, *OTHER) for layout in ("contiguous", "f64")),
        *((name, "channels last") for name, (_, size) in {**STRIDED, **OTHER}.items() if len(size) == 4),
    ],
)
def test_convolution_gradients_equal_eager(name: str, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    conv, size = {**STRIDED, **OTHER}[name]
    torch.manual_seed(0)
    conv, x = copy.deepcopy(conv), torch.randn(size)
    if layout == "f64":
        conv, x = conv.double(), x.double()
    elif layout == "channels last":
        x = x.contiguous(memory_format=torch.channels_last)
    eager = nn.Sequential(copy.deepcopy(conv))
    model = fused(conv, monkeypatch)
    own, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    y = model(own)
    gradient = torch.randn_like(y)
    y.backward(gradient)
    eager(other).backward(gradient)
    assert own.grad is not None and other.grad is not None
    assert own.grad.stride() == other.grad.stride()
    # Convolutions of few channels, and 1x1 convolutions, are computed channels last in training (layouts.py):
    # oneDNN adds in another order.
    is_moved = layout == "contiguous" and name in ("1x1", "groups", "depthwise")
    bounds = {"rtol": 1e-4, "atol": 2e-3} if is_moved else {"rtol": 0.0, "atol": 0.0}
    torch.testing.assert_close(own.grad, other.grad, **bounds)
    for p, q in zip(model.parameters(), eager.parameters()):
        torch.testing.assert_close(p.grad, q.grad, **bounds)


def test_strided_convolution_input_gradient_needs_at_most_two_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    conv, size = STRIDED["1x1"]
    model = fused(copy.deepcopy(conv), monkeypatch)
    x = torch.randn(size, requires_grad=True)
    y = model(x)
    gradient = torch.ones_like(y)
    torch.autograd.grad(y, x, gradient, retain_graph=True)
    took = allocated(lambda: torch.autograd.grad(y, x, gradient))
    assert took <= 2.25 * x.nbytes  # with one plain call, torch holds it three times


@pytest.mark.sweep
@pytest.mark.parametrize(("activation", "most"), [(nn.ReLU, 365), (nn.SiLU, 430)], ids=["ReLU", "SiLU"])
def test_resnet18_training_step_stays_within_memory_limit(activation: type[nn.Module], most: int) -> None:
    """The limit is in MiB above the weights and the images, at batch 128, with all that torch and oneDNN allocate."""
    model = ogt.fuse(zoo.resnet18(activation))
    x = torch.randn(128, 3, 32, 32)

    def step() -> None:
        model.zero_grad()
        model(x).sum().backward()

    step()
    model.zero_grad()
    assert allocated(step) <= most * 2**20
