"""Random graphs whose results are written over inputs: right, or refused before any write.

Arrays for outputs are inputs, parts of inputs, reversed inputs, inputs shifted by an element or interleaved with them,
and other outputs, as far as shapes allow: through `out=`, `bind`, `donate=` and, partition by partition, `execute`.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from random_arrays import laid_out
from random_calls import Feeds, _alike, _buffers, _given, _has_values, _names, differing, has_dead_ops
from random_scenario import Scenario
from random_truth import listed, same_bits

import opgraph as og
from opgraph.errors import InvalidArguments, OpGraphError
from opgraph.ir import dtypes
from opgraph.ir.copy_graph import needed_ops
from opgraph.ir.logical_tensor import LogicalTensor
from opgraph.partition.partition import Partition
from opgraph.runtime.reference import evaluate


@dataclass
class Arrays:
    """The arrays of one call.

    Attributes:
        ins, outs: by name; they may share memory.
        ways: the memory of each output, in words.
    """

    ins: Feeds
    outs: Feeds
    ways: dict[str, str]

    def copies(self) -> Feeds:
        """The inputs as they are now, each a separate copy."""
        return {name: array.copy() for name, array in self.ins.items()}

    def changed(self, before: Mapping[str, np.ndarray]) -> Iterator[str]:
        """Inputs that have changed."""
        yield from (name for name, array in before.items() if not same_bits(self.ins[name], array))

    def apart(self) -> set[str]:
        """Inputs that no output shares memory with."""
        outs = [a for a in self.outs.values() if a.size]
        return {n for n, a in self.ins.items() if not any(np.may_share_memory(a, out) for out in outs)}


def written(found: Scenario, rng: random.Random) -> Iterator[str]:
    """Problems of writing the results of a scenario's graph over its inputs."""
    graph, feeds = found.graph, found.feeds[rng.randrange(len(found.feeds))]
    try:
        f = og.compile(graph)
        bits = [np.array(r) for r in listed(f(feeds))]
        if has_dead_ops(graph):  # the reference runs them, too, and may refuse them
            evaluate(graph, feeds, dtype=None)
    except OpGraphError:
        return  # the check of calls decides if that is right
    for _ in range(3):
        yield from _called(graph, f, feeds, bits, rng)
    yield from _bound_over(graph, f, feeds, bits, rng)
    yield from _in_threads(graph, f, feeds, bits, rng)
    yield from _donated_beside(graph, f, feeds, bits, rng)
    yield from _pulled_back(graph, feeds, rng)
    yield from _executed(graph, feeds, rng)


def _called(graph: og.Graph, f: Any, feeds: Feeds, bits: list[np.ndarray], rng: random.Random) -> Iterator[str]:
    arrays = arranged(graph, feeds, bits, rng)
    before, room = arrays.copies(), {n: a.copy() for n, a in arrays.outs.items()}
    try:
        f(arrays.ins, out=_given(graph, arrays.outs, rng))
    except InvalidArguments:
        yield from (f"out {arrays.ways}: refused, but {n} has changed" for n in arrays.changed(before))
        wrote = (n for n, a in arrays.outs.items() if not same_bits(a, room[n]))
        yield from (f"out {arrays.ways}: refused, but {n} was written to" for n in wrote)
        return
    yield from _alike(f"out {arrays.ways}", graph, f, feeds, list(arrays.outs.values()), bits)
    kept = arrays.apart()
    yield from (f"out {arrays.ways} changed {n}" for n in arrays.changed(before) if n in kept)


def _bound_over(graph: og.Graph, f: Any, feeds: Feeds, bits: list[np.ndarray], rng: random.Random) -> Iterator[str]:
    """A bound call that runs again reads the values that it has written."""
    arrays = arranged(graph, feeds, bits, rng)
    before = arrays.copies()
    try:
        again = f.bind(arrays.ins, out=_given(graph, arrays.outs, rng))
    except InvalidArguments:
        yield from (f"bind {arrays.ways}: refused, but {n} has changed" for n in arrays.changed(before))
        return
    for number in range(3):
        given = arrays.copies()
        try:
            want = [np.array(r) for r in listed(f(given))]
        except OpGraphError:
            return  # a shape among the inputs was written over
        again()
        what = f"bind {arrays.ways}, run {number + 1}"
        yield from _alike(what, graph, f, given, list(arrays.outs.values()), want)
        yield from (f"{what} changed {n}" for n in arrays.changed(given) if n in arrays.apart())


