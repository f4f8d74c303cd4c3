"""Memory of large results that nobody holds any more, kept for the next ones.

The C library gives memory of 32 MiB and more back to the system each time it is freed, and the system clears every page
before it gives it out again, which takes as long as a kernel that is bound by memory. Here such memory waits instead,
lent to the system (MADV_FREE): whoever needs memory gets it, and what was not needed is still there, without a page
fault. specs/decisions/0024-memory-pool-for-large-results.md has the measurements.
"""

from __future__ import annotations

import mmap
import weakref
from collections import deque

import numpy as np

#: Bytes of the smallest result that is kept: what glibc never serves from its heap (DEFAULT_MMAP_THRESHOLD_MAX).
SMALLEST = 32 << 20
#: Bytes that wait at most.
MOST = 256 << 20
_HUGE = 2 << 20

#: What waits, the oldest first. Memory may come back in any thread and within any statement, when a collector runs: so
#: there is no lock, and every step is one call of the deque.
_waiting: deque[mmap.mmap] = deque()


def is_kept(size: int) -> bool:
    """Whether a result of so many bytes is worth keeping, and the system has the call for it."""
    return size >= SMALLEST and hasattr(mmap, "MADV_FREE") and hasattr(mmap, "MADV_HUGEPAGE")


def array(size: int) -> np.ndarray:
    """Bytes with any content: of memory that waits, or new, on huge pages.

    Args:
        size: in bytes, of a result that `is_kept`.

    Returns:
        A uint8 array of one dimension. When it and all that is made of it are gone, its memory waits again.

    Raises:
        OSError: the system has not that much.
    """
    whole = -(-size // _HUGE) * _HUGE
    memory = _taken(whole)
    if memory is None:
        memory = mmap.mmap(-1, whole, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_HUGEPAGE)  # advice: a kernel set to never says yes and does nothing
    made = np.frombuffer(memory, np.uint8, size)
    weakref.finalize(made, _give_back, memory).atexit = False
    return made


def empty_cache() -> int:
    """Gives the memory of freed results back to the system at once. Returns how many bytes that are.

    Results of 32 MiB and more on the CPU leave up to 256 MiB behind when they are freed, for the next ones. The system
    may take that whenever it needs memory, but counts it as the process's own until then.
    """
    return _shrink(0)


def _taken(size: int) -> mmap.mmap | None:
    """Memory of just that size, the youngest first: it is likeliest to be there still."""
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
    """Gives the oldest back until no more than so many bytes wait. Returns the bytes given back."""
    given = 0
    while sum(map(len, list(_waiting))) > most:
        try:
            given += len(_waiting.popleft())
        except IndexError:  # another thread was first
            break
    return given
