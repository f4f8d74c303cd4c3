"""Memory between inaccessible pages: an access beyond its end ends the process."""

from __future__ import annotations

import ctypes
import mmap

import numpy as np

_LIBC = ctypes.CDLL(None, use_errno=True)
_PAGE = mmap.PAGESIZE


def guarded(size: int) -> np.ndarray:
    """`size` bytes, all 0xA5, from a multiple of 16 on, as every GPU allocator's; less than 16 more are accessible."""
    room = -(-size // _PAGE) * _PAGE
    memory = np.frombuffer(mmap.mmap(-1, room + 2 * _PAGE), np.uint8)
    first = memory.__array_interface__["data"][0]
    for page in (first, first + _PAGE + room):
        refused = _LIBC.mprotect(ctypes.c_void_p(page), ctypes.c_size_t(_PAGE), 0)  # PROT_NONE
        assert not refused, ctypes.get_errno()
    start = (_PAGE + room - size) // 16 * 16
    memory[_PAGE : _PAGE + room] = 0xA5
    return memory[start : start + size]
