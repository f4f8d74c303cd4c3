"""The steps of a partition: ops, the single ops that whole units stand for, and the smaller ops of spelled ops."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from opgraph.ir import opdef
from opgraph.ir.logical_tensor import LogicalTensor
from opgraph.ir.op import AttrValue
from opgraph.partition.partition import Partition
from opgraph.partition.rules import Unit

#: An operand, and its alignment.
Leaf: TypeAlias = tuple[LogicalTensor, str]


@dataclass(frozen=True, slots=True)
class Step:
    """One future statement: an op, or the single op that a unit stands for."""

    kind: str
    inputs: tuple[LogicalTensor, ...]
    attrs: dict[str, AttrValue]
    output: LogicalTensor
    tag: int
    per_row: bool = False  # a SumTo that is a reduction of rows
    form: str = ""  # for one value for each row: "kept" with the row axes, or "dropped" without them

    @property
    def record(self) -> opdef.OpDef:
        """The record of its kind."""
        return opdef.get(self.kind, where="lower")

    @property
    def ports(self) -> tuple[opdef.Port, ...]:
        """The ports of its inputs."""
        return self.record.with_optional(len(self.inputs))

    @property
    def is_sum(self) -> bool:
        """True if it is a sum over the whole loop."""
        return self.record.family == "sum" and not self.per_row

    @property
    def reduces(self) -> bool:
        """True if it reduces a row to one value."""
        return self.per_row or self.record.row is not None

    @property
    def is_relay(self) -> bool:
        """True if its value is that of its first input, in another shape: the loop needs no statement for it."""
        record = self.record
        moves = record.expression == f"{{{record.inputs[0].name}}}" and any(p.shape_only for p in record.inputs)
        return moves or self.is_sum or record.family == "shape"

    def alignment(self, port: int) -> str:
        """The alignment of an input with the iteration space."""
        # The input of a view has the other form; all other inputs, and a view's shape operand, have the result's form.
        is_viewed = self.record.family == "shape" and self.form != "" and not self.ports[port].shape_only
        without_rows = (self.form == "dropped") != is_viewed
        if without_rows and not self.reduces and self.inputs[port].ndim != 0:
            return "rows"
        aligned = self.record.lies_along_channel(port, [t.ndim for t in self.inputs], self.attrs)
        return "channel" if aligned else "right"


def steps_of(partition: Partition, units: Iterable[Unit]) -> list[Step]:
    """The steps of a partition: units are single ops, and spelled ops are their smaller ops."""
    replaced: dict[int, Unit] = {u.root.id: u for u in units if u.kind}
    rows = partition.rows
    steps = []
    for tag, op in enumerate(partition.ops):
        unit = replaced.get(op.id)
        if unit is None:
            parts = rows.inside.get(op.id) or opdef.get(op.kind, where="lower").parts(op)
            for part in parts:
                output = part.outputs[0]
                is_row_sum, form = output.id in rows.sums, rows.forms.get(output.id, "")
                steps.append(Step(part.kind, part.inputs, part.attrs, output, tag, is_row_sum, form))
        else:
            record = opdef.get(unit.kind, where="lower")
            steps.append(
                Step(
                    unit.kind,
                    tuple(unit.inputs),
                    {**record.default_attrs(), **unit.attrs},
                    op.outputs[0],
                    tag,
                    form=rows.forms.get(op.outputs[0].id, ""),
                )
            )
    return steps


def live_steps(steps: Sequence[Step], wanted: Iterable[int]) -> list[Step]:
    """The steps whose values are used; an operand that only provides a shape is not used."""
    needed = set(wanted)
    kept = []
    for step in reversed(steps):
        if step.output.id in needed:
            needed.update(t.id for t, port in zip(step.inputs, step.ports, strict=True) if not port.shape_only)
            kept.append(step)
    return kept[::-1]


class Shapes:
    """The operands that determine the shape of a value, for uses that only need a shape."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self._makers = {step.output.id: step for step in steps}
        self._of: dict[int, tuple[Leaf, ...]] = {}
        self._unions: dict[tuple[tuple[Leaf, ...], ...], tuple[Leaf, ...]] = {}  # most steps share them with another

    def leaves(self, step: Step, port: int) -> tuple[Leaf, ...]:
        """The operands whose common shape is that of an input of a step; empty for no dimensions."""
        waiting = [step.inputs[port].id]
        while waiting:  # only what is needed: many large partitions need the shape of one early value
            maker = self._makers.get(waiting[-1])
            if maker is None or maker.output.id in self._of:
                waiting.pop()
                continue
            # A sum has the shape of its second operand, whatever the shape of the first is.
            ports = (1,) if maker.record.family == "sum" else range(len(maker.inputs))
            sources = [maker.inputs[at].id for at in ports]
            unknown = [id for id in sources if id in self._makers and id not in self._of]
            if unknown:
                waiting += unknown
                continue
            own = dict.fromkeys(self._known(maker, at) for at in ports)
            key = tuple(own)
            if key not in self._unions:
                self._unions[key] = tuple({(t.id, a): (t, a) for leaves in key for t, a in leaves}.values())
            self._of[maker.output.id] = self._unions[key]
        return self._known(step, port)

    def _known(self, step: Step, port: int) -> tuple[Leaf, ...]:
        tensor = step.inputs[port]
        found = self._of.get(tensor.id)
        if found is not None:
            return found
        return () if tensor.is_scalar_constant else ((tensor, step.alignment(port)),)


def used_by_stores_only(steps: Sequence[Step], outputs: Sequence[LogicalTensor]) -> set[int]:
    """Values that only stores use, which round them anyway."""
    read = {t.id for step in steps for t in step.inputs}
    return {t.id for t in outputs} - read
