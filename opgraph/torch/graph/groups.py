"""Which nodes of a captured graph run in one kernel, and in which order kernels and library calls run.

Each computed node has a level: one more than that of a library call, or of a sum down columns, that it reads. Nodes of
one level that read each other, or the same tensor, form a group: no path leads out of a group and back, because
nothing on a level reads what the same level stores. A node whose readers are all on later levels moves to the first of
them. A node with readers on several levels is computed on each, where that reads less memory than its value takes.
Sums down columns are apart from sums along rows: together they would be two kernels that store values for each other.

Random ops run in the order of the graph, which is eager's: they share one stream of numbers. A write keeps its place
among the reads of that memory.
"""

from __future__ import annotations

import heapq
import operator
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import HigherOrderOperator
from torch.fx import Graph, Node

from opgraph.torch.graph.aten import VIEWS, is_computed, is_reduction, packet, reduced_axes, value_of
from opgraph.torch.graph.axis_splits import join_of
from opgraph.torch.graph.slices import move_slices_up

aten = torch.ops.aten


def is_view(node: Node) -> bool:
    """Whether the node is the memory of the node that it reads."""
    if node.op != "call_function":
        return False
    if node.target is operator.getitem:
        source = node.args[0]
        return isinstance(source, Node) and is_view(source)
    value = value_of(node)
    if (
        value is None
        or node.target is aten.view.dtype
        or (isinstance(value, torch.Tensor) and (value.is_neg() or value.is_conj()))
    ):
        return False  # more than a place in memory: torch makes such a view
    if packet(node) is aten.as_strided:
        # It counts from the beginning of the storage, and no guard says where in its storage an input begins.
        return base_of(node.all_input_nodes[0]).op != "placeholder"
    return packet(node) in VIEWS


def is_random(node: Node) -> bool:
    """Whether the node takes numbers from a random generator, or might."""
    tags = getattr(node.target, "tags", ())
    return torch.Tag.nondeterministic_seeded in tags or isinstance(node.target, HigherOrderOperator)


def base_of(node: Node) -> Node:
    """The node whose memory a chain of views reads."""
    while is_view(node):
        node = node.all_input_nodes[0]
    return node


def keeps_elements(node: Node) -> bool:
    """Whether a chain of views broadcasts at most: a kernel that made its base has its elements at hand."""
    while is_view(node):
        if packet(node) not in (aten.expand, aten.alias, aten.detach):
            return False
        source = node.all_input_nodes[0]
        if value_of(node).dim() != value_of(source).dim():
            return False
        node = source
    return True


@dataclass(frozen=True, slots=True)
class Group:
    """Nodes that run in one kernel.

    Attributes:
        nodes: in topological order.
        outputs: those whose values are read elsewhere, or are outputs of the graph.
    """

    nodes: tuple[Node, ...]
    outputs: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Schedule:
    """The steps of a graph, in order: groups, and nodes that torch computes."""

    steps: tuple[Group | Node, ...]


def schedule(graph: Graph, *, refused: Iterable[Node] = (), gather_kernels: bool = False) -> Schedule:
    """Groups and order for a graph of ATen ops.

    Args:
        graph: functional but for a final copy to inputs; with `val` in each node's meta.
        refused: nodes that torch is to compute although opgraph has their ops.
        gather_kernels: library calls run as early as they can, so that kernels stand together and one native loop
            launches them. Values live longer for it.
    """
    kept_out = set(refused)
    computed = {n for n in graph.nodes if n not in kept_out and is_computed(n)}
    computed -= {n for n in computed if join_of(n) is not None and not any(u in computed for u in n.users)}
    move_slices_up(graph, computed, _levels(graph, computed, _waits(graph)))
    levels = _levels(graph, computed, _waits(graph))
    _sink(graph, computed, levels)
    _duplicate(graph, computed, levels)
    found = _groups(graph, computed, levels)
    found = _groups(graph, computed, levels, _columns_apart(graph, computed, levels, found))
    return Schedule(tuple(_ordered(graph, found, _waits(graph), gather_kernels)))


def _waits(graph: Graph) -> dict[Node, list[Node]]:
    """What a node must wait for beside its inputs: a write for the earlier reads of that memory, a read for the earlier
    writes, a random op for the random op before it. (AOTAutograd leaves writes to a graph's inputs, which it puts at
    the end.)"""
    waits: dict[Node, list[Node]] = {}
    readers: dict[Node, list[Node]] = {}
    writers: dict[Node, list[Node]] = {}
    drawn: Node | None = None  # the last random op
    for node in graph.nodes:
        if node.op != "call_function" or is_view(node):
            continue
        bases = dict.fromkeys(base_of(source) for source in node.all_input_nodes)
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


