"""Measures a network in a separate process: `python -m opgraph.bench.network_process QUESTION NETWORK ...`.

It prints one line of JSON. `turns` compares the results of the ways with eager torch's, then times them in turns.
`memory` and `first` run a single way, so that memory and caches left by another way have no effect.
"""

from __future__ import annotations

import copy
import gc
import json
import logging
import math
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import cache
from typing import Any, TypeAlias
from unittest import mock

import torch
from torch import nn

from opgraph.bench.networks import EAGER, INFERENCE, OURS, WAYS, Network, network
from opgraph.bench.results import Cell
from opgraph.bench.suites.timed import told, with_times
from opgraph.bench.timing import Call, HostClock, in_turns, once
from opgraph.bench.truth import far_off
from opgraph.torch.graph.parameter_branches import BranchCheck
from opgraph.torch.graph.torch_internals import import_dynamo

#: The result and the gradients of a call, as arrays of one dimension.
Results: TypeAlias = Mapping[str, Any]
#: A factor that changes a number of f32 by one or two units in the last place.
_ONE_UNIT = 1 + 2.0**-22


class Running:
    """A model that runs in one way.

    Args:
        model: in the mode in which it runs; not shared with others.
        batch: the batch size of the inputs.
        device: the device on which it runs.
        by: the factor by which the inputs are multiplied.
    """

    def __init__(self, net: Network, model: nn.Module, way: str, batch: int, device: str, by: float = 1.0) -> None:
        self._feed = {name: _leaf_on(_times(t, by), device) for name, t in net.feed(batch).items()}
        model.to(device)
        self._parameters = list(model.parameters())
        self._states = [*self._parameters, *model.buffers()]
        self._leaves = [*self._parameters, *(t for t in self._feed.values() if t.requires_grad)]
        self._model = WAYS[way].apply(model, net)
        self._direction: torch.Tensor | None = None

    def forward(self) -> torch.Tensor:
        """The result, or its logits."""
        found: Any = self._model(**self._feed)
        result: torch.Tensor = getattr(found, "logits", found)
        return result

    def inference(self) -> torch.Tensor:
        """A call without gradients."""
        with torch.no_grad():
            return self.forward()

    def step(self) -> torch.Tensor:
        """Forward, and the gradients of the sum of the result times random numbers that are drawn once."""
        self.forget()
        y = self.forward()
        if self._direction is None:
            self._direction = torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(y.device)
        torch.autograd.backward(y, self._direction)
        return y.detach()

    def forget(self) -> None:
        """Drops the gradients."""
        for leaf in self._leaves:
            leaf.grad = None

    def first(self, call: Call) -> float:
        """Seconds of the first call, including all compilation for it."""
        start = time.perf_counter()
        call()
        _wait(self._feed)
        return time.perf_counter() - start

    def results(self, call: Call) -> dict[str, Any]:
        """The result of a call and all gradients, as arrays of one dimension."""
        y = call()
        assert isinstance(y, torch.Tensor)
        gradients = [leaf.grad.flatten() for leaf in self._leaves if leaf.grad is not None]
        found = {"the result": y.flatten().cpu().numpy()}
        return found | ({"the gradients": torch.cat(gradients).cpu().numpy()} if gradients else {})

    def kept(self) -> int:
        """Bytes that forward saves for backward: of storages other than parameters' and buffers', each counted once."""
        own = {t.untyped_storage().data_ptr() for t in self._states}
        seen: dict[int, int] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                seen[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            y = self.forward()  # held, so that no saved storage is freed and its address reused during the count
        del y
        return sum(seen.values())


def _times(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    return tensor * factor if factor != 1 and tensor.is_floating_point() else tensor


def _leaf_on(tensor: torch.Tensor, device: str) -> torch.Tensor:
    return tensor.detach().to(device).requires_grad_(tensor.requires_grad)


def _wait(tensors: Mapping[str, torch.Tensor]) -> None:
    """Waits for the work launched on the GPU of these tensors."""
    if any(t.is_cuda for t in tensors.values()):
        torch.cuda.synchronize()


class GpuClock(HostClock):
    """The host's clock, from an idle GPU to an idle GPU."""

    def run(self, call: Call, repeats: int) -> float:
        """Seconds of one call."""
        torch.cuda.synchronize()

        def calls() -> None:
            for _ in range(repeats):
                call()
            torch.cuda.synchronize()

        return once(calls, 1) / repeats


def running(
    net: Network, model: nn.Module, way: str, question: str, batch: int, device: str, by: float = 1.0
) -> tuple[Running, Call]:
    """A copy of a model that runs in one way, and the call that a question measures."""
    own = copy.deepcopy(model)
    made = Running(net, own.eval() if question == INFERENCE else own, way, batch, device, by)
    return made, made.inference if question == INFERENCE else made.step


def turns(net: Network, question: str, ways: list[str], seconds: float, device: str) -> dict[str, Any]:
    """The cells of a row: the ways, timed in turns, opgraph first.

    Args:
        seconds: the seconds of timing.
    """
    model = made_of(net)
    truth = _results(*running(net, model, EAGER, question, net.batch, device))
    moved = cache(lambda: _results(*running(net, model, EAGER, question, net.batch, device, by=_ONE_UNIT)))
    cells: dict[str, Cell] = {}
    calls: dict[str, Call] = {}
    for way in ways:
        try:
            run, call = running(net, model, way, question, net.batch, device)
            first = run.first(call)
            if net.draws and question != INFERENCE and not way.startswith((OURS, EAGER)):
                _results(run, call)
                off, wrong, note = None, "", "draws other numbers than eager torch: not compared"
            else:
                off, wrong, note = judged(_results(run, call), truth, moved)
        except Exception as error:  # any exception is the result of this way
            cells[way] = Cell(peer=way, failed=told(error))
            continue
        failed = f"wrong: {wrong}" if wrong else ""
        cells[way] = Cell(peer=way, first_ms=first * 1e3, off=off, note=note, failed=failed)
        if not wrong:
            calls[way] = call
    if OURS in calls:
        times = in_turns(calls, HostClock() if device == "cpu" else GpuClock(), seconds)
        cells = {name: with_times(cell, times) for name, cell in cells.items()}
    return {"cells": [asdict(cell) for cell in cells.values()]}


def judged(results: Results, truth: Results, moved: Callable[[], Results], most: float = 4.0) -> tuple[float, str, str]:
    """The error of results in units of the truth's last place, a text that says what is wrong, and a note.

    In networks with steps (the gradient of ReLU, an activation that jumps), a rounding can become a large difference.
    There, results are right if their error is about that of eager torch's results for slightly changed inputs.

    Args:
        truth: eager torch's results.
        moved: returns eager torch's results of inputs changed by their last place; called only if `results` are off.
        most: how many times as large the error may be.
    """
    off, wrong = far_off(results, truth, dict.fromkeys(truth, "f32"))
    if not wrong:
        return off, "", ""
    for name, true in truth.items():
        own, failed = far_off(results, {name: true}, {name: "f32"})
        if failed and not own <= most * far_off(moved(), {name: true}, {name: "f32"})[0]:
            return off, wrong, ""
    return off, "", "rounding alone moves eager torch's results as far"


def _results(run: Running, call: Call) -> Results:
    """The results from a fixed seed: those of any way that draws the same random numbers as eager torch."""
    torch.manual_seed(3)
    return run.results(call)


def memory(net: Network, way: str, device: str) -> dict[str, float]:
    """MiB that a way saves for backward, and the maximum growth of the device's memory in a step."""
    run, step = running(net, made_of(net), way, "", net.counted, device)
    run.first(step)
    found = {"kept": run.kept() / 2**20}
    run.forget()
    gc.collect()
    peak = resident_peak(step) if device == "cpu" else allocated_peak(step)
    return found if math.isnan(peak) else {**found, "peak": peak / 2**20}


def resident_peak(call: Call) -> float:
    """The maximum growth of the process's resident memory during a call, in bytes; nan where Linux reports none."""
    try:
        with open("/proc/self/clear_refs", "w") as mark:
            mark.write("5")
        before = _status("VmRSS")
        call()
        return _status("VmHWM") - before
    except OSError:
        return math.nan


def allocated_peak(call: Call) -> float:
    """The maximum growth of torch's allocations on the GPU during a call, in bytes."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _status(field: str) -> int:
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))


def first(net: Network, way: str, device: str) -> dict[str, float]:
    """Seconds of a way's first training step, without the import of modules for it."""
    import_dynamo()  # torch.compile imports it before the step, ogt.fuse during the step
    run, step = running(net, made_of(net), way, "", net.batch, device)
    return {"seconds": run.first(step)}


def branches(net: Network, way: str, device: str) -> dict[str, float]:
    """Microseconds that checks of branches on parameters take in a training step: the median of 20 steps. Their other
    work evicts the data of the checks from the processor's caches."""
    checked = 0.0
    check = BranchCheck.__call__

    def timed(self: BranchCheck, parameters: Sequence[torch.Tensor]) -> bool:
        nonlocal checked
        start = time.perf_counter()
        answer = check(self, parameters)
        checked += time.perf_counter() - start
        return answer

    run, step = running(net, made_of(net), way, "", net.batch, device)
    run.first(step), step()
    found = []
    with mock.patch.object(BranchCheck, "__call__", timed):
        for _ in range(20):
            checked = 0.0
            step()
            found.append(checked)
    return {"us": statistics.median(found) * 1e6}


def made_of(net: Network) -> nn.Module:
    """The model, with the same weights each time."""
    torch.manual_seed(0)
    return net.make().train()


def main(arguments: list[str]) -> None:
    """Measures one question and prints the result."""
    asked: dict[str, Any] = json.loads(arguments[0])
    warnings.simplefilter("ignore")
    logging.getLogger("torch._dynamo").setLevel(logging.ERROR)
    net = network(asked["network"])
    torch.set_num_threads(net.threads or asked["threads"])
    found: dict[str, Any]
    if asked["ask"] == "turns":
        found = turns(net, asked["question"], asked["ways"], asked["seconds"], asked["device"])
    else:
        found = {"memory": memory, "first": first, "branches": branches}[asked["ask"]](
            net, asked["way"], asked["device"]
        )
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
