"""Huge pages for large new memory on the CPU: the first write to it then faults once in 2 MiB, not once in 4 KiB.

NumPy requests them for its own arrays of at least 4 MiB (numpy/_core/src/multiarray/alloc.c). torch does not, so this
module requests them for results that torch allocates. The call is advice: if the system lacks it, or is set to always
or never, nothing changes. specs/decisions/0017-huge-pages.md has the measurements. (Larger results:
opgraph.runtime.memory_pool.)
"""

from __future__ import annotations

import ctypes
import mmap
from functools import cache
from typing import Any

#: The smallest size in bytes that is worth a system call, which takes 1 to 2 us; the same as in NumPy.
LARGE = 4 << 20


def advise(address: int, size: int) -> None:
    """Requests huge pages for memory that was just allocated and not yet written.

    Args:
        address, size: the memory; pages that it shares with its neighbours are excluded. Below `LARGE`, nothing is
            requested.
    """
    if size < LARGE:
        return
    call = _madvise()
    if call is None:
        return
    first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (address + size) // mmap.PAGESIZE * mmap.PAGESIZE
    call(first, end - first, mmap.MADV_HUGEPAGE)  # a kernel without them returns an error, which is fine


@cache
def _madvise() -> Any:
    """The system's call, or None if it has none that supports huge pages."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):  # Linux only
        return None
    try:
        found = ctypes.CDLL(None).madvise
    except (OSError, AttributeError):
        return None
    found.argtypes, found.restype = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int], ctypes.c_int
    return found
