"""Values that depend on a graph alone, computed once for all the executables that checks make of it."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any

from random_truth import kept_with

import opgraph as og
from opgraph.codegen.kernel import KernelSource
from opgraph.loops.loop import Loop
from opgraph.partition.partition import Partition
from opgraph.runtime import compiled_partition, cpu_kernel, executable, training
from opgraph.schedule.schedule import CpuSchedule


@contextmanager
def found_once() -> Iterator[None]:
    """In this context, a finalized graph is partitioned once, has one training plan for the same inputs, each of its
    partitions one loop, and a loop one text for each way to call it."""
    partition, training_plan, lower = executable.partition, training.training_plan, compiled_partition.lower
    source = cpu_kernel.host_source
    texts: dict[tuple[int, Hashable], tuple[Loop, KernelSource]] = {}
    loops: dict[tuple[int, str, frozenset[int]], tuple[Partition, Any]] = {}

    def partitioned(graph: og.Graph) -> Any:
        return kept_with(graph, "partitions", lambda: partition(graph))

    def planned(graph: og.Graph, wrt: tuple[str, ...], *, units: bool) -> Any:
        if not graph.is_finalized:
            return training_plan(graph, wrt, units=units)
        return kept_with(graph, f"plan {units} {wrt}", lambda: training_plan(graph, wrt, units=units))

    def lowered(part: Partition, *, rounding: str, arguments: Any) -> Any:
        key = id(part), rounding, frozenset(arguments)
        if key not in loops:
            loops[key] = part, lower(part, rounding=rounding, arguments=arguments)  # kept, so that its id is not reused
        return loops[key][1]

    def written(schedule: CpuSchedule) -> KernelSource:
        key = id(schedule.loop), schedule.key
        if key not in texts:
            texts[key] = schedule.loop, source(schedule)
        return texts[key][1]

    cpu_kernel.host_source = written
    executable.partition, training.training_plan = partitioned, planned  # type: ignore[assignment]
    compiled_partition.lower = lowered  # type: ignore[assignment]
    try:
        yield
    finally:
        executable.partition, training.training_plan, compiled_partition.lower = partition, training_plan, lower
        cpu_kernel.host_source = source
