"""Random graphs run by any number of threads, of OpenMP and of Python: right, and with the bits of a plain call.

This check needs the fewest kernels of all: one executable is called with all arrays of a scenario, in turns.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from random_arrays import laid_out
from random_calls import differing
from random_scenario import Scenario
from random_truth import listed, problem, truths

import opgraph as og
from opgraph.errors import OpGraphError, Unimplemented
from opgraph.ir import dtypes
from opgraph.ir.logical_tensor import port_name
from opgraph.runtime import threads

#: Threads of OpenMP, or of a pool of Python's threads.
_TEAMS = ((1, False), (2, False), (5, False), (3, True))


def teams(found: Scenario, rng: random.Random) -> Iterator[str]:
    """Problems of calling the graph of a scenario, and sometimes its gradient, with other numbers of threads."""
    graph = found.graph
    wrt = _some_input(graph, rng)
    # A small kernel, once bound, always runs in one thread, so the others have executables of their own.
    (f, slope), (shared, shared_slope) = ((og.compile(graph), wrt and og.compile(graph, wrt=wrt)) for _ in range(2))
    turned = rng.randrange(len(found.feeds))
    for number, feeds in enumerate(found.feeds):
        try:
            want = [np.array(r) for r in listed(f(feeds))]
            allowed = truths(graph, feeds, seed=number)
        except OpGraphError:  # if only one of them refuses, `calls` reports it
            continue
        yield from (f"arrays {number}: {p}" for p in map(problem, want, allowed) if p)
        if number == turned:
            other = {n: laid_out(a, rng) for n, a in feeds.items()}
            strides = {n: (a.strides, a.shape) for n, a in other.items()}
            yield from (f"strides {strides}: {p}" for p in map(problem, listed(f(other)), allowed) if p)
        outs = {port_name(t): np.empty_like(r) for t, r in zip(graph.outputs, want, strict=True)}
        d = {n: np.ones_like(a) for n, a in outs.items() if a.dtype.kind not in "biu"}
        gradient = [np.array(g) for g in listed(slope.vjp(feeds)[1](d))] if slope and d else []
        bound = rng.choice(_TEAMS)
        for count, of_python in _TEAMS:
            told = f"arrays {number}, {count} threads" + (" of a pool" if of_python else "")
            with team(count, of_python=of_python):
                yield from _of_kernels(shared, differing(told, listed(shared(feeds)), want))
                if len(outs) == len(want):
                    again = shared.bind(feeds, out=outs) if (count, of_python) == bound else None
                    for out in outs.values():  # shows elements that no piece writes
                        out[...] = np.zeros((), out.dtype)
                    again() if again is not None else shared(feeds, out=outs)
                    yield from _of_kernels(shared, differing(f"{told}, out=", list(outs.values()), want))
                if gradient and shared_slope:
                    pulled = listed(shared_slope.vjp(feeds)[1](d))
                    yield from _of_kernels(shared_slope, differing(f"{told}, gradient", pulled, gradient))


def _some_input(graph: og.Graph, rng: random.Random) -> tuple[str, ...]:
    """Sometimes an input with a gradient."""
    floats = [port_name(t) for t in graph.inputs if t.dtype in dtypes.FLOATS]
    if not floats or rng.random() > 0.3:
        return ()
    chosen = (rng.choice(floats),)
    try:
        og.gradient(graph, chosen)
    except Unimplemented:
        return ()
    return chosen


def _of_kernels(f: og.Executable, found: Iterator[str]) -> Iterator[str]:
    """The problems, if only kernels run: in a library, a thread's part decides which elements are vectors."""
    return found if set(f.engines) == {"opgraph"} else iter(())


@contextmanager
def team(count: int, *, of_python: bool) -> Iterator[None]:
    """In this context, every kernel is run by so many threads, whatever its size and the number of cores."""
    usual, least = threads.team, threads.SINGLE_THREADED
    parallel = None if of_python else threads._team(True).parallel
    threads.team, threads.SINGLE_THREADED = lambda size: (count, parallel), 0
    try:
        yield
    finally:
        threads.team, threads.SINGLE_THREADED = usual, least
