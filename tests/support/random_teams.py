"""Random graphs by any number of threads, of OpenMP and of Python: right, and with the bits of a plain call.

Of all checks this one needs the fewest kernels: one executable is called with all arrays of a scenario, in turns.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import numpy as np
from random_arrays import laid_out
from random_calls import _differs
from random_scenario import Scenario
from random_truth import listed, problem, truths

import opgraph as og
from opgraph.errors import OpGraphError, Unimplemented
from opgraph.ir import dtypes
from opgraph.ir.logical_tensor import port_name
from opgraph.runtime import threads

#: Threads of OpenMP, or of a pool of Python's threads.
_TEAMS = ((1, False), (2, False), (5, False), (2, True), (5, True))


def teams(found: Scenario, rng: random.Random) -> Iterator[str]:
    """Problems of calling the graph of a scenario, and now and then its gradient, by other numbers of threads."""
    graph = found.graph
    f = og.compile(graph)
    floats = [port_name(t) for t in graph.inputs if t.dtype in dtypes.FLOATS]
    slope = None
    if floats and rng.random() < 0.3:
        with suppress(Unimplemented):
            slope = og.compile(graph, wrt=(rng.choice(floats),))
    turned = rng.randrange(len(found.feeds))
    for number, feeds in enumerate(found.feeds):
        try:
            want = [np.array(r) for r in listed(f(feeds))]
            allowed = truths(graph, feeds, seed=number)
        except OpGraphError:  # where one alone refuses them, `calls` tells it
            continue
        yield from (f"arrays {number}: {p}" for p in map(problem, want, allowed) if p)
        if number == turned:
            other = {n: laid_out(a, rng) for n, a in feeds.items()}
            strides = {n: (a.strides, a.shape) for n, a in other.items()}
            yield from (f"strides {strides}: {p}" for p in map(problem, listed(f(other)), allowed) if p)
        outs = {port_name(t): np.empty_like(r) for t, r in zip(graph.outputs, want, strict=True)}
        repeated = f.bind(feeds, out=outs) if len(outs) == len(want) else None
        pull = slope.vjp(feeds)[1] if slope is not None and set(slope.engines) == {"opgraph"} else None
        d = {n: np.ones_like(a) for n, a in outs.items() if a.dtype.kind not in "biu"}
        gradient = [np.array(g) for g in listed(pull(d))] if pull is not None and d else None
        for count, of_python in _TEAMS:
            told = f"arrays {number}, {count} threads" + (" of a pool" if of_python else "")
            with team(count, of_python=of_python):
                yield from _of_libraries(f, _differs(told, listed(f(feeds)), want))
                if repeated is not None:
                    for out in outs.values():
                        out[...] = np.zeros((), out.dtype)
                    repeated()
                    yield from _of_libraries(f, _differs(f"{told}, bound", list(outs.values()), want))
                if gradient is not None and pull is not None:
                    yield from _differs(f"{told}, gradient", listed(pull(d)), gradient)


def _of_libraries(f: og.Executable, found: Iterator[str]) -> Iterator[str]:
    """What is found where kernels alone run: of a library a thread's part decides which elements are vectors."""
    return found if set(f.engines) == {"opgraph"} else iter(())


@contextmanager
def team(count: int, *, of_python: bool) -> Iterator[None]:
    """While this lasts, every kernel is run by so many threads, whatever its size and the number of cores."""
    usual, least = threads.team, threads.SINGLE_THREADED
    parallel = None if of_python else threads._team(True).parallel
    threads.team, threads.SINGLE_THREADED = lambda size: (count, parallel), 0
    try:
        yield
    finally:
        threads.team, threads.SINGLE_THREADED = usual, least
