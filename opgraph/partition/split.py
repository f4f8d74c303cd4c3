"""Splitting large fused partitions where one kernel would be the slower choice.

A kernel of n statements takes a C++ compiler a time that grows faster than n (measured: 60 ops 0.25 s, 300 ops 1.4 s,
one after the other on one core), and pieces are compiled side by side. A cut costs memory: each value that crosses it
is written once and read once more, and operands that both sides read are read twice. That is little next to a piece's
own arithmetic where few values cross, and much where many are alive (then the whole spills registers instead, to
memory that stays in the nearest cache, which is cheaper). So a partition of more than MAX_COST instructions per element
is cut, at its cheapest places, if the bytes that are moved again cost at most MAX_LOSS of the piece.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from opgraph.ir import dtypes
from opgraph.partition.books import Books, Refusal
from opgraph.partition.partition import FUSED
from opgraph.partition.traits import cost_of
from opgraph.partition.units import Unit

#: Instructions per element, by the records' costs, of one kernel: about 0.35 s of compilation.
MAX_COST = 900
#: What moving one byte costs, in instructions per element: 10 GB/s against vectors of 16 at 1.5 a cycle.
BYTE_COST = 7
#: The share of a piece's own instructions that the bytes moved again may cost.
MAX_LOSS = 0.15


@dataclass(frozen=True, slots=True)
class _Flow:
    """What crosses each place of a sequence of nodes; place p lies before node p."""

    cost: list[int]
    moved: list[int]
    allowed: list[bool]


def split(books: Books, cluster: Sequence[int], units: Iterable[Unit]) -> tuple[list[int], list[Refusal]]:
    """The cluster of each node after splitting, and why ops were kept apart.

    Args:
        cluster: of each node, by the number of one of its members.
        units: named units; none is cut.

    A piece is a part of its cluster in topological order, so no cycle can arise.
    """
    members: dict[int, list[int]] = {}
    for node, own in enumerate(cluster):
        members.setdefault(own, []).append(node)
    result: list[int] = list(cluster)
    told: list[Refusal] = []
    large = {c: nodes for c, nodes in members.items() if _is_large(books, c, nodes)}
    if not large:
        return result, told
    last_of = _unit_ends(books, cluster, units, large)
    for nodes in large.values():
        flow = _flow(books, nodes, last_of)
        begin = 0
        for place in [*_cuts(flow), len(nodes)]:
            for piece in _connected(books, nodes[begin:place]):
                for node in piece:
                    result[node] = piece[0]
            begin = place
        told += _told(books, nodes, result)
    return result, told


def _is_large(books: Books, cluster: int, nodes: Sequence[int]) -> bool:
    """Whether a cluster is pointwise throughout, and more than one kernel should be."""
    if books.kinds[cluster][0] != FUSED or books.cost[cluster] <= MAX_COST:
        return False
    plain = all(not books.nodes.sums[n] and books.nodes.owners[n] is books.nodes.ops[n] for n in nodes)
    return plain and not books.row_forms(cluster)[0]


def _unit_ends(
    books: Books, cluster: Sequence[int], units: Iterable[Unit], large: Mapping[int, object]
) -> dict[int, int]:
    """For the first node of each unit inside a large cluster, its last node."""
    node_of = {op.id: node for node, op in enumerate(books.nodes.owners)}
    found: dict[int, int] = {}
    for unit in units:
        nodes = sorted(node_of[op.id] for op in unit.ops)
        if cluster[nodes[0]] in large and all(cluster[n] == cluster[nodes[0]] for n in nodes):
            found[nodes[0]] = max(found.get(nodes[0], 0), nodes[-1])
    return found


def _flow(books: Books, nodes: Sequence[int], last_of: Mapping[int, int]) -> _Flow:
    """Bytes per element that a cut at each place would move again; values of smaller shapes cost nothing."""
    place = {node: p for p, node in enumerate(nodes)}
    change = [0] * (len(nodes) + 1)
    first: dict[int, int] = {}  # value from outside -> where it is read first, and last
    last: dict[int, int] = {}
    for p, node in enumerate(nodes):
        for value in books.nodes.reads[node]:
            first.setdefault(value, p)
            last[value] = p
    made = {t.id: node for node in nodes for t in books.nodes.ops[node].outputs}
    for value, start in first.items():
        tensor = next(t for t in books.nodes.ops[nodes[start]].inputs if t.id == value)
        times, begin = (1, start) if value not in made else (2, place[made[value]])
        change[begin + 1] += times * dtypes.get(tensor.dtype).itemsize
        change[last[value] + 1] -= times * dtypes.get(tensor.dtype).itemsize
    cost, moved, allowed = [0], [], []
    total, until = 0, -1
    for p, node in enumerate(nodes):
        total += change[p]
        moved.append(total)
        allowed.append(node > until)
        until = max(until, last_of.get(node, -1))
        cost.append(cost[-1] + cost_of(books.nodes.ops[node]))
    return _Flow(cost, moved, allowed)


def _cuts(flow: _Flow) -> list[int]:
    """Where to cut: the cheapest place in the second half of what one kernel may be, as long as that pays."""
    cuts: list[int] = []
    begin, count = 0, len(flow.moved)
    while flow.cost[count] - flow.cost[begin] > MAX_COST:
        best, place = None, begin + 1
        while place < count and flow.cost[place] - flow.cost[begin] <= MAX_COST:
            own = flow.cost[place] - flow.cost[begin]
            pays = flow.moved[place] * BYTE_COST <= MAX_LOSS * own
            if flow.allowed[place] and pays and 2 * own >= MAX_COST:
                best = place if best is None or flow.moved[place] <= flow.moved[best] else best
            place += 1
        if best is None:  # too much is alive here: what follows stays with it
            break
        cuts.append(best)
        begin = best
    return cuts


def _connected(books: Books, nodes: Sequence[int]) -> list[list[int]]:
    """The parts of a piece that hang together by values that they make or read, each in order."""
    parent = {node: node for node in nodes}

    def root(node: int) -> int:
        while parent[node] != node:
            parent[node] = parent[parent[node]]
            node = parent[node]
        return node

    touched: dict[int, int] = {}
    for node in nodes:
        for tensor in (*books.nodes.ops[node].inputs, *books.nodes.ops[node].outputs):
            other = touched.setdefault(tensor.id, node)
            parent[root(node)] = root(other)
    parts: dict[int, list[int]] = {}
    for node in nodes:
        parts.setdefault(root(node), []).append(node)
    return list(parts.values())


def _told(books: Books, nodes: Sequence[int], result: Sequence[int]) -> list[Refusal]:
    total = sum(cost_of(books.nodes.ops[n]) for n in nodes)
    inside = set(nodes)
    reason = f"split: one kernel of {total} instructions per element would compile slowly, and little crosses here"
    return [
        Refusal(books.nodes.ops[source], books.nodes.ops[node], reason)
        for node in nodes
        for source in books.nodes.sources[node]
        if source in inside and result[source] != result[node]
    ]
