"""Disables Python's cycle collector while large graphs are built or partitioned.

It would walk all ops repeatedly, which takes half of the time for large files, and find nothing: these objects form no
cycles.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collector() -> Iterator[None]:
    """A context without cycle collection; the previous state is restored at its end."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
