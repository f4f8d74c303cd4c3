"""Groups the nodes of a captured graph into kernels, and orders kernels and library calls.

Each computed node has a level: one more than that of a library call, or of a sum down columns, that it reads. Nodes of
one level that read each other, or the same tensor, form a group. No path leads out of a group and back, because nothing
on a level reads values that the same level stores. A node whose readers are all on later levels moves to the first of
these. A node with readers on several levels is computed on each, if that reads less memory than its value takes. A
value that is recomputed for a library call that may run later moves, with that call, to the level that reads the same
memory: in backward, an activation for the gradient of a weight moves to the activation's own gradient.

The result of a row reduction is available in the same kernel. Rows are the last axes, or axes along which memory lies
in runs, such as the images of a channel. If a group has several kinds of rows, those along other axes than the last are
summed down columns.

Random ops run in the order of the graph, which is eager's: they share one stream of numbers. A write keeps its place
among the reads of that memory.
"""

from __future__ import annotations

import heapq
import operator
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.fx import Graph, Node

from opgraph.torch.graph.aten import (
    bytes_of,
    is_computed,
    is_random,
    is_reduction,
    keeps_axes,
    packet,
    reduced_axes,
    value_of,
    writes,
)
from opgraph.torch.graph.axis_order import move_views_down
from opgraph.torch.graph.axis_splits import join_of
from opgraph.torch.graph.duplication import Sources, duplicate
from opgraph.torch.graph.slice_pushdown import move_slices_up
from opgraph.torch.graph.views import base_of, is_view, keeps_elements, owners, readers

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Group:
    """Nodes that run in one kernel.

    Attributes:
        nodes: in topological order.
        outputs: the nodes whose values are read elsewhere, or are outputs of the graph.
    """

    nodes: tuple[Node, ...]
    outputs: tuple[Node, ...]


def columns_of(group: Group) -> set[Node]:
    """The sums of a group that one pass over its loop computes with everything else, which depends on none of them.

    If a loop has no rows, and computes nothing but sums along the same axes, they are reductions, which may walk
    columns one after the other.
    """
    reductions = [n for n in group.nodes if is_reduction(n)]
    read = {base_of(source) for node in group.nodes for source in node.all_input_nodes}
    rows = {reduced_axes(n) for n in reductions if n in read}
    rows = rows or {reduced_axes(n) for n in reductions if _is_last(n) or _lies_in_runs(n)}
    columns = [n for n in reductions if n not in read and reduced_axes(n) not in rows]
    shapes = {loop_shape(n) for n in group.outputs if not is_reduction(n)}
    alone = not rows and len({reduced_axes(n) for n in columns}) == 1
    return {
        n for n in columns
        if packet(n) is aten.sum and keeps_axes(n) and not (alone and loop_shape(n) not in shapes)
    }  # fmt: skip


#: The steps of a graph, in order: groups, and nodes that torch computes.
Schedule: TypeAlias = Sequence[Group | Node]


def schedule(graph: Graph, *, refused: Iterable[Node] = (), gather_kernels: bool = False) -> Schedule:
    """Computes the groups and the order of a graph of ATen ops.

    Args:
        graph: functional except for a final copy to inputs; with `val` in each node's meta.
        refused: nodes that torch computes although opgraph has ops for them.
        gather_kernels: True: library calls run as early as possible, so that kernels are adjacent and one native loop
            launches them. Values live longer then.
    """
    kept_out = set(refused)
    computed = {n for n in graph.nodes if n not in kept_out and is_computed(n)}
    computed -= {n for n in computed if join_of(n) is not None and not any(u in computed for u in n.users)}
    move_views_down(graph, computed)
    rows = {n for n in computed if is_reduction(n) and (_is_last(n) or _lies_in_runs(n))}
    while True:
        waits = _waits(graph)
        levels = _levels(graph, computed, rows, waits)
        mixed = _of_other_rows(_groups(graph, computed, levels), rows)
        if not mixed:
            break
        rows -= mixed
    move_slices_up(graph, computed, levels)
    waits = _waits(graph)
    levels = _levels(graph, computed, rows, waits)
    waiting: dict[Node, list[Node]] = {}
    for node, earlier in waits.items():
        for before in earlier:
            waiting.setdefault(before, []).append(node)
    _sink(graph, computed, levels, waiting)
    _postpone(graph, computed, levels, waiting)
    duplicate(graph, computed, levels)
    found = _groups(graph, computed, levels)
    return _ordered(graph, found, _waits(graph), gather_kernels)


