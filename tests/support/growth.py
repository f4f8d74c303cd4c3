"""How the time of a computation grows with its size."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

#: How many times larger the large one is.
FACTOR = 8


def growth(prepare: Callable[[int], Callable[[], object]], size: int) -> float:
    """The time that a computation of FACTOR times a size takes, over FACTOR times that of the size itself.

    Linear ones have about 1, quadratic ones FACTOR. Both are measured in one process, in processor time, the least of
    three runs each, without Python's garbage collector.

    Args:
        prepare: what makes the computation of a size; its own time does not count.
        size: of the small one: it should take 10 ms and more.
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
