"""What a partition computes, step by step: ops, what whole units stand for, and what is spelled in smaller ops."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from opgraph.ir import opdef
from opgraph.ir.logical_tensor import LogicalTensor
from opgraph.ir.op import AttrValue
from opgraph.partition.partition import Partition
from opgraph.partition.rules import Unit

#: An operand, and how it is aligned.
Leaf: TypeAlias = tuple[LogicalTensor, str]


@dataclass(frozen=True, slots=True)
class Step:
    """One statement to be: an op, or the single op that a unit stands for."""

    kind: str
    inputs: tuple[LogicalTensor, ...]
    attrs: dict[str, AttrValue]
    output: LogicalTensor
    tag: int
    per_row: bool = False  # a SumTo that is a reduction of rows
    form: str = ""  # of one value for each row: with or without the rows' axes

    @property
    def record(self) -> opdef.OpDef:
        """What is known of its kind."""
        return opdef.get(self.kind, where="lower")

    @property
    def ports(self) -> tuple[opdef.Port, ...]:
        """Those that its inputs are given to."""
        return self.record.with_optional(len(self.inputs))

    @property
    def is_sum(self) -> bool:
        """Whether it is added up over the whole loop."""
        return self.record.family == "sum" and not self.per_row

    @property
    def reduces(self) -> bool:
        """Whether it makes one value of a row."""
        return self.per_row or self.record.row is not None

    @property
    def is_relay(self) -> bool:
        """Whether its value is that of its first input, in another shape: a loop has nothing to do for it."""
        record = self.record
        moves = record.expression == f"{{{record.inputs[0].name}}}" and any(p.shape_only for p in record.inputs)
        return moves or self.is_sum or record.family == "shape"

    def alignment(self, port: int) -> str:
        """How an input lies in the iteration space."""
        # A view turns one form into the other; all else, and what lends it a shape, has the form of the result.
        is_viewed = self.record.family == "shape" and self.form != "" and not self.ports[port].shape_only
        without_rows = (self.form == "dropped") != is_viewed
        if without_rows and not self.reduces and self.inputs[port].ndim != 0:
            return "rows"
        aligned = self.record.lies_along_channel(port, [t.ndim for t in self.inputs], self.attrs)
        return "channel" if aligned else "right"


def steps_of(partition: Partition, units: Iterable[Unit]) -> list[Step]:
    """The ops of a partition, its units and what is spelled in small ops, one by one."""
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
    """The steps whose values are used; of what only lends its shape, no value is."""
    needed = set(wanted)
    kept = []
    for step in reversed(steps):
        if step.output.id in needed:
            needed.update(t.id for t, port in zip(step.inputs, step.ports, strict=True) if not port.shape_only)
            kept.append(step)
    return kept[::-1]


class Shapes:
    """From which operands the shape of a value follows, where something needs a shape alone."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self._makers = {step.output.id: step for step in steps}
        self._of: dict[int, tuple[Leaf, ...]] = {}
        self._unions: dict[tuple[tuple[Leaf, ...], ...], tuple[Leaf, ...]] = {}  # most steps have those of another

    def leaves(self, step: Step, port: int) -> tuple[Leaf, ...]:
        """The operands whose common shape that input of a step has; none: no dimensions."""
        waiting = [step.inputs[port].id]
        while waiting:  # what is asked for, and no more: many large partitions ask for the shape of one early value
            maker = self._makers.get(waiting[-1])
            if maker is None or maker.output.id in self._of:
                waiting.pop()
                continue
            # A sum has the shape that it is added up to, whatever that of its operand is.
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
    """Values that are rounded by their store anyway, and by nothing else's use before."""
    read = {t.id for step in steps for t in step.inputs}
    return {t.id for t in outputs} - read
