"""One activation in several ways, alone and in a small network: memory saved for backward, peak, time, results."""

from __future__ import annotations

import copy
import functools
import itertools
import logging
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from opgraph.bench.timing import HostClock, in_turns, ratio
from opgraph.torch.fuse import fuse
from opgraph.torch.memory.measure import saved_tensors

#: Shapes of the tensor, and of the images for the network.
TENSOR, IMAGES = (16, 32, 32, 32), (16, 3, 32, 32)
_CHANNELS = 32

Way = Callable[[nn.Module, type[nn.Module]], nn.Module]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One way to run a model.

    Attributes:
        kept: bytes saved for backward.
        peak: the maximum of bytes above the weights in one forward and one backward pass.
        first: seconds of the first forward and backward pass, including all compilation for it.
        step: seconds of the fastest later one.
        ratio: the time of a step divided by that of the first way: the median over rounds in turns.
        results: the output, and the gradient of the input if it needs one.
    """

    kept: int
    peak: int
    first: float
    step: float
    ratio: float
    results: tuple[np.ndarray, ...]


def _eager(model: nn.Module, activation: type[nn.Module]) -> nn.Module:
    return model


def _checkpointed(model: nn.Module, activation: type[nn.Module]) -> nn.Module:
    for module in _all(model, activation):
        module.forward = functools.partial(checkpoint, module.forward, use_reentrant=False)
    return model


def _compiled(model: nn.Module, activation: type[nn.Module]) -> nn.Module:
    torch.compiler.reset()  # code compiled for another model would shorten the first call, and count as recompilation
    compiled: Any = torch.compile(model)
    return compiled  # type: ignore[no-any-return]


def _fused(model: nn.Module, activation: type[nn.Module]) -> nn.Module:
    return fuse(model)


def _all(model: nn.Module, kind: type[nn.Module]) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, kind)]


EAGER, COMPILED, FUSED = "eager", "torch.compile", "opgraph"
#: Name -> the function that makes a model run in this way; the others are compared with the first.
WAYS: Mapping[str, Way] = {
    EAGER: _eager,
    "torch.utils.checkpoint": _checkpointed,
    COMPILED: _compiled,
    FUSED: _fused,
}


def alone(activation: type[nn.Module]) -> tuple[nn.Module, torch.Tensor]:
    """The activation alone, and an input that needs a gradient."""
    torch.manual_seed(0)
    return activation(), torch.randn(TENSOR, requires_grad=True)


def network(activation: type[nn.Module]) -> tuple[nn.Module, torch.Tensor]:
    """Three 3x3 convolutions, each with batch normalization and the activation, and a classifier; and images."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise((IMAGES[1], _CHANNELS, _CHANNELS, _CHANNELS)):
        layers += [nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), activation()]
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(_CHANNELS, 10)]
    return nn.Sequential(*layers), torch.randn(IMAGES)


def measured(
    model: nn.Module,
    x: torch.Tensor,
    activation: type[nn.Module],
    ways: Mapping[str, Way],
    budget: float,
    step: Callable[[str], None] = lambda _: None,
) -> dict[str, Measured]:
    """Runs copies of a model forward and backward, each in one way.

    Args:
        ways: some of `WAYS`; the others are compared with the first.
        budget: seconds of timing in all, without the first steps.
        step: receives a description of the next step.
    """
    with _undisturbed():
        _passes(nn.SiLU(), torch.zeros_like(x, requires_grad=True))  # torch's own first call counts for no way
        calls, firsts = {}, {}
        for name, way in ways.items():
            step(f"{name}: the first call")
            calls[name] = functools.partial(_passes, way(copy.deepcopy(model), activation), x)
            firsts[name] = _seconds(calls[name])
        step("steps, in turns")
        times = in_turns(calls, HostClock(), budget)
        first = [t for t in times[next(iter(ways))] if t is not None]
        found = {}
        for name, call in calls.items():
            step(f"{name}: what it keeps")
            report = saved_tensors(call.args[0], x)
            found[name] = Measured(
                kept=report.totals.kept,
                peak=report.peak.bytes,
                first=firsts[name],
                step=min(t for t in times[name] if t is not None),
                ratio=1 / ratio(first, times[name]).median,
                results=call(),
            )
    return found


def truth(model: nn.Module, x: torch.Tensor) -> tuple[np.ndarray, ...]:
    """The output and the gradient of the input, computed in float64 by eager torch."""
    return _passes(copy.deepcopy(model).double(), x.detach().double().requires_grad_(x.requires_grad))


def _passes(model: nn.Module, x: torch.Tensor) -> tuple[np.ndarray, ...]:
    """A forward and a backward pass with respect to everything that needs a gradient."""
    y = model(x)
    wanted = [*([x] if x.requires_grad else []), *model.parameters()]
    gradients = torch.autograd.grad(y, wanted, torch.ones_like(y))
    return tuple(t.detach().numpy() for t in (y, *gradients[: x.requires_grad]))


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Restores the state of the random numbers, and hides the messages of torch.compile."""
    log = logging.getLogger("torch._dynamo")
    level = log.level
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        log.setLevel(logging.ERROR)
        try:
            yield
        finally:
            log.setLevel(level)