def _in_threads(graph: og.Graph, f: Any, feeds: Feeds, bits: list[np.ndarray], rng: random.Random) -> Iterator[str]:
    """Two threads at once, each of which writes over arrays of its own."""
    both = [[arranged(graph, feeds, bits, rng) for _ in range(3)] for _ in range(2)]
    given = [[_given(graph, arrays.outs, rng) for arrays in own] for own in both]
    done: list[Arrays] = []

    def run(which: int) -> None:
        for arrays, out in zip(both[which], given[which], strict=True):
            try:
                f(arrays.ins, out=out)
            except InvalidArguments:
                continue
            done.append(arrays)

    workers = [threading.Thread(target=run, args=(i,)) for i in (0, 1)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for arrays in done:
        yield from _alike(f"threads, out {arrays.ways}", graph, f, feeds, list(arrays.outs.values()), bits)


def _pulled_back(graph: og.Graph, feeds: Feeds, rng: random.Random) -> Iterator[str]:
    """Gradients of a graph whose forward pass writes over values that its backward pass does not read."""
    floats = [n for n, a in feeds.items() if any(a.dtype == dtypes.get(d).numpy for d in dtypes.FLOATS)]
    if not floats:
        return
    wrt = tuple(rng.sample(floats, rng.randint(1, len(floats))))
    taken: list[str] = []
    try:
        f = og.compile(graph, wrt=wrt)
        for name in rng.sample(list(feeds), len(feeds)):
            try:
                og.compile(graph, wrt=wrt, donate=(*taken, name))
            except InvalidArguments:
                continue
            taken.append(name)
        if not taken:
            return
        giving = og.compile(graph, wrt=wrt, donate=tuple(taken))
        results, pull = f.vjp({n: a.copy() for n, a in feeds.items()})
        made, pull_beside = giving.vjp({n: a.copy() for n, a in feeds.items()})
    except OpGraphError:
        return
    what = f"gradient by {wrt}, donate={taken}"
    want, got = ([np.array(a) for a in listed(r)] for r in (results, made))
    yield from differing(f"{what}: forward", got, want)
    d = {n: np.ones_like(a) for n, a in zip(_names(graph), want, strict=True) if a.dtype.kind not in "biu"}
    if d:
        yield from differing(what, listed(pull_beside(d)), [np.array(a) for a in listed(pull(d))])


def _donated_beside(graph: og.Graph, f: Any, feeds: Feeds, bits: list[np.ndarray], rng: random.Random) -> Iterator[str]:
    """Donated inputs, and results over others by `out=`."""
    taken: list[str] = []
    for name in rng.sample(list(feeds), min(len(feeds), 3)):
        try:
            og.compile(graph, donate=(*taken, name))
        except OpGraphError:
            continue
        taken.append(name)
    if not taken:
        return
    giving = og.compile(graph, donate=tuple(taken))
    for with_out in (False, True):
        arrays = arranged(graph, feeds, bits, rng)
        before = arrays.copies()
        what = f"donate={taken}" + (f", out {arrays.ways}" if with_out else "")
        try:
            made = giving(arrays.ins, out=_given(graph, arrays.outs, rng)) if with_out else giving(arrays.ins)
        except InvalidArguments:
            yield from (f"{what}: refused, but {n} has changed" for n in arrays.changed(before))
            continue
        got = list(arrays.outs.values()) if with_out else listed(made)
        yield from _alike(what, graph, f, feeds, got, bits)
        kept = (arrays.apart() if with_out else set(arrays.ins)) - set(taken)
        lent = [arrays.ins[n] for n in taken]
        kept -= {n for n in kept if any(np.may_share_memory(arrays.ins[n], a) for a in lent)}
        yield from (f"{what} changed {n}" for n in arrays.changed(before) if n in kept)


# -- memory -----------------------------------------------------------------------------------------------------------


def arranged(graph: og.Graph, feeds: Feeds, bits: list[np.ndarray], rng: random.Random) -> Arrays:
    """Arrays for a call: the inputs, some with another layout, and outputs that share memory with them."""
    ins = {n: laid_out(a, rng) if rng.random() < 0.3 else a.copy() for n, a in feeds.items()}
    outs, _ = _buffers(graph, bits, rng)
    ways = dict.fromkeys(outs, "apart")
    for (name, result), tensor in zip(zip(_names(graph), bits, strict=True), graph.outputs, strict=True):
        # A result of another dtype may be over an input, too, if elements are of one size; 2 is no boolean.
        size = result.dtype.itemsize
        like = {n: a for n, a in ins.items() if a.dtype == result.dtype or (a.itemsize == size and a.dtype != np.bool_)}
        alike = [n for n, a in like.items() if a.shape == result.shape and a.size]
        larger = [n for n, a in like.items() if a.size >= result.size > 0]
        twins = [n for n, a in outs.items() if n != name and a.dtype == result.dtype and a.shape == result.shape]
        how = rng.choice(("over", "over", "over", "shifted", "flipped", "turned", "packed", "part", "twin", "apart"))
        source = rng.choice(larger if how == "part" else alike) if (larger if how == "part" else alike) else ""
        if how == "twin" and twins and tensor.id >= 0:
            outs[name], ways[name] = outs[rng.choice(twins)], "over another output"
        elif source and _has_values(source, feeds) and how in _LAID:
            ins[source], lying = _LAID[how](ins[source], result, rng)
            outs[name] = lying.view(result.dtype)
            ways[name] = f"{how} {source}"
    return Arrays(ins, outs, ways)


def _over(array: np.ndarray, result: np.ndarray, rng: random.Random) -> tuple[np.ndarray, np.ndarray]:
    return array, array


def _shifted(array: np.ndarray, result: np.ndarray, rng: random.Random) -> tuple[np.ndarray, np.ndarray]:
    by = rng.choice((1, 2, max(array.shape[-1] if array.ndim else 1, 1)))
    base = np.concatenate([array.reshape(-1), np.resize(array, by)])
    first, second = base[: array.size].reshape(array.shape), base[by:].reshape(array.shape)
    return (first, second) if rng.random() < 0.5 else (second.__setitem__(..., array.copy()) or second, first)


def _flipped(array: np.ndarray, result: np.ndarray, rng: random.Random) -> tuple[np.ndarray, np.ndarray]:
    return array, np.flip(array, rng.randrange(array.ndim)) if array.ndim else array


def _turned(array: np.ndarray, result: np.ndarray, rng: random.Random) -> tuple[np.ndarray, np.ndarray]:
    order = list(range(array.ndim))
    rng.shuffle(order)
    turned = array.transpose(order)
    return array, turned if turned.shape == array.shape else array


def _packed(array: np.ndarray, result: np.ndarray, rng: random.Random) -> tuple[np.ndarray, np.ndarray]:
    wide = np.zeros((*array.shape, 2), array.dtype)
    wide[..., 0] = array
    return wide[..., 0], wide[..., 1]


def _part(array: np.ndarray, result: np.ndarray, rng: random.Random) -> tuple[np.ndarray, np.ndarray]:
    dense = np.array(array, order="C")
    first = rng.choice((0, dense.size - result.size))
    return dense, dense.reshape(-1)[first : first + result.size].reshape(result.shape)


_LAID = {"over": _over, "shifted": _shifted, "flipped": _flipped, "turned": _turned, "packed": _packed, "part": _part}


# -- partitions -------------------------------------------------------------------------------------------------------


def _executed(graph: og.Graph, feeds: Feeds, rng: random.Random) -> Iterator[str]:
    """Each partition alone: over the pairs that it names, all at once, and over others, right or refused."""
    values = {t.id: feeds[str(t.name)] for t in graph.inputs}
    try:
        with np.errstate(all="ignore"):
            evaluate(graph, feeds, dtype=None, watch=lambda t, a: values.__setitem__(t.id, a))
    except OpGraphError:
        return
    needed = {op.id for op in needed_ops(graph.ops, (t.id for t in graph.outputs))[0]}
    for part in graph.get_partitions():
        if not part.supported or not needed & {op.id for op in part.ops}:  # these never run
            continue
        yield from (f"execute of partition {part.id}: {p}" for p in _over_ports(part, values, rng))


def _over_ports(part: Partition, values: dict[int, np.ndarray], rng: random.Random) -> Iterator[str]:
    def shaped(tensor: LogicalTensor) -> LogicalTensor:
        return tensor.with_(dims=values[tensor.id].shape, strides=None, layout="strided")

    engine = og.Engine("cpu")
    stream = og.Stream(engine)
    made = part.compile([shaped(t) for t in part.input_ports], [shaped(t) for t in part.output_ports], engine)

    def run(pairs: list[tuple[int, int]]) -> tuple[Feeds, Feeds]:
        ins = {t.id: np.array(values[t.id], order="C") for t in part.input_ports}
        outs = {t.id: np.zeros_like(values[t.id], order="C") for t in part.output_ports}
        outs |= {o: ins[i] for i, o in pairs}
        try:
            made.execute(stream, ins, outs)
        except InvalidArguments:
            for id, array in ins.items():
                assert same_bits(array, values[id]), f"refused, but input {id} has changed"
            raise
        return ins, outs

    _, want = run([])
    named = made.inplace_ports()
    alike = [
        (i.id, o.id)
        for i in part.input_ports
        for o in part.output_ports
        if i.dtype == o.dtype and values[i.id].shape == values[o.id].shape
    ]
    for pairs in ([named] if named else []) + [[p] for p in rng.sample(alike, min(len(alike), 3))]:
        try:
            ins, outs = run(pairs)
        except InvalidArguments as error:
            if set(pairs) <= set(named):
                yield f"{pairs} are named by inplace_ports, but refused: {error}"
            continue
        yield from (f"{pairs}: output {o} has other bits" for o, a in outs.items() if not same_bits(a, want[o]))
        over = {i for i, _ in pairs}
        yield from (
            f"{pairs}: input {i} has changed" for i, a in ins.items() if i not in over and not same_bits(a, values[i])
        )
