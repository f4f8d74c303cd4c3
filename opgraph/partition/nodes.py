"""Nodes: the ops of a graph for partitioning, and the properties of each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from opgraph.ir import opdef
from opgraph.ir.graph import Graph
from opgraph.ir.logical_tensor import LogicalTensor
from opgraph.ir.op import Op
from opgraph.partition.decompose import opened_ops
from opgraph.partition.partition import FUSED
from opgraph.partition.reduction_analysis import RowValue
from opgraph.partition.symbols import Shape, is_scalar_shape
from opgraph.partition.traits import (
    OPGRAPH,
    SUM,
    aligned_operands,
    bound_to_its_shape,
    kind_and_provider,
    values_read,
)

_ROWS = "its rows are those of its own shape"


class Nodes:
    """A node is the place of an op (without End) in topological order.

    An op whose record spells it in smaller ops that all fit into one loop is a node for each of these.

    Args:
        graph: finalized.

    Attributes:
        ops, owners: the op, and the op of the graph that it belongs to.
        kinds: its kind of partition, and the provider that runs it.
        sources, targets: the nodes that it reads from, and those that read it.
        sums: True if it is a sum that ends its loop.
        axes: the row axes, if it makes a row value.
        shape: its own; for a sum, the shape that it runs over; for a row value, the shape of all rows.
        cost: instructions per element; 0 for parts of one element, which leave the loop.
        makes_output: True if it makes an output of the graph.
        placed: the reason why it cannot be computed inside a larger shape; "" if it can.
        reads: ids of the values of its shape whose data it reads.
        apart: edges that must not lie inside any cluster, (source, node), and pairs that must not be in one cluster.
        summed_like: nodes to whose shape sums reduce; their values must be in memory for that.
        mixed: shapes whose rows run along different axes.
        inside, seen, rows: see `Opened` and `Rows`.
    """

    def __init__(self, graph: Graph) -> None:
        taken = opened_ops([op for op in graph.ops if op.kind != "End"])
        self.inside, self.seen, self.owners = taken.inside, taken.seen, taken.owners
        self.ops = list(self.seen.ops)
        self.rows = taken.rows
        made = {t.id: node for node, op in enumerate(self.ops) for t in op.outputs}
        self.sources = [_once([made[t.id] for t in inputs if t.id in made]) for inputs in self._inputs()]
        self.targets: list[list[int]] = [[] for _ in self.ops]
        for node, sources in enumerate(self.sources):
            for source in sources:
                self.targets[source].append(node)
        outputs = {t.id for t in graph.outputs}
        self.makes_output = [any(t.id in outputs for t in op.outputs) for op in self.ops]
        tags = [self.rows.of(op) for op in self.ops]
        self.axes = [tag.axes if tag else None for tag in tags]
        self.kinds: list[tuple[str, str]] = []
        self.sums: list[bool] = []
        self.shape: list[Shape] = []
        self.cost: list[int] = []
        self.placed: list[str] = []
        self.reads: list[list[int]] = []
        for node, (op, tag) in enumerate(zip(self.ops, tags, strict=True)):
            self._know(node, op, tag)
        self.apart: set[tuple[int, int]] = set(self.seen.conflicts)
        self.summed_like: set[int] = set()
        self._keep_apart(made)
        several: dict[Shape, set[tuple[int, ...]]] = {}
        for tag in tags:
            if tag:
                several.setdefault(tag.space, set()).add(tag.axes)
        self.mixed = {shape for shape, axes in several.items() if len(axes) > 1}

    def _inputs(self) -> Iterator[Sequence[LogicalTensor]]:
        """The dependencies of each node: its inputs; for the first node of an opened op also inputs that none reads."""
        begun: set[int] = set()
        for op, owner in zip(self.ops, self.owners, strict=True):
            inner = self.inside.get(owner.id, ())
            if not inner or owner.id in begun:
                yield op.inputs
                continue
            begun.add(owner.id)
            read = {t.id for o in inner for t in o.inputs}
            yield (*op.inputs, *(t for t in owner.inputs if t.id not in read))

    def _know(self, node: int, op: Op, tag: RowValue | None) -> None:
        record, shapes = opdef.of(op), self.seen.shapes_at(node)
        kind = (FUSED, OPGRAPH) if tag or record.is_pointwise else kind_and_provider(op)
        is_sum = record.family == SUM and tag is None
        shape: Shape = tag.space if tag else ()
        if tag is None and op.outputs:
            shape = shapes[(op.inputs if is_sum else op.outputs)[0].id]
        self.kinds.append(kind)
        self.sums.append(is_sum)
        self.shape.append(shape)
        self.cost.append(0 if is_scalar_shape(shape) else record.cost)
        self.placed.append(_ROWS if tag else bound_to_its_shape(op, self.seen.axes))
        self.reads.append(values_read(op, shapes, shape) if kind[0] == FUSED else [])

    def _keep_apart(self, made: dict[int, int]) -> None:
        with_rows = bool(self.rows.values)
        for node, op in enumerate(self.ops):
            if opdef.of(op).channel_inputs:
                self._read_from_memory(aligned_operands(op, self.seen.axes), node, made)
            if with_rows:
                self._read_from_memory(self.rows.misread(op), node, made)
            if self.sums[node] and op.inputs[1].id in self.rows.without_known_shape:
                self._read_from_memory([op.inputs[1].id], node, made)
                self.summed_like.add(made[op.inputs[1].id])
            if node in self.seen.apart:
                self._read_from_memory(self.seen.apart[node], node, made)
            for source in self.sources[node]:
                if self.sums[source]:
                    self.apart.add((source, node))

    def _read_from_memory(self, operands: list[int] | tuple[int, ...], node: int, made: dict[int, int]) -> None:
        self.apart.update((made[id], node) for id in operands if id in made)


def _once(nodes: list[int]) -> list[int]:
    return nodes if len(nodes) < 2 else list(dict.fromkeys(nodes))
