"""The view of a graph for patterns: ops, and the equivalent single ops of units found; constants of one element."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from opgraph.ir import opdef
from opgraph.ir.graph import Graph
from opgraph.ir.logical_tensor import LogicalTensor
from opgraph.ir.op import AttrValue, Op


@dataclass(frozen=True, slots=True)
class Form:
    """One reading of an op: as itself, or as the equivalent single op of a unit found there."""

    kind: str
    inputs: tuple[LogicalTensor, ...]
    attrs: dict[str, AttrValue]
    ops: tuple[Op, ...]


class View:
    """The view of a finalized graph for patterns."""

    def __init__(self, graph: Graph) -> None:
        self._producer = {t.id: op for op in graph.ops for t in op.outputs[:1]}
        self._units: dict[int, Form] = {}

    def stands_for(
        self, op: Op, kind: str, inputs: tuple[LogicalTensor, ...], attrs: dict[str, AttrValue], ops: tuple[Op, ...]
    ) -> None:
        """Adds this single op as a second reading of `op`."""
        self._units[op.id] = Form(kind, inputs, attrs, ops)

    def producer(self, tensor: LogicalTensor) -> Op | None:
        """The op whose first output this is."""
        return self._producer.get(tensor.id)

    def forms(self, op: Op) -> Iterator[Form]:
        """The readings of an op."""
        yield Form(op.kind, op.inputs, op.attrs, (op,))
        if op.id in self._units:
            yield self._units[op.id]

    def reads_as(self, op: Op, kind: str) -> bool:
        """True if one of its readings has this kind."""
        return op.kind == kind or (op.id in self._units and self._units[op.id].kind == kind)

    def kinds_below(self, op: Op) -> list[tuple[str, str]]:
        """Kinds of the ops right below and of those under these: (kind, ""), (kind, kind under it).

        All readings count. For an operand of the op's own kind, its operands count too: products associate in any way.
        """
        kinds: dict[tuple[str, str], None] = {}
        for tensor in op.inputs:
            below = self._producer.get(tensor.id)
            if below is None:
                continue
            self._add_kinds(below, kinds)
            if below.kind == op.kind:
                for inner in below.inputs:
                    further = self._producer.get(inner.id)
                    if further is not None:
                        self._add_kinds(further, kinds)
        return list(kinds)

    def _add_kinds(self, op: Op, kinds: dict[tuple[str, str], None]) -> None:
        unit = self._units.get(op.id)
        readings = [(op.kind, op.inputs)] if unit is None else [(op.kind, op.inputs), (unit.kind, unit.inputs)]
        for kind, inputs in readings:
            kinds[kind, ""] = None
            for tensor in inputs:
                under = self._producer.get(tensor.id)
                if under is not None:
                    kinds[kind, under.kind] = None
                    if under.id in self._units:
                        kinds[kind, self._units[under.id].kind] = None


def is_scalar(tensor: LogicalTensor, peers: Sequence[LogicalTensor]) -> bool:
    """True if a tensor is one constant number that does not add dimensions to the other operands ([1] next to [N,C]).

    Other numbers do not count as operands for this: Clamp(x[N], [1,1], [1,1]) is [1,N].
    """
    if tensor.data is None or tensor.data.size != 1:
        return False
    rank = tensor.data.ndim
    met = (p for p in peers if p.id != tensor.id and (p.data is None or p.data.size != 1))
    return rank == 0 or any((p.ndim or 0) >= rank for p in met)


def scalar(tensor: LogicalTensor) -> float:
    """The value of a constant of one element."""
    return float(opdef.array_of(tensor).reshape(-1)[0])


def equals_number(tensor: LogicalTensor, value: float) -> bool:
    """True if a constant of one element is `value`, rounded to the constant's dtype."""
    data = opdef.array_of(tensor)
    return scalar(tensor) == float(np.asarray(value).astype(data.dtype))
