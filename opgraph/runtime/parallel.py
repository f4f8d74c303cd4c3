"""Runs several compilers in parallel: each is a process, or a library that lets other threads run."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence


def at_once(calls: Sequence[Callable[[], object]]) -> None:
    """Runs calls in parallel, as many at a time as there are processors; raises the error of the first that fails."""
    if len(calls) == 1:
        calls[0]()
    elif calls:
        from concurrent.futures import ThreadPoolExecutor  # costs milliseconds of `import opgraph`

        with ThreadPoolExecutor(min(len(os.sched_getaffinity(0)), len(calls))) as pool:
            for done in [pool.submit(call) for call in calls]:
                done.result()
