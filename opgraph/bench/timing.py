"""Runs in turns: the times of calls, and the median of the ratios of neighbouring runs.

Other work on a machine slows neighbouring runs equally, so it cancels in their ratio, but not in a ratio of two medians
or of two fastest runs. Every figure of the project that is a time comes from here.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import numpy as np

Call = Callable[[], object]

#: The minimum seconds of one timed run: a shorter call is repeated.
SAMPLE = 1e-3
#: The minimum and the maximum number of rounds.
LEAST, MOST = 5, 41
#: A run that takes more seconds than this, and more than the budget, is not repeated.
LONG = 0.5
#: A ratio is noisy if its quartiles are farther apart than this fraction of it: it gets more rounds, then a mark.
NOISY = 0.15


class Clock(Protocol):
    """A way to time a run."""

    def repeats(self, seconds: float) -> int:
        """The number of repeats, in one run, of a call that takes `seconds`."""

    def run(self, call: Call, repeats: int) -> float:
        """Seconds of one call, the mean over `repeats`."""


def once(call: Call, repeats: int) -> float:
    """Seconds of one call, the mean over `repeats` in a row, by the host's clock."""
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - start) / repeats


class HostClock:
    """The host's clock. Data stay in the caches from one call to the next, where they fit.

    Args:
        cold: bytes written before each run, which evict the data from the caches; each run is then one call.
    """

    def __init__(self, cold: int = 0) -> None:
        self._other = np.zeros(cold // 8) if cold else None

    def repeats(self, seconds: float) -> int:
        """The number of calls that fill SAMPLE."""
        return 1 if self._other is not None else max(1, round(SAMPLE / max(seconds, 1e-8)))

    def run(self, call: Call, repeats: int) -> float:
        """Seconds of one call."""
        if self._other is not None:
            self._other += 1.0
        return once(call, repeats)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """One call's time divided by another's: median and quartiles over rounds in which both ran.

    Attributes:
        median: that of the ratios of neighbouring runs; below 1 the first call is faster.
        low, high: the quartiles.
        rounds: the number of pairs.
    """

    median: float
    low: float
    high: float
    rounds: int

    @property
    def noisy(self) -> bool:
        """True if the times vary too much to state more than the quartiles."""
        return self.rounds < 3 or self.high - self.low > NOISY * self.median


def ratio(ours: Sequence[float], theirs: Sequence[float | None]) -> Ratio:
    """The ratio of two rows of times.

    Args:
        ours: seconds, one for each round.
        theirs: the same; None for rounds in which it did not run.
    """
    pairs = [a / b for a, b in zip(ours, theirs, strict=True) if b is not None]
    low, middle, high = quartiles(pairs)
    return Ratio(median=middle, low=low, high=high, rounds=len(pairs))


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median, upper quartile, all within the values."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


Times = dict[str, list[float | None]]


def in_turns(calls: Mapping[str, Call], clock: Clock, budget: float, most: int = MOST) -> Times:
    """Runs calls in turns; each round reverses the order of the one before.

    Args:
        calls: the first takes part in every round, and others are compared with it. Each is called once before.
        clock: times a run.
        budget: approximate seconds in all. A call that is too slow for its share skips rounds, evenly spread. All run
            LEAST rounds, or 3 if LEAST would take longer than the budget, or 1 if one run alone takes longer than the
            budget and than LONG.
        most: the maximum number of rounds.

    Returns: seconds of each call, round by round; None for a round that it skipped.
    """
    with undisturbed():
        begun = time.perf_counter()
        repeats, costs = {}, {}
        for name, call in calls.items():
            cost, aside = _tried(call, clock)
            if cost < 20 * SAMPLE:  # for the first run of a short call, code and data were not in the caches
                cost, aside = min((cost, aside), _tried(call, clock))
            repeats[name] = clock.repeats(cost)
            costs[name] = max(repeats[name] * cost + aside, 1e-7)
        left = max(budget - (time.perf_counter() - begun), 0.0)
        rounds = planned(costs, left, most)
        times: Times = {name: [] for name in calls}
        total = rounds[next(iter(calls))]
        for index in range(total):
            present = [name for name in calls if takes_part(index, rounds[name], total)]
            found = {name: clock.run(calls[name], repeats[name]) for name in (present, present[::-1])[index % 2]}
            for name, row in times.items():
                row.append(found.get(name))
    return times


def _tried(call: Call, clock: Clock) -> tuple[float, float]:
    """Seconds of one call, and those that a run takes in addition: emptying caches, waiting for a device."""
    start = time.perf_counter()
    found = clock.run(call, 1)
    return found, max(time.perf_counter() - start - found, 0.0)


def planned(costs: Mapping[str, float], budget: float, most: int = MOST) -> dict[str, int]:
    """The number of rounds of each call, given the seconds of one run: an equal share of the budget for each."""
    share = budget / len(costs)
    least = LEAST if LEAST * sum(costs.values()) <= budget else 3
    rounds = {
        name: 1 if cost > max(budget, LONG) else int(min(max(share / cost, least), most))
        for name, cost in costs.items()
    }
    # All are compared with the first call: no call runs without it.
    total = rounds[next(iter(costs))]
    return {name: min(count, total) for name, count in rounds.items()}


def takes_part(index: int, rounds: int, total: int) -> bool:
    """True if a call that runs `rounds` of `total` rounds runs in this one."""
    return (index + 1) * rounds // total != index * rounds // total


def compare(ours: Call, theirs: Call, rounds: int = 31) -> dict[str, float]:
    """Times two calls in turns: median microseconds of both, and the quartiles of the ratio ours / theirs."""
    ours(), theirs()
    clock = HostClock()
    repeats = clock.repeats(once(ours, 3))
    pairs = [(clock.run(ours, repeats), clock.run(theirs, repeats)) for _ in range(rounds)]
    found = ratio([a for a, _ in pairs], [b for _, b in pairs])
    return {
        "ours_us": statistics.median(a for a, _ in pairs) * 1e6,
        "theirs_us": statistics.median(b for _, b in pairs) * 1e6,
        "ratio": found.median,
        "low": found.low,
        "high": found.high,
    }


@contextmanager
def undisturbed() -> Iterator[None]:
    """Disables garbage collection inside."""
    was = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
