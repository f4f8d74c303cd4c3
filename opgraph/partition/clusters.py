"""Clusters: groups of the ops of a graph, joined step by step; the graph between the groups never has a cycle.

The groups are in a list, which is a topological order of them. Two groups may be joined if no path leads from one to
the other through a third. To find such a path, only the groups between the two in the list are searched, from both ends
at once. A join moves the groups of the side whose search has finished.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

_GAP = 1 << 40


@dataclass(frozen=True, slots=True)
class Blocked:
    """The obstacle to a join: members of the clusters on a path between the two; empty if the search gave up."""

    path: tuple[int, ...]


class Clusters:
    """Nodes 0 ... n-1 in topological order, each a separate cluster at first.

    Args:
        sources: for each node, the nodes that it reads from, which all have smaller numbers.
        budget: the number of edges that all searches may visit together; then joins that need a search are refused.
    """

    def __init__(self, sources: list[list[int]], budget: int) -> None:
        count = len(sources)
        self.budget = budget
        self._parent = list(range(count))
        self._before: list[set[int]] = [set(s) for s in sources]
        self._after: list[set[int]] = [set() for _ in range(count)]
        for node, around in enumerate(self._before):
            for source in around:
                self._after[source].add(node)
        self._enter(range(count))

    # -- queries ------------------------------------------------------------------------------------------------

    def find(self, node: int) -> int:
        """The cluster of a node, by the number of one of its members."""
        parent = self._parent
        while parent[node] != node:
            parent[node] = parent[parent[node]]
            node = parent[node]
        return node

    def before(self, cluster: int) -> set[int]:
        """The clusters that feed a cluster."""
        return {self.find(n) for n in self._before[cluster]} - {cluster}

    def after(self, cluster: int) -> set[int]:
        """The clusters that a cluster feeds."""
        return {self.find(n) for n in self._after[cluster]} - {cluster}

    def ordered(self, a: int, b: int) -> tuple[int, int]:
        """Two clusters in their current order."""
        return (a, b) if self._label[a] < self._label[b] else (b, a)

    def __iter__(self) -> Iterator[int]:
        """Clusters in topological order."""
        at = self._next[self._head]
        while at != self._head:
            yield at
            at = self._next[at]

    # -- joining many at once -----------------------------------------------------------------------------------

    def join_by_level(self, may_join: Callable[[int, int], bool]) -> list[tuple[int, int]]:
        """Joins clusters of one level along edges for which `may_join` is True, without a search; linear time.

        The level of a cluster is the largest number of other edges on a path to it. No path leaves a level and returns
        to it, so joins along joinable edges within one level create no cycle.

        Returns: the joins made, (kept, absorbed).
        """
        level: dict[int, int] = {}
        joins: list[tuple[int, int]] = []
        for cluster in self:
            own = 0
            joinable = []
            for source in sorted(self.before(cluster)):
                fits = may_join(source, cluster)
                own = max(own, level[source] + (not fits))
                if fits:
                    joinable.append(source)
            level[cluster] = own
            joins += [(s, cluster) for s in joinable if level[s] == own]
        return self.join_all(joins, level)

    def join_siblings(self, color: Callable[[int], str]) -> list[tuple[int, int]]:
        """Joins clusters of one color (not "") at the same depth; legal, since no path connects two of them.

        Returns: the joins made, (kept, absorbed).
        """
        level: dict[int, int] = {}
        first: dict[tuple[str, int], int] = {}
        joins = []
        for cluster in self:
            level[cluster] = max((level[s] + 1 for s in self.before(cluster)), default=0)
            if color(cluster):
                key = (color(cluster), level[cluster])
                if first.setdefault(key, cluster) != cluster:
                    joins.append((first[key], cluster))
        return self.join_all(joins, level)

    def join_all(self, joins: list[tuple[int, int]], level: dict[int, int]) -> list[tuple[int, int]]:
        """Joins these pairs without a check; sorted by `level`, the clusters are then in topological order."""
        made = []
        for a, b in joins:
            a, b = self.find(a), self.find(b)
            if a != b:
                made.append(self._merge(a, b))
        kept = sorted({self.find(c) for c in level}, key=lambda c: (level[c], c))
        self._enter(kept)
        return made

    def _merge(self, a: int, b: int) -> tuple[int, int]:
        """Merges two clusters under the number of the one with more edges; its place in the list is left open."""
        if len(self._before[a]) + len(self._after[a]) < len(self._before[b]) + len(self._after[b]):
            a, b = b, a
        self._parent[b] = a
        for edges in (self._before, self._after):
            more, less = (edges[a], edges[b]) if len(edges[a]) >= len(edges[b]) else (edges[b], edges[a])
            more |= less
            edges[a], edges[b] = more, set()
        return a, b

    # -- joining two --------------------------------------------------------------------------------------------

    def join(self, a: int, b: int) -> tuple[int, int] | Blocked:
        """Joins a cluster and one that it feeds, or that comes later in the order.

        Returns: (kept, absorbed), or the obstacle.
        """
        ahead: dict[int, int] = {a: a}  # clusters reached from a -> the cluster before each on the path
        behind: dict[int, int] = {b: b}  # clusters that reach b -> the cluster after each on the path
        front, back = deque([a]), deque([b])
        cost_ahead = cost_behind = 0
        while front and back:
            next_ahead, next_behind = len(self._after[front[0]]), len(self._before[back[0]])
            if self.budget < 0 and min(next_ahead, next_behind) > 8:
                return Blocked(())
            if cost_ahead + next_ahead <= cost_behind + next_behind:
                met = self._step(front, ahead, behind, self._after, a, b)
                cost_ahead += next_ahead
                self.budget -= next_ahead
            else:
                met = self._step(back, behind, ahead, self._before, b, a)
                cost_behind += next_behind
                self.budget -= next_behind
            if met is not None:
                return Blocked(_path(met, ahead, behind))
            if self.budget < 0 and front and back:
                return Blocked(())
        # The search that finished has visited all clusters on its side between the two; these move away.
        label = self._label.__getitem__
        if front:
            anchor, moved, place = a, sorted(behind.keys() - {b}, key=label), a
        else:
            anchor, moved, place = b, sorted(ahead.keys() - {a}, key=label), self._next[b]
        kept, absorbed = self._merge(a, b)
        for node in moved:
            self._unlink(node)
        self._insert(moved, place)
        self._unlink(b if anchor == a else a)
        if anchor == absorbed:
            self._replace(absorbed, kept)
        return kept, absorbed

    def _step(
        self,
        queue: deque[int],
        seen: dict[int, int],
        others: dict[int, int],
        edges: list[set[int]],
        start: int,
        goal: int,
    ) -> tuple[int, int] | None:
        """Visits the neighbours of one cluster; returns an edge on which the two searches met."""
        label, forward, find = self._label, edges is self._after, self.find
        node = queue.popleft()
        edges[node] = around = {find(n) for n in edges[node]} - {node}  # drops edges that joins made obsolete
        for near in around:
            if near in seen or (near == goal and node == start):
                continue
            if near in others:
                return (node, near) if forward else (near, node)
            if label[near] < label[goal] if forward else label[near] > label[goal]:
                seen[near] = node
                queue.append(near)
        return None

    # -- the list -----------------------------------------------------------------------------------------------

    def _enter(self, order: Iterable[int]) -> None:
        """Rebuilds the list. Its head is a sentinel before the first and after the last cluster."""
        nodes = list(order)
        self._head = -1
        ring = [self._head, *nodes]
        self._next = dict(zip(ring, [*nodes, self._head], strict=True))
        self._previous = {b: a for a, b in self._next.items()}
        self._label = {node: (place + 1) * _GAP for place, node in enumerate(nodes)}
        self._label[self._head] = 0

    def _unlink(self, node: int) -> None:
        before, after = self._previous.pop(node), self._next.pop(node)
        self._next[before], self._previous[after] = after, before

    def _insert(self, nodes: list[int], place: int) -> None:
        """Links nodes in front of `place`."""
        before = self._previous[place]
        low = self._label[before]
        high = self._label[place] if place != self._head else low + (len(nodes) + 1) * _GAP
        step = (high - low) // (len(nodes) + 1)
        for node in nodes:
            low += step
            self._next[before], self._previous[node], self._label[node] = node, before, low
            before = node
        self._next[before], self._previous[place] = place, before
        if step == 0:
            self._enter(list(self))

    def _replace(self, old: int, new: int) -> None:
        before, after = self._previous.pop(old), self._next.pop(old)
        self._next[before] = self._previous[after] = new
        self._previous[new], self._next[new] = before, after
        self._label[new] = self._label.pop(old)


def _path(met: tuple[int, int], ahead: dict[int, int], behind: dict[int, int]) -> tuple[int, ...]:
    """The clusters between the two ends, in order."""
    path = []
    node = met[0]
    while ahead[node] != node:
        path.append(node)
        node = ahead[node]
    path.reverse()
    node = met[1]
    while behind[node] != node:
        path.append(node)
        node = behind[node]
    return tuple(path)