def _waits(graph: Graph) -> dict[Node, list[Node]]:
    """The nodes that must run before a node, in addition to its inputs: earlier reads of that memory before a write,
    earlier writes before a read, and the random op before a random op. (AOTAutograd keeps writes to a graph's inputs,
    and puts them at the end.)"""
    waits: dict[Node, list[Node]] = {}
    readers: dict[Node, list[Node]] = {}
    writers: dict[Node, list[Node]] = {}
    drawn: Node | None = None  # the last random op
    for node in graph.nodes:
        if node.op != "call_function" or is_view(node):
            continue
        bases = dict.fromkeys(owner for source in node.all_input_nodes for owner in owners(source))
        is_write = writes(node)
        earlier = [n for b in bases for n in (*writers.get(b, ()), *(readers.get(b, ()) if is_write else ()))]
        if is_random(node):
            earlier += [drawn] if drawn is not None else []
            drawn = node
        if earlier:
            waits[node] = earlier
        for base in bases:
            (writers if is_write else readers).setdefault(base, []).append(node)
    return waits


#: The most row reductions in one kernel that depend on each other. The ops that lead to each are compiled for each, so
#: a compiler's time grows with their square (8 layer norms in a row: 5 s of g++, 4 of them 2 s).
MAX_REDUCTION_DEPTH = 8
#: The most reductions on one level. A loop in Python makes one sum of a parameter's gradient for each iteration.
MAX_REDUCTIONS = 128


def _levels(
    graph: Graph, computed: set[Node], rows: AbstractSet[Node], waits: Mapping[Node, list[Node]]
) -> dict[Node, int]:
    levels: dict[Node, int] = {}
    depths: dict[Node, int] = {}  # reductions of rows on a path to a node, on its level
    reductions: Counter[int] = Counter()
    for node in graph.nodes:
        if node.op != "call_function":
            levels[node] = 0
            continue
        level = -1 if is_random(node) else 0  # numbers that are drawn from no data depend on no kernel
        for source in node.all_input_nodes:
            base = base_of(source)
            if base.op == "call_function":
                ends = node in computed and not _fuses(source, base, computed, rows)
                level = max(level, levels[base] + ends)
            elif base.op == "placeholder":
                level = max(level, 0)
        for earlier in waits.get(node, ()):
            level = max(level, levels[earlier] + (node in computed))
        if node in computed:
            depth = {b: depths.get(b, 0) + (b in rows) for b in map(base_of, node.all_input_nodes)}
            level += node in rows and any(levels[b] == level and d >= MAX_REDUCTION_DEPTH for b, d in depth.items())
            while reductions[level] >= MAX_REDUCTIONS:
                level += 1
            depths[node] = max((d for b, d in depth.items() if levels[b] == level), default=0)
            reductions[level] += is_reduction(node)
        levels[node] = level
    return levels


def _fuses(source: Node, base: Node, computed: AbstractSet[Node], rows: AbstractSet[Node]) -> bool:
    """True if a reader of a computed node, perhaps through views, may be in one group with it."""
    if base not in computed or (source is not base and not keeps_elements(source)):
        return False
    return not is_reduction(base) or base in rows


def _is_last(node: Node) -> bool:
    """True if a reduction reduces the last axes."""
    axes, rank = reduced_axes(node), value_of(node.args[0]).dim()  # type: ignore[arg-type]
    return axes == tuple(range(rank - len(axes), rank))


#: For rows of other axes than the last: the fewest contiguous elements, and the fewest rows, which threads share.
_SHORTEST_RUN, _FEWEST_ROWS = 8, 16


