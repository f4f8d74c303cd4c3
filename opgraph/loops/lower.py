"""Lowers a fused partition to its loop."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from opgraph.ir import dtypes, opdef
from opgraph.ir.logical_tensor import LogicalTensor
from opgraph.ir.stage_log import is_on, log
from opgraph.loops.hoist_factors import without_row_factors
from opgraph.loops.loop import Arg, Axes, Load, Loop, Statement, Store
from opgraph.loops.steps import Shapes, live_steps, steps_of, used_by_stores_only
from opgraph.loops.verify import verify_loop
from opgraph.ops.conversion import cast
from opgraph.partition.partition import Partition, RowForms

ROUNDINGS = ("store", "each")
#: Floats that are computed in f32, so that a value has more digits than its dtype holds until it is rounded.
NARROW = ("f16", "bf16")
#: The rewritings of a lowered loop, in this order, by name. Each function takes the loop and the names of the loads
#: that stand for literals.
REWRITINGS: dict[str, Callable[[Loop, Collection[str]], Loop]] = {"hoist_factors": without_row_factors}


@dataclass(frozen=True, slots=True, kw_only=True)
class Lowered:
    """A loop and the tensors that its operands stand for.

    Attributes:
        loop: the loop.
        plain: the loop before any rewriting, with the same loads and stores. It is needed for rows of no elements,
            whose sum is 0 for any factors.
        loads: the tensor behind each load (inputs of the partition, constants); None for an index or a position.
        stores: the tensor behind each store, the partition's output ports.
        labels: label of each op of the partition, by the tag of a statement.
    """

    loop: Loop
    plain: Loop
    loads: tuple[LogicalTensor | None, ...]
    stores: tuple[LogicalTensor, ...]
    labels: tuple[str, ...]


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


class _Statements:
    """The statements so far, by name; equal computations are one statement.

    A gradient repeats the row statistics of the forward pass next to it, and a compiler does not merge two sums.
    """

    def __init__(self) -> None:
        self.made: dict[str, Statement] = {}
        self._names: dict[str, str] = {}

    def add(self, **fields: Any) -> str:
        """Adds a statement with these fields, unless an equal one exists; returns its name."""
        statement = Statement(result=f"t{len(self.made)}", **fields)
        # Compared as text, which distinguishes 0.0 from -0.0 and 1 from True.
        computed = repr((statement.kind, statement.dtype, statement.args, statement.attrs, statement.rounds))
        name = self._names.setdefault(computed, statement.result)
        self.made.setdefault(name, statement)
        return name

    def rounded(self, name: str, tag: int) -> str:
        """A value rounded to its dtype, for ops that test it."""
        statement = self.made.get(name)
        if statement is None or statement.rounds or statement.dtype not in NARROW:
            return name
        return self.add(dtype=statement.dtype, kind="TypeCast", args=(name,), rounds=True, tag=tag)


def lower(partition: Partition, *, rounding: str = "store", arguments: Collection[int] = ()) -> Lowered:
    """The loop of a fused partition.

    Args:
        partition: of kind "fused".
        rounding: "store": f16 and bf16 values are rounded once, when stored; "each": after every op, as eager torch
            does.
        arguments: ids of the scalar constants that the loop reads as operands; others are literals. Loops that differ
            only in these numbers are one kernel. A named unit still takes them as attributes.

    An op on an f16 or bf16 value whose result is not a float (a comparison, IsInf, a cast to integers) gets the rounded
    value in either case: its result is that for the value which a store would write. The same holds for a cast to wider
    floats of a value that the loop stores: the mean of such values is then the mean of the stored values, from which
    their readers (the backward pass of a norm) subtract it.

    Each named unit becomes one statement of the equivalent op (x*sigmoid(x) becomes a Swish), which is accurate where
    its parts are not. Ops that are then unused are left out.
    """
    made = lowerings(partition, rounding=rounding, arguments=arguments)
    if is_on("loop"):
        for name, lowered in changed(made):
            log("loop", f"partition {partition.id}: loop after {name}", lowered.loop)
    return made[-1][1]


def changed(made: Sequence[tuple[str, Lowered]]) -> list[tuple[str, Lowered]]:
    """From the result of `lowerings`, the loop after lowering, and after each rewriting that changed it."""
    return [step for at, step in enumerate(made) if at == 0 or step[1].loop != made[at - 1][1].loop]


def lowerings(
    partition: Partition, *, rounding: str = "store", arguments: Collection[int] = ()
) -> list[tuple[str, Lowered]]:
    """Like `lower`: the loop after lowering and after each rewriting, each with the name of that step."""
    lowered = _lowered(partition, rounding, arguments)
    operands = zip(lowered.loop.loads, lowered.loads)
    numbers = {x.name for x, t in operands if t is not None and t.id in arguments}
    made = [("lowering", lowered)]
    for name, rewritten in REWRITINGS.items():
        lowered = replace(lowered, loop=verify_loop(rewritten(lowered.loop, numbers)))
        made.append((name, lowered))
    return made


def _lowered(partition: Partition, rounding: str, arguments: Collection[int]) -> Lowered:
    outputs = partition.output_ports
    units = partition.unit_matches if rounding == "store" else ()  # a unit has no intermediate values to round
    steps = steps_of(partition, units)
    shapes = Shapes(steps)
    live = live_steps(steps, {t.id for t in outputs})
    rows = partition.rows
    operands = _Operands(rows)
    values: dict[int, str] = {}  # tensor -> load or statement that holds its value
    sums: dict[int, tuple[str, tuple[str, ...]]] = {}
    statements = _Statements()
    stored = {t.id for t in outputs}
    stored_only = used_by_stores_only(live, outputs)

    def is_literal(tensor: LogicalTensor) -> bool:
        return tensor.is_scalar_constant and tensor.dtype in dtypes.ARITHMETIC and tensor.id not in arguments

    for step in live:
        record = step.record
        asks = not dtypes.BY_NAME[step.output.dtype].is_float or (record.is_cast and step.inputs[0].id in stored)
        args: list[Arg] = []
        for index, (port, tensor) in enumerate(zip(step.ports, step.inputs, strict=True)):
            if step.reduces and index:
                break  # the row axes, or a shape that has them
            if port.shape_only:
                for leaf, align in shapes.leaves(step, index):
                    operands.load(leaf, align)
            elif tensor.id in values:
                args.append(statements.rounded(values[tensor.id], step.tag) if asks else values[tensor.id])
            elif is_literal(tensor) and not step.is_relay:
                number = opdef.array_of(tensor)
                # A cast literal gets the dtype of the result here: C++ would convert it by other rules.
                args.append((cast(number, step.output.dtype) if record.is_cast else number).item())
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
        dtype = step.output.dtype
        values[step.output.id] = statements.add(
            dtype=dtype,
            kind="ReduceSum" if step.per_row else step.kind,
            args=tuple(args),
            attrs=() if step.reduces else tuple(sorted(step.attrs.items())),
            rounds=dtype in NARROW
            and step.output.id not in stored_only
            and (rounding == "each" or (record.is_cast and step.inputs[0].dtype != dtype)),
            tag=step.tag,
        )
    loop = Loop(
        axes=_axes(rows.axes),
        loads=tuple(operands.loads),
        statements=tuple(statements.made.values()),
        stores=tuple(_store(t, values, sums, rows, operands) for t in outputs),
    )
    return Lowered(
        loop=loop,
        plain=loop,
        loads=tuple(operands.tensors),
        stores=outputs,
        labels=tuple(o.label for o in partition.ops),
    )


def _axes(rows: tuple[int, ...]) -> tuple[Axes, ...]:
    outer = Axes(kind="parallel")
    return (outer, Axes(kind="reduce", which=",".join(map(str, rows)))) if rows else (outer,)


def _store(
    tensor: LogicalTensor,
    values: Mapping[int, str],
    sums: Mapping[int, tuple[str, tuple[str, ...]]],
    rows: RowForms,
    operands: _Operands,
) -> Store:
    cut = rows.cuts.get(tensor.id, ())
    if tensor.id in sums:
        value, to = sums[tensor.id]
        # An operand whose sizes are all 1 fits any number of axes, so it is never cut, and neither is a sum of its
        # shape, unless the operand has the loop's axes and a reshape after it merges these.
        named = [(x, t) for x, t in zip(operands.loads, operands.tensors, strict=True) if x.name in to]
        rank = max((len(t.dims or ()) for _, t in named if t is not None), default=0)
        cut = cut if any(x.cut for x, _ in named) or rank == sum(max(len(part), 1) for part in cut) else ()
        return Store(value=value, dtype=tensor.dtype, to=to, cut=cut)
    return Store(value=values[tensor.id], dtype=tensor.dtype, per_row=rows.forms.get(tensor.id, ""), cut=cut)
