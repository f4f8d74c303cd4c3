"""A pool for the memory of large results: when they are freed, it is kept for the next ones.

The C library returns freed memory of 32 MiB and more to the system, and the system clears every page before it gives it
out again. This takes as long as a memory-bound kernel. The pool keeps such memory instead, and lends it to the system
(MADV_FREE): the system may take it when it needs memory, and pages that it did not take are reused without a page
fault. specs/decisions/0024-memory-pool-for-large-results.md has the measurements.
"""

from __future__ import annotations

import mmap
import weakref
from collections import deque

import numpy as np

#: Bytes of the smallest result that is kept: glibc never serves this from its heap (DEFAULT_MMAP_THRESHOLD_MAX).
SMALLEST = 32 << 20
#: The most bytes that the pool keeps.
MOST = 256 << 20
_HUGE = 2 << 20

#: The kept memory, the oldest first. The garbage collector may return memory in any thread and within any statement. So
#: there is no lock, and every step is one call of the deque.
_waiting: deque[mmap.mmap] = deque()


def is_kept(size: int) -> bool:
    """True if a result of `size` bytes is worth keeping, and the system has the call for it."""
    return size >= SMALLEST and hasattr(mmap, "MADV_FREE") and hasattr(mmap, "MADV_HUGEPAGE")


def array(size: int) -> np.ndarray:
    """Returns bytes with any content: kept memory, or new memory on huge pages.

    Args:
        size: in bytes; `is_kept(size)` must be true.

    Returns:
        A uint8 array of one dimension. When it and all its views are gone, its memory returns to the pool.

    Raises:
        OSError: the system does not have that much memory.
    """
    whole = -(-size // _HUGE) * _HUGE
    memory = _taken(whole)
    if memory is None:
        memory = mmap.mmap(-1, whole, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_HUGEPAGE)  # advice: a kernel set to never accepts it and does nothing
    made = np.frombuffer(memory, np.uint8, size)
    weakref.finalize(made, _give_back, memory).atexit = False
    return made


def empty_cache() -> int:
    """Gives the memory of freed results back to the system at once. Returns the number of bytes.

    When results of 32 MiB and more on the CPU are freed, up to 256 MiB are kept for the next ones. The system may take
    that whenever it needs memory, but counts it as memory of the process until then.
    """
    return _shrink(0)


def _taken(size: int) -> mmap.mmap | None:
    """Takes kept memory of exactly that size, the youngest first: its pages are the most likely to be still there."""
    for memory in reversed(list(_waiting)):
        if len(memory) == size:
            try:
                _waiting.remove(memory)
            except ValueError:  # another thread was first
                continue
            return memory
    return None


def _give_back(memory: mmap.mmap) -> None:
    if len(memory) > MOST:
        return
    memory.madvise(mmap.MADV_FREE)
    _waiting.append(memory)
    _shrink(MOST)


def _shrink(most: int) -> int:
    """Gives the oldest memory back to the system until at most `most` bytes are kept. Returns the bytes given back."""
    given = 0
    while sum(map(len, list(_waiting))) > most:
        try:
            given += len(_waiting.popleft())
        except IndexError:  # another thread was first
            break
    return given