def _lies_in_runs(node: Node) -> bool:
    """True if a reduction of other axes than the last reduces the innermost axes in memory, in long enough runs."""
    value, reduced = value_of(node.args[0]), reduced_axes(node)  # type: ignore[arg-type]
    run = 1
    for stride, axis in sorted((stride, axis) for axis, stride in enumerate(value.stride()) if value.shape[axis] != 1):
        if axis not in reduced or stride != run:
            break
        run *= int(value.shape[axis])
    return run >= _SHORTEST_RUN and value_of(node).numel() >= _FEWEST_ROWS


def _of_other_rows(groups: Mapping[Node, Group], rows: AbstractSet[Node]) -> set[Node]:
    """The reductions of other axes than the last, in groups with several kinds of rows."""
    kinds: dict[int, set[tuple[int, ...]]] = {}
    for node in rows:
        kinds.setdefault(id(groups[node]), set()).add(reduced_axes(node))
    return {n for n in rows if len(kinds[id(groups[n])]) > 1 and not _is_last(n)}


def _sink(graph: Graph, computed: set[Node], levels: dict[Node, int], waiting: Mapping[Node, list[Node]]) -> None:
    """Moves nodes to the first level that reads them. Nodes that are returned as well are not moved, except masks of
    random numbers: these depend on nothing, and would be separate kernels.

    Args:
        waiting: the nodes that must run after a node without reading it, such as a write after a read of that memory.
    """
    for node in reversed(graph.nodes):
        if node not in computed or is_reduction(node):
            continue
        is_drawn = all(is_random(n) for n in node.all_input_nodes) and bool(node.all_input_nodes)
        reading = [levels[later] - (later in computed) for later in waiting.get(node, ())]
        for _, user, fuses in readers(node):
            if user.op != "output":
                reading.append(levels[user] - (user in computed and not fuses))
            elif not is_drawn:
                reading.append(levels[node])
        if reading and min(reading) > levels[node]:
            levels[node] = min(reading)


#: The most levels by which a library call is delayed: its operands live as long.
_LATEST = 3


def _postpone(graph: Graph, computed: set[Node], levels: dict[Node, int], waiting: Mapping[Node, list[Node]]) -> None:
    """Moves nodes that are computed for library calls alone, and that have no entry in `waiting`, to a later level that
    reads the same memory, and the calls behind them.

    Args:
        waiting: see `_sink`.
    """
    sources = Sources(computed)
    calls: dict[Node, set[Node]] = {}  # node -> the calls for which alone it is computed
    for node in reversed(graph.nodes):
        if node not in computed or is_reduction(node) or node in waiting:
            continue
        found: set[Node] = set()
        for _, user, _ in readers(node):
            if user in calls:
                found |= calls[user]
            elif user not in computed and _is_last_call(user):
                found.add(user)
            else:
                break
        else:
            if found:
                calls[node] = found
    reading: dict[Node, set[int]] = {}
    for node in computed - calls.keys():
        for source in node.all_input_nodes:
            reading.setdefault(base_of(source), set()).add(levels[node])
    for node in reversed(graph.nodes):
        if node not in calls:
            continue
        users = readers(node)
        if any(user in calls for _, user, _ in users):  # its readers' level, or one less if a view ends the kernel
            levels[node] = min(levels[user] - (user in computed and not fuses) for _, user, fuses in users)
            continue
        large = [s for s in sources.of(node) if 2 * bytes_of(s) >= bytes_of(node)]
        later = set.intersection(*(reading.get(s, set()) for s in large)) if large else set()
        later = {level for level in later if levels[node] < level <= levels[node] + _LATEST}
        if later:
            levels[node] = min(later)
            for call in calls[node]:
                levels[call] = max(levels[call], levels[node])


def _is_last_call(node: Node) -> bool:
    """True if a library call may run at any time: only the graph's outputs read its result."""
    if node.op != "call_function" or writes(node) or is_random(node):
        return False
    return all(u.op == "output" or (u.target is operator.getitem and _is_last_call(u)) for _, u, _ in readers(node))


def loop_shape(node: Node) -> tuple[int, ...]:
    """The iteration space of a loop that computes the node."""
    return tuple(value_of(node.all_input_nodes[0] if is_reduction(node) else node).shape)


