"""Gradients of random graphs: the compiled ones against the reference, and the reference against finite differences."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
from random_arrays import laid_out
from random_calls import Feeds, differing
from random_scenario import Scenario
from random_truth import Truth, epsilon, listed, problem, same_bits, truths

import opgraph as og
from opgraph.errors import OpGraphError, Unimplemented
from opgraph.ir import dtypes
from opgraph.ir.logical_tensor import port_name
from opgraph.runtime.reference import evaluate
from opgraph.transforms.units import named


def gradients(found: Scenario, rng: random.Random) -> Iterator[str]:
    """Problems of the gradient of a scenario's graph with respect to some of its inputs, and of the second gradient."""
    graph = found.graph
    floats = [port_name(t) for t in graph.inputs if t.dtype in dtypes.FLOATS]
    if not floats:
        return
    wrt = tuple(rng.sample(floats, rng.randint(1, len(floats))))
    try:
        slope = og.gradient(graph, wrt)
    except Unimplemented:
        return
    number = rng.randrange(len(found.feeds))
    feeds = found.feeds[number]
    try:
        results = listed(evaluate(graph, feeds))
    except OpGraphError:
        return
    given = _cotangents(slope, graph, feeds, results, rng)
    want = truths(slope, given)
    got = listed(og.compile(slope)(given))
    yield from (f"gradient by {wrt}: {p}" for p in map(problem, got, want) if p)
    yield from (f"gradient by {wrt}, backwards: {p}" for p in _backwards(graph, wrt, feeds, given, want, rng))
    # Only if all is f64: the gradients of results, which a cast may have narrowed, are inputs of the slope.
    if found.smooth and all(t.dtype == "f64" for t in (*graph.inputs, *slope.inputs) if t.dtype in dtypes.FLOATS):
        yield from (f"gradient by {wrt}: {p}" for p in differences(graph, slope, wrt, given, rng))
        second = [port_name(t) for t in slope.inputs if t.dtype in dtypes.FLOATS]
        if len(slope.ops) < 80 and rng.random() < 0.4 and second:
            chosen = tuple(rng.sample(second, rng.randint(1, min(2, len(second)))))
            try:
                bend = og.gradient(slope, chosen)
            except Unimplemented:
                return
            more = _cotangents(bend, slope, given, listed(evaluate(slope, given)), rng)
            yield from (f"second by {wrt}, {chosen}: {p}" for p in differences(slope, bend, chosen, more, rng))
            if len(bend.ops) < 150:
                got = listed(og.compile(bend)(more))
                yield from (
                    f"second by {wrt}, {chosen}, compiled: {p}" for p in map(problem, got, truths(bend, more)) if p
                )


def _cotangents(slope: og.Graph, graph: og.Graph, feeds: Feeds, results: list[np.ndarray], rng: random.Random) -> Feeds:
    """The arrays for a gradient's inputs: those of the graph, and random ones for its outputs."""
    draw = np.random.default_rng(rng.getrandbits(32))
    shapes = {f"d_{port_name(t)}": r.shape for t, r in zip(graph.outputs, results, strict=True)}
    given = {}
    for tensor in slope.inputs:
        name = port_name(tensor)
        if name in feeds:
            given[name] = feeds[name]
            continue
        given[name] = np.asarray(draw.uniform(-1, 1, shapes[name])).astype(dtypes.get(tensor.dtype).numpy)
    return given


def _backwards(
    graph: og.Graph, wrt: tuple[str, ...], feeds: Feeds, given: Feeds, want: list[Any], rng: random.Random
) -> Iterator[str]:
    """Checks a training step: results and gradients, the saved tensors, and that these do not change."""
    f = og.compile(graph, wrt=wrt)
    fresh = {n: laid_out(a, rng) if rng.random() < 0.3 else a.copy() for n, a in feeds.items()}
    results, pull = f.vjp(fresh)
    # If the backward pass keeps more than inputs, units are single ops in the forward, too: Swish(-inf) is -0, not NaN.
    forms = (graph, named(graph))
    wrong = [[p for p in map(problem, listed(results), truths(form, feeds)) if p] for form in forms]
    if all(wrong):
        yield f"forward: {wrong[0][0]}"
    planned = [(s.name, s.role, s.dtype) for s in f.saved_tensors()]
    if planned != [(s.name, s.role, s.dtype) for s in pull.saved]:
        yield f"kept is {pull.saved}, planned was {planned}"
    for entry in f.saved_tensors():
        if entry.role == "input" and pull._kept[entry.name] is not None:
            kept = pull._kept[entry.name]
            if entry.name in fresh and not same_bits(np.asarray(kept), feeds[entry.name]):
                yield f"{entry.name} is kept, but it is not the input"
    held = {n: np.array(a) for n, a in pull._kept.items()}
    d = {n.removeprefix("d_"): a for n, a in given.items() if n.startswith("d_") and n not in feeds}
    copies = {n: a.copy() for n, a in d.items()}
    first = listed(pull({n: a.copy() for n, a in d.items()})) if d else None
    if first is None:
        return
    bits = [a.copy() for a in first]
    want = _of_plan(f, pull, d, want)
    yield from (p for p in map(problem, first, want) if p)
    for array in first:
        if array.flags.writeable:  # an optimizer's step must not change saved tensors
            array[...] = np.zeros((), array.dtype)
    yield from (
        f"the backward pass changed {n}" for n, a in pull._kept.items() if not same_bits(np.asarray(a), held[n])
    )
    yield from (f"the backward pass changed input {n}" for n, a in fresh.items() if not same_bits(a, feeds[n]))
    again = listed(pull({n: laid_out(a, rng) for n, a in copies.items()}))
    yield from (f"again, in another layout: {p}" for p in map(problem, again, want) if p)
    yield from differing("again", listed(pull({n: a.copy() for n, a in copies.items()})), bits)
    beside = listed(f(feeds))
    if len(f._plan.forward.outputs) == len(graph.outputs):
        yield from differing("a call beside it", beside, listed(f.vjp(feeds)[0]))


