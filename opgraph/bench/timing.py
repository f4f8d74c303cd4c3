"""Runs in turns: how long calls take, and the median of the ratios of neighbouring runs.

Other work on a machine slows neighbouring runs alike, so that it cancels in their ratio; a ratio of two medians, or of
two fastest runs, keeps it. Every figure of the project that is a time comes from here.
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

#: Seconds that one timed run lasts at least: a call that takes less is repeated.
SAMPLE = 1e-3
#: Rounds: at least, and at most.
LEAST, MOST = 5, 41
#: Seconds of a run that is not repeated where they are more than there is.
LONG = 0.5
#: A ratio whose quartiles lie farther apart than this part of it is noisy: it gets more rounds, then a mark.
NOISY = 0.15


class Clock(Protocol):
    """How a run is timed."""

    def repeats(self, seconds: float) -> int:
        """How often a call of so many seconds is repeated in one run."""

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
        cold: bytes written before each run, which drive the data out of the caches; each run is one call then.
    """

    def __init__(self, cold: int = 0) -> None:
        self._other = np.zeros(cold // 8) if cold else None

    def repeats(self, seconds: float) -> int:
        """As many as fill SAMPLE."""
        return 1 if self._other is not None else max(1, round(SAMPLE / max(seconds, 1e-8)))

    def run(self, call: Call, repeats: int) -> float:
        """Seconds of one call."""
        if self._other is not None:
            self._other += 1.0
        return once(call, repeats)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """One call's time as a part of another's: median and quartiles over rounds in which both ran.

    Attributes:
        median: of the ratios of neighbouring runs; below 1 is faster than the other.
        low, high: the quartiles.
        rounds: how many pairs.
    """

    median: float
    low: float
    high: float
    rounds: int

    @property
    def noisy(self) -> bool:
        """Whether the machine was too restless to say more than the quartiles say."""
        return self.rounds < 3 or self.high - self.low > NOISY * self.median


def ratio(ours: Sequence[float], theirs: Sequence[float | None]) -> Ratio:
    """The ratio of two rows of times.

    Args:
        ours: seconds, one for each round.
        theirs: the same; None where it sat a round out.
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
    """Runs calls in turns; each round in the other direction than the one before.

    Args:
        calls: the first takes part in every round, and others are compared with it. Each is called once before.
        clock: how a run is timed.
        budget: seconds in all, about. A call that is too slow for its share of them sits rounds out, evenly spread; all
            run LEAST rounds, or 3 where so many would take longer than the budget, or one that takes longer by itself,
            and more than LONG.
        most: rounds.

    Returns: seconds of each call, round by round; None for a round that it sat out.
    """
    with undisturbed():
        begun = time.perf_counter()
        repeats, costs = {}, {}
        for name, call in calls.items():
            cost, aside = _tried(call, clock)
            if cost < 20 * SAMPLE:  # the first run of a short call found its code and data nowhere near
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
    """Seconds of one call, and what a run takes beside it: emptying caches, waiting for a device."""
    start = time.perf_counter()
    found = clock.run(call, 1)
    return found, max(time.perf_counter() - start - found, 0.0)


def planned(costs: Mapping[str, float], budget: float, most: int = MOST) -> dict[str, int]:
    """How many rounds each call runs, given the seconds of one run: an equal share of the budget for each."""
    share = budget / len(costs)
    least = LEAST if LEAST * sum(costs.values()) <= budget else 3
    rounds = {
        name: 1 if cost > max(budget, LONG) else int(min(max(share / cost, least), most))
        for name, cost in costs.items()
    }
    # The first is what all are compared with: nobody runs without it.
    total = rounds[next(iter(costs))]
    return {name: min(count, total) for name, count in rounds.items()}


def takes_part(index: int, rounds: int, total: int) -> bool:
    """Whether a call that runs `rounds` of `total` rounds runs in this one."""
    return (index + 1) * rounds // total != index * rounds // total


def compare(ours: Call, theirs: Call, rounds: int = 31) -> dict[str, float]:
    """Two calls in turns: median microseconds of both, and the quartiles of the ratio ours / theirs."""
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
    """No garbage collection inside."""
    was = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