def _groups(graph: Graph, computed: set[Node], levels: Mapping[Node, int]) -> dict[Node, Group]:
    """The group of each computed node. A group has nodes that read each other, and loops of one shape that read one
    tensor, or results of one call."""
    parent = {n: n for n in computed}

    def root(node: Node) -> Node:
        while parent[node] is not node:
            parent[node] = parent[parent[node]]
            node = parent[node]
        return node

    sharing: dict[tuple[Any, ...], Node] = {}
    for node in graph.nodes:
        if node in computed:
            for source in node.all_input_nodes:
                base = base_of(source)
                if base in computed and levels[base] == levels[node]:
                    parent[root(base)] = root(node)
                elif value_of(source).numel() > 1:
                    made = base.args[0] if base.target is operator.getitem else base
                    key = made, levels[node], loop_shape(node)
                    parent[root(sharing.setdefault(key, node))] = root(node)
    members: dict[Node, list[Node]] = {}
    for node in graph.nodes:
        if node in computed:
            members.setdefault(root(node), []).append(node)
    read = _read_elsewhere(graph, {n: root(n) for n in computed})
    groups = {r: Group(tuple(ns), tuple(n for n in ns if n in read)) for r, ns in members.items()}
    return {n: groups[root(n)] for n in computed}


def _read_elsewhere(graph: Graph, roots: Mapping[Node, Node]) -> set[Node]:
    """The computed nodes whose memory is read outside their group."""
    found = set()
    for node in graph.nodes:
        if is_view(node):
            continue
        for source in node.all_input_nodes:
            base = base_of(source)
            if base in roots and roots.get(node) is not roots[base]:
                found.add(base)
    return found


def _ordered(
    graph: Graph, groups: Mapping[Node, Group], waits: Mapping[Node, list[Node]], gather_kernels: bool
) -> list[Group | Node]:
    """Steps in topological order, near the order of the graph."""
    units: dict[Node, Group | Node] = {
        n: groups.get(n, n) for n in graph.nodes if n.op == "call_function" and not is_view(n)
    }
    needs: dict[int, list[Group | Node]] = {}
    for node, unit in units.items():
        reads = needs.setdefault(id(unit), [])
        for base in map(base_of, node.all_input_nodes):
            if base in units and units[base] is not unit:
                reads.append(units[base])
        reads += [units[n] for n in waits.get(node, ()) if units[n] is not unit]
    order: list[Group | Node] = []
    done: set[int] = set()
    for first in units.values():
        waiting: list[tuple[Group | Node, bool]] = [(first, False)]
        while waiting:
            unit, ready = waiting.pop()
            if ready:
                order.append(unit)
            elif id(unit) not in done:
                done.add(id(unit))
                waiting.append((unit, True))
                waiting += [(u, False) for u in reversed(needs[id(unit)]) if id(u) not in done]
    return _gathered(order, needs) if gather_kernels else order


def _gathered(order: list[Group | Node], needs: Mapping[int, list[Group | Node]]) -> list[Group | Node]:
    """The same steps with kernels together: all library calls that can run, then all kernels, and so on."""
    place = {id(u): i for i, u in enumerate(order)}
    left = {id(u): {id(v) for v in needs[id(u)]} for u in order}
    readers: dict[int, list[Group | Node]] = {}
    for unit in order:
        for source in needs[id(unit)]:
            readers.setdefault(id(source), []).append(unit)
    queues: dict[bool, list[int]] = {True: [], False: []}
    for unit in order:
        if not left[id(unit)]:
            heapq.heappush(queues[isinstance(unit, Group)], place[id(unit)])
    result, kernels = [], False
    while queues[True] or queues[False]:
        kernels = kernels if queues[kernels] else not kernels
        unit = order[heapq.heappop(queues[kernels])]
        result.append(unit)
        for user in readers.get(id(unit), ()):
            if id(unit) in left[id(user)]:
                left[id(user)].discard(id(unit))
                if not left[id(user)]:
                    heapq.heappush(queues[isinstance(user, Group)], place[id(user)])
    if len(result) != len(order):
        raise RuntimeError("steps of a graph wait for each other")
    return result
