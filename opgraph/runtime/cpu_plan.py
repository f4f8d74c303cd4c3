"""The plan of a CPU kernel's call: the arguments of its entry point, and the launch."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from opgraph.runtime import threads

#: Doubles that boxes may pass to the second stage without separate memory (kernels/cpu/tiled_sums.h: small_work).
_SMALL_WORK = 2048


#: The address of each operand; None if the operand is an array of a call.
Slots: TypeAlias = list[int | None]


@dataclass(frozen=True, slots=True)
class Plan:
    """The launch parameters for one combination of shapes and strides, computed once.

    Attributes:
        entry: the kernel's entry point, `Logged` where calls are logged.
        layout, layout_address: the layout as the entry point takes it, and its address.
        pointers: the array type for the operands' addresses.
        size: elements of the space.
        boxes: pieces that threads may take; 0 if they may take any number of elements.
        work: doubles of memory that sums need.
        stages: the number of stages that `boxes` consists of; each starts when the one before has ended.
        results: shape and dtype of each.
        fixed: operands that are not arrays of the call, and their addresses.
    """

    entry: Any
    layout: Any
    layout_address: int
    pointers: type[ctypes.Array[ctypes.c_void_p]]
    size: int
    boxes: int
    work: int
    results: tuple[tuple[tuple[int, ...], np.dtype[Any]], ...]
    fixed: tuple[tuple[int, int], ...]
    keep: tuple[np.ndarray, ...]
    stages: int = 1

    @property
    def slots(self) -> Slots:
        """The address of each operand that is not an array of a call, else None; without the memory of sums."""
        own: dict[int, int] = dict(self.fixed)
        return [own.get(i) for i in range(len(self.pointers()) - (1 if self.boxes else 0))]

    @property
    def workspace(self) -> int:
        """Doubles of memory for sums that a call without a thread pool must provide; 0 if a kernel has enough."""
        return self.work if self.work > _SMALL_WORK else 0

    @property
    def is_small(self) -> bool:
        """True if one thread runs it, without a workspace."""
        return self.size < threads.SINGLE_THREADED and not self.workspace

    def launch_on(self, base: Any) -> Callable[[], None]:
        """Returns a function that runs the kernel on the operand addresses in `base`; they may change between runs."""
        if self.is_small:
            return partial(self.entry, base, self.layout_address, 0, self.boxes or self.size, 1, None)
        return partial(launch, self, base)


def launch(plan: Plan, base: Any) -> None:
    """Runs a kernel on the operand addresses in `base`, with as many threads as pay off for its size."""
    entry, layout, pieces = plan.entry, plan.layout_address, plan.boxes or plan.size
    count, parallel = threads.team(plan.size)
    pooled = parallel is None and count > 1
    if plan.work > _SMALL_WORK or (pooled and plan.boxes):
        memory = np.empty(max(plan.work, 1))  # one for each call: calls may overlap
        base = plan.pointers.from_buffer_copy(base)
        base[len(base) - 1] = memory.__array_interface__["data"][0]
    if pooled:
        each = pieces // plan.stages
        for stage in range(plan.stages):

            def piece(begin: int, end: int, first: int = stage * each) -> None:
                entry(base, layout, first + begin, first + end, 1, None)

            threads.run_in_pool(piece, each, count)
            if plan.boxes:
                entry(base, layout, -1 - stage, 0, 1, None)  # the work after the stage
    else:
        entry(base, layout, 0, pieces, count, parallel)
