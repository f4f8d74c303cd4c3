"""The minimum cut between a forward and a backward graph: the values to save, with the fewest bytes."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable

from opgraph.ir import dtypes, opdef
from opgraph.ir.graph import Graph
from opgraph.ir.logical_tensor import LogicalTensor, port_name
from opgraph.ir.op import Op
from opgraph.ir.optional_dependencies import require
from opgraph.ops.shape import VIEWS
from opgraph.transforms.selections import Comparison, has_same_bits

#: Assumed extent of an unknown dimension: larger than a parameter's, so that data counts more.
UNKNOWN_EXTENT = 4096
#: An input exists anyway, so it is preferred to a value of the same size, which would have to be written first.
_INPUT_SHARE = 900
#: The reader of an output keeps it anyway. The small weight decides between equal cuts, and avoids an output that saves
#: only a few numbers.
_OUTPUT_SHARE = 1
#: The weight of every other byte. Integers add up exactly. With rounding, the choice between equal cuts would depend on
#: the order in which networkx walks, which differs between processes.
_SHARE = 1000


def kept_name(graph: Graph, tensor: LogicalTensor) -> str:
    """The name of a forward value as an input of the gradient graph: an output keeps its name.

    The gradient graph also has inputs with the names of the graph's inputs, and `d_<output>`. The returned name differs
    from all of these.
    """
    outputs = {port_name(t): t.id for t in graph.outputs}
    taken = {port_name(t) for t in graph.inputs} | {f"d_{name}" for name in outputs}
    name = port_name(tensor)
    if outputs.get(name) == tensor.id and name not in taken:
        return name
    name = f"kept_{tensor.id}"
    while name in taken or outputs.get(name, tensor.id) != tensor.id:
        name = f"_{name}"
    return name


def read_inputs(op: Op) -> list[LogicalTensor]:
    """The inputs whose data an op reads; only the shapes of the others count."""
    return opdef.get(op.kind, where=op.label).read_inputs(op)


class Cut:
    """The search for the forward values that separate the inputs of the forward graph from the backward ops.

    Args:
        graph, joint: the forward graph, and the gradient graph that recomputes its values.
        told: ids of conditions that follow from an output.
        compared: comparisons whose values are recomputed only for other readers, not for the comparison.
    """

    def __init__(self, graph: Graph, joint: Graph, told: Collection[int], compared: Iterable[Comparison] = ()) -> None:
        copied = {(c.value, made) for c in compared for made in c.between}
        #: The values that are not recomputed for comparisons, by the ids of the copies that these read.
        self.copied = {-1 - value: value for value, _ in copied}
        self.inputs = {t.id for t in graph.inputs}
        #: Outputs, and conditions that follow from one: they take no additional memory.
        self.outputs = {t.id for t in graph.outputs} | set(told)
        # Values that depend on the gradients of the outputs are backward; all others are forward, recomputed or saved.
        backward = {t.id for t in joint.inputs} - self.inputs
        self.needed: set[int] = set()
        self.made_from: dict[int, list[int]] = {}
        #: Forward values whose last bit may change when they are recomputed.
        self.inexact: set[int] = set()
        self.fixed: set[int] = set()
        for op in joint.ops:
            outs = [t.id for t in op.outputs]
            read = [t.id for t in read_inputs(op) if not t.is_constant]
            read = [-1 - i if any((i, o) in copied for o in outs) else i for i in read]
            if any(t.id in backward for t in op.inputs):
                backward.update(outs)
                self.needed.update(i for i in read if i not in backward)
            else:
                self.made_from.update((o, read) for o in outs)
                self.inexact.update(() if has_same_bits(op) else outs)
                if not opdef.get(op.kind, where=op.label).is_pointwise and op.kind not in VIEWS:
                    self.fixed.update(outs)
        # A gradient that does not depend on any d_... (it is zero, or a copy of a shape) reads nothing.
        self.needed.update(t.id for t in joint.outputs if self.made_from.get(t.id))
        #: Values of the forward graph. A value that only backward computes cannot be saved from forward.
        self.known = self.inputs | {t.id for op in graph.ops for t in op.outputs}
        self.fixed &= self.known
        self.fixed |= self.copied.keys()
        self.slice = self._slice()
        values = {i: self.copied.get(i, i) for i in self.slice}
        self.weights = {i: self._weight(joint.tensor(v)) for i, v in values.items() if v in self.known}

    def is_computed_twice(self, comparison: Comparison, kept: Collection[int]) -> bool:
        """True if backward compares a value that it recomputes with a value that forward computed from it."""
        is_known = comparison.value in self.known
        if not is_known or comparison.result in kept or comparison.between.isdisjoint(kept):
            return False
        seen: set[int] = set()
        waiting = [comparison.value]
        while waiting:
            id = waiting.pop()
            if id in self.made_from and id not in seen and id not in self.fixed and id not in kept:
                if id in self.inexact:
                    return True
                seen.add(id)
                waiting += self.made_from[id]
        return False

    def _slice(self) -> set[int]:
        """Forward values from which the needed ones are computed, including the needed ones."""
        seen: set[int] = set()
        waiting = list(self.needed)
        while waiting:
            id = waiting.pop()
            if id not in seen:
                seen.add(id)
                waiting.extend(() if id in self.fixed else self.made_from.get(id, ()))
        return seen

    def _weight(self, tensor: LogicalTensor) -> int:
        size = dtypes.get(tensor.dtype).itemsize
        for extent in tensor.dims or (UNKNOWN_EXTENT,):
            size *= extent if isinstance(extent, int) else UNKNOWN_EXTENT
        share = _INPUT_SHARE if tensor.id in self.inputs else _OUTPUT_SHARE if tensor.id in self.outputs else _SHARE
        return size * share

    def solved(self) -> tuple[int, set[int]]:
        """The weight of the cheapest cut, and the values that it saves."""
        weight, kept = self._solved()
        return weight, {self.copied.get(i, i) for i in kept}

    def _solved(self) -> tuple[int, set[int]]:
        """The same, with separate ids for copies of values."""
        sources = {i for i in self.slice if i in self.fixed or i not in self.made_from}
        total = sum(self.weights[i] for i in sources)
        others = [w for i, w in self.weights.items() if i not in sources]
        if all(w >= total for w in others):  # any other value alone costs as much
            return total, sources
        if len(self.needed) == 1:
            (one,) = self.needed
            alone = self.weights.get(one)
            if alone is not None and all(
                w > alone for i, w in self.weights.items() if i != one
            ):  # it suffices, and no cut is cheaper
                return alone, {one}
        if self._each_has_a_way(sources):
            return total, sources
        return self._minimum_cut(sources)

    def _each_has_a_way(self, sources: set[int]) -> bool:
        """True if a flow of the sources' whole weight to the needed values is found: then no cut is cheaper.

        Each source's weight is sent along the shortest path with enough capacity left. This finds the flow in the
        common case, without loading networkx. If it is not found, it may still exist.
        """
        readers: dict[int, list[int]] = {}
        for id in sorted(self.slice - sources):
            for operand in self.made_from[id]:
                readers.setdefault(operand, []).append(id)
        room = {i: self.weights.get(i, float("inf")) for i in self.slice}
        for source in sorted(sources):
            flow = room[source]
            came_from: dict[int, int | None] = {source: None}
            reached: int | None = None
            waiting = deque([source])
            while waiting and reached is None:
                id = waiting.popleft()
                if id in self.needed:
                    reached = id
                for reader in readers.get(id, ()):
                    if reader not in came_from and room[reader] >= flow:
                        came_from[reader] = id
                        waiting.append(reader)
            if reached is None:
                return False
            while reached is not None:
                room[reached] -= flow
                reached = came_from[reached]
        return True

    def _minimum_cut(self, sources: set[int]) -> tuple[int, set[int]]:
        require("networkx", "train", "choosing what to keep for backward needs", "training")
        import networkx  # only where there is a choice

        network = networkx.DiGraph()
        for id in sorted(self.slice):
            capacity = {"capacity": self.weights[id]} if id in self.weights else {}
            network.add_edge((id, "in"), (id, "out"), **capacity)
            if id in sources:
                network.add_edge("source", (id, "in"))
            else:
                for operand in self.made_from[id]:
                    network.add_edge((operand, "out"), (id, "in"))
            if id in self.needed:
                network.add_edge((id, "out"), "sink")
        weight, (near, far) = networkx.minimum_cut(network, "source", "sink")
        return weight, {i for i in self.slice if (i, "in") in near and (i, "out") in far}
