"""What an activation costs a network: kept for backward, peak and step time, several ways.

    python tests/benchmarks/networks.py [--json FILE] [--compile] [--steps] [--batch 16] [--seconds 20] [--limit 600]
        [--networks resnet18 ...] [--activations Mish ...]

Kept and peak are counted at batch 128, 3x32x32, f32, in a dry run, which allocates nothing: `ogt.saved_tensors`. For
torch.compile, which a dry run cannot follow, they are counted at --batch and scaled, with what does not grow with the
batch: at 2 images that doubles the figure. Step times are ratios to the same network with eager SiLU, in turns, at
--batch, for --seconds each (--steps; convolutions take most of them on a CPU). Each cell of torch.compile (--compile)
runs in a process of its own, which is given up after --limit seconds.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

import opgraph.torch as ogt
from opgraph.bench.machine import machine
from opgraph.bench.side_by_side import COMPILED, EAGER, WAYS
from opgraph.bench.timing import HostClock, in_turns, ratio
from opgraph.torch.naf1 import NAF1
from opgraph.torch.zoo import MODELS

BATCH = 128
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


def cell(network: str, name: str, way: str, *, batch: int, seconds: float) -> dict[str, float]:
    """One row of the table: MiB kept and at the peak, weights aside; with `seconds` the step time as a ratio, too."""
    model = model_of(network, {**NATIVE, **COMPOSED}[name], way)
    dry = way != COMPILED
    counted = BATCH if dry else batch
    report = ogt.saved_tensors(model, torch.zeros(counted, 3, 32, 32), dry_run=dry)
    scale = BATCH / counted / _MIB
    row = {"kept": report.totals.kept * scale, "peak": report.peak.bytes * scale}
    if seconds:
        x = torch.randn(batch, 3, 32, 32, generator=torch.Generator().manual_seed(0))
        plain = model_of(network, nn.SiLU, EAGER)
        calls = {"ours": lambda: model(x).sum().backward(), "plain": lambda: plain(x).sum().backward()}
        calls["ours"]()  # whatever is compiled
        times = in_turns(calls, HostClock(), seconds)
        found = ratio([t for t in times["ours"] if t is not None], times["plain"])
        row |= {"step": found.median, "step_low": found.low, "step_high": found.high, "batch": batch}
    return row


def cell_apart(limit: float, *args: str) -> dict[str, Any]:
    """`cell` in a process of its own; {"failed": why} where it failed, or took longer than `limit` seconds."""
    try:
        done = subprocess.run(
            [sys.executable, __file__, "--cell", *args], capture_output=True, text=True, check=False, timeout=limit
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"took longer than {limit:.0f} s"}
    if done.returncode:
        return {"failed": done.stderr.strip().splitlines()[-1][:200]}
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return row


def main() -> None:
    """Runs everything and prints it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    activations = {**NATIVE, **COMPOSED}
    parser.add_argument("--json", help="write the results to this file as well")
    parser.add_argument("--compile", action="store_true", help="with torch.compile, which takes minutes")
    parser.add_argument("--steps", action="store_true", help="with step times")
    parser.add_argument("--batch", type=int, default=16, help="images in a step, and where torch.compile is counted")
    parser.add_argument("--seconds", type=float, default=20, help="of timing for each step time")
    parser.add_argument("--limit", type=float, default=600, help="seconds for one cell of torch.compile")
    parser.add_argument("--networks", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--activations", nargs="*", default=list(activations), choices=list(activations))
    parser.add_argument("--cell", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.cell:
        network, name, way, batch, seconds = options.cell
        print(json.dumps(cell(network, name, way, batch=int(batch), seconds=float(seconds))))
        return
    seconds = options.seconds if options.steps else 0.0
    results: dict[str, Any] = {"machine": machine()}
    print(f"{'network':<18}{'activation':<20}{'way':<26}{'kept':>8}{'peak':>8}{'step':>8}  quartiles")
    for network in options.networks:
        for name in options.activations:
            for way in WAYS if name in COMPOSED else (EAGER,):
                if way == COMPILED and not options.compile:
                    continue
                if way == COMPILED:
                    row = cell_apart(options.limit, network, name, way, str(options.batch), str(seconds))
                else:
                    row = cell(network, name, way, batch=options.batch, seconds=seconds)
                results[f"{network} / {name} / {way}"] = row
                print(f"{network:<18}{name:<20}{way:<26}{_shown(row)}", flush=True)
                if options.json:  # after each row: hours of work are not lost to one
                    Path(options.json).write_text(json.dumps(results, indent=1) + "\n")


def _shown(row: dict[str, Any]) -> str:
    if "failed" in row:
        return f"  {row['failed']}"
    text = f"{row['kept']:>8.0f}{row['peak']:>8.0f}"
    if "step" in row:
        text += f"{row['step']:>8.2f}  {row['step_low']:.2f} to {row['step_high']:.2f}"
    return text


if __name__ == "__main__":
    main()