def _of_plan(f: Any, pull: Any, d: Feeds, want: list[Truth]) -> list[Truth]:
    """The gradients by the plan of the backward pass, which may start at rounded outputs, as 1 - tanh(x)^2 does.

    They must be near those of the graph, to the rounding of saved tensors. Where they are NaN and those of the graph
    are not, the latter count: in f64 a recomputed value equals no rounded saved one, so none is the largest.
    """
    given = {**pull._kept, **{f"d_{n}": a for n, a in d.items()}}
    names = [port_name(t) for t in f.backward_graph.inputs]
    planned = truths(f.backward_graph, {n: np.asarray(given[n]) for n in names})
    coarsest = max(epsilon(t.dtype) for t in f.backward_graph.inputs if t.dtype in dtypes.FLOATS)
    found = []
    for own, exact in zip(planned, want, strict=True):
        lost = np.isnan(own.value) & ~np.isnan(exact.value)
        own.value, own.bound = (np.where(lost, b, a) for a, b in ((own.value, exact.value), (own.bound, exact.bound)))
        with np.errstate(all="ignore"):
            wide = np.nanmax(np.abs(exact.value), initial=1.0, where=np.isfinite(exact.value))
            near = np.abs(own.value - exact.value) <= exact.bound + own.bound + 64 * coarsest * wide
        same = near | np.isnan(exact.bound) | np.isnan(own.bound) | ~np.isfinite(exact.value)
        found.append(own if same.all() else exact)
    return found


def differences(
    graph: og.Graph, slope: og.Graph, wrt: tuple[str, ...], given: Feeds, rng: random.Random
) -> Iterator[str]:
    """Compares the gradient in f64 with differences along random directions, where both sides give the same."""
    draw = np.random.default_rng(rng.getrandbits(32))
    names = [port_name(t) for t in graph.inputs]
    if any(op.kind in ("StopGradient", "Quantize", "Dequantize", "Dropout") for op in graph.ops):
        return
    own = {n: given[n] for n in names if n in given}
    missing = [n for n in names if n not in given]
    if missing:  # the gradient does not read them; the graph does
        return
    found = dict(zip(wrt, listed(evaluate(slope, given)), strict=True))
    outputs = [port_name(t) for t in graph.outputs]

    def total(feeds: Feeds) -> float:
        results = dict(zip(outputs, listed(evaluate(graph, feeds)), strict=True))
        parts = [np.sum(r * given[f"d_{n}"]) for n, r in results.items() if f"d_{n}" in given]
        return float(np.sum(parts))

    for name in wrt:
        if own[name].size == 0:
            continue
        at = total(own)
        direction = draw.standard_normal(own[name].shape)
        if rng.random() < 0.5:  # one element alone
            flat = np.zeros(own[name].size)
            flat[rng.randrange(flat.size)] = 1.0
            direction = flat.reshape(own[name].shape)
        slopes = []
        for step in (1e-5, -1e-5, 3e-6, -3e-6):
            with np.errstate(all="ignore"):
                slopes.append((total({**own, name: own[name] + step * direction}) - at) / step)
        with np.errstate(all="ignore"):
            told = float(np.sum(found[name] * direction))
        central, finer = (slopes[0] + slopes[1]) / 2, (slopes[2] + slopes[3]) / 2
        size = max(abs(central), abs(finer), 1e-3 * abs(at))
        if not all(np.isfinite(slopes)) or size > 1e6:
            continue
        smooth = max(slopes) - min(slopes) <= 1e-2 * size and abs(central - finer) <= 1e-4 * size
        if smooth and not abs(told - finer) <= 1e-3 * size + 1e-6:
            yield f"differences by {name}: {told!r} instead of {finer!r}"
