"""Growing partitions: fused ones along equal shapes, then over smaller shapes, then libraries over what is left."""

from __future__ import annotations

from dataclasses import dataclass

from opgraph.ir.graph import Graph
from opgraph.ir.op import Op
from opgraph.partition.clusters import Blocked, Clusters
from opgraph.partition.partition import FUSED, LIBRARY
from opgraph.partition.symbols import Shape, is_scalar_shape, row_share, shape_text, size_ratio, symbolic_shapes
from opgraph.partition.traits import (
    aligned_operands,
    bound_to_its_shape,
    cost_of,
    described,
    is_sum,
    kind_and_provider,
    values_read,
)

#: How many edges the searches for cycles may visit, for each op of the graph.
SEARCH_BUDGET = 20
#: Recomputing a smaller part in the loop over a bigger shape is free up to this many instructions per element ...
FREE_COST = 4
#: ... or where the loop is at most this many times as large.
FREE_RATIO = 2.0
#: What is constant along a row is computed once for a row on the CPU, once for a pack of so many elements on CUDA.
PACK = 4

#: Parts are joined for what they both read as long as the whole reads at most so many values of the loop's shape.
MAX_READS = 16


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why two neighbours stayed apart: the op that gave the value, the one that reads it, and the reason."""

    producer: Op
    consumer: Op
    reason: str


class Cutter:
    """The state of one partitioning. A node is the place of an op (End left out) in topological order."""

    def __init__(self, graph: Graph) -> None:
        self.ops = [op for op in graph.ops if op.kind != "End"]
        made = {t.id: node for node, op in enumerate(self.ops) for t in op.outputs}
        shapes = symbolic_shapes(graph)
        outputs = {t.id for t in graph.outputs}
        self.kinds = [kind_and_provider(op) for op in self.ops]
        self.sources = [list(dict.fromkeys(made[t.id] for t in op.inputs if t.id in made)) for op in self.ops]
        self.targets: list[list[int]] = [[] for _ in self.ops]
        for node, sources in enumerate(self.sources):
            for source in sources:
                self.targets[source].append(node)
        self.clusters = Clusters(self.sources, SEARCH_BUDGET * len(self.ops) + 1000)
        self.refusals: dict[tuple[int, int], str] = {}
        # What is known of each cluster, at the node that stands for it: its nodes, its largest shape (of a sum, the one
        # that it runs over), instructions per element (0-d parts leave the loop, so they do not count), whether it
        # makes an output of the graph, why it cannot be computed inside a larger shape, and edges that must not lie
        # inside any cluster.
        self.members = [[node] for node in range(len(self.ops))]
        self.sums = [is_sum(op) for op in self.ops]
        self.shape: list[Shape] = [
            shapes[op.inputs[0].id] if summed else shapes[op.outputs[0].id] if op.outputs else ()
            for op, summed in zip(self.ops, self.sums, strict=True)
        ]
        self.cost = [0 if is_scalar_shape(s) else cost_of(op) for op, s in zip(self.ops, self.shape, strict=True)]
        self.makes_output = [any(t.id in outputs for t in op.outputs) for op in self.ops]
        self.placed = [bound_to_its_shape(op, shapes) for op in self.ops]
        self.reads = [
            values_read(op, shapes, shape) if kind == FUSED else []
            for op, shape, (kind, _) in zip(self.ops, self.shape, self.kinds, strict=True)
        ]
        self.apart: list[set[tuple[int, int]]] = [set() for _ in self.ops]
        for node, op in enumerate(self.ops):
            for tensor_id in aligned_operands(op, shapes):
                if tensor_id in made:
                    self._keep_apart(made[tensor_id], node)
            for source in self.sources[node]:
                if self.sums[source]:
                    self._keep_apart(source, node)

    def _keep_apart(self, source: int, node: int) -> None:
        self.apart[source].add((source, node))
        self.apart[node].add((source, node))

    # -- steps --------------------------------------------------------------------------------------------------

    def fuse_equal_shapes(self) -> None:
        """Joins pointwise neighbours of one shape: first where levels show it to be legal, then by searching."""
        self._keep_books(self.clusters.join_by_level(self._alike))
        for node, sources in enumerate(self.sources):
            for source in sources:
                a, b = self.clusters.find(source), self.clusters.find(node)
                if a != b and self._alike(source, node):
                    self._join(source, node, a, b)

    def fuse_readers(self) -> None:
        """Joins parts of one shape that read one value of that shape and do not wait for each other: it is read once.

        So do the gradients of a function: each is made of the same few tensors, and none of another.
        """
        live = self._live()
        reads: dict[int, set[int]] = {}  # cluster -> values of its own shape
        for node, values in enumerate(self.reads):
            reads.setdefault(self.clusters.find(node), set()).update(values)
        latest: dict[int, int] = {}  # value -> the last node that reads it
        for node, values in enumerate(self.reads):
            for value in values if live[node] else ():
                a, b = self.clusters.find(latest.setdefault(value, node)), self.clusters.find(node)
                if a != b and self.shape[a] == self.shape[b] and len(reads[a] | reads[b]) <= MAX_READS:
                    self._join_readers(a, b, reads)
                latest[value] = node

    def _join_readers(self, a: int, b: int, reads: dict[int, set[int]]) -> None:
        if self._apart_between(a, b):
            return
        result = self.clusters.join(*self.clusters.ordered(a, b))
        if not isinstance(result, Blocked):
            self._keep_books([result])
            reads[result[0]] = reads[a] | reads[b]

    def _live(self) -> list[bool]:
        """Whether an output of the graph depends on each op; what nothing depends on is not run."""
        live = list(self.makes_output)
        for node in reversed(range(len(self.ops))):
            if live[node]:
                for source in self.sources[node]:
                    live[source] = True
        return live

    def absorb_smaller_shapes(self) -> None:
        """Takes parts of smaller shape into the one cluster that uses them; last ones first, so that chains go along.

        Such a part feeds one cluster only, so no path leads from it to that cluster through a third.
        """
        for part in reversed(list(self.clusters)):
            if self.kinds[part][0] != FUSED:
                continue
            users = self.clusters.after(part)
            user = min(users, default=part)
            if len(users) != 1 or self.kinds[user][0] != FUSED:
                continue
            reason = self._against_absorbing(part, user)
            if reason:
                self.refusals[self._edge(part, user)] = reason
            else:
                self._join(*self._edge(part, user), part, user)

    def join_libraries(self) -> None:
        """Joins what one library runs: along edges, then side by side where neither waits for the other."""
        self._keep_books(self.clusters.join_by_level(self._one_library))
        for node, sources in enumerate(self.sources):
            for source in sources:
                a, b = self.clusters.find(source), self.clusters.find(node)
                if a != b and self._one_library(a, b):
                    self._join(source, node, a, b)
        self._keep_books(self.clusters.join_siblings(lambda c: self.kinds[c][1] if self.kinds[c][0] == LIBRARY else ""))

    # -- rules --------------------------------------------------------------------------------------------------

    def _alike(self, a: int, b: int) -> bool:
        """Whether two ops, one feeding the other, are pointwise over one shape."""
        both = self.kinds[a][0] == FUSED and self.kinds[b][0] == FUSED
        return both and self.shape[a] == self.shape[b] and (a, b) not in self.apart[b]

    def _one_library(self, a: int, b: int) -> bool:
        return self.kinds[a][0] == LIBRARY and self.kinds[a] == self.kinds[b]

    def _against_absorbing(self, part: int, user: int) -> str:
        """Why a part should not be computed within the cluster that uses it; "" where it should."""
        small, big = self.shape[part], self.shape[user]
        texts = f"{shape_text(small)} inside {shape_text(big)}"
        producer, consumer = self._edge(part, user)
        if (producer, consumer) in self.apart[part]:
            return self._why_apart(producer)
        if self.makes_output[part]:
            return f"smaller shape {texts}: its value is an output of the graph, which is written once"
        if self.placed[part] and small != big:
            return f"smaller shape {texts}: {self.placed[part]}"
        ratio, cost = size_ratio(small, big), self.cost[part]
        if cost // min(row_share(small, big), PACK) <= FREE_COST or ratio <= FREE_RATIO:
            return ""
        times = "an unknown number of" if ratio == float("inf") else f"{ratio:.0f}"
        return f"smaller shape {texts}: recomputing costs {cost} instructions per element, {times} times each"

    # -- books --------------------------------------------------------------------------------------------------

    def _join(self, producer: int, consumer: int, a: int, b: int) -> None:
        """Joins cluster a (of `producer`) and cluster b (of `consumer`), or notes why not."""
        between = self._apart_between(a, b)
        if between:
            self.refusals[producer, consumer] = self._why_apart(min(between))
            return
        shape = self.shape[b]  # values only grow on their way through pointwise ops
        result = self.clusters.join(a, b)
        if isinstance(result, Blocked):
            self.refusals[producer, consumer] = self._in_the_way(result)
        else:
            self._keep_books([result])
            self.shape[result[0]] = shape

    def _apart_between(self, a: int, b: int) -> list[int]:
        """The ops from which an edge leads from one cluster to the other that must not lie inside any."""
        fewer = min(self.apart[a], self.apart[b], key=len)
        return [p for p, c in fewer if {self.clusters.find(p), self.clusters.find(c)} == {a, b}]

    def _why_apart(self, producer: int) -> str:
        if self.sums[producer]:
            return "a sum is whole only when its loop has ended; what uses it is another kernel"
        return "an operand along the channel axis is read from memory"

    def _in_the_way(self, blocked: Blocked) -> str:
        if not blocked.path:
            return "the search for cycles reached its limit"
        foreign = [c for c in blocked.path if self.kinds[c][0] != FUSED]
        return f"fusing would make a cycle through {described(self.ops[min(foreign or blocked.path)])}"

    def _keep_books(self, joins: list[tuple[int, int]]) -> None:
        for kept, gone in joins:
            self.cost[kept] += self.cost[gone]
            self.makes_output[kept] |= self.makes_output[gone]
            self.placed[kept] = self.placed[kept] or self.placed[gone]
            # The shorter goes into the longer, so that all joins together stay linear (but for a logarithm).
            longer, shorter = sorted((self.members[kept], self.members[gone]), key=len, reverse=True)
            longer.extend(shorter)
            self.members[kept], self.members[gone] = longer, []
            more, less = sorted((self.apart[kept], self.apart[gone]), key=len, reverse=True)
            more.update(less)
            self.apart[kept], self.apart[gone] = more, set()

    def _edge(self, part: int, user: int) -> tuple[int, int]:
        """The first edge from one cluster to another, as nodes."""
        for node in self.members[part]:
            for target in self.targets[node]:
                if self.clusters.find(target) == user:
                    return node, target
        raise AssertionError("clusters without an edge")

    def told(self) -> list[Refusal]:
        """The refusals between ops that indeed ended apart."""
        find = self.clusters.find
        return [Refusal(self.ops[p], self.ops[c], r) for (p, c), r in self.refusals.items() if find(p) != find(c)]
