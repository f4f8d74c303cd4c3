"""Splits large fused partitions where one kernel would be the slower choice.

The C++ compile time of a loop of n statements grows faster than n (measured: 60 ops 0.25 s, 300 ops 1.4 s, one after
the other on one core), and pieces are compiled in parallel. A cut costs memory traffic: each value that crosses it is
written once and read once more, and operands that both sides read are read twice. If few values cross, this is little
compared with a piece's own arithmetic. If many are alive, it is much; the whole kernel would spill registers instead,
to memory that stays in the nearest cache, which is cheaper. A partition of more than MAX_COST instructions per element
is therefore cut at its cheapest places if moving the bytes again costs at most MAX_LOSS of the piece. If statements
cost enough to become calls of shared functions (opgraph/codegen/outlining.py), a kernel may cost MAX_SHARED_COST. If
rows are reduced, the ops before and after them would be compiled once for each pass over a row, so these become
separate pieces.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from opgraph.ir import dtypes
from opgraph.partition.cluster_info import ClusterInfo, Refusal
from opgraph.partition.partition import FUSED
from opgraph.partition.symbols import Shape
from opgraph.partition.traits import cost_of
from opgraph.partition.units import Unit

#: The most instructions per element, by the records' costs, of a kernel that is one loop: about 0.4 s of compilation.
MAX_COST = 900
#: The same for a kernel whose statements share functions; it compiles in the same time.
MAX_SHARED_COST = 9000
#: Instructions of a statement that cost as much as a store of its result to a cache and a load from there.
STATEMENT_COST = 4
#: The cost of moving one byte, in instructions per element: 10 GB/s compared with vectors of 16 at 1.5 a cycle.
BYTE_COST = 7
#: The largest cost of the bytes that are moved again, as a share of a piece's own instructions.
MAX_LOSS = 0.15


@dataclass(frozen=True, slots=True)
class _Flow:
    """For each place in a sequence of nodes: the cost before it and the bytes that a cut moves; p is before node p."""

    cost: list[int]
    moved: list[int]
    allowed: list[bool]

    def pays(self, place: int, begin: int, end: int) -> bool:
        """True if the bytes that a cut moves again cost little compared with the piece [begin, end)."""
        return self.moved[place] * BYTE_COST <= MAX_LOSS * (self.cost[end] - self.cost[begin])


def split(info: ClusterInfo, cluster: Sequence[int], units: Iterable[Unit]) -> tuple[list[int], list[Refusal]]:
    """The cluster of each node after splitting, and the reasons why ops were kept apart.

    Args:
        cluster: of each node, by the number of one of its members.
        units: named units; none is cut.

    A piece is a section of its cluster in topological order, so no cycle can arise.
    """
    members: dict[int, list[int]] = {}
    for node, own in enumerate(cluster):
        members.setdefault(own, []).append(node)
    result: list[int] = list(cluster)
    told: list[Refusal] = []
    large = {c: nodes for c, nodes in members.items() if _is_large(info, c, nodes)}
    if not large:
        return result, told
    whole = _units_of(info, cluster, units, large)
    for own, nodes in large.items():
        before, rows, after = _around_rows(info, nodes)
        ordered = [*before, *rows, *after]
        flow = _flow(info, ordered, [*whole[own], rows])
        begin = 0
        for place in [*_cuts(flow, len(before), len(before) + len(rows), _most(info, nodes)), len(nodes)]:
            for piece in info.connected(ordered[begin:place]):
                for node in piece:
                    result[node] = piece[0]
            begin = place
        _set_apart(info, nodes, info.shape[own], result)
        told += _told(info, nodes, result)
    return result, told


def _is_large(info: ClusterInfo, cluster: int, nodes: Sequence[int]) -> bool:
    """True if a cluster should be more than one kernel, and may be: no sum ends it, and no axes are in pieces."""
    if info.kinds[cluster][0] != FUSED or info.cost[cluster] <= _most(info, nodes):
        return False
    return not any(info.nodes.sums[n] or n in info.nodes.seen.said for n in nodes)


def _most(info: ClusterInfo, nodes: Sequence[int]) -> int:
    """The largest cost of one kernel for a part of a cluster; rows and cheap statements do not share functions."""
    total = sum(cost_of(info.nodes.ops[n]) for n in nodes)
    shares = total >= STATEMENT_COST * len(nodes) and not _in_rows(info, nodes)
    return max(MAX_COST, MAX_SHARED_COST) if shares else MAX_COST


def _in_rows(info: ClusterInfo, nodes: Iterable[int]) -> set[int]:
    """The nodes that make row values or are inside opened ops."""
    known = info.nodes
    return {n for n in nodes if known.rows.of(known.ops[n]) is not None or known.owners[n] is not known.ops[n]}


def _units_of(
    info: ClusterInfo, cluster: Sequence[int], units: Iterable[Unit], large: Mapping[int, object]
) -> dict[int, list[list[int]]]:
    """For each large cluster, the nodes of each unit inside."""
    node_of = {op.id: node for node, op in enumerate(info.nodes.owners)}
    found: dict[int, list[list[int]]] = {own: [] for own in large}
    for unit in units:
        nodes = [node_of[op.id] for op in unit.ops]
        if cluster[nodes[0]] in large and all(cluster[n] == cluster[nodes[0]] for n in nodes):
            found[cluster[nodes[0]]].append(nodes)
    return found


def _around_rows(info: ClusterInfo, nodes: Sequence[int]) -> tuple[list[int], list[int], list[int]]:
    """The nodes that only lead to the rows of a cluster, those in one kernel with rows, and the rest, each in order.

    One kernel has the row values, the nodes inside opened ops, and all nodes on a path between any of these.
    """
    inside, known = set(nodes), info.nodes
    own = _in_rows(info, nodes)
    below, above = set(own), set(own)
    for node in nodes:
        if any(source in below for source in known.sources[node]):
            below.add(node)
    for node in reversed(nodes):
        if any(target in above for target in known.targets[node] if target in inside):
            above.add(node)
    before = [n for n in nodes if n in above and n not in below]
    rows = [n for n in nodes if n in above and n in below]
    return before, rows, [n for n in nodes if n not in above]


def _flow(info: ClusterInfo, nodes: Sequence[int], whole: Iterable[Sequence[int]]) -> _Flow:
    """Bytes per element that a cut at each place would move again; values of smaller shapes cost nothing.

    Args:
        nodes: in topological order.
        whole: groups of nodes that stay together.
    """
    place = {node: p for p, node in enumerate(nodes)}
    change = [0] * (len(nodes) + 1)
    first: dict[int, int] = {}  # value that is read -> place of its first read; in `last`, of its last read
    last: dict[int, int] = {}
    for p, node in enumerate(nodes):
        for value in info.nodes.reads[node]:
            first.setdefault(value, p)
            last[value] = p
    made = {t.id: node for node in nodes for t in info.nodes.ops[node].outputs}
    for value, start in first.items():
        tensor = next(t for t in info.nodes.ops[nodes[start]].inputs if t.id == value)
        times, begin = (1, start) if value not in made else (2, place[made[value]])
        change[begin + 1] += times * dtypes.get(tensor.dtype).itemsize
        change[last[value] + 1] -= times * dtypes.get(tensor.dtype).itemsize
    until = list(range(len(nodes)))
    for together in whole:
        places = [place[n] for n in together]
        if places:
            until[min(places)] = max(until[min(places)], *places)
    cost, moved, allowed = [0], [], []
    total, end = 0, -1
    for p, node in enumerate(nodes):
        total += change[p]
        moved.append(total)
        allowed.append(p > end)
        end = max(end, until[p])
        cost.append(cost[-1] + cost_of(info.nodes.ops[node]))
    return _Flow(cost, moved, allowed)


def _cuts(flow: _Flow, rows: int, end: int, most: int) -> list[int]:
    """The places to cut: around the rows, [rows, end), since nodes in one kernel with them are compiled once for each
    pass, and inside the rest."""
    count = len(flow.moved)
    cuts = _cuts_inside(flow, 0, rows, most)
    begin = cuts[-1] if cuts else 0
    if 0 < rows < end and flow.allowed[rows] and flow.pays(rows, begin, rows):
        cuts.append(rows)
        begin = rows
    if rows < end < count and flow.allowed[end] and flow.pays(end, end, count):
        cuts += [*_cuts_inside(flow, begin, end, most), end]
        begin = end
    return cuts + _cuts_inside(flow, begin, count, most)


def _cuts_inside(flow: _Flow, begin: int, end: int, most: int) -> list[int]:
    """The cheapest places in the second half of the largest allowed kernel, as long as a cut pays for both sides."""
    cuts: list[int] = []
    while flow.cost[end] - flow.cost[begin] > most:
        best, place = None, begin + 1
        while place < end and flow.cost[place] - flow.cost[begin] <= most:
            pays = flow.pays(place, begin, place) and flow.pays(place, place, end)
            if flow.allowed[place] and pays and 2 * (flow.cost[place] - flow.cost[begin]) >= most:
                best = place if best is None or flow.moved[place] <= flow.moved[best] else best
            place += 1
        if best is None:  # too many values are alive here: the following nodes stay in this piece
            break
        cuts.append(best)
        begin = best
    return cuts


def _set_apart(info: ClusterInfo, nodes: Sequence[int], shape: Shape, result: list[int]) -> None:
    """Moves values of smaller shape that several pieces need, and the nodes that lead to these, to separate kernels: a
    loop writes results of its own shape."""
    known, inside = info.nodes, set(nodes)
    small = [n for n in nodes if known.shape[n] != shape]
    waiting = [n for n in small if any(result[t] != result[n] for t in known.targets[n] if t in inside)]
    apart: set[int] = set()
    while waiting:
        node = waiting.pop()
        if node not in apart:
            apart.add(node)
            waiting += [source for source in known.sources[node] if source in inside]
    group: dict[int, int] = {}
    for own in dict.fromkeys(known.shape[n] for n in small if n in apart):
        for piece in info.connected([n for n in small if n in apart and known.shape[n] == own]):
            group.update(dict.fromkeys(piece, piece[0]))
    number: dict[tuple[int, int | None], int] = {}
    for node in nodes if group else ():
        result[node] = number.setdefault((-1 if node in group else result[node], group.get(node)), node)


def _told(info: ClusterInfo, nodes: Sequence[int], result: Sequence[int]) -> list[Refusal]:
    total = sum(cost_of(info.nodes.ops[n]) for n in nodes)
    inside = set(nodes)
    reason = f"split: one kernel of {total} instructions per element would compile slowly, and little crosses here"
    return [
        Refusal(info.nodes.ops[source], info.nodes.ops[node], reason)
        for node in nodes
        for source in info.nodes.sources[node]
        if source in inside and result[source] != result[node]
    ]
