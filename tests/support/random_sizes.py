"""Random graphs without sizes, called with arrays that may not fit: refused as by the reference, else right."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
from random_calls import Feeds, has_dead_ops
from random_scenario import Scenario
from random_shrink import part_of
from random_truth import listed, problem, truths

import opgraph as og
from opgraph.errors import OpGraphError
from opgraph.runtime.reference import evaluate


def sizes(found: Scenario, rng: random.Random) -> Iterator[str]:
    """Problems of calling the graph of a scenario, of inputs of unknown sizes, with sizes that may not fit."""
    free = part_of(found, found.graph.outputs, (), unknown=True)
    if free is None or has_dead_ops(free.graph):
        return
    f = og.compile(free.graph)
    for _ in range(5):
        feeds = resized(free.feeds[0], rng)
        told = {n: list(a.shape) for n, a in feeds.items()}
        try:
            evaluate(free.graph, feeds)
        except OpGraphError as error:
            try:
                f(feeds)
            except OpGraphError:
                continue
            refused = " ".join(str(error).split())
            yield f"arrays {told}: the reference refuses what the compiled graph takes: {refused}"
            continue
        got = listed(f(feeds))
        yield from (f"arrays {told}: {p}" for p in map(problem, got, truths(free.graph, feeds)) if p)


def resized(feeds: Feeds, rng: random.Random) -> Feeds:
    """The same arrays, one or two of them with another size along an axis."""
    values = [n for n, a in feeds.items() if a.ndim and a.dtype != np.int32]  # those may be shapes
    found = dict(feeds)
    for name in rng.sample(values, min(len(values), rng.choice((0, 1, 1, 2)))):
        shape = list(found[name].shape)
        axis = rng.randrange(len(shape))
        shape[axis] = rng.choice((1, 1, 0, shape[axis] + 1, max(shape[axis] - 1, 1), 2 * shape[axis]))
        found[name] = np.resize(found[name], shape) if found[name].size else np.zeros(shape, found[name].dtype)
    return found
