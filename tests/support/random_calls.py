"""Every way to call a compiled graph: each must give the bits of a plain call, or raise a named error."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from random_arrays import laid_out, without_steps
from random_scenario import Scenario
from random_truth import listed, problem, same_bits, truths

import opgraph as og
from opgraph.errors import InvalidArguments, OpGraphError
from opgraph.ir import opdef
from opgraph.ir.logical_tensor import port_name

Feeds = dict[str, np.ndarray]


def calls(found: Scenario, rng: random.Random) -> Iterator[str]:
    """Problems of calling the graph of a scenario, and of a second graph with results rounded after each op."""
    graph = found.graph
    f = og.compile(graph, rounding=rng.choice(("store", "store", "store", "each")))
    plain: list[tuple[Feeds, list[np.ndarray]]] = []
    for number, feeds in enumerate(found.feeds):
        before = {name: array.copy() for name, array in feeds.items()}
        try:
            want = truths(graph, feeds, seed=number)
        except OpGraphError as error:
            refused = " ".join(str(error).split())
            try:
                f(feeds)
            except OpGraphError:
                continue
            if has_dead_ops(graph):  # they need not run
                continue
            yield f"binding {number}: the reference refuses what the compiled graph takes: {refused}"
            continue
        got = listed(f(feeds))
        yield from (f"binding {number}: {p}" for p in map(problem, got, want) if p)
        yield from (f"a call changed input {n}" for n, a in feeds.items() if not same_bits(a, before[n]))
        plain.append((feeds, [g.copy() for g in got]))
        if f.memory_plan(feeds).clashes():
            yield f"values share memory while both are needed: {f.memory_plan(feeds)}"
        yield from _owned(graph, got, feeds)
    for again in range(2):
        for feeds, want_bits in plain:
            yield from differing(f"call {again + 2}", listed(f(feeds)), want_bits)
    if not plain:
        return
    feeds, bits = plain[rng.randrange(len(plain))]
    ways = (_layouts, _repeated, _out, _over_inputs, _donated, _bound, _threads, _compiled_again, _shared)
    for way in rng.sample(ways, 4):  # each compiles kernels of its own
        yield from (f"{way.__name__[1:]}: {p}" for p in way(graph, f, feeds, bits, rng))


def has_dead_ops(graph: og.Graph) -> bool:
    """True if no output needs some op: such an op need not run."""
    read = {t.id for t in graph.outputs} | {t.id for op in graph.ops for t in op.inputs}
    return any(t.id not in read for op in graph.ops for t in op.outputs)


def _owned(graph: og.Graph, got: list[np.ndarray], feeds: Feeds) -> Iterator[str]:
    """Results belong to the caller, who may write to them, unless they are inputs; later calls show the effects."""
    inputs = {t.id for t in graph.inputs}
    for tensor, result in zip(graph.outputs, got, strict=True):
        if tensor.id in inputs or not result.size:
            continue
        yield from (f"a result lies over input {n}" for n, a in feeds.items() if np.shares_memory(result, a))
        if result.flags.writeable:
            result[...] = np.zeros((), result.dtype)


def differing(what: str, got: list[np.ndarray], want: list[np.ndarray]) -> Iterator[str]:
    for place, (a, b) in enumerate(zip(got, want, strict=True)):
        if not same_bits(a, b):
            if a.shape != b.shape or a.dtype != b.dtype:
                yield f"{what}: result {place} is {a.dtype}{list(a.shape)} instead of {b.dtype}{list(b.shape)}"
                continue
            off = np.argwhere((a != b) & ~((a != a) & (b != b)))
            at = tuple(int(i) for i in off[0]) if len(off) else ()
            shown = f"at {list(at)} {a[at]!r} instead of {b[at]!r}" if len(off) else "signs of zeros"
            yield f"{what}: result {place} has other bits, {len(off)} of {a.size}: {shown}"


def _alike(
    what: str, graph: og.Graph, f: Any, feeds: Feeds, got: list[np.ndarray], want: list[np.ndarray]
) -> Iterator[str]:
    """Like `differing`; but sums, and libraries, may add up in another order for other layouts of arrays.

    Args:
        feeds: the inputs of the results.
    """
    found = list(differing(what, got, want))
    if found and not (
        set(f.engines) == {"opgraph"} and all(opdef.get(op.kind, where="").is_pointwise for op in graph.ops)
    ):
        found = [f"{what}: {p}" for p in map(problem, got, truths(graph, feeds)) if p]
    yield from found


def _layouts(graph: og.Graph, f: Any, feeds: Feeds, bits: list[np.ndarray], rng: random.Random) -> Iterator[str]:
    for _ in range(2):
        other = {name: laid_out(array, rng) for name, array in feeds.items()}
        strides = {n: (a.strides, a.shape) for n, a in other.items()}
        yield from _alike(f"operands with strides {strides}", graph, f, feeds, listed(f(other)), bits)


def _repeated(graph: og.Graph, f: Any, feeds: Feeds, bits: list[np.ndarray], rng: random.Random) -> Iterator[str]:
    other = {name: without_steps(array, rng) if _has_values(name, feeds) else array for name, array in feeds.items()}
    dense = {name: np.array(array, order="C") for name, array in other.items()}
    strides = {n: (a.strides, a.shape) for n, a in other.items()}
    try:
        want = listed(f(dense))
    except OpGraphError:
        return
    yield from _alike(f"strides {strides}", graph, f, dense, listed(f(other)), want)


def _has_values(name: str, feeds: Feeds) -> bool:
    return feeds[name].dtype != np.int32  # those may be shapes


def _shared(graph: og.Graph, f: Any, feeds: Feeds, bits: list[np.ndarray], rng: random.Random) -> Iterator[str]:
    """One array for several inputs, and overlapping views of it."""
    names = list(feeds)
    rng.shuffle(names)
    for a in names:
        for b in names:
            if a >= b or feeds[a].shape != feeds[b].shape or feeds[a].dtype != feeds[b].dtype:
                continue
            if not _has_values(a, feeds):
                continue
            one = feeds[a].copy()
            dense = {**feeds, a: one.copy(), b: one.copy()}
            got = listed(f({**feeds, a: one, b: one}))
            yield from _alike(f"one array for {a} and {b}", graph, f, dense, got, listed(f(dense)))
            base = np.concatenate([one.reshape(-1), one.reshape(-1)[:3]])
            shifted = base[min(2, one.size) :][: one.size].reshape(one.shape)
            first = base[: one.size].reshape(one.shape)
            dense = {**feeds, a: first.copy(), b: shifted.copy()}
            got = listed(f({**feeds, a: first, b: shifted}))
            yield from _alike(f"overlapping {a} and {b}", graph, f, dense, got, listed(f(dense)))
            return


def _names(graph: og.Graph) -> list[str]:
    return [port_name(t) for t in graph.outputs]


def _given(graph: og.Graph, outs: Mapping[str, np.ndarray], rng: random.Random) -> Any:
    return next(iter(outs.values())) if len(outs) == 1 and rng.random() < 0.7 else dict(outs)


def _buffers(graph: og.Graph, bits: list[np.ndarray], rng: random.Random) -> tuple[dict[str, Any], list[Any]]:
    """Arrays to write to, sometimes strided, and the memory around them."""
    outs, around = {}, []
    for name, result in zip(_names(graph), bits, strict=True):
        shape = [*result.shape]
        steps = [rng.choice((1, 1, 1, 2)) for _ in shape] if rng.random() < 0.5 else [1] * len(shape)
        wide = np.full([s * k + 1 for s, k in zip(shape, steps, strict=True)], 99, np.float64).astype(result.dtype)
        view = wide[tuple(slice(0, s * k, k) for s, k in zip(shape, steps, strict=True))] if shape else wide[...]
        if rng.random() < 0.15 and view.ndim:
            view = np.flip(view, rng.randrange(view.ndim))
        if rng.random() < 0.4:
            wide = view = np.full(shape, 99, np.float64).astype(result.dtype)
        outs[name] = view
        around.append((wide, view))
    return outs, around


def _harmed(around: list[Any]) -> Iterator[str]:
    for wide, view in around:
        kept = view.copy()
        filler = np.full((), 99, np.float64).astype(view.dtype)
        view[...] = filler
        if not (wide == filler).all():
            yield f"memory around an output of strides {view.strides} was written to"
        view[...] = kept


def _out(graph: og.Graph, f: Any, feeds: Feeds, bits: list[np.ndarray], rng: random.Random) -> Iterator[str]:
    outs, around = _buffers(graph, bits, rng)
    given = _given(graph, outs, rng)
    for again in range(2):
        f(feeds, out=given)
        strides = [a.strides for a in outs.values()]
        yield from _alike(f"out= with strides {strides}, {again + 1}", graph, f, feeds, list(outs.values()), bits)
    yield from _harmed(around)
    yield from differing("a plain call after out=", listed(f(feeds)), bits)


def _over_inputs(graph: og.Graph, f: Any, feeds: Feeds, bits: list[np.ndarray], rng: random.Random) -> Iterator[str]:
    """An output over an input: right, or refused; the other arrays do not change."""
    names = _names(graph)
    pairs = [
        (place, name)
        for place, result in enumerate(bits)
        for name, array in feeds.items()
        if result.dtype == array.dtype and result.shape == array.shape and array.size
    ]
    if not pairs:
        return
    place, name = rng.choice(pairs)
    for shift in (0, 1):
        fresh = {n: a.copy() for n, a in feeds.items()}
        base = np.concatenate([fresh[name].reshape(-1), fresh[name].reshape(-1)[:1]])
        fresh[name] = base[: feeds[name].size].reshape(feeds[name].shape)
        over = base[shift:][: feeds[name].size].reshape(feeds[name].shape)
        outs = {n: np.zeros(b.shape, b.dtype) for n, b in zip(names, bits, strict=True)}
        outs[names[place]] = over
        try:
            f(fresh, out=_given(graph, outs, rng))
        except InvalidArguments:
            yield from (f"refused, but {n} has changed" for n in feeds if not same_bits(fresh[n], feeds[n]))
            continue
        yield from differing(f"out {names[place]} over input {name} + {shift}", list(outs.values()), bits)


def _donated(graph: og.Graph, f: Any, feeds: Feeds, bits: list[np.ndarray], rng: random.Random) -> Iterator[str]:
    names = [n for n in feeds if rng.random() < 0.8]
    taken = []
    for name in names:
        try:
            og.compile(graph, donate=(*taken, name))
        except OpGraphError:
            continue
        taken.append(name)
    if not taken:
        return
    giving = og.compile(graph, donate=tuple(taken))
    plain = listed(og.compile(graph)(feeds))
    for how in range(4):
        fresh = {n: a.copy() if how != 1 else np.array(laid_out(a, rng), order="K") for n, a in feeds.items()}
        dense = feeds
        if how == 2:  # zero strides: a write would go to the same memory many times
            fresh[taken[0]] = without_steps(feeds[taken[0]], rng)
            dense = {n: np.array(a, order="C") for n, a in fresh.items()}
            plain = listed(og.compile(graph)(dense))
        if how == 3:
            outs, around = _buffers(graph, bits, rng)
            plain = listed(og.compile(graph)(feeds))
        try:
            got = giving(fresh) if how != 3 else giving(fresh, out=_given(graph, outs, rng))
        except InvalidArguments:
            continue
        got = listed(got)
        yield from _alike(f"donate={taken}, way {how}", graph, f, dense, got, plain)
        if how == 3:
            yield from _harmed(around)
        if how != 2:
            for n in feeds:
                if n not in taken and not same_bits(fresh[n], feeds[n]):
                    yield f"donate={taken} changed {n}"


def _bound(graph: og.Graph, f: Any, feeds: Feeds, bits: list[np.ndarray], rng: random.Random) -> Iterator[str]:
    outs, around = _buffers(graph, bits, rng)
    fresh = {n: a.copy() if rng.random() < 0.5 else laid_out(a, rng) for n, a in feeds.items()}
    again = f.bind(fresh, out=_given(graph, outs, rng))
    again()
    yield from _alike("bind", graph, f, feeds, list(outs.values()), bits)
    for n, a in fresh.items():
        if a.flags.writeable and _has_values(n, feeds) and a.size:
            a[...] = np.roll(a, 1)
    other = {n: np.array(a, order="C") for n, a in fresh.items()}
    again()
    yield from _alike("bind, other values", graph, f, other, list(outs.values()), listed(f(other)))
    yield from _harmed(around)


def _threads(graph: og.Graph, f: Any, feeds: Feeds, bits: list[np.ndarray], rng: random.Random) -> Iterator[str]:
    rolled = {n: np.roll(a, 1) if _has_values(n, feeds) else a for n, a in feeds.items()}
    found: list[str] = []
    want = (bits, listed(f(rolled)))

    def run(which: int) -> None:
        for _ in range(4):
            found.extend(differing(f"thread {which}", listed(f((feeds, rolled)[which])), want[which]))

    workers = [threading.Thread(target=run, args=(i,)) for i in (0, 1)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    yield from found
    if max((b.size for b in (*bits, *feeds.values())), default=0) >= 60_000:
        import torch

        usual = torch.get_num_threads()
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            got = listed(f(feeds))
            if set(f.engines) == {"opgraph"}:
                yield from differing(f"{count} threads", got, bits)
            else:  # in torch, the part of a thread decides on vectors and on the order of sums
                yield from _alike(f"{count} threads", graph, f, feeds, got, bits)
        torch.set_num_threads(usual)


def _compiled_again(graph: og.Graph, f: Any, feeds: Feeds, bits: list[np.ndarray], rng: random.Random) -> Iterator[str]:
    """Compiles from the graph's text, and from the kernels on disk."""
    text = str(graph)
    large = {t.name: t.data for t in graph.constants if t.data is not None and t.data.size > 64}
    again = og.parse(
        text, constants={n: a for n, a in large.items() if f"const {n}:" in text}
    )  # not a constant without readers
    if again != graph:
        yield "the text form is of another graph"
    plain = listed(og.compile(graph)(feeds))
    yield from differing("from text", listed(og.compile(again)(feeds)), plain)
    before = og.onednn.get_compiled_partition_cache_capacity()
    og.onednn.set_compiled_partition_cache_capacity(0)
    try:
        yield from differing("from disk", listed(og.compile(graph)(feeds)), plain)
    finally:
        og.onednn.set_compiled_partition_cache_capacity(before)
