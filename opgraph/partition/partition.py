"""Partition: a part of a graph that runs as a whole."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from opgraph.errors import InvalidArguments
from opgraph.ir.graph import Graph
from opgraph.ir.logical_tensor import LogicalTensor, port_name
from opgraph.ir.op import Op
from opgraph.ir.stage_log import is_on, log
from opgraph.partition.ports import needed_outside, read_from_outside
from opgraph.partition.units import Unit

if TYPE_CHECKING:
    from opgraph.runtime.compiled_partition import CompiledPartition
    from opgraph.runtime.engine import Engine

FUSED, LIBRARY, UNSUPPORTED = "fused", "library", "unsupported"
#: The provider of library ops that have records: torch if it is installed, else NumPy; determined at run time.
NATIVE = "native"


@dataclass(frozen=True, slots=True, kw_only=True)
class RowForms:
    """Rows that one kernel reduces.

    Attributes:
        axes: the axes of a row, counted from the last (-1), in ascending order; empty if no row is reduced.
        forms: for each row value (one value for each row), by tensor id: "kept" if it has the row's axes with size 1,
            "dropped" if it does not have them.
        sums: the row values that SumTo makes.
        inside: by op id, the ops that run instead of an op: the smaller ops in which its record spells it, or the op
            rewritten for other axes than its own.
        cuts: by tensor id, the split of the axes of an operand or a result into more axes (`opgraph.loops.loop.Cut`).
    """

    axes: tuple[int, ...] = ()
    forms: Mapping[int, str] = field(default_factory=dict)
    sums: frozenset[int] = frozenset()
    inside: Mapping[int, tuple[Op, ...]] = field(default_factory=dict)
    cuts: Mapping[int, tuple[tuple[int, ...], ...]] = field(default_factory=dict)


NO_ROWS = RowForms()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, weakref_slot=True)
class Partition:
    """One part of a graph.

    Attributes:
        id: its place in the topological order of partitions.
        kind: "fused" (one generated kernel), "library" (a provider runs it) or "unsupported" (no provider runs it).
        ops: in topological order.
        input_ports: the tensors that it reads from outside, each once, in order of first use; without constants.
        output_ports: the tensors that are read outside or are outputs of the graph, each once.
        constants: the constants that it reads, each once.
        unit_matches: the named units inside, in topological order of their roots.
        provider: "opgraph", "native", "onnxruntime", or "" if no provider runs it.
        engine: the engine kind of its graph.
        rows: its rows and row values.

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
        """Names of the units inside, including nested ones, in topological order of their roots."""
        return tuple(unit.name for unit in self.unit_matches)

    @property
    def supported(self) -> bool:
        """True if it can be compiled."""
        return self.kind != UNSUPPORTED

    @classmethod
    def of(cls, op: Op, engine: str = "cpu") -> Partition:
        """The partition of a single op without a graph.

        Args:
            op: complete; it is copied.
            engine: the engine kind, "cpu" or "cuda".

        Raises:
            InvalidGraphOp, InvalidDataType, InvalidShape: the op does not fit its schema.
            InvalidArguments: unknown engine kind, or the op is End, which is in no partition.

        Source: oneDNN Graph `partition(op, engine_kind)`.
        """
        from opgraph.partition.partitioner import partition  # it imports this module

        graph = Graph(engine)
        graph.add_op(op)
        made = partition(graph.finalize(), policy="debug").partitions
        if not made:
            raise InvalidArguments(f"{op.kind} is in no partition", where=op.label, fix="leave it out")
        return made[0]

    def compile(
        self, inputs: Sequence[LogicalTensor], outputs: Sequence[LogicalTensor], engine: Engine
    ) -> CompiledPartition:
        """Compiles it for these shapes.

        Args:
            inputs, outputs: logical tensors, matched to the ports by id, in any order; other ids are ignored. Inputs
                need known shapes; unknown dimensions of outputs are inferred.
            engine: of the graph's engine kind.

        Raises:
            InvalidArguments: the partition is unsupported, a port is missing, an input shape is unknown, or the engine
                is of another kind.
            InvalidShape: the shapes do not fit the ops.
            DeviceError: the kernel does not compile.
        """
        from opgraph.runtime.compiled_partition import compile_partition  # imported late: a later stage

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
    """A partition of these ops; its ports are derived from the graph.

    Args:
        outputs: ids of the graph's outputs.
        ops: in topological order.
    """
    inputs, constants = read_from_outside(ops)
    return Partition(
        id=id,
        kind=kind,
        ops=tuple(ops),
        input_ports=inputs,
        output_ports=needed_outside(graph, outputs, ops),
        constants=constants,
        unit_matches=tuple(units),
        provider=provider,
        engine=graph.engine,
        rows=rows,
    )


def graph_of(part: Partition) -> Graph:
    """A partition as a separate graph; its inputs are bound by tensor id."""
    ops: Sequence[Op] = part.ops
    sides = (part.input_ports, part.output_ports)
    if any(len({port_name(t) for t in side}) < len(side) for side in sides):  # one port's name is another port's t<id>
        plain = {t.id: t.with_(name=None) for side in sides for t in side if re.fullmatch("t[0-9]+", t.name or "")}
        ops = [
            Op.locked(o.id, o.kind, _instead(o.inputs, plain), _instead(o.outputs, plain), o.name, o.attrs) for o in ops
        ]
    graph = Graph(part.engine)
    for op in ops:
        graph.add_op(op)
    graph.set_outputs(graph.tensor(t.id) for t in part.output_ports)
    return graph.finalize()


def _instead(tensors: Sequence[LogicalTensor], others: Mapping[int, LogicalTensor]) -> tuple[LogicalTensor, ...]:
    return tuple(others.get(t.id, t) for t in tensors)


def log_partitions(partitions: Sequence[Partition], how: str = "") -> None:
    """Logs the partitions of a graph; `how` is appended to their titles."""
    if is_on("partition"):
        for part in partitions:
            log("partition", f"{part!r}{how}", graph_of(part))


def needed_for(partitions: Sequence[Partition], values: Iterable[int]) -> tuple[Partition, ...]:
    """The partitions that these values (by id) depend on: a graph may contain ops that none of its outputs needs."""
    wanted = set(values)
    kept = []
    for part in reversed(partitions):
        if any(t.id in wanted for t in part.output_ports):
            wanted.update(t.id for t in part.input_ports)
            kept.append(part)
    return tuple(reversed(kept))
