"""Captured graphs without a compiler: the loops of their kernels are run op by op, on the kernels' memory.

Capture, the partition into kernels, each kernel's reads and writes and their layouts are the same as with a compiler;
only the C++ text is left out. (Where the library itself finds no compiler it leaves captured graphs to torch.)
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import numpy as np
import torch

from opgraph.ir.dtypes import get as dtype_of
from opgraph.loops.lower import Lowered, lower
from opgraph.partition.partition import Partition
from opgraph.runtime import cpu_compiler
from opgraph.runtime.compiled_partition import runner
from opgraph.runtime.cpu_kernel import HostKernel
from opgraph.runtime.kernel_sequence import KernelLaunch
from opgraph.runtime.operands import Operands
from opgraph.runtime.providers.torch import to_numpy
from opgraph.runtime.providers.torch_dtypes import NAMES
from opgraph.torch.graph import device_targets
from opgraph.torch.graph.tensor_locations import Beginnings, Place


@dataclass(frozen=True)
class LoopKernel:
    """A loop that is run op by op.

    Attributes:
        run: the function that runs the loop, on arrays.
        reads: the indices of the partition's inputs that it reads.
        own: the kernel before compilation, with the layouts of the loop's operands.
    """

    run: Any
    reads: tuple[int, ...]
    own: HostKernel

    @property
    def lowered(self) -> Lowered:
        """The loop."""
        return self.own.lowered

    @property
    def operands(self) -> Operands:
        """The layouts of the loop's operands."""
        return self.own.operands

    def with_scalars(self, scalars: Mapping[int, float]) -> LoopKernel:
        """As HostKernel."""
        made, run = self.own.with_scalars(scalars), copy.copy(self.run)
        run._sources = [made.operands.constants.get(load, source) for load, source in enumerate(run._sources)]
        return replace(self, run=run, own=made)


@dataclass(frozen=True)
class LoopPlan:
    """A loop and the places of its operands, those that it reads first."""

    kernel: LoopKernel
    places: tuple[Place, ...]


class InterpretedTarget(device_targets.HostTarget):
    """The CPU without a compiler."""

    def kernel(self, partition: Partition, rounding: str, arguments: Collection[int]) -> Any:
        """As HostTarget."""
        made: Any = runner(partition, self.engine, rounding=rounding, arguments=arguments)
        own = HostKernel(lower(partition, arguments=arguments), partition)
        return LoopKernel(made, tuple(range(len(partition.input_ports))), own)

    def plan(
        self, kernel: Any, reads: Sequence[Place], writes: Sequence[Place], begin: Beginnings, *, compiles: bool
    ) -> Any:
        """As HostTarget."""
        return LoopPlan(kernel, (*reads, *writes))

    def sequence(
        self, name: str, launches: Sequence[KernelLaunch[Any]], addresses: Sequence[str]
    ) -> device_targets.Lines:
        """As HostTarget, except that the lines pass tensors, not their addresses."""
        tensors = ", ".join(a.removesuffix(".data_ptr()") for a in addresses)

        def call(*given: torch.Tensor) -> None:
            for launch in launches:
                arrays = [
                    _array(given[place], lies, skipped)
                    for lies, (place, skipped) in zip(launch.plan.places, launch.operands, strict=True)
                ]
                count = len(launch.plan.kernel.reads)
                launch.plan.kernel.run(arrays[:count], arrays[count:])

        return device_targets.Lines([f"{name}({tensors})"], {name: call})

    def symbolic_sequence(
        self, name: str, launches: Sequence[KernelLaunch[Any]], addresses: Sequence[str]
    ) -> device_targets.Lines:
        """As HostTarget."""
        made = self.sequence(name, launches, addresses)
        return made if launches[0].plan is not None else device_targets.Lines(made.lines)


def _array(tensor: torch.Tensor, place: Place, skipped: int) -> np.ndarray:
    if not place.name:  # only the shape matters
        return np.broadcast_to(np.zeros((), dtype_of(NAMES[place.dtype]).numpy), place.kernel_size)
    first = tensor.storage_offset() + skipped // place.dtype.itemsize
    return to_numpy(tensor.detach().as_strided(place.kernel_size, place.kernel_stride, first))


_TARGET = InterpretedTarget()


@contextmanager
def interpreted() -> Iterator[None]:
    """A context in which no compiler is found, and captured graphs run their loops op by op."""
    with (
        mock.patch.object(cpu_compiler, "find_compiler", lambda: None),
        mock.patch.object(device_targets, "_HOST", _TARGET),
    ):
        yield
