"""The suites of entries: one job after the other, within a time budget."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from opgraph.bench.case import make
from opgraph.bench.peers.peer import Peer
from opgraph.bench.plan import COMPILER, Job, available_bytes, needed_bytes
from opgraph.bench.results import COLD, WARM, Cell, Row
from opgraph.bench.suites.timed import Say, measured
from opgraph.bench.timing import Clock, HostClock
from opgraph.errors import OpGraphError

#: Seconds of timing for one row: without a time limit; and the minimum.
ROW, SHORTEST = 2.0, 0.15
_GIB = 2**30


class Budget:
    """Shares the remaining time of a run among the remaining rows.

    Args:
        seconds: None for no limit.
        rows: the number of rows of the run.
    """

    def __init__(self, seconds: float | None, rows: int) -> None:
        self._end = None if seconds is None else time.perf_counter() + seconds
        self._rows = rows
        self._done = 0
        self._spent = 0.0
        self._compiling = 5.0

    def left(self) -> float | None:
        """The remaining seconds; None without a limit."""
        return None if self._end is None else max(self._end - time.perf_counter(), 0.0)

    def of_row(self) -> float:
        """Seconds of timing for the next row: its share, minus the time for building and checking in earlier rows."""
        left = self.left()
        if left is None:
            return ROW
        overhead = self._spent / self._done if self._done else 0.5
        return min(max(left / max(self._rows - self._done, 1) - overhead, SHORTEST), ROW)

    def may_compile(self) -> bool:
        """True if torch.compile would leave enough time for every later row's minimum."""
        left = self.left()
        if left is None:
            return True
        overhead = self._spent / self._done if self._done else 0.5
        return left > self._compiling + (self._rows - self._done) * (overhead + SHORTEST)

    def end_row(self, row: Row, begun: float, timing: float) -> None:
        """Updates the estimates with a finished row."""
        compiled = [c.first_ms for c in row.cells if c.peer == COMPILER and c.first_ms is not None]
        if compiled:
            self._compiling = 0.7 * self._compiling + 0.3 * compiled[0] * 1e-3
        self._done += 1
        self._spent += max(time.perf_counter() - begun - timing - sum(compiled) * 1e-3, 0.0)


def clock_of(device: str, cache: str) -> Clock:
    """The clock of a device."""
    if device == "cuda":
        from opgraph.bench.device_clock import DeviceClock

        return DeviceClock(warm=cache == WARM)
    return HostClock(cold=2 * last_level_cache() if cache == COLD else 0)


def last_level_cache(folder: str = "/sys/devices/system/cpu/cpu0/cache") -> int:
    """Bytes of the CPU's largest cache; 64 MiB where the machine does not report it."""
    sizes = []
    for path in Path(folder).glob("index*/size"):
        number, unit = path.read_text().strip()[:-1], path.read_text().strip()[-1:]
        sizes.append(int(number) << {"K": 10, "M": 20}.get(unit, 0) if number.isdigit() else 0)
    return max(sizes, default=0) or 64 << 20


def row_of(job: Job, peers: Sequence[Peer], device: str, threads: int, cache: str, budget: Budget, say: Say) -> Row:
    """Measures one job; if that is not possible, returns a row with the reason."""
    begun = time.perf_counter()
    size, available = needed_bytes(job), available_bytes(device)
    missing = job.entry.missing()
    timing = budget.of_row()
    if missing:
        row = _failed(job, cache, f"opgraph has no {missing}")
    elif size > available:
        row = _failed(job, cache, f"needs {size / _GIB:.1f} GiB of memory, {available / _GIB:.1f} are free")
    else:
        without = dict.fromkeys(job.without, "left out of this row by the plan: it compiles for seconds")
        if not budget.may_compile():
            without.setdefault(COMPILER, "left out of this row: no time was left to compile it")
        taking = [p for p in peers if p.name not in without]
        try:
            say("arrays")
            case = make(job.entry, job.direction, job.dtype, job.size, device, threads)
            row = measured(case, taking, clock_of(device, cache), timing, cache, say)
            left_out = [Cell(peer=p.name, failed=without[p.name]) for p in peers if p.name in without]
            row = replace(row, cells=(*row.cells, *left_out))
        except (OpGraphError, MemoryError, RuntimeError) as error:
            row = _failed(job, cache, " ".join(str(error).split())[:300])
    budget.end_row(row, begun, timing)
    return replace(row, size=job.size)


def _failed(job: Job, cache: str, why: str) -> Row:
    return Row(
        suite=job.entry.suite,
        entry=job.entry.name,
        direction=job.direction,
        dtype=job.dtype,
        elements=job.size,
        cache=cache,
        cells=(Cell(peer="opgraph", failed=why),),
    )
