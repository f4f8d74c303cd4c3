"""Calls one executable in turns with arrays of several sizes, in every way: each call must be like the only one."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import ml_dtypes
import numpy as np
from random_arrays import laid_out, without_steps
from random_calls import Feeds, _alike, _buffers, _given, differing
from random_scenario import Scenario
from random_shrink import part_of
from random_sizes import resized
from random_truth import listed

import opgraph as og
from opgraph.errors import OpGraphError, Unimplemented
from opgraph.ir import dtypes
from opgraph.ir.logical_tensor import port_name
from opgraph.runtime.reference import evaluate

#: The number of sets of arrays, and of calls in turns with them.
_SETS, _TURNS = 4, 8


def again(found: Scenario, rng: random.Random) -> Iterator[str]:
    """Problems of calling the graph of a scenario, with inputs of unknown sizes, in turns with arrays of several sizes.

    The first call of an executable gives the right result; the check of calls compares that with the reference.
    """
    free = part_of(found, found.graph.outputs, (), unknown=True)
    if free is None:
        return
    graph = free.graph
    drawn = [*free.feeds, *(resized(free.feeds[0], rng) for _ in range(3 * _SETS))]
    sets = list(islice(_fitting(graph, drawn), _SETS))
    if not sets:
        return
    alone = [[np.array(r) for r in listed(og.compile(graph)(feeds))] for feeds in sets]
    f = og.compile(graph)
    held: list[Callable[[], Iterator[str]]] = []
    for turn in range(_TURNS):
        number = rng.randrange(len(sets))
        way = rng.choice((_plain, _plain, _out, _bound))
        told = f"turn {turn}, {way.__name__[1:]}, {[list(a.shape) for a in sets[number].values()]}"
        yield from way(told, graph, f, sets[number], alone[number], rng, held)
        if held and rng.random() < 0.5:
            yield from rng.choice(held)()
    yield from _pulled(graph, sets, rng)


def _fitting(graph: og.Graph, sets: list[Feeds]) -> Iterator[Feeds]:
    """The sets that the reference accepts."""
    for feeds in sets:
        try:
            evaluate(graph, feeds, dtype=None)
            og.compile(graph)(feeds)
        except OpGraphError:
            continue
        yield feeds


def _plain(
    told: str, graph: og.Graph, f: Any, feeds: Feeds, bits: list[np.ndarray], rng: random.Random, held: list[Any]
) -> Iterator[str]:
    fresh = {n: laid_out(a, rng) if rng.random() < 0.3 else a for n, a in feeds.items()}
    yield from _alike(told, graph, f, feeds, listed(f(fresh)), bits)


def _out(
    told: str, graph: og.Graph, f: Any, feeds: Feeds, bits: list[np.ndarray], rng: random.Random, held: list[Any]
) -> Iterator[str]:
    outs, _ = _buffers(graph, bits, rng)
    f(feeds, out=_given(graph, outs, rng))
    yield from _alike(told, graph, f, feeds, list(outs.values()), bits)


def _bound(
    told: str, graph: og.Graph, f: Any, feeds: Feeds, bits: list[np.ndarray], rng: random.Random, held: list[Any]
) -> Iterator[str]:
    """A call that is repeated now, and later between others."""
    outs, _ = _buffers(graph, bits, rng)
    fresh = {n: a.copy() for n, a in feeds.items()}
    call = f.bind(fresh, out=_given(graph, outs, rng))

    def run() -> Iterator[str]:
        for array in outs.values():
            array[...] = np.zeros((), array.dtype)
        call()
        yield from _alike(told, graph, f, feeds, list(outs.values()), bits)

    held.append(run)
    yield from run()


def _pulled(graph: og.Graph, sets: list[Feeds], rng: random.Random) -> Iterator[str]:
    """Gradients of several calls, computed in another order than the calls, and more than once."""
    floats = [port_name(t) for t in graph.inputs if t.dtype in dtypes.FLOATS]
    if not floats:
        return
    wrt = tuple(rng.sample(floats, rng.randint(1, min(3, len(floats)))))
    try:
        f, single = (og.compile(graph, wrt=wrt) for _ in range(2))
    except Unimplemented:
        return
    draw = np.random.default_rng(rng.getrandbits(32))
    names = [port_name(t) for t in graph.outputs]
    wide = {port_name(t) for t in f.backward_graph.inputs}
    pulls = []
    for feeds in sets:
        results = dict(zip(names, listed(single(feeds)), strict=True))
        d = {
            n: np.asarray(draw.uniform(-1, 1, r.shape)).astype(r.dtype) for n, r in results.items() if f"d_{n}" in wide
        }
        if rng.random() < 0.3:  # as for a sum: one number everywhere
            d = {n: without_steps(a, rng) for n, a in d.items()}
        if not d:
            return
        dense = {n: np.array(a, order="C") for n, a in d.items()}
        try:
            want = [g.copy() for g in listed(og.compile(graph, wrt=wrt).vjp(feeds)[1](dense))]
        except OpGraphError:
            continue
        pulls.append((f.vjp({n: a.copy() for n, a in feeds.items()})[1], d, want))
    for turn in range(2 * len(pulls)):
        pull, d, want = rng.choice(pulls)
        dense = all(a.flags.c_contiguous for a in d.values())
        got = listed(pull(d))
        if dense:
            yield from differing(f"gradient by {wrt}, turn {turn}", got, want)
        else:
            yield from _near(f"gradient by {wrt}, turn {turn}, of one number", got, want)


def _near(what: str, got: list[np.ndarray], want: list[np.ndarray]) -> Iterator[str]:
    """Like `differing`, for sums of gradients up to 1 that may be added in another order: only large errors count."""
    for place, (a, b) in enumerate(zip(got, want, strict=True)):
        if a.shape != b.shape or a.dtype != b.dtype:
            yield f"{what}: result {place} is {a.dtype}{list(a.shape)} instead of {b.dtype}{list(b.shape)}"
            continue
        x, y = a.astype(np.float64), b.astype(np.float64)
        with np.errstate(all="ignore"):
            size = np.nanmax(np.abs(y), initial=1e-30, where=np.isfinite(y))
            rounding = 64 * float(ml_dtypes.finfo(a.dtype).eps)  # the only part left where the summands cancel
            off = ~(np.abs(x - y) <= 1e-2 * size + rounding) & np.isfinite(x) & np.isfinite(y)
        if off.any():
            at = tuple(int(i) for i in np.argwhere(off)[0])
            yield f"{what}: result {place} at {list(at)} is {a[at]!r} instead of {b[at]!r}"
