"""ClusterInfo: the properties of clusters of nodes while partitions grow, and the reasons that keep clusters apart."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from opgraph.ir import opdef
from opgraph.ir.op import Op
from opgraph.partition.clusters import Blocked, Clusters
from opgraph.partition.nodes import Nodes
from opgraph.partition.partition import FUSED
from opgraph.partition.symbols import Shape
from opgraph.partition.traits import described

#: The number of edges that the cycle searches may visit, for each op of the graph.
SEARCH_BUDGET = 20


@dataclass(frozen=True, slots=True)
class Refusal:
    """The reason why two neighbours stayed apart: the op that makes the value, the one that reads it, and a text."""

    producer: Op
    consumer: Op
    reason: str


class ClusterInfo:
    """The clusters of a graph's nodes. The lists hold the properties of a cluster at the index of its representative.

    Attributes:
        members: its nodes.
        kinds: its kind of partition, and the provider that runs it.
        shape: its largest shape.
        axes: the axes of its rows, if it has any.
        cost: instructions per element.
        makes_output: True if it makes an output of the graph.
        placed: the reason why it cannot be computed inside a larger shape.
        refusals: the reasons why two nodes are in different clusters, by edge.
    """

    def __init__(self, nodes: Nodes) -> None:
        self.nodes = nodes
        self.clusters = Clusters(nodes.sources, SEARCH_BUDGET * len(nodes.ops) + 1000)
        self.members = [[node] for node in range(len(nodes.ops))]
        self.kinds = list(nodes.kinds)
        self.shape: list[Shape] = list(nodes.shape)
        self.axes = list(nodes.axes)
        self.cost = list(nodes.cost)
        self.makes_output = list(nodes.makes_output)
        self.placed = list(nodes.placed)
        self.refusals: dict[tuple[int, int], str] = {}
        self._apart: dict[int, set[tuple[int, int]]] = {}  # a dict, since few clusters have such an edge
        self._conflicts = frozenset(nodes.seen.conflicts)
        for edge in nodes.apart:
            for node in edge:
                self._apart.setdefault(node, set()).add(edge)
        if nodes.inside:
            self._join_opened()

    def _join_opened(self) -> None:
        """Makes one cluster of the nodes inside each opened op; legal, since a path that leaves it does not return."""
        nodes = self.nodes
        place: dict[int, int] = {}
        joins = []
        for node, owner in enumerate(nodes.owners):
            first = place.setdefault(owner.id, node)
            if first != node:
                joins.append((first, node))
        # An opened op has one shape, that of its rows or of its result, whatever shapes its parts have.
        shape = {place[owner.id]: nodes.shape[n] for n, owner in enumerate(nodes.owners) if owner is not nodes.ops[n]}
        shape |= {place[nodes.owners[n].id]: nodes.shape[n] for n, axes in enumerate(nodes.axes) if axes is not None}
        self.keep(self.clusters.join_all(joins, {n: place[o.id] for n, o in enumerate(nodes.owners)}))
        for node, own in shape.items():
            self.shape[self.clusters.find(node)] = own

    # -- joining ------------------------------------------------------------------------------------------------

    def join(self, producer: int, consumer: int, a: int, b: int) -> None:
        """Joins cluster a (of `producer`) and cluster b (of `consumer`), or records the reason why not."""
        between = self.apart_between(a, b)
        if between:
            self.refusals[producer, consumer] = self.why_apart(min(between))
            return
        if self.rows_differ(a, b):
            axes = [list(self.axes[c] or ()) for c in (a, b)]
            self.refusals[producer, consumer] = f"rows over axes {axes[0]} and over axes {axes[1]} are two loops"
            return
        shape = self.shape[b]  # shapes only grow from operands to results of pointwise ops
        result = self.clusters.join(a, b)
        if isinstance(result, Blocked):
            self.refusals[producer, consumer] = self._in_the_way(result)
        else:
            self.keep([result])
            self.shape[result[0]] = shape

    def keep(self, joins: Iterable[tuple[int, int]]) -> None:
        """Updates the properties after joins, each (kept, absorbed)."""
        for kept, gone in joins:
            self.cost[kept] += self.cost[gone]
            self.axes[kept] = self.axes[kept] or self.axes[gone]
            self.makes_output[kept] |= self.makes_output[gone]
            self.placed[kept] = self.placed[kept] or self.placed[gone]
            # The shorter list is appended to the longer one, so that all joins together are linear up to a logarithm.
            longer, shorter = self.members[kept], self.members[gone]
            if len(longer) < len(shorter):
                longer, shorter = shorter, longer
            longer.extend(shorter)
            self.members[kept], self.members[gone] = longer, []
            if gone in self._apart:
                edges = (self._apart.pop(kept, set()), self._apart.pop(gone))
                less, more = sorted(edges, key=len)
                more.update(less)
                self._apart[kept] = more

    # -- queries ------------------------------------------------------------------------------------------------

    def apart_between(self, a: int, b: int) -> list[int]:
        """The source nodes of the edges between two clusters that must not lie inside any cluster."""
        if a not in self._apart or b not in self._apart:
            return []
        find = self.clusters.find
        fewer = min(self._apart[a], self._apart[b], key=len)
        return [p for p, c in fewer if {find(p), find(c)} == {a, b}]

    def has_conflict(self, *clusters: int) -> bool:
        """True if a node of these clusters must not be in one cluster with some other node.

        There may be no edge between the two, so a join of many clusters at once could put both into one.
        """
        return any(edge in self._conflicts for c in clusters for edge in self._apart.get(c, ()))

    def rows_differ(self, a: int, b: int) -> bool:
        """True if both clusters have rows, along different axes."""
        return None not in (self.axes[a], self.axes[b]) and self.axes[a] != self.axes[b]

    def edge(self, part: int, user: int) -> tuple[int, int]:
        """The first edge from one cluster to another, as nodes."""
        for node in self.members[part]:
            for target in self.nodes.targets[node]:
                if self.clusters.find(target) == user:
                    return node, target
        raise AssertionError("clusters without an edge")

    def why_apart(self, producer: int) -> str:
        """The reason why an edge from this node must not lie inside a cluster."""
        if self.nodes.sums[producer]:
            return "a sum is whole only when its loop has ended; what uses it is another kernel"
        if producer in self.nodes.summed_like:
            return "a sum to its shape reads that from memory"
        if self.nodes.rows.of(self.nodes.ops[producer]) is not None:
            return "one value for each row, used along another axis"
        if any(producer in pair for pair in self._conflicts):
            return "they read one operand along different axes, and a loop reads it along one"
        return "an operand along the channel axis is read from memory"

    def _in_the_way(self, blocked: Blocked) -> str:
        if not blocked.path:
            return "the search for cycles reached its limit"
        foreign = [c for c in blocked.path if self.kinds[c][0] != FUSED]
        return f"fusing would make a cycle through {described(self.nodes.ops[min(foreign or blocked.path)])}"

    def told(self) -> list[Refusal]:
        """The refusals between ops that are in different clusters at the end."""
        find, owners = self.clusters.find, self.nodes.owners
        told = [(p, c, r) for (p, c), r in self.refusals.items() if find(p) != find(c)]
        return [Refusal(owners[p], owners[c], r) for p, c, r in told]

    def row_forms(self, nodes: Sequence[int]) -> tuple[tuple[int, ...], dict[int, str], frozenset[int]]:
        """The row axes of a partition of these nodes, the form of each row value by id, and the row values that SumTo
        makes. All are empty if there is no reduction, row sum or view, and every op makes a "kept" row value."""
        axes, rows = next((axes for n in nodes if (axes := self.nodes.axes[n]) is not None), None), self.nodes.rows
        if axes is None:
            return (), {}, frozenset()
        ops = [self.nodes.ops[node] for node in nodes]
        forms = {t.id: rows.values[t.id].form for op in ops for t in op.outputs[:1] if t.id in rows.values}
        records = [opdef.of(op) for op in ops]
        reduces = any(record.row is not None for record in records)
        sums = rows.sums & forms.keys()
        moves = any(record.family == "shape" for record in records)
        is_plain = not (reduces or sums or moves) and len(forms) == len(ops) and set(forms.values()) == {"kept"}
        return ((), {}, frozenset()) if is_plain else (axes, forms, frozenset(sums))

    def connected(self, nodes: Sequence[int]) -> list[list[int]]:
        """The connected components of a piece, by values that its nodes make or read, each in order."""
        parent = {node: node for node in nodes}

        def root(node: int) -> int:
            while parent[node] != node:
                parent[node] = parent[parent[node]]
                node = parent[node]
            return node

        touched: dict[int, int] = {}
        for node in nodes:
            for tensor in (*self.nodes.ops[node].inputs, *self.nodes.ops[node].outputs):
                other = touched.setdefault(tensor.id, node)
                parent[root(node)] = root(other)
        parts: dict[int, list[int]] = {}
        for node in nodes:
            parts.setdefault(root(node), []).append(node)
        return list(parts.values())
