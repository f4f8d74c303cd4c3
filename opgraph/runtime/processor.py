"""The processor of this machine, which determines the code of kernels and is part of their key in the disk cache."""

from __future__ import annotations

import platform
from functools import cache


@cache
def identity() -> str:
    """The text that -march=native depends on: a machine with an older processor may share the home directory."""
    try:
        with open("/proc/cpuinfo", "rb") as file:
            head = file.read(16384).decode(errors="replace")
    except OSError:
        head = ""
    named = ("vendor_id", "model name", "flags", "Features", "CPU part")
    return "\n".join([platform.machine(), *(x for x in head.split("\n\n")[0].splitlines() if x.startswith(named))])


def has_avx512() -> bool:
    """True if it has the instructions that kernels/math/lanes.h requires."""
    return {"avx512f", "avx512dq", "avx512bw", "avx512vl"} <= set(identity().split())


def owns_lines() -> bool:
    """True on Intel: kernels should then prefetch or bypass lines that they write to (kernels/math/lane_memory.h)."""
    return "GenuineIntel" in identity()
