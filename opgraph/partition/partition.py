"""Partition: a piece of a graph that runs as one; and the check that the pieces of a graph fit together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from opgraph.errors import InvalidArguments, InvalidGraph
from opgraph.ir.graph import Graph
from opgraph.ir.logical_tensor import LogicalTensor
from opgraph.ir.op import Op
from opgraph.partition.units import Unit

if TYPE_CHECKING:
    from opgraph.runtime.compiled import CompiledPartition
    from opgraph.runtime.engine import Engine

FUSED, LIBRARY, UNSUPPORTED = "fused", "library", "unsupported"
#: The provider of library ops that have records: torch where it is installed, else NumPy; that shows at run time.
NATIVE = "native"


@dataclass(frozen=True, slots=True, kw_only=True)
class RowForms:
    """Rows that one kernel reduces.

    Attributes:
        axes: those of a row, counted from the last (-1), in ascending order; none where no row is reduced.
        forms: of each value that there is one of for each row, by tensor id, whether the axes of the row stay, with
            size 1 ("kept"), or not ("dropped").
        sums: of these, the ones that SumTo makes.
        inside: for each op that its record spells in smaller ones and that runs as these, or that is said with other
            axes than its own, by op id, these.
        cuts: by tensor id, how the axes of an operand or a result are taken for more (`opgraph.loops.loop.Cut`).
    """

    axes: tuple[int, ...] = ()
    forms: Mapping[int, str] = field(default_factory=dict)
    sums: frozenset[int] = frozenset()
    inside: Mapping[int, tuple[Op, ...]] = field(default_factory=dict)
    cuts: Mapping[int, tuple[tuple[int, ...], ...]] = field(default_factory=dict)


NO_ROWS = RowForms()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, weakref_slot=True)
class Partition:
    """One piece of a graph.

    Attributes:
        id: its place in the topological order of partitions.
        kind: "fused" (one generated kernel), "library" (a provider runs it) or "unsupported" (nobody does).
        ops: in topological order.
        input_ports: what it reads from elsewhere, each tensor once, in order of first use; without constants.
        output_ports: what is read elsewhere or is an output of the graph, each once.
        constants: the constants that it reads, each once.
        unit_matches: the named units that lie inside, in topological order of their roots.
        provider: who runs it: "opgraph", "native", "onnxruntime", or "".
        engine: the engine kind of its graph.
        rows: what of it is one value for each row.

    Source: oneDNN Graph `partition`.
    """

    id: int
    kind: str
    ops: tuple[Op, ...]
    input_ports: tuple[LogicalTensor, ...]
    output_ports: tuple[LogicalTensor, ...]
    constants: tuple[LogicalTensor, ...]
    unit_matches: tuple[Unit, ...]
    provider: str
    engine: str
    rows: RowForms = NO_ROWS

    @property
    def units(self) -> tuple[str, ...]:
        """Names of the units inside, nested ones too, in topological order of their roots."""
        return tuple(unit.name for unit in self.unit_matches)

    @property
    def supported(self) -> bool:
        """Whether it can be compiled."""
        return self.kind != UNSUPPORTED

    @classmethod
    def of(cls, op: Op, engine: str = "cpu") -> Partition:
        """The partition of one op, without a graph around it.

        Args:
            op: complete; it is copied.
            engine: the engine kind, "cpu" or "cuda".

        Raises:
            InvalidGraphOp, InvalidDataType, InvalidShape: the op does not fit its schema.
            InvalidArguments: unknown engine kind, or End, which is in no partition.

        Source: oneDNN Graph `partition(op, engine_kind)`.
        """
        from opgraph.partition.partitioner import partition  # it makes these

        graph = Graph(engine)
        graph.add_op(op)
        made = partition(graph.finalize(), policy="debug").partitions
        if not made:
            raise InvalidArguments(f"{op.kind} is in no partition", where=op.label, fix="leave it out")
        return made[0]

    def compile(
        self, inputs: Sequence[LogicalTensor], outputs: Sequence[LogicalTensor], engine: Engine
    ) -> CompiledPartition:
        """Makes it executable for these shapes.

        Args:
            inputs, outputs: logical tensors, matched to the ports by id, in any order; ids that are no port are
                ignored. Inputs need known shapes; unknown dimensions of outputs are inferred.
            engine: of the graph's engine kind.

        Raises:
            InvalidArguments: the partition is unsupported, a port is missing, an input shape is unknown, the engine is
                of another kind.
            InvalidShape: the shapes do not fit the ops.
            DeviceError: the kernel does not compile.
        """
        from opgraph.runtime.compiled import compile_partition  # front door: a later stage

        return compile_partition(self, inputs, outputs, engine)

    def __repr__(self) -> str:
        units = f", units={self.units}" if self.unit_matches else ""
        return f"<Partition {self.id}: {self.kind}, {len(self.ops)} ops{units}>"


def make_partition(
    graph: Graph,
    outputs: set[int],
    id: int,
    kind: str,
    ops: Sequence[Op],
    units: Sequence[Unit],
    provider: str,
    rows: RowForms = NO_ROWS,
) -> Partition:
    """A partition of these ops, its ports found from the graph.

    Args:
        outputs: ids of the graph's outputs.
        ops: in topological order.
    """
    inputs, constants = _read_from_outside(ops)
    return Partition(
        id=id,
        kind=kind,
        ops=tuple(ops),
        input_ports=inputs,
        output_ports=_needed_outside(graph, outputs, ops),
        constants=constants,
        unit_matches=tuple(units),
        provider=provider,
        engine=graph.engine,
        rows=rows,
    )


def _read_from_outside(ops: Iterable[Op]) -> tuple[tuple[LogicalTensor, ...], tuple[LogicalTensor, ...]]:
    made: set[int] = set()
    inputs: dict[int, LogicalTensor] = {}
    constants: dict[int, LogicalTensor] = {}
    for op in ops:
        for tensor in op.inputs:
            if tensor.is_constant:
                constants.setdefault(tensor.id, tensor)
            elif tensor.id not in made:
                inputs.setdefault(tensor.id, tensor)
        made.update(t.id for t in op.outputs)
    return tuple(inputs.values()), tuple(constants.values())


def needed_for(partitions: Sequence[Partition], values: Iterable[int]) -> tuple[Partition, ...]:
    """Those that these values (by id) depend on: a graph may hold ops that no output of it needs."""
    wanted = set(values)
    kept = []
    for part in reversed(partitions):
        if any(t.id in wanted for t in part.output_ports):
            wanted.update(t.id for t in part.input_ports)
            kept.append(part)
    return tuple(reversed(kept))


def _needed_outside(graph: Graph, outputs: set[int], ops: Sequence[Op]) -> tuple[LogicalTensor, ...]:
    inside = {op.id for op in ops}
    made = [t for op in ops for t in op.outputs]
    needed = [t for t in made if t.id in outputs or any(c.id not in inside for c in graph.consumers(t.id))]
    # Where nobody needs anything (an importer dropped the values), the partition still makes its last values.
    return tuple(needed or [t for t in made if not graph.consumers(t.id)])


def verify_partitions(graph: Graph, partitions: Sequence[Partition]) -> None:
    """What partitioning promises: every op but End in exactly one partition, in an order in which they can run.

    Each partition's inputs are made by earlier ones; so the graph of partitions has no cycle, and each is convex. A
    fused one is connected, by values that its ops make or read. Ports are what is read from and needed outside.

    Raises:
        InvalidGraph: a promise is broken; a mistake in the partitioner, not of its caller.
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
        _verify_one(graph, outputs, part)


def _verify_one(graph: Graph, outputs: set[int], part: Partition) -> None:
    inputs, constants = _read_from_outside(part.ops)
    needed = _needed_outside(graph, outputs, part.ops)
    ports = (part.input_ports, part.constants, part.output_ports)
    for given, right, what in zip(
        ports, (inputs, constants, needed), ("input ports", "constants", "output ports"), strict=True
    ):
        if [t.id for t in given] != [t.id for t in right]:
            raise _broken(part, f"has {what} {[t.id for t in given]} instead of {[t.id for t in right]}")
    inside = {op.id for op in part.ops}
    if any(op.id not in inside for unit in part.unit_matches for op in unit.ops):
        raise _broken(part, "names a unit that reaches outside")
    if part.kind == FUSED and not _connected(part.ops):
        raise _broken(part, "is fused, but not connected")


def _connected(ops: Sequence[Op]) -> bool:
    """Whether all ops hang together by the values that they make and read."""
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
