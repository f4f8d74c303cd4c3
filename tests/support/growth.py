"""The growth of a computation's time with its size."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

#: The ratio of the two sizes.
FACTOR = 8


def growth(prepare: Callable[[int], Callable[[], object]], size: int) -> float:
    """The time of a computation of FACTOR times a size, divided by FACTOR times that of the size itself.

    About 1 for linear computations, FACTOR for quadratic ones. Both are measured in one process, in processor time, the
    least of three runs each, without Python's garbage collector.

    Args:
        prepare: returns the computation of a size; its own time does not count.
        size: the small size: its computation should take 10 ms and more.
    """
    small, large = (min(_seconds(prepare(n)) for _ in range(3)) for n in (size, FACTOR * size))
    return large / small / FACTOR


def _seconds(run: Callable[[], object]) -> float:
    gc.disable()
    try:
        started = time.process_time()
        run()
        return time.process_time() - started
    finally:
        gc.enable()
