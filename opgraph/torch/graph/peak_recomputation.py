"""Recomputes values for later readers, if a program would hold the values over its memory peak and that is cheap.

Backward recomputes activations from saved tensors. A chain of residual blocks is computed in one go, because each block
reads the one before it, and each of its values is held until the convolution that reads it runs: at the peak of a
ResNet, five activations. Most of them follow from one or two tensors that are alive then in any case. Such a value
stays inside its kernel, and its later readers get a copy of the nodes that compute it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Sequence

from torch.fx import Graph, Node

from opgraph.torch.graph.aten import bytes_of, is_elementwise, is_fill
from opgraph.torch.graph.kernel_groups import Group, Schedule, schedule
from opgraph.torch.graph.min_cut import PARAMETER
from opgraph.torch.graph.selections import compared_values
from opgraph.torch.graph.views import base_of, is_view, keeps_elements, readers

#: Values of fewer bytes than this are held.
SMALLEST = 2**20
#: The most tensors that a value is computed from: holding the value takes a write and a read, three accesses to memory.
_MOST_SOURCES = 2
#: The most steps that are the peak one after the other.
_MOST_PEAKS = 64
#: The most schedules that are made of one graph, each with fewer values held.
_MOST_ROUNDS = 4
#: The most nodes of its size that are recomputed for a value: an activation as long as NAF1, and a norm before it.
_LONGEST = 32


class Lives:
    """The lifetimes of the values of a graph under a schedule.

    Attributes:
        bytes: for each step, with its operands and results; without parameters, which are always alive.
        born, last: for each value that has memory, the step that makes it (-1: an input) and its last reader's step.
        step_of: the step in which a node runs.
    """

    def __init__(self, graph: Graph, schedule: Schedule) -> None:
        end = len(schedule)
        self.born = {n: -1 for n in graph.nodes if n.op in ("placeholder", "get_attr")}
        self.last: dict[Node, int] = {}
        self.step_of: dict[Node, int] = {}
        for number, step in enumerate(schedule):
            nodes = step.nodes if isinstance(step, Group) else (step,)
            self.step_of.update((node, number) for node in nodes)
            for node in step.outputs if isinstance(step, Group) else nodes:
                whole = node.args[0] if node.target is operator.getitem else None
                self.born[node] = self.step_of.get(whole, number)  # type: ignore[arg-type]
            for node in nodes:
                self.last.update((base_of(source), number) for source in node.all_input_nodes)
        output = graph.output_node()
        self.last.update((base_of(n), end) for n in output.all_input_nodes)
        self.bytes = [0] * end
        for node, born in self.born.items():
            if not node.meta.get(PARAMETER) and node.op != "get_attr":
                self._add(bytes_of(node), max(born, 0), self.last.get(node, born))
        for number, step in enumerate(schedule):
            if isinstance(step, Group):
                self.bytes[number] -= self._overlap(step, number)

    def _add(self, size: int, first: int, last: int) -> None:
        for step in range(first, min(last, len(self.bytes) - 1) + 1):
            self.bytes[step] += size

    def _overlap(self, group: Group, number: int) -> int:
        """The approximate bytes of results that take the memory of values that die there (`reuse`)."""
        read = {base_of(n) for node in group.nodes for n in node.all_input_nodes}
        dying = [bytes_of(n) for n in read if self.born.get(n, -1) >= 0 and self.last[n] == number]
        overlap = 0
        for size in map(bytes_of, group.outputs):
            if size in dying:
                dying.remove(size)
                overlap += size
        return overlap

    def held(self, step: int) -> list[Node]:
        """The large values that are alive at a step, and are read after it."""
        return [
            n for n, born in self.born.items()
            if 0 <= born <= step < self.last.get(n, -1) < len(self.bytes) and bytes_of(n) >= SMALLEST
        ]  # fmt: skip

    def move(self, node: Node, last: int, copies: Sequence[Node], until: int) -> None:
        """Records that a value's last reader is at an earlier step, and that later readers read a copy made for them.

        Args:
            copies: the copies of the nodes that compute the value; that of the value itself is the last one.
        """
        self._add(
            -bytes_of(node), last + (last > self.born[node]), until - 1
        )  # not stored at all if it has no other readers
        self.step_of.update(dict.fromkeys(copies, until))
        self.born[copies[-1]], self.last[copies[-1]] = until, self.last[node]
        self.last[node] = last


def with_lower_peak(graph: Graph, planned: Schedule) -> Schedule:
    """The schedule of a graph in which values that would be held over the peak are recomputed, as long as the peak
    falls: a schedule of the copies may have its peak elsewhere.

    Args:
        planned: the schedule of the graph, which is changed.
    """
    peak = math.inf
    for _ in range(_MOST_ROUNDS):
        found = max(Lives(graph, planned).bytes, default=0)
        if found >= peak or not recompute_over_peak(graph, planned):
            break
        peak = found
        planned = schedule(graph)
    return planned


def recompute_over_peak(graph: Graph, schedule: Schedule) -> bool:
    """Gives later readers of values that are held over the peak, unread, copies of the nodes that compute them; as
    often as that lowers the peak.

    Args:
        schedule: the schedule of the graph, which is changed.

    Returns: True if the graph was changed.
    """
    lives = Lives(graph, schedule)
    computed = {n for step in schedule if isinstance(step, Group) for n in step.nodes}
    computed.difference_update(compared_values(graph))
    changed = False
    for _ in range(_MOST_PEAKS):
        peak = max(range(len(lives.bytes)), key=lives.bytes.__getitem__, default=0)
        order = {n: i for i, n in enumerate(graph.nodes)}
        found = False
        for node in sorted(lives.held(peak), key=order.__getitem__, reverse=True):  # readers come before their operands
            reading = [(read, user) for read, user, _ in readers(node)]
            steps = [lives.step_of[user] for _, user in reading]
            until = min((step for step in steps if step > peak), default=-1)
            is_free = node in computed and (peak in steps) == (lives.born[node] == peak)
            chain = None if not is_free or until < 0 else _chain(node, lives, computed, until)
            if chain is not None:
                later = [reader for reader, step in zip(reading, steps) if step > peak]
                copies = _copied(graph, chain, later)
                computed.update(copies)
                last = max((step for step in steps if step <= peak), default=lives.born[node])
                lives.move(node, last, copies, until)
                found = changed = True
        if not found:
            break
    return changed


def _chain(node: Node, lives: Lives, computed: Collection[Node], until: int) -> set[Node] | None:
    """The nodes that compute a value from values that are alive at a later step in any case; None if that is much."""
    chain: set[Node] = set()
    sources: set[Node] = set()
    waiting = [node]
    length = 0
    while waiting:
        link = waiting.pop()
        if link in chain:
            continue
        chain.add(link)
        if not is_elementwise(link) and not is_fill(link):
            return None
        length += 2 * bytes_of(link) >= bytes_of(node)  # values of few elements, as those of parameters, cost nothing
        if length > _LONGEST:
            return None
        for read in link.all_input_nodes:
            base = base_of(read)
            is_large = 2 * bytes_of(base) >= bytes_of(node)
            is_stored = base in lives.born
            if is_stored and (not is_large or lives.last.get(base, -1) >= until):
                if is_large:
                    sources.add(base)
                continue
            if base not in computed or (read is not base and not keeps_elements(read)):
                return None
            waiting.append(base)
        if len(sources) > _MOST_SOURCES:
            return None
    return chain


def _copied(graph: Graph, chain: Collection[Node], readers: Sequence[tuple[Node, Node]]) -> list[Node]:
    """Makes readers read a copy of a chain, which stands before the first of them.

    Args:
        readers: (the end of the chain or a view of it, the reader of that).

    Returns: the copies, without views; that of the end last.
    """
    order = {n: i for i, n in enumerate(graph.nodes)}
    copies: dict[Node, Node] = {}

    def copy(node: Node) -> Node:
        if node not in copies and (node in chain or (is_view(node) and base_of(node) in chain)):
            copies[node] = graph.node_copy(node, copy)
        return copies.get(node, node)

    with graph.inserting_before(min((user for _, user in readers), key=order.__getitem__)):
        for node in sorted(chain, key=order.__getitem__):
            copy(node)
        made = [n for n in copies.values() if not is_view(n)]
        for read, user in readers:
            user.replace_input_with(read, copy(read))
    return made
