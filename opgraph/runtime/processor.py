"""The processor of this machine: what kernels for it are compiled by, and kept under on disk."""

from __future__ import annotations

import platform
from functools import cache


@cache
def identity() -> str:
    """What -march=native depends on: a home directory may be shared with a machine that has an older processor."""
    try:
        with open("/proc/cpuinfo", "rb") as file:
            head = file.read(16384).decode(errors="replace")
    except OSError:
        head = ""
    named = ("vendor_id", "model name", "flags", "Features", "CPU part")
    return "\n".join([platform.machine(), *(x for x in head.split("\n\n")[0].splitlines() if x.startswith(named))])


def has_avx512() -> bool:
    """Whether it has what kernels/math/lanes.h asks for."""
    return {"avx512f", "avx512dq", "avx512bw", "avx512vl"} <= set(identity().split())


def owns_lines() -> bool:
    """Whether kernels should look after the lines that they write to (kernels/math/lane_memory.h): on Intel's."""
    return "GenuineIntel" in identity()
