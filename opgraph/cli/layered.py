"""Layered layout of an acyclic graph: ranks by longest path, few crossings, straight edges.

The steps are Sugiyama's (Sugiyama, Tagawa, Toda 1981). An edge across several ranks goes through one dummy node in each
rank. The order within ranks follows the median of the neighbours (Eades and Wormald 1994). Positions minimise the
squared distance to the neighbours without changing the order, by pooling adjacent violators.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise

Point = tuple[float, float]

_ORDER_SWEEPS = 12
_PLACE_SWEEPS = 12
#: The weight of an edge's segment between two dummy nodes, so that it becomes straighter (Gansner et al. 1993).
_STRAIGHT = 8.0


@dataclass(frozen=True, slots=True)
class Placed:
    """A layout.

    Attributes:
        centres: of each node.
        routes: of each edge: the points that it passes, from the centre of one node to the centre of the other.
        width, height: of everything; all coordinates lie between 0 and these.
    """

    centres: list[Point]
    routes: list[list[Point]]
    width: float
    height: float


def layered(
    sizes: Sequence[tuple[float, float]],
    edges: Sequence[tuple[int, int]],
    *,
    gap: float,
    rank_gap: float,
    first: Collection[int] = (),
    last: Collection[int] = (),
    bundles: Sequence[object] | None = None,
) -> Placed:
    """Places nodes in ranks from top to bottom.

    Args:
        sizes: width and height of each node.
        edges: from, to; acyclic.
        gap, rank_gap: least distance between neighbours in a rank, and between ranks.
        first, last: nodes that are alone in the first, or last, rank.
        bundles: edges from one node with equal entries share a path until they diverge; by default all edges of a node.
    """
    ranks = _ranks(len(sizes), edges, set(first), set(last))
    widths = [w for w, _ in sizes]
    chains, pieces, levels = _split(ranks, edges, bundles or [None] * len(edges), widths)
    above: list[list[int]] = [[] for _ in widths]
    below: list[list[int]] = [[] for _ in widths]
    for a, b in pieces:
        below[a].append(b)
        above[b].append(a)
    _order(levels, above, below)
    xs = _positions(levels, above, below, widths, gap, real=len(sizes))
    bands = _bands(levels, sizes, rank_gap)
    left = min((x - w / 2 for x, w in zip(xs, widths, strict=True)), default=0.0)
    xs = [x - left for x in xs]
    level_of = {node: i for i, level in enumerate(levels) for node in level}
    centres = [(xs[n], sum(bands[level_of[n]]) / 2) for n in range(len(sizes))]
    routes = []
    for start, *between, end in chains:
        # Edges go straight down past the nodes of a rank, so that no edge cuts their corners.
        passed = [(xs[n], y) for n in between for y in bands[level_of[n]]]
        routes.append([centres[start], *passed, centres[end]])
    width = max((x + w / 2 for x, w in zip(xs, widths, strict=True)), default=0.0)
    return Placed(centres=centres, routes=routes, width=width, height=bands[-1][1] if bands else 0.0)


def _ranks(count: int, edges: Sequence[tuple[int, int]], first: set[int], last: set[int]) -> list[int]:
    after: list[list[int]] = [[] for _ in range(count)]
    waiting = [0] * count
    for a, b in edges:
        after[a].append(b)
        waiting[b] += 1
    order = [n for n in range(count) if not waiting[n]]
    for node in order:
        for other in after[node]:
            waiting[other] -= 1
            if not waiting[other]:
                order.append(other)
    ranks = [0 if n in first or not first else 1 for n in range(count)]
    for node in order:
        for other in after[node]:
            ranks[other] = max(ranks[other], ranks[node] + 1)
    sources = set(range(count)) - {b for _, b in edges} - first
    for node in order:  # a node without inputs is right above its first use
        if node in sources and after[node]:
            ranks[node] = min(ranks[n] for n in after[node]) - 1
    bottom = max((r for n, r in enumerate(ranks) if n not in last), default=-1) + 1
    return [bottom if n in last else r for n, r in enumerate(ranks)]


def _split(
    ranks: list[int], edges: Sequence[tuple[int, int]], bundles: Sequence[object], widths: list[float]
) -> tuple[list[list[int]], list[tuple[int, int]], list[list[int]]]:
    """Cuts long edges into pieces of one rank each; appends a width for every dummy node."""
    levels: list[list[int]] = [[] for _ in range(max(ranks, default=-1) + 1)]
    for node, rank in enumerate(ranks):
        levels[rank].append(node)
    chains: list[list[int]] = []
    shared: dict[tuple[int, object, int], int] = {}
    pieces: dict[tuple[int, int], None] = {}
    for (a, b), bundle in zip(edges, bundles, strict=True):
        chain = [a]
        for rank in range(ranks[a] + 1, ranks[b]):
            if (a, bundle, rank) not in shared:
                shared[a, bundle, rank] = len(widths)
                levels[rank].append(len(widths))
                widths.append(0.0)
            chain.append(shared[a, bundle, rank])
        chain.append(b)
        chains.append(chain)
        pieces.update(dict.fromkeys(pairwise(chain)))
    return chains, list(pieces), levels


def _order(levels: list[list[int]], above: list[list[int]], below: list[list[int]]) -> None:
    place: dict[int, float] = {}
    for level in levels:
        place.update((n, i) for i, n in enumerate(level))
    best, fewest = [list(level) for level in levels], _crossings(levels, below)
    for sweep in range(_ORDER_SWEEPS):
        down = sweep % 2 == 0
        for level in levels[1:] if down else levels[-2::-1]:
            near = above if down else below
            keys = {n: _median([place[m] for m in near[n]], place[n]) for n in level}
            level.sort(key=keys.__getitem__)
            place.update((n, i) for i, n in enumerate(level))
        crossings = _crossings(levels, below)
        if crossings < fewest:
            best, fewest = [list(level) for level in levels], crossings
    levels[:] = best


def _median(places: list[float], own: float) -> float:
    if not places:
        return own
    places.sort()
    middle = len(places) // 2
    return places[middle] if len(places) % 2 else (places[middle - 1] + places[middle]) / 2


def _crossings(levels: list[list[int]], below: list[list[int]]) -> int:
    """Pairs of edge pieces that cross, counted by inversions with a Fenwick tree (Barth, Mutzel, Jünger 2004)."""
    total = 0
    for upper, lower in pairwise(levels):
        place = {n: i for i, n in enumerate(lower)}
        tree, seen = [0] * (len(lower) + 1), 0
        for node in upper:
            ends = sorted(place[m] for m in below[node])
            for end in ends:
                total += seen - _below_or_at(tree, end)
            for end in ends:
                seen += 1
                at = end + 1
                while at < len(tree):
                    tree[at] += 1
                    at += at & -at
    return total


def _below_or_at(tree: list[int], end: int) -> int:
    at, found = end + 1, 0
    while at:
        found += tree[at]
        at -= at & -at
    return found


def _positions(
    levels: list[list[int]], above: list[list[int]], below: list[list[int]], widths: list[float], gap: float, real: int
) -> list[float]:
    xs = [0.0] * len(widths)
    offsets: list[list[float]] = []
    for level in levels:
        offset, at = [], 0.0
        for i, node in enumerate(level):
            if i:
                at += (widths[level[i - 1]] + widths[node]) / 2 + gap
            offset.append(at)
            xs[node] = at
        offsets.append(offset)
        for node in level:
            xs[node] -= at / 2
    for sweep in range(_PLACE_SWEEPS):
        down = sweep % 2 == 0
        numbered = list(enumerate(levels))
        for index, level in numbered if down else reversed(numbered):
            wishes, weights = [], []
            for node in level:
                # The last sweeps use both directions, so that neither end of an edge dominates.
                near = above[node] + below[node] if sweep >= _PLACE_SWEEPS - 4 else (above if down else below)[node]
                pull = [(_STRAIGHT if node >= real and m >= real else 1.0, xs[m]) for m in near]
                weight = sum(w for w, _ in pull)
                wishes.append(sum(w * x for w, x in pull) / weight if pull else xs[node])
                weights.append(weight or 0.1)
            for node, x in zip(level, _nearest_in_order(wishes, weights, offsets[index]), strict=True):
                xs[node] = x
    return xs


def _nearest_in_order(wishes: list[float], weights: list[float], offsets: list[float]) -> list[float]:
    """Positions nearest to the wishes (weighted squares) that keep at least the distances of `offsets`."""
    blocks: list[tuple[float, float, int]] = []  # position less offset, weight, how many nodes
    for wish, weight, offset in zip(wishes, weights, offsets, strict=True):
        mean, mass, count = wish - offset, weight, 1
        while blocks and blocks[-1][0] > mean:
            other, heft, many = blocks.pop()
            mean, mass, count = (mean * mass + other * heft) / (mass + heft), mass + heft, count + many
        blocks.append((mean, mass, count))
    flat = [mean for mean, _, count in blocks for _ in range(count)]
    return [f + o for f, o in zip(flat, offsets, strict=True)]


def _bands(levels: list[list[int]], sizes: Sequence[tuple[float, float]], rank_gap: float) -> list[Point]:
    """Top and bottom of each rank."""
    bands, at = [], 0.0
    for level in levels:
        tall = max((sizes[n][1] for n in level if n < len(sizes)), default=0.0)
        bands.append((at, at + tall))
        at += tall + rank_gap
    return bands
