"""What an activation costs a network: kept for backward, peak and step time, several ways.

    python tests/benchmarks/networks.py [--json FILE] [--compile] [--networks resnet18 ...] [--steps]

Kept and peak are counted at batch 128, 3x32x32, f32, in a dry run, which allocates nothing: `ogt.saved_tensors`. For
torch.compile, which a dry run cannot follow, they are counted at batch 8 and scaled. Step times are ratios to the same
network with eager SiLU, in turns, at batch 16 (--steps; convolutions take most of them on a CPU).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

import opgraph.torch as ogt
from opgraph.bench.machine import machine
from opgraph.bench.timing import compare
from opgraph.torch.naf1 import NAF1
from opgraph.torch.side_by_side import COMPILED, EAGER, WAYS
from opgraph.torch.zoo import MODELS

BATCH, MEASURED, TIMED = 128, 8, 16
_MIB = 2**20


class Swish(nn.Module):
    """x * sigmoid(alpha * x) with a trainable factor for each channel, composed of torch ops."""

    def __init__(self) -> None:
        super().__init__()
        self.alpha = nn.UninitializedParameter()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[N, C, H, W] -> the same."""
        return x * torch.sigmoid(self.alpha.view(1, -1, 1, 1) * x)


class Mish(nn.Module):
    """Mish, composed of torch ops."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Any shape -> the same."""
        return x * torch.tanh(nn.functional.softplus(x))


class Leaky(nn.Module):
    """A function like ReLU, by torch.where."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Any shape -> the same."""
        return torch.where(x > 0, x, 0.01 * x)


NATIVE = {"ReLU": nn.ReLU, "SiLU": nn.SiLU}
COMPOSED = {"where-split ReLU": Leaky, "swish per channel": Swish, "Mish": Mish, "NAF1": NAF1}


def model_of(network: str, activation: type[nn.Module], way: str) -> nn.Module:
    """A network with random weights, run in one of the ways."""
    torch.manual_seed(0)
    model = MODELS[network](activation, 10)
    _give_channels(model)
    return WAYS[way](model, activation)


def _give_channels(model: nn.Module) -> None:
    """Sizes the factors of `Swish` by what reaches them."""
    found: list[Any] = []

    def note(module: Swish, inputs: tuple[torch.Tensor]) -> None:
        if isinstance(module.alpha, nn.UninitializedParameter):
            module.alpha.materialize((inputs[0].shape[1],))
            nn.init.ones_(module.alpha)

    for module in model.modules():
        if isinstance(module, Swish):
            found.append(module.register_forward_pre_hook(note))
    if found:
        with torch.no_grad():
            model.eval()(torch.zeros(1, 3, 32, 32))
        model.train()
    for handle in found:
        handle.remove()


def counted(network: str, activation: type[nn.Module], way: str) -> dict[str, float]:
    """MiB kept for backward and at the peak, weights aside."""
    dry, batch = way != COMPILED, BATCH if way != COMPILED else MEASURED
    report = ogt.saved_tensors(model_of(network, activation, way), torch.zeros(batch, 3, 32, 32), dry_run=dry)
    scale = BATCH / batch / _MIB
    return {"kept": report.totals.kept * scale, "peak": report.peak.bytes * scale}


def stepped(network: str, activation: type[nn.Module], way: str) -> dict[str, float]:
    """The time of a forward and a backward pass, as a ratio to that with eager SiLU."""
    x = torch.randn(TIMED, 3, 32, 32, generator=torch.Generator().manual_seed(0))

    def step(model: nn.Module) -> Any:
        return lambda: model(x).sum().backward()

    found = compare(step(model_of(network, activation, way)), step(model_of(network, nn.SiLU, EAGER)), rounds=9)
    return {"step": found["ratio"], "step_low": found["low"], "step_high": found["high"]}


def main() -> None:
    """Runs everything and prints it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write the results to this file as well")
    parser.add_argument("--compile", action="store_true", help="with torch.compile, which takes minutes")
    parser.add_argument("--steps", action="store_true", help="with step times")
    parser.add_argument("--networks", nargs="*", default=list(MODELS))
    options = parser.parse_args()
    results: dict[str, Any] = {"machine": machine()}
    print(f"{'network':<18}{'activation':<20}{'way':<26}{'kept':>8}{'peak':>8}{'step':>8}")
    for network in options.networks:
        for name, activation in {**NATIVE, **COMPOSED}.items():
            for way in WAYS if name in COMPOSED else (EAGER,):
                if way == COMPILED and not options.compile:
                    continue
                row = counted(network, activation, way)
                if options.steps:
                    row |= stepped(network, activation, way)
                results[f"{network} / {name} / {way}"] = row
                step = f"{row['step']:>8.2f}" if "step" in row else ""
                print(f"{network:<18}{name:<20}{way:<26}{row['kept']:>8.0f}{row['peak']:>8.0f}{step}", flush=True)
    if options.json:
        Path(options.json).write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
