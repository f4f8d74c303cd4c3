"""Runs a fused partition without a C++ compiler: with torch's ops if installed, else with NumPy; warns once."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from opgraph.ir.stage_log import is_on, log, shapes_text
from opgraph.loops.interpret import NUMPY, Library, interpret
from opgraph.loops.lower import Lowered
from opgraph.partition.partition import Partition
from opgraph.runtime import cpu_compiler
from opgraph.runtime.cpu_kernel import HostKernel
from opgraph.runtime.operands import Operands, copied_into
from opgraph.runtime.runner import NO_SOURCES, Runner
from opgraph.runtime.shape_rules import ShapeRules

_FIX = "Install g++ or clang, or: pip install 'opgraph[compiler]'."


def host_runner(lowered: Lowered, partition: Partition) -> Runner:
    """The best runner for a loop on this machine's CPU."""
    if cpu_compiler.is_available():
        return HostKernel(lowered, partition)
    return InterpretedKernel(lowered, partition)


@cache
def _notice(engine: str) -> None:
    warnings.warn(
        f"{cpu_compiler.no_compiler()}: fused partitions run op by op in {engine}, which is slower. {_FIX}",
        stacklevel=3,
    )


class InterpretedKernel:
    """Runs a loop op by op, with the same rounding as the kernel."""

    sources = NO_SOURCES
    spins = False

    def __init__(self, lowered: Lowered, partition: Partition) -> None:
        self.lowered = lowered
        self._rules = ShapeRules(partition)
        self.operands = Operands(lowered, partition.input_ports)
        order = {t.id: i for i, t in enumerate(partition.input_ports)}
        self._sources = [None if t is None else order.get(t.id, t.data) for t in lowered.loads]
        self._with_torch = importlib.util.find_spec("torch") is not None
        _notice("torch" if self._with_torch else "NumPy")

    @property
    def runs_in(self) -> str:
        """The library whose ops run: "torch" or "NumPy"."""
        return "torch" if self._with_torch else "NumPy"

    def _library(self) -> Library:
        if not self._with_torch:
            return NUMPY
        from opgraph.runtime.providers.torch import TORCH  # torch is slow to import

        return TORCH

    def repeated(self, arrays: Sequence[Any], outs: Sequence[Any]) -> None:
        """See Runner; None, since every call allocates."""

    def __call__(
        self, arrays: Sequence[np.ndarray], outs: Sequence[np.ndarray | None] | None = None
    ) -> list[np.ndarray]:
        """Runs the loop; see `HostKernel.__call__`."""
        shapes = [a.shape for a in arrays]
        self._rules.check(shapes)
        if self._rules.may_differ(shapes):
            results = _owned(self._rules.by_definition(arrays), arrays)
        else:
            loads = [arrays[s] if isinstance(s, int) else s for s in self._sources]
            results = _owned(interpret(self.lowered.loop, loads, self._library()), loads)
        if is_on("run"):
            made = [result.shape for result in results]
            log("run", f"a loop, op by op in {self.runs_in}: {shapes_text((shapes, made))}")
        if outs is None:
            return results
        return [result if out is None else copied_into(out, result) for out, result in zip(outs, results, strict=True)]


def _owned(results: Sequence[np.ndarray], loads: Sequence[np.ndarray | None]) -> list[np.ndarray]:
    """Returns results in separate memory: those of an Identity or a BroadcastTo are views of an operand."""
    found: list[np.ndarray] = []
    for result in results:
        is_view = any(a is not None and np.may_share_memory(result, a) for a in (*loads, *found))
        found.append(np.array(result, order="C") if is_view or not result.flags.c_contiguous else result)
    return found
