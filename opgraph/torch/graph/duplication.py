"""Values that are computed more than once: readers on later levels get their own copy of a node."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet

from torch.fx import Graph, Node

from opgraph.torch.graph.aten import bytes_of, is_reduction
from opgraph.torch.graph.selections import compared_values
from opgraph.torch.graph.views import base_of, is_view, keeps_elements, readers

#: The most nodes of a chain that is recomputed on another level.
_LONGEST_CHAIN = 8


def duplicate(graph: Graph, computed: set[Node], levels: dict[Node, int]) -> None:
    """Gives readers on later levels their own copy of a node, if that causes no more memory traffic.

    A value that is stored for a later level is written once and read once; a copy reads the operands of the value. The
    copy stands before its first reader: groups run in the order of the graph, and one whose first node stands far
    before the others would run early and keep its results alive.
    """
    sources = Sources(computed, compared_values(graph))
    order = _Order(graph)
    for node in reversed(graph.nodes):
        if not sources.is_link(node):
            continue
        by_level: dict[int, list[tuple[Node, Node]]] = {}  # (the node or a view of it, the reader of that)
        stored = False
        for read, user, fuses in readers(node):
            if user in computed and fuses:
                by_level.setdefault(levels[user], []).append((read, user))
            else:
                stored = True
        for level, found in by_level.items():
            if level == levels[node] or sources.is_long(node):
                continue
            there = {s for _, user in found for other in user.all_input_nodes if base_of(other) is not node
                     for s in sources.of(base_of(other))}  # fmt: skip
            new = [s for s in sources.of(node) if s not in there and 2 * bytes_of(s) >= bytes_of(node)]
            if len(new) > (0 if stored else 1):
                continue
            copy = order.copy_before(node, [user for _, user in found])
            computed.add(copy)
            levels[copy] = level
            for read, user in found:
                user.replace_input_with(read, _with_base(graph, read, node, copy))
    for node in reversed(list(graph.nodes)):
        if (node in computed or is_view(node)) and not node.users:
            computed.discard(node)
            graph.erase_node(node)


class _Order:
    """The order of a graph's nodes, to which copies are added; a node is copied after its readers."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._place = {node: place for place, node in enumerate(graph.nodes)}
        #: Place of a node -> the first of the copies that stand before it.
        self._first: dict[int, Node] = {}

    def copy_before(self, node: Node, readers: Sequence[Node]) -> Node:
        """A copy of a node that stands before the first of its readers."""
        reader = min(readers, key=self._place.__getitem__)
        place = self._place[reader]
        with self._graph.inserting_before(self._first.get(place, reader)):
            copy = self._graph.node_copy(node)
        self._place[copy], self._first[place] = place, copy
        return copy


def _with_base(graph: Graph, view: Node, base: Node, other: Node) -> Node:
    """The same view of another node."""
    if view is base:
        return other
    source = _with_base(graph, view.all_input_nodes[0], base, other)
    with graph.inserting_after(source):
        return graph.node_copy(view, lambda n: source if n is view.all_input_nodes[0] else n)


class Sources:
    """The values that computed nodes read from memory if no value between them is stored.

    Args:
        computed: the nodes of kernels.
        once: those of them that are stored for all their readers.
    """

    def __init__(self, computed: set[Node], once: AbstractSet[Node] = frozenset()) -> None:
        self._computed, self._once = computed, once
        self._found: dict[Node, frozenset[Node]] = {}

    def of(self, node: Node) -> frozenset[Node]:
        """The stored values that the chain that ends at a node reads."""
        waiting = [node] if self.is_link(node) and node not in self._found else []
        while waiting:
            link = waiting[-1]
            reads = [(base_of(s), base_of(s) is s or keeps_elements(s)) for s in link.all_input_nodes]
            unknown = [n for n, goes_on in reads if goes_on and n not in self._found and self.is_link(n)]
            waiting += unknown
            if not unknown:
                waiting.pop()
                self._found[link] = frozenset().union(
                    *(self._found.get(base, (base,)) if goes_on else (base,) for base, goes_on in reads)
                )
        return self._found.get(node, frozenset((node,)))

    def is_long(self, node: Node) -> bool:
        """True if a node takes many nodes, each counted once, to compute from stored values."""
        chain: set[Node] = set()
        waiting = [node]
        while waiting and len(chain) <= _LONGEST_CHAIN:
            link = waiting.pop()
            if self.is_link(link) and link not in chain:
                chain.add(link)
                waiting += [base_of(s) for s in link.all_input_nodes if base_of(s) is s or keeps_elements(s)]
        return len(chain) > _LONGEST_CHAIN

    def is_link(self, node: Node) -> bool:
        """True if a node may be recomputed."""
        return node in self._computed and node not in self._once and not is_reduction(node)
