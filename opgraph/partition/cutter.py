"""Growing partitions: fused ones along equal shapes, then over smaller shapes, then libraries over what is left."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from opgraph.ir import opdef
from opgraph.ir.graph import Graph
from opgraph.ir.op import Op
from opgraph.partition.clusters import Blocked, Clusters
from opgraph.partition.opened import opened_ops
from opgraph.partition.partition import FUSED, LIBRARY
from opgraph.partition.rows import Rows, is_cached
from opgraph.partition.symbols import Shape, is_scalar_shape, row_share, shape_text, size_ratio
from opgraph.partition.traits import (
    OPGRAPH,
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

#: Rows of fewer elements are short: the work done once a row takes longer than theirs.
SHORT_ROW = 64
_ROWS = "its rows are those of its own shape"

#: Parts are joined for what they both read as long as the whole reads at most so many values of the loop's shape.
MAX_READS = 16


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why two neighbours stayed apart: the op that gave the value, the one that reads it, and the reason."""

    producer: Op
    consumer: Op
    reason: str


class Cutter:
    """The state of one partitioning. A node is the place of an op (End left out) in topological order.

    An op that its record spells in smaller ones, all of which fit into one loop, is a node for each of these.

    Args:
        with_rows: whether kernels may reduce rows; else libraries do.
    """

    def __init__(self, graph: Graph, *, with_rows: bool) -> None:
        whole = [op for op in graph.ops if op.kind != "End"]
        made_of = opened_ops(whole, with_rows=with_rows)
        self.inside, self.seen = made_of.inside, made_of.seen
        #: The op of the graph that a node belongs to.
        self.owners = made_of.owners
        self.ops, shapes = list(self.seen.ops), self.seen.shapes
        outside = {t.id for node in self.seen.plain for t in self.ops[node].outputs}
        self.rows = Rows(self.ops if with_rows else (), shapes, outside)
        made = {t.id: node for node, op in enumerate(self.ops) for t in op.outputs}
        outputs = {t.id for t in graph.outputs}
        tags = [self.rows.of(op) for op in self.ops]
        self.kinds = [(FUSED, OPGRAPH) if tag else kind_and_provider(op) for op, tag in zip(self.ops, tags)]
        self.sources = [list(dict.fromkeys(made[t.id] for t in op.inputs if t.id in made)) for op in self.ops]
        self.targets: list[list[int]] = [[] for _ in self.ops]
        for node, sources in enumerate(self.sources):
            for source in sources:
                self.targets[source].append(node)
        self.clusters = Clusters(self.sources, SEARCH_BUDGET * len(self.ops) + 1000)
        self.refusals: dict[tuple[int, int], str] = {}
        # What is known of each cluster, at the node that stands for it: its nodes, its largest shape (of a sum, the one
        # that it runs over; of one value for each row, that of all rows), the axes of its rows if it has any,
        # instructions per element (0-d parts leave the loop, so they do not count), whether it makes an output of the
        # graph, why it cannot be computed inside a larger shape, and edges that must not lie inside any cluster.
        self.members = [[node] for node in range(len(self.ops))]
        self.sums = [is_sum(op) and tag is None for op, tag in zip(self.ops, tags)]
        self.axes = [tag.axes if tag else None for tag in tags]
        self.shape: list[Shape] = [
            tag.space if tag else shapes[op.inputs[0].id] if summed else shapes[op.outputs[0].id] if op.outputs else ()
            for op, summed, tag in zip(self.ops, self.sums, tags, strict=True)
        ]
        for node, own in self.seen.plain.items():
            self.shape[node] = own
        several: dict[Shape, set[tuple[int, ...]]] = {}
        for tag in tags:
            if tag:
                several.setdefault(tag.space, set()).add(tag.axes)
        #: Shapes of which rows run along different axes: joins are then looked at one by one.
        self.mixed = {shape for shape, axes in several.items() if len(axes) > 1}
        self.cost = [0 if is_scalar_shape(s) else cost_of(op) for op, s in zip(self.ops, self.shape, strict=True)]
        self.makes_output = [any(t.id in outputs for t in op.outputs) for op in self.ops]
        self.placed = [_ROWS if tag else bound_to_its_shape(op, shapes) for op, tag in zip(self.ops, tags)]
        self.reads = [
            values_read(op, shapes, shape) if kind == FUSED else []
            for op, shape, (kind, _) in zip(self.ops, self.shape, self.kinds, strict=True)
        ]
        self.apart: list[set[tuple[int, int]]] = [set() for _ in self.ops]
        for node, op in enumerate(self.ops):
            for tensor_id in aligned_operands(op, shapes):
                if tensor_id in made:
                    self._keep_apart(made[tensor_id], node)
            for tensor_id in (*self.rows.misread(op), *self.seen.apart.get(node, ())):
                if tensor_id in made:
                    self._keep_apart(made[tensor_id], node)
            for source in self.sources[node]:
                if self.sums[source]:
                    self._keep_apart(source, node)
        self._join_opened()

    def _keep_apart(self, source: int, node: int) -> None:
        self.apart[source].add((source, node))
        self.apart[node].add((source, node))

    def _join_opened(self) -> None:
        """Makes one cluster of what is inside each op that was opened: a path that leaves it does not come back."""
        if not self.inside:
            return
        place: dict[int, int] = {}
        joins = []
        for node, owner in enumerate(self.owners):
            first = place.setdefault(owner.id, node)
            if first != node:
                joins.append((first, node))
        # An op is about one shape, that of its rows, or of its result, whatever else its parts are made of.
        shape = {place[owner.id]: self.shape[n] for n, owner in enumerate(self.owners) if owner is not self.ops[n]}
        shape |= {place[self.owners[n].id]: self.shape[n] for n in range(len(self.ops)) if self.axes[n] is not None}
        self._keep_books(self.clusters.join_all(joins, {n: place[o.id] for n, o in enumerate(self.owners)}))
        for node, own in shape.items():
            self.shape[self.clusters.find(node)] = own

    # -- steps --------------------------------------------------------------------------------------------------

    def fuse_equal_shapes(self) -> None:
        """Joins pointwise neighbours of one shape: first where levels show it to be legal, then by searching."""
        self._keep_books(self.clusters.join_by_level(self._simply_alike))
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
        made = {t.id: self.clusters.find(node) for node, op in enumerate(self.ops) for t in op.outputs}
        reads: dict[int, set[int]] = {}  # cluster -> values of its own shape that it does not make
        for node, values in enumerate(self.reads):
            own = self.clusters.find(node)
            reads.setdefault(own, set()).update(v for v in values if made.get(v) != own)
        latest: dict[int, int] = {}  # value -> the last node that reads it
        for node, values in enumerate(self.reads):
            for value in values if live[node] else ():
                a, b = self.clusters.find(latest.setdefault(value, node)), self.clusters.find(node)
                if a != b and self.shape[a] == self.shape[b] and len(reads[a] | reads[b]) <= MAX_READS:
                    self._join_readers(a, b, reads)
                latest[value] = node

    def _join_readers(self, a: int, b: int, reads: dict[int, set[int]]) -> None:
        if self._apart_between(a, b) or self._rows_differ(a, b):
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
                self.refusals.setdefault(self._edge(part, user), reason)
            else:
                self._join(*self._edge(part, user), part, user)

    def leave_short_rows(self) -> None:
        """Gives a reduction that stands alone to a library where its rows are known to be short.

        Fused, it costs no pass over memory of its own. Alone, what is done once a row would be most of the work: a
        library takes several short rows at a time.
        """
        for node in list(self.clusters):
            axes, space = self.axes[node], self.shape[node]
            if axes is None or isinstance(space, str) or len(self.members[node]) > 1:
                continue
            if opdef.get(self.ops[node].kind, where="rows").row is None or self.owners[node] is not self.ops[node]:
                continue
            sizes = [space[a] for a in axes]
            length = prod(d for d in sizes if isinstance(d, int))
            if all(isinstance(d, int) for d in sizes) and length < SHORT_ROW and not is_cached(space):
                self.kinds[node] = kind_and_provider(self.ops[node])

    def leave_reshapes(self) -> None:
        """Gives reshapes that no loop has anything around to a library, which need not touch the elements."""
        for node in list(self.clusters):
            if all(n in self.seen.reshapes for n in self.members[node]):
                self.kinds[node] = kind_and_provider(self.owners[node])

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
        return both and self.shape[self.clusters.find(a)] == self.shape[self.clusters.find(b)]

    def _simply_alike(self, a: int, b: int) -> bool:
        """Whether clusters may be joined, however many of their like are joined at once."""
        if not self._alike(a, b) or self._apart_between(a, b):
            return False
        return self.shape[a] not in self.mixed or (self.axes[a] is None and self.axes[b] is None)

    def _rows_differ(self, a: int, b: int) -> bool:
        """Whether both clusters have rows, along different axes."""
        return None not in (self.axes[a], self.axes[b]) and self.axes[a] != self.axes[b]

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
        if self._rows_differ(a, b):
            axes = [list(self.axes[c] or ()) for c in (a, b)]
            self.refusals[producer, consumer] = f"rows over axes {axes[0]} and over axes {axes[1]} are two loops"
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
        if self.rows.of(self.ops[producer]) is not None:
            return "one value for each row, used along another axis"
        return "an operand along the channel axis is read from memory"

    def _in_the_way(self, blocked: Blocked) -> str:
        if not blocked.path:
            return "the search for cycles reached its limit"
        foreign = [c for c in blocked.path if self.kinds[c][0] != FUSED]
        return f"fusing would make a cycle through {described(self.ops[min(foreign or blocked.path)])}"

    def _keep_books(self, joins: list[tuple[int, int]]) -> None:
        for kept, gone in joins:
            self.cost[kept] += self.cost[gone]
            self.axes[kept] = self.axes[kept] or self.axes[gone]
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
        told = [(p, c, r) for (p, c), r in self.refusals.items() if find(p) != find(c)]
        return [Refusal(self.owners[p], self.owners[c], r) for p, c, r in told]

    def row_forms(self, cluster: int) -> tuple[tuple[int, ...], dict[int, str], frozenset[int]]:
        """The axes of a cluster's rows, which of its values are one for each row, in which form, and which of these are
        sums; nothing of all that where the cluster neither reduces rows nor holds more than their values."""
        axes = self.axes[cluster]
        if axes is None:
            return (), {}, frozenset()
        ops = [self.ops[node] for node in self.members[cluster]]
        forms = {t.id: self.rows.values[t.id].form for op in ops for t in op.outputs[:1] if t.id in self.rows.values}
        records = [opdef.get(op.kind, where=op.label) for op in ops]
        reduces = any(record.row is not None for record in records)
        sums = self.rows.sums & forms.keys()
        moves = any(record.family == "shape" for record in records)
        is_plain = not (reduces or sums or moves) and len(forms) == len(ops) and set(forms.values()) == {"kept"}
        return ((), {}, frozenset()) if is_plain else (axes, forms, frozenset(sums))
