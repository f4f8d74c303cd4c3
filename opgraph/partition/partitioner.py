"""Cuts a graph into partitions: the ops that run as one kernel, the ops that go to a library, and their order.

Fused partitions grow in three steps. First, ops of provably equal shape are joined along edges, as long as no cycle
arises. Then parts that read the same values are joined. Then smaller parts (arithmetic on a parameter, a [C] next to
[N,C]) are joined into the only partition that uses them, if recomputing them for each element is cheap. Library
partitions take the remaining ops. Each step is linear, except for cycle searches, which share one budget.
specs/partitioning.md has the full rules.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from opgraph.errors import InvalidArguments, InvalidGraph
from opgraph.ir.graph import Graph
from opgraph.ir.op import Op
from opgraph.ir.pause_gc import no_collector
from opgraph.partition.axis_factors import cuts_of
from opgraph.partition.cluster_info import ClusterInfo, Refusal
from opgraph.partition.fuser import Cutter
from opgraph.partition.partition import FUSED, NO_ROWS, Partition, RowForms, log_partitions, make_partition
from opgraph.partition.rules import RULES, find_units
from opgraph.partition.split import split
from opgraph.partition.units import Rule, Unit
from opgraph.partition.verify import verify_partitions

if TYPE_CHECKING:
    from opgraph.partition.report import Report

POLICIES = ("fusion", "debug")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Partitioning:
    """The partitions of a graph in topological order, and the reasons why neighbours were kept apart."""

    graph: Graph
    policy: str
    partitions: tuple[Partition, ...]
    refusals: tuple[Refusal, ...]

    @property
    def report(self) -> Report:
        """The reasons for the partitioning, op by op; computed on access."""
        from opgraph.partition.report import make_report  # rarely needed

        return make_report(self.graph, self.partitions, self.refusals, self.policy)


def partition(
    graph: Graph, *, policy: str = "fusion", rules: Sequence[Rule] = RULES, side_by_side: bool = False
) -> Partitioning:
    """Cuts a finalized graph into partitions, the same for every engine kind.

    Args:
        policy: "fusion", or "debug" (every op alone).
        rules: the rules of the named units to match.
        side_by_side: join parts of one shape even if they read no common value.

    Returns: the verified partitions in topological order, and the report with the reasons.

    Raises:
        InvalidGraph: the graph is not finalized.
        InvalidArguments: unknown policy.

    Cost: linear in ops and edges; 100,000 ops take a few seconds, a million half a minute.
    """
    if policy not in POLICIES:
        raise InvalidArguments(f"unknown policy {policy!r}", where="partition", fix=f"use one of {', '.join(POLICIES)}")
    if not graph.is_finalized:
        raise InvalidGraph("the graph is not finalized", where="partition", fix="call graph.finalize() first")
    with no_collector():
        return _partitioned(graph, policy, rules, side_by_side)


def _partitioned(graph: Graph, policy: str, rules: Sequence[Rule], side_by_side: bool) -> Partitioning:
    cutter = Cutter(graph)
    if policy == "fusion":
        cutter.fuse_equal_shapes()
        cutter.fuse_readers()
        if side_by_side:
            cutter.fuse_neighbours()
        cutter.absorb_smaller_shapes()
    cutter.leave_reshapes()
    if policy == "fusion":
        cutter.join_libraries()
    info = cutter.info
    units = find_units(graph, rules)
    cluster, splits = split(info, [info.clusters.find(node) for node in range(len(cutter.nodes.ops))], units)
    partitions = _in_order(graph, info, cluster, units)
    verify_partitions(graph, partitions, side_by_side=side_by_side)
    log_partitions(partitions)
    return Partitioning(graph=graph, policy=policy, partitions=partitions, refusals=(*info.told(), *splits))


def _in_order(graph: Graph, info: ClusterInfo, cluster: list[int], units: Sequence[Unit]) -> tuple[Partition, ...]:
    """Partitions in topological order; of those that are ready, the one with the earliest op comes first."""
    members: dict[int, list[int]] = {}
    for node, own in enumerate(cluster):
        members.setdefault(own, []).append(node)
    waits_for = {
        c: {cluster[s] for node in nodes for s in info.nodes.sources[node]} - {c} for c, nodes in members.items()
    }
    feeds: dict[int, list[int]] = {c: [] for c in members}
    for c, sources in waits_for.items():
        for source in sources:
            feeds[source].append(c)
    waiting = {c: len(sources) for c, sources in waits_for.items()}
    ready = [(members[c][0], c) for c, count in waiting.items() if count == 0]
    heapq.heapify(ready)
    order: list[int] = []
    while ready:
        _, c = heapq.heappop(ready)
        order.append(c)
        for after in feeds[c]:
            waiting[after] -= 1
            if waiting[after] == 0:
                heapq.heappush(ready, (members[after][0], after))
    inside = _units_inside(info, cluster, units)
    outputs = {t.id for t in graph.outputs}
    parts = []
    for index, c in enumerate(order):
        ops = list({info.nodes.owners[node].id: info.nodes.owners[node] for node in members[c]}.values())
        kind, provider = info.kinds[c]
        rows = NO_ROWS
        if kind == FUSED:
            rows = _rows(info, members[c])
        parts.append(make_partition(graph, outputs, index, kind, ops, inside.get(c, ()), provider, rows))
    return tuple(parts)


def _rows(info: ClusterInfo, nodes: Sequence[int]) -> RowForms:
    """The row values of a fused partition, and the ops that run instead of others."""
    axes, forms, sums = info.row_forms(nodes)
    seen = info.nodes.seen
    in_pieces = bool(axes) or any(n in seen.reshapes for n in nodes)
    inside: dict[int, tuple[Op, ...]] = {}
    for node in nodes:
        owner = info.nodes.owners[node]
        if in_pieces and (owner.id in info.nodes.inside or info.nodes.ops[node] is not owner):
            inside[owner.id] = (*inside.get(owner.id, ()), info.nodes.ops[node])
        elif owner.id in info.nodes.inside:
            inside[owner.id] = info.nodes.inside[owner.id]
    ids = (t.id for n in nodes if n in seen.said for t in (*info.nodes.ops[n].inputs, *info.nodes.ops[n].outputs))
    cuts = cuts_of(seen.pieces, ids) if in_pieces else {}
    if not axes and not inside:
        return NO_ROWS
    return RowForms(axes=axes, forms=forms, sums=sums, inside=inside, cuts=cuts)


def _units_inside(info: ClusterInfo, cluster: list[int], units: Sequence[Unit]) -> dict[int, list[Unit]]:
    """The units whose ops are all in one cluster, by cluster."""
    node_of = {op.id: node for node, op in enumerate(info.nodes.owners)}
    inside: dict[int, list[Unit]] = {}
    for unit in units:
        touched = {cluster[node_of[op.id]] for op in unit.ops}
        if len(touched) == 1:
            inside.setdefault(touched.pop(), []).append(unit)
    return inside
