"""Grows partitions: fused ones along equal shapes, then over smaller shapes, then library ones from the rest."""

from __future__ import annotations

from opgraph.ir.graph import Graph
from opgraph.partition.cluster_info import ClusterInfo
from opgraph.partition.clusters import Blocked
from opgraph.partition.nodes import Nodes
from opgraph.partition.partition import FUSED, LIBRARY
from opgraph.partition.symbols import Shape, is_scalar_shape, row_share, shape_text, size_ratio
from opgraph.partition.traits import kind_and_provider

#: Recomputing a smaller part in the loop over a bigger shape is free up to this many instructions per element ...
FREE_COST = 4
#: ... or where the loop is at most this many times as large.
FREE_RATIO = 2.0
#: A value that is constant along a row is computed once per row on the CPU, once per pack of so many elements on CUDA.
PACK = 4


#: Parts with common operands are joined as long as the result reads at most this many values of the loop's shape.
MAX_READS = 16


class Cutter:
    """The steps of one partitioning.

    Args:
        graph: finalized.

    Attributes:
        nodes: the ops and their properties.
        info: the properties of each cluster of nodes.
        clusters: the clusters.
    """

    def __init__(self, graph: Graph) -> None:
        self.nodes = Nodes(graph)
        self.info = ClusterInfo(self.nodes)
        self.clusters = self.info.clusters

    # -- steps --------------------------------------------------------------------------------------------------

    def fuse_equal_shapes(self) -> None:
        """Joins pointwise neighbours of one shape: first those that are legal by level, then the rest by search."""
        info, find = self.info, self.clusters.find
        info.keep(self.clusters.join_by_level(self._simply_alike))
        for node, sources in enumerate(self.nodes.sources):
            for source in sources:
                a, b = find(source), find(node)
                if a != b and self._alike(a, b):
                    info.join(source, node, a, b)

    def fuse_readers(self) -> None:
        """Joins independent parts of one shape that read a common value of that shape, so that it is read once.

        The gradients of a function are such parts: each is computed from the same few tensors, and none from another.
        """
        nodes, info, find = self.nodes, self.info, self.clusters.find
        live = self._live()
        made = {t.id: find(node) for node, op in enumerate(nodes.ops) for t in op.outputs}
        reads: dict[int, set[int]] = {}  # cluster -> values of its own shape that it does not make
        for node, values in enumerate(nodes.reads):
            own = find(node)
            reads.setdefault(own, set()).update([v for v in values if made.get(v) != own])
        latest: dict[int, int] = {}  # value -> the last node that reads it
        for node, values in enumerate(nodes.reads):
            for value in values if live[node] else ():
                a, b = find(latest.setdefault(value, node)), find(node)
                if a != b and info.shape[a] == info.shape[b] and len(reads[a] | reads[b]) <= MAX_READS:
                    self._join_readers(a, b, reads)
                latest[value] = node

    def fuse_neighbours(self) -> None:
        """Joins independent parts of one shape, even without a common operand."""
        info, nodes, live = self.info, self.nodes, self._live()
        made = {t.id: self.clusters.find(node) for node, op in enumerate(nodes.ops) for t in op.outputs}
        reads: dict[int, set[int]] = {}
        for node, values in enumerate(nodes.reads):
            own = self.clusters.find(node)
            if live[node]:
                reads.setdefault(own, set()).update([v for v in values if made.get(v) != own])
        found: dict[tuple[Shape, Shape], int] = {}
        for cluster in list(self.clusters):
            if cluster not in reads or info.kinds[cluster][0] != FUSED or is_scalar_shape(info.shape[cluster]):
                continue
            key = info.shape[cluster], self._shape_of_arrays(cluster)
            first = self.clusters.find(found.setdefault(key, cluster))
            if first != cluster and len(reads[first] | reads[cluster]) <= MAX_READS:
                self._join_readers(first, cluster, reads)

    def _shape_of_arrays(self, cluster: int) -> Shape:
        """The uncut shape of a cluster without rows and reshapes: its loop does not cut axes, so parts whose shape is
        equal only after the cut do not fit into it. For other clusters, the shape after the cut."""
        nodes, members = self.nodes, self.info.members[cluster]
        if self.info.axes[cluster] is not None or any(node in nodes.seen.reshapes for node in members):
            return self.info.shape[cluster]
        op = nodes.ops[members[0]]
        return nodes.seen.axes[(op.inputs if nodes.sums[members[0]] else op.outputs)[0].id]

    def _join_readers(self, a: int, b: int, reads: dict[int, set[int]]) -> None:
        if self.info.apart_between(a, b) or self.info.rows_differ(a, b):
            return
        result = self.clusters.join(*self.clusters.ordered(a, b))
        if not isinstance(result, Blocked):
            self.info.keep([result])
            reads[result[0]] = reads[a] | reads[b]

    def _live(self) -> list[bool]:
        """For each op, True if an output of the graph depends on it; other ops do not run."""
        live = list(self.nodes.makes_output)
        for node in reversed(range(len(live))):
            if live[node]:
                for source in self.nodes.sources[node]:
                    live[source] = True
        return live

    def absorb_smaller_shapes(self) -> None:
        """Joins parts of smaller shape into the only cluster that uses them; last parts first, so that chains follow.

        Such a part feeds only one cluster, so no path leads from it to that cluster through a third.
        """
        info = self.info
        for part in reversed(list(self.clusters)):
            if info.kinds[part][0] != FUSED:
                continue
            users = self.clusters.after(part)
            if len(users) > 1:
                self._tell_users(part, len(users))
            user = min(users, default=part)
            if len(users) != 1 or info.kinds[user][0] != FUSED:
                continue
            edge = info.edge(part, user)
            reason = self._against_absorbing(part, user, edge)
            if reason:
                info.refusals.setdefault(edge, reason)
            else:
                info.join(*edge, part, user)

    def _tell_users(self, part: int, count: int) -> None:
        """Records why a part that several partitions use is in none of them, in one pass over its outgoing edges."""
        info, find = self.info, self.clusters.find
        said: dict[Shape, str] = {info.shape[part]: ""}
        for node in info.members[part]:
            for target in self.nodes.targets[node]:
                user = find(target)
                if user == part or info.kinds[user][0] != FUSED or (node, target) in self.nodes.apart:
                    continue
                big = info.shape[user]
                if big not in said:
                    said[big] = f"{_inside(info.shape[part], big)}: {count} partitions use it"
                if said[big]:
                    info.refusals.setdefault((node, target), said[big])

    def leave_reshapes(self) -> None:
        """Assigns clusters of nothing but reshapes to a library, which need not touch the elements."""
        nodes, info = self.nodes, self.info
        for node in sorted({self.clusters.find(n) for n in nodes.seen.reshapes}):
            if all(n in nodes.seen.reshapes for n in info.members[node]):
                info.kinds[node] = kind_and_provider(nodes.owners[node])

    def join_libraries(self) -> None:
        """Joins clusters of one library: along edges, then independent ones."""
        info, find = self.info, self.clusters.find
        if all(kind != LIBRARY for kind, _ in info.kinds):
            return
        info.keep(self.clusters.join_by_level(self._one_library))
        for node, sources in enumerate(self.nodes.sources):
            for source in sources:
                a, b = find(source), find(node)
                if a != b and self._one_library(a, b):
                    info.join(source, node, a, b)
        kinds = info.kinds
        info.keep(self.clusters.join_siblings(lambda c: kinds[c][1] if kinds[c][0] == LIBRARY else ""))

    # -- rules --------------------------------------------------------------------------------------------------

    def _alike(self, a: int, b: int) -> bool:
        """True if two clusters, one feeding the other, are pointwise over one shape."""
        info = self.info
        return info.kinds[a][0] == info.kinds[b][0] == FUSED and info.shape[a] == info.shape[b]

    def _simply_alike(self, a: int, b: int) -> bool:
        """True if two clusters may be joined even if many such clusters are joined at once."""
        if not self._alike(a, b) or self.info.apart_between(a, b) or self.info.has_conflict(a, b):
            return False
        axes = self.info.axes
        return self.info.shape[a] not in self.nodes.mixed or (axes[a] is None and axes[b] is None)

    def _one_library(self, a: int, b: int) -> bool:
        return self.info.kinds[a][0] == LIBRARY and self.info.kinds[a] == self.info.kinds[b]

    def _against_absorbing(self, part: int, user: int, edge: tuple[int, int]) -> str:
        """The reason against computing a part within the cluster that uses it; "" if there is none."""
        info = self.info
        small, big = info.shape[part], info.shape[user]
        if edge in self.nodes.apart:
            return info.why_apart(edge[0])
        texts = _inside(small, big)
        if info.makes_output[part]:
            return f"{texts}: its value is an output of the graph, which is written once"
        if info.placed[part] and small != big:
            return f"{texts}: {info.placed[part]}"
        ratio, cost = size_ratio(small, big), info.cost[part]
        if cost // min(row_share(small, big), PACK) <= FREE_COST or ratio <= FREE_RATIO:
            return ""
        times = "an unknown number of" if ratio == float("inf") else f"{ratio:.0f}"
        return f"{texts}: recomputing costs {cost} instructions per element, {times} times each"


def _inside(small: Shape, big: Shape) -> str:
    """The text for two shapes that keep parts apart, with a hint if they look the same because of unknown sizes."""
    alike = shape_text(small) == shape_text(big)
    hint = ", which may differ (give equal sizes one name)" if alike else ""
    return f"smaller shape {shape_text(small)} inside {shape_text(big)}{hint}"
