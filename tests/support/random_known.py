"""What depends on a graph alone, found once for all the executables that checks make of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from random_truth import kept_with

import opgraph as og
from opgraph.partition.partition import Partition
from opgraph.runtime import compiled, executable, training


@contextmanager
def found_once() -> Iterator[None]:
    """While this lasts, a finalized graph is partitioned once, has one training plan for the same inputs, and each of
    its partitions one loop."""
    partition, training_plan, lower = executable.partition, training.training_plan, compiled.lower
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
            loops[key] = part, lower(part, rounding=rounding, arguments=arguments)  # kept, so that its id stays its own
        return loops[key][1]

    executable.partition, training.training_plan = partitioned, planned  # type: ignore[assignment]
    compiled.lower = lowered  # type: ignore[assignment]
    try:
        yield
    finally:
        executable.partition, training.training_plan, compiled.lower = partition, training_plan, lower
