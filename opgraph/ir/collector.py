"""Python's collector of cycles, left off while large graphs are built or cut.

It walks all ops again and again, half of the time of large files, and finds nothing: what is built here holds no
cycle.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collector(lasting: bool = False) -> Iterator[None]:
    """Within, cycles are not collected; afterwards they are again, if they were before.

    Args:
        lasting: what is made within lives on. It joins the old objects without being walked, so that no full collection
            follows at once (0.2 s where torch and transformers are loaded). For what is rare: young garbage of the
            whole process waits for the next full collection. Nothing of this where objects are frozen.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            if lasting and not gc.get_freeze_count():
                gc.freeze()
                gc.unfreeze()  # into the oldest generation
            gc.enable()
