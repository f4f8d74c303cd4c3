"""From a fused partition to its loop."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from opgraph.ir import dtypes, opdef
from opgraph.ir.logical_tensor import LogicalTensor
from opgraph.ir.op import AttrValue
from opgraph.loops.factors import without_row_factors
from opgraph.loops.loop import Arg, Axes, Load, Loop, Statement, Store, verify_loop
from opgraph.partition.partition import Partition, RowForms
from opgraph.partition.rules import Unit

ROUNDINGS = ("store", "each")


@dataclass(frozen=True, slots=True, kw_only=True)
class Lowered:
    """A loop and the tensors that its operands stand for.

    Attributes:
        loop: the loop.
        loads: the tensor behind each load (inputs of the partition, constants); None for an index or a position.
        stores: the tensor behind each store, the partition's output ports.
        labels: label of each op of the partition, by the tag of a statement.
    """

    loop: Loop
    loads: tuple[LogicalTensor | None, ...]
    stores: tuple[LogicalTensor, ...]
    labels: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Step:
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
        return opdef.get(self.kind, where="lower")

    @property
    def ports(self) -> tuple[opdef.Port, ...]:
        return self.record.with_optional(len(self.inputs))

    @property
    def is_sum(self) -> bool:
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
        # A view turns one form into the other; of all else operands have the form of the result.
        without_rows = (self.form == "dropped") != (self.record.family == "shape" and self.form != "")
        if without_rows and not self.reduces and self.inputs[port].ndim != 0:
            return "rows"
        aligned = self.record.lies_along_channel(port, [t.ndim for t in self.inputs], self.attrs)
        return "channel" if aligned else "right"


_Leaf: TypeAlias = tuple[LogicalTensor, str]


class _Operands:
    """The loads so far, one for each tensor and alignment."""

    def __init__(self, rows: RowForms) -> None:
        self.row_axes, self.cuts = rows.axes, rows.cuts
        self.loads: list[Load] = []
        self.tensors: list[LogicalTensor | None] = []
        self.known: dict[tuple[int, str], str] = {}

    def load(self, tensor: LogicalTensor, align: str) -> str:
        if (tensor.id, align) not in self.known:
            rows = self.row_axes if align == "rows" else ()
            self.known[tensor.id, align] = self._add(
                Load(
                    name=f"x{len(self.loads)}",
                    dtype=tensor.dtype,
                    align=align,
                    rows=rows,
                    cut=self.cuts.get(tensor.id, ()),
                ),
                tensor,
            )
        return self.known[tensor.id, align]

    def index(self, dtype: str, axis: int) -> str:
        if (axis, "index") not in self.known:
            load = Load(name=f"x{len(self.loads)}", dtype=dtype, align="index", axis=axis)
            self.known[axis, "index"] = self._add(load, None)
        return self.known[axis, "index"]

    def position(self) -> str:
        if (0, "position") not in self.known:
            load = Load(name=f"x{len(self.loads)}", dtype="s64", align="position")
            self.known[0, "position"] = self._add(load, None)
        return self.known[0, "position"]

    def _add(self, load: Load, tensor: LogicalTensor | None) -> str:
        self.loads.append(load)
        self.tensors.append(tensor)
        return load.name


def lower(partition: Partition, *, rounding: str = "store") -> Lowered:
    """The loop of a fused partition.

    Args:
        partition: of kind "fused".
        rounding: "store": f16 and bf16 values are rounded once, when stored; "each": after every op, as eager torch
            does.

    Each named unit becomes one statement of the op that means the same (x*sigmoid(x) a Swish): that is what makes it
    accurate where its parts are not. What nothing uses afterwards is left out.
    """
    outputs = partition.output_ports
    units = partition.unit_matches if rounding == "store" else ()  # a unit has no values in between to round
    steps = _steps(partition, units)
    shapes = _Shapes(steps)
    live = _live(steps, {t.id for t in outputs})
    rows = partition.rows
    operands = _Operands(rows)
    values: dict[int, str] = {}  # tensor -> load or statement that holds its value
    sums: dict[int, tuple[str, tuple[str, ...]]] = {}
    statements: list[Statement] = []
    made: dict[str, str] = {}  # what is computed -> the statement that does it first
    stored_only = _used_by_stores_only(live, outputs)
    for step in live:
        record = step.record
        args: list[Arg] = []
        for index, (port, tensor) in enumerate(zip(step.ports, step.inputs, strict=True)):
            if step.reduces and index:
                break  # the axes of the rows, or a shape that has them
            if port.shape_only:
                for leaf, align in shapes.leaves(step, index):
                    operands.load(leaf, align)
            elif tensor.id in values:
                args.append(values[tensor.id])
            elif tensor.is_scalar_constant and tensor.dtype in dtypes.ARITHMETIC and not step.is_relay:
                args.append(opdef.array_of(tensor).item())
            else:
                args.append(operands.load(tensor, step.alignment(index)))
        if step.is_sum:
            loads = tuple(operands.load(leaf, align) for leaf, align in shapes.leaves(step, 1))
            sums[step.output.id] = str(args[0]), loads
            continue
        if step.is_relay:
            values[step.output.id] = str(args[0])
            continue
        if record.index_of:  # its value is a position; the source gives the iteration space its shape
            args = [operands.index(step.output.dtype, int(step.attrs[record.index_of]))]  # type: ignore[arg-type]
        if record.by_position:
            args.append(operands.position())
        result = f"t{len(statements)}"
        dtype = step.output.dtype
        narrow = dtype in ("f16", "bf16")
        kind = "ReduceSum" if step.per_row else step.kind
        statement = Statement(
            result=result,
            dtype=dtype,
            kind=kind,
            args=tuple(args),
            attrs=() if step.reduces else tuple(sorted(step.attrs.items())),
            rounds=narrow
            and step.output.id not in stored_only
            and (rounding == "each" or (record.is_cast and step.inputs[0].dtype != dtype)),
            tag=step.tag,
        )
        # A gradient has statistics of rows again that the forward beside it has: a compiler does not join two sums.
        values[step.output.id] = made.setdefault(_computed(statement), result)
        if values[step.output.id] == result:
            statements.append(statement)
    loop = Loop(
        axes=_axes(rows.axes),
        loads=tuple(operands.loads),
        statements=tuple(statements),
        stores=tuple(_store(t, values, sums, rows) for t in outputs),
    )
    return Lowered(
        loop=verify_loop(without_row_factors(loop)),
        loads=tuple(operands.tensors),
        stores=outputs,
        labels=tuple(o.label for o in partition.ops),
    )


def _computed(s: Statement) -> str:
    """What a statement computes, whatever its name and its op; text, in which 0.0 is not -0.0 and 1 not True."""
    return repr((s.kind, s.dtype, s.args, s.attrs, s.rounds))


def _axes(rows: tuple[int, ...]) -> tuple[Axes, ...]:
    outer = Axes(kind="parallel")
    return (outer, Axes(kind="reduce", which=",".join(map(str, rows)))) if rows else (outer,)


def _store(
    tensor: LogicalTensor,
    values: Mapping[int, str],
    sums: Mapping[int, tuple[str, tuple[str, ...]]],
    rows: RowForms,
) -> Store:
    cut = rows.cuts.get(tensor.id, ())
    if tensor.id in sums:
        value, to = sums[tensor.id]
        return Store(value=value, dtype=tensor.dtype, to=to, cut=cut)
    return Store(value=values[tensor.id], dtype=tensor.dtype, per_row=rows.forms.get(tensor.id, ""), cut=cut)


def _steps(partition: Partition, units: Iterable[Unit]) -> list[_Step]:
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
                steps.append(_Step(part.kind, part.inputs, part.attrs, output, tag, is_row_sum, form))
        else:
            record = opdef.get(unit.kind, where="lower")
            steps.append(
                _Step(
                    unit.kind,
                    tuple(unit.inputs),
                    {**record.default_attrs(), **unit.attrs},
                    op.outputs[0],
                    tag,
                    form=rows.forms.get(op.outputs[0].id, ""),
                )
            )
    return steps


def _live(steps: Sequence[_Step], wanted: Iterable[int]) -> list[_Step]:
    """The steps whose values are used; of what only lends its shape, no value is."""
    needed = set(wanted)
    kept = []
    for step in reversed(steps):
        if step.output.id in needed:
            needed.update(t.id for t, port in zip(step.inputs, step.ports, strict=True) if not port.shape_only)
            kept.append(step)
    return kept[::-1]


class _Shapes:
    """From which operands the shape of a value follows, where something needs a shape alone."""

    def __init__(self, steps: Sequence[_Step]) -> None:
        self.steps = steps
        self._of: dict[int, tuple[_Leaf, ...]] | None = None

    def leaves(self, step: _Step, port: int) -> tuple[_Leaf, ...]:
        """The operands whose common shape that input of a step has; none: no dimensions."""
        return self._leaves(step.inputs[port], step.alignment(port))

    def _leaves(self, tensor: LogicalTensor, align: str) -> tuple[_Leaf, ...]:
        if self._of is None:  # rarely asked for
            self._of = {}
            unions: dict[tuple[tuple[_Leaf, ...], ...], tuple[_Leaf, ...]] = {}  # most steps have those of another
            for step in self.steps:
                own = dict.fromkeys(self.leaves(step, port) for port in range(len(step.inputs)))
                key = tuple(own)
                if key not in unions:
                    unions[key] = tuple({(t.id, a): (t, a) for leaves in key for t, a in leaves}.values())
                self._of[step.output.id] = unions[key]
        if tensor.id in self._of:
            return self._of[tensor.id]
        return () if tensor.is_scalar_constant else ((tensor, align),)


def _used_by_stores_only(steps: Sequence[_Step], outputs: Sequence[LogicalTensor]) -> set[int]:
    """Values that are rounded by their store anyway, and by nothing else's use before."""
    read = {t.id for step in steps for t in step.inputs}
    return {t.id for t in outputs} - read
