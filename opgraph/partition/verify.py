"""Checks that the partitions of a graph fit together."""

from __future__ import annotations

from collections.abc import Sequence

from opgraph.errors import InvalidGraph
from opgraph.ir.graph import Graph
from opgraph.ir.op import Op
from opgraph.partition.partition import FUSED, Partition
from opgraph.partition.ports import needed_outside, read_from_outside


def verify_partitions(graph: Graph, partitions: Sequence[Partition], *, side_by_side: bool = False) -> None:
    """Checks that every op but End is in exactly one partition, and that the partitions can run in this order.

    Earlier partitions make each partition's inputs, so the graph of partitions has no cycle, and each is convex. A
    fused partition is connected by values that its ops make or read. Ports are the tensors read from outside and those
    needed outside.

    Args:
        side_by_side: fused partitions need not be connected.

    Raises:
        InvalidGraph: a check fails; this is a bug of the partitioner, not of its caller.
    """
    place: dict[int, int] = {}
    position = {op.id: index for index, op in enumerate(graph.ops)}
    for index, part in enumerate(partitions):
        if part.id != index:
            raise _broken(part, f"stands at place {index}")
        for op in part.ops:
            if op.id in place:
                raise _broken(part, f"holds {op.label}, which partition {place[op.id]} holds too")
            place[op.id] = index
        if any(position[a.id] >= position[b.id] for a, b in zip(part.ops, part.ops[1:], strict=False)):
            raise _broken(part, "holds its ops out of order")
    for op in graph.ops:
        if (op.id in place) == (op.kind == "End"):
            raise InvalidGraph(
                f"{op.label} is in {'a' if op.id in place else 'no'} partition",
                where="verify_partitions",
                fix="every op but End belongs to exactly one partition",
            )
        for tensor in op.inputs:
            maker = graph.producer(tensor.id)
            if maker is not None and op.id in place and place[maker.id] > place[op.id]:
                raise _broken(partitions[place[op.id]], f"needs {tensor.label} before partition {place[maker.id]} ran")
    outputs = {t.id for t in graph.outputs}
    for part in partitions:
        _verify_one(graph, outputs, part, side_by_side)


def _verify_one(graph: Graph, outputs: set[int], part: Partition, side_by_side: bool) -> None:
    inputs, constants = read_from_outside(part.ops)
    needed = needed_outside(graph, outputs, part.ops)
    ports = (part.input_ports, part.constants, part.output_ports)
    for given, right, what in zip(
        ports, (inputs, constants, needed), ("input ports", "constants", "output ports"), strict=True
    ):
        if [t.id for t in given] != [t.id for t in right]:
            raise _broken(part, f"has {what} {[t.id for t in given]} instead of {[t.id for t in right]}")
    inside = {op.id for op in part.ops}
    if any(op.id not in inside for unit in part.unit_matches for op in unit.ops):
        raise _broken(part, "names a unit that reaches outside")
    if part.kind == FUSED and not side_by_side and not _connected(part.ops):
        raise _broken(part, "is fused, but not connected")


def _connected(ops: Sequence[Op]) -> bool:
    """True if all ops are connected by the values that they make and read."""
    touching: dict[int, list[Op]] = {}
    for op in ops:
        for tensor in (*op.inputs, *op.outputs):
            touching.setdefault(tensor.id, []).append(op)
    seen, waiting = {ops[0].id}, [ops[0]]
    while waiting:
        op = waiting.pop()
        for tensor in (*op.inputs, *op.outputs):
            for other in touching.pop(tensor.id, ()):
                if other.id not in seen:
                    seen.add(other.id)
                    waiting.append(other)
    return len(seen) == len(ops)


def _broken(part: Partition, what: str) -> InvalidGraph:
    return InvalidGraph(f"partition {part.id} {what}", where=repr(part), fix="report this graph: the partitioner erred")