def writes(node: Node) -> bool:
    """Whether a call may change memory that it is given; not every schema says so."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return node.target is not operator.getitem
    return schema.is_mutable or not schema.returns or str(schema.name).endswith("_")


def _levels(graph: Graph, computed: set[Node], waits: Mapping[Node, list[Node]]) -> dict[Node, int]:
    levels: dict[Node, int] = {}
    for node in graph.nodes:
        if node.op != "call_function":
            levels[node] = 0
            continue
        level = 0
        for source in node.all_input_nodes:
            base = base_of(source)
            ends = node in computed and base.op == "call_function" and not _fuses(source, base, node, computed)
            level = max(level, levels[base] + ends)
        for earlier in waits.get(node, ()):
            level = max(level, levels[earlier] + (node in computed))
        levels[node] = level
    return levels


def _fuses(source: Node, base: Node, node: Node, computed: set[Node]) -> bool:
    """Whether a node may be in one group with the computed node that it reads, perhaps through views."""
    if base not in computed or (source is not base and not keeps_elements(source)):
        return False
    return not is_reduction(base) or _reduces_rows(base)


def _reduces_rows(node: Node) -> bool:
    """Whether a reduction takes the last axes away: a kernel has the whole row at hand."""
    axes, rank = reduced_axes(node), value_of(node.args[0]).dim()  # type: ignore[arg-type]
    return axes == tuple(range(rank - len(axes), rank))


def _sink(graph: Graph, computed: set[Node], levels: dict[Node, int]) -> None:
    """Moves nodes to the first level that reads them."""
    for node in reversed(graph.nodes):
        if node not in computed or is_reduction(node):
            continue
        readers: list[int] = []
        waiting = [(user, True) for user in node.users]
        while waiting:
            user, fuses = waiting.pop()
            if is_view(user):
                waiting += [(u, fuses and keeps_elements(user)) for u in user.users]
            elif user.op == "output":
                readers.append(levels[node])
            else:
                readers.append(levels[user] - (user in computed and not fuses))
        if readers and min(readers) > levels[node]:
            levels[node] = min(readers)


#: Nodes of a chain that is computed again on another level.
_LONGEST_CHAIN = 8


def _duplicate(graph: Graph, computed: set[Node], levels: dict[Node, int]) -> None:
    """Gives readers on later levels a copy of a node of their own, where that costs no more memory traffic.

    A value that is stored for a later level is written once and read once; a copy reads what the value is made of.
    """
    sources = _Sources(computed)
    for node in reversed(graph.nodes):
        if node not in computed or is_reduction(node):
            continue
        readers: dict[int, list[tuple[Node, Node]]] = {}  # by level: (what it reads: the node or a view of it, reader)
        stored = False
        waiting = [(node, user) for user in node.users]
        while waiting:
            read, user = waiting.pop()
            if is_view(user) and keeps_elements(user):
                waiting += [(user, u) for u in user.users]
            elif user in computed and (read is node or keeps_elements(read)):
                readers.setdefault(levels[user], []).append((read, user))
            else:
                stored = True
        for level, found in readers.items():
            if level == levels[node] or sources.chain(node) > _LONGEST_CHAIN:
                continue
            there = {s for _, user in found for other in user.all_input_nodes if base_of(other) is not node
                     for s in sources.of(base_of(other))}  # fmt: skip
            new = [s for s in sources.of(node) if s not in there and 2 * _bytes(s) >= _bytes(node)]
            if len(new) > (0 if stored else 1):
                continue
            with graph.inserting_after(node):
                copy = graph.node_copy(node)
            computed.add(copy)
            levels[copy] = level
            for read, user in found:
                user.replace_input_with(read, _with_base(graph, read, node, copy))


def _with_base(graph: Graph, view: Node, base: Node, other: Node) -> Node:
    """The same view of another node."""
    if view is base:
        return other
    source = _with_base(graph, view.all_input_nodes[0], base, other)
    with graph.inserting_after(source):
        return graph.node_copy(view, lambda n: source if n is view.all_input_nodes[0] else n)


def _bytes(node: Node) -> int:
    value = value_of(node)
    return int(value.numel()) * value.dtype.itemsize if isinstance(value, torch.Tensor) else 0


class _Sources:
    """What computed nodes read from memory, were nothing between them stored."""

    def __init__(self, computed: set[Node]) -> None:
        self._computed = computed
        self._found: dict[Node, tuple[frozenset[Node], int]] = {}

    def of(self, node: Node) -> frozenset[Node]:
        """The stored values that a chain which ends at a node reads."""
        return self._look(node)[0]

    def chain(self, node: Node) -> int:
        """How many nodes compute it from stored values, at most."""
        return self._look(node)[1]

    def _look(self, node: Node) -> tuple[frozenset[Node], int]:
        known = self._found.get(node)
        if known is not None:
            return known
        if node not in self._computed or is_reduction(node):
            return frozenset((node,)), 0
        read: frozenset[Node] = frozenset()
        length = 1
        for source in node.all_input_nodes:
            base = base_of(source)
            fuses = source is base or keeps_elements(source)
            found, steps = self._look(base) if fuses else (frozenset((base,)), 0)
            read |= found
            length += steps
        self._found[node] = read, length
        return read, length


#: Values of full size that a sum down columns reads at most to compute a value again. A value in memory costs as much:
#: it is written, which reads the memory too, and read, in one kernel more.
_MOST_SOURCES = 4


def _columns_apart(
    graph: Graph, computed: set[Node], levels: dict[Node, int], groups: Mapping[Node, Group]
) -> set[Node]:
    """Takes sums down columns out of groups that reduce rows: two kernels, of which neither waits for values that the
    other one stores for it alone.

    Returns: the sums, with the nodes that compute their operands, copies for them; and sums of values in memory.
    """
    sources = _Sources(computed)
    with_rows = {id(g) for n, g in groups.items() if is_reduction(n) and _reduces_rows(n)}
    apart: set[Node] = set()
    copies: dict[Node, Node] = {}

    def reads_many(node: Node) -> bool:
        return sum(2 * _bytes(s) >= _bytes(node) for s in sources.of(node)) > _MOST_SOURCES

    def again(read: Node, group: Group) -> Node:
        base = base_of(read)
        if base not in computed or is_reduction(base) or groups.get(base) is not group:
            return read
        if base not in copies and reads_many(base) and not any(reads_many(base_of(n)) for n in base.all_input_nodes):
            return read
        if base not in copies:
            with graph.inserting_after(base):
                copies[base] = graph.node_copy(base, lambda n: again(n, group))
            computed.add(copies[base])
            apart.add(copies[base])
            levels[copies[base]] = levels[base]
        return _with_base(graph, read, base, copies[base])

    for node in list(graph.nodes):
        if node not in computed or not is_reduction(node) or _reduces_rows(node):
            continue
        (operand,), group = node.all_input_nodes, groups[node]
        base = base_of(operand)
        if groups.get(base) is not group:
            apart.add(node)
        elif id(group) in with_rows:
            apart.add(node)
            node.replace_input_with(operand, again(operand, group))
            _erase_unread(graph, base, computed)
    return apart


def _erase_unread(graph: Graph, node: Node, computed: set[Node]) -> None:
    """Takes a node out of the graph, and what only it reads, where nothing reads it."""
    waiting = [node]
    erased: set[Node] = set()
    while waiting:
        unread = waiting.pop()
        if unread not in erased and not unread.users and (unread in computed or is_view(unread)):
            erased.add(unread)
            waiting += unread.all_input_nodes
            computed.discard(unread)
            graph.erase_node(unread)


def _groups(
    graph: Graph, computed: set[Node], levels: Mapping[Node, int], apart: AbstractSet[Node] = frozenset()
) -> dict[Node, Group]:
    """The group of each computed node; those `apart` share none with others."""
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
                if base in computed and levels[base] == levels[node] and (base in apart) == (node in apart):
                    parent[root(base)] = root(node)
                elif (node in apart and is_reduction(node)) or value_of(source).numel() == value_of(node).numel() > 1:
                    key = base, levels[node], value_of(source).shape, node in apart
                    parent[root(sharing.setdefault(key, node))] = root(node)
    members: dict[Node, list[Node]] = {}
    for node in graph.nodes:
        if node in computed:
            members.setdefault(root(node), []).append(node)
    read = _read_elsewhere(graph, {n: root(n) for n in computed})
    groups = {r: Group(tuple(ns), tuple(n for n in ns if n in read)) for r, ns in members.items()}
    return {n: groups[root(n)] for n in computed}


def _read_elsewhere(graph: Graph, roots: Mapping[Node, Node]) -> set[Node]:
    """The computed nodes whose memory somebody outside of their group reads."""
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
    """The same steps with kernels together: library calls while there are any that can run, then kernels likewise."""
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
    return result
