"""Python's collector of cycles, left off while large graphs are built or cut.

It walks all ops again and again, half of the time of large files, and finds nothing: what is built here holds no
cycle.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collector() -> Iterator[None]:
    """Within, cycles are not collected; afterwards they are again, if they were before."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
