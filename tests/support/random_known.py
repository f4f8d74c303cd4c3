"""What depends on a graph alone, found once for all the executables that checks make of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from random_truth import kept_with

import opgraph as og
from opgraph.runtime import executable, training


@contextmanager
def found_once() -> Iterator[None]:
    """While this lasts, a finalized graph is partitioned once, and has one training plan for the same inputs."""
    partition, training_plan = executable.partition, training.training_plan

    def partitioned(graph: og.Graph) -> Any:
        return kept_with(graph, "partitions", lambda: partition(graph))

    def planned(graph: og.Graph, wrt: tuple[str, ...], *, units: bool) -> Any:
        if not graph.is_finalized:
            return training_plan(graph, wrt, units=units)
        return kept_with(graph, f"plan {units} {wrt}", lambda: training_plan(graph, wrt, units=units))

    executable.partition, training.training_plan = partitioned, planned  # type: ignore[assignment]
    try:
        yield
    finally:
        executable.partition, training.training_plan = partition, training_plan
