"""Time on a GPU: events around a call, and a cache without data of the previous call."""

from __future__ import annotations

import statistics
from typing import Any

from opgraph.bench.timing import Call

#: Calls in one run; the median of them is its time.
CALLS = 5
#: The minimum of bytes written before each call: some 150 us, longer than a host takes to prepare a step of autograd.
WRITTEN = 512 << 20


class DeviceClock:
    """Device events on torch's current stream.

    Before each call, WRITTEN bytes are written, many times the size of the second-level cache. So none of the call's
    data is there, as in a network, where other layers run in between. The writing also keeps the device busy while the
    host prepares the launch, so that the time between two events is the device's alone, unless preparing takes longer.

    Args:
        warm: leave the cache as it is.
    """

    def __init__(self, *, warm: bool = False) -> None:
        import torch

        self._cuda: Any = torch.cuda
        size = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
        self._other: Any = None if warm else torch.empty(max(4 * size, WRITTEN), dtype=torch.uint8, device="cuda")
        self._events = [tuple(self._cuda.Event(enable_timing=True) for _ in range(2)) for _ in range(CALLS)]

    def repeats(self, seconds: float) -> int:
        """One run is always CALLS calls."""
        return 1

    def run(self, call: Call, repeats: int) -> float:
        """Seconds of one call on the device."""
        for before, after in self._events:
            if self._other is not None:
                self._other.zero_()
            before.record()
            call()
            after.record()
        self._cuda.synchronize()
        milliseconds = [float(before.elapsed_time(after)) for before, after in self._events]
        return statistics.median(milliseconds) * 1e-3
