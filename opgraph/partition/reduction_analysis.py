"""Rows: finds row values (one value for each row of a larger shape); one loop over that shape makes and reads them.

The mean of x[N,C] over its last axis is [N,1] or [N]. Ops that compute with it in that shape, and ops that bring it
back to [N,C], belong in the loop over x. A row value is described by the shape that its loop runs over, the axes that
were reduced, and whether it still has these axes ("kept", with size 1) or not ("dropped").
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

from opgraph.ir import dtypes, opdef
from opgraph.ir.op import Op
from opgraph.ops.reduction_gradients import static_axes
from opgraph.partition.symbols import Shape, is_scalar_shape
from opgraph.partition.traits import aligned_operands

#: Elements of a space that fits in the second-level cache with room to spare.
CACHED = 64 * 1024
#: Runs of a row with fewer elements take longer to start than to iterate.
SHORT_RUN = 8


@dataclass(frozen=True, slots=True)
class RowValue:
    """One value for each row.

    Attributes:
        space: the shape that the loop runs over.
        axes: the axes of a row, counted from the last (-1), in ascending order.
        form: "kept" or "dropped".
    """

    space: tuple[int | str, ...]
    axes: tuple[int, ...]
    form: str

    @property
    def shape(self) -> tuple[int | str, ...]:
        """The shape of the value itself."""
        rows = {a + len(self.space) for a in self.axes}
        if self.form == "kept":
            return tuple(1 if i in rows else d for i, d in enumerate(self.space))
        return tuple(d for i, d in enumerate(self.space) if i not in rows)

    def is_like(self, other: RowValue) -> bool:
        """True if sums over the axes of either are equal: they differ at most in axes of size 1."""
        return (self.space, self.form, self.shape) == (other.space, other.form, other.shape)

    def in_form(self, form: str) -> RowValue:
        """The same value with ("kept") or without ("dropped") its axes."""
        return RowValue(self.space, self.axes, form)


class Rows:
    """The rows of a graph.

    Args:
        ops: in topological order.
        shapes: of every tensor.
        apart: tensors that cannot be row values: the ops that make them have other axes than these shapes.
        homes: by tensor, the opened op that makes it inside, if that op takes part only in its own rows.

    Attributes:
        values: the row values, by tensor id.
        sums: the row values that SumTo makes; every other SumTo ends its loop.
    """

    def __init__(
        self,
        ops: Sequence[Op],
        shapes: dict[int, Shape],
        apart: Collection[int] = (),
        homes: Mapping[int, int] | None = None,
    ) -> None:
        self.ops, self.shapes = ops, shapes
        self._apart, self._homes = apart, homes or {}
        self.values: dict[int, RowValue] = {}
        self.sums: set[int] = set()
        self._wanted: dict[int, RowValue] = {}
        self._summed: dict[int, RowValue] = {}  # results of SumTo that have one value for each row
        reductions = {op.outputs[0].id: made for op in ops if (made := self._reduction(op)) is not None}
        sums = {op.outputs[0].id: made for op in ops if (made := self._row_sum(op)) is not None}
        if not reductions and not sums:
            return
        self._forward({**reductions, **sums})
        self.sums = self._leading_back(sums)
        self._summed = sums
        begun = {**reductions, **{i: sums[i] for i in self.sums}}
        self._forward(begun)
        self._want(begun)
        self._forward(begun)

    def of(self, op: Op) -> RowValue | None:
        """The row value that an op makes, or None."""
        return self.values.get(op.outputs[0].id) if op.outputs else None

    def misread(self, op: Op) -> list[int]:
        """Operands that an op must read from memory, since inside the loop they would lie along other axes: "dropped"
        row values that it uses as something else, and other operands that it alone uses as row values."""
        if not self.values:
            return []
        own, is_view = self.of(op), opdef.of(op).family == "shape"
        found = []
        for tensor in op.inputs:
            tag = self.values.get(tensor.id)
            if tag is None:
                is_row = own is not None and (is_view or own.form == "dropped") and opdef.of(op).row is None
                if is_row and self.shapes[tensor.id] != ():  # one element with axes determines the loop's rank
                    found.append(tensor.id)
            elif tag.form == "dropped" and own != tag and own != tag.in_form("kept"):
                found.append(tensor.id)
        return found

    @cached_property
    def without_known_shape(self) -> set[int]:
        """Tensors whose shape no operand of their loop has: row values, and values computed from them in a smaller
        shape than that of the loop."""
        found = set(self.values)
        space = {id: tag.space for id, tag in self.values.items()}
        for op in self.ops if found else ():
            spaces = {space[t.id] for t in op.inputs if t.id in found}
            for tensor in op.outputs if opdef.of(op).is_pointwise else ():
                if tensor.id not in found and spaces and self.shapes[tensor.id] not in spaces:
                    found.add(tensor.id)
                    space[tensor.id] = next(iter(spaces))
        return found

    # -- where rows begin ---------------------------------------------------------------------------------------

    def _reduction(self, op: Op) -> RowValue | None:
        record = opdef.of(op)
        if record.row is None or op.outputs[0].id in self._apart:
            return None
        src, axes = self.shapes[op.inputs[0].id], static_axes(op.inputs, op.attrs)
        if isinstance(src, str) or not axes or {op.inputs[0].dtype, op.outputs[0].dtype} - set(dtypes.FLOATS):
            return None
        rows = tuple(sorted({a if a < 0 else a - len(src) for a in axes}))
        walked = op.inputs[0].dtype != "f64" or _is_walked(rows, src)
        return RowValue(src, rows, "kept" if op.attrs["keep_dims"] else "dropped") if walked else None

    def _row_sum(self, op: Op) -> RowValue | None:
        """The row value that a SumTo makes if it keeps its axes or sums all of them, else None."""
        if op.outputs and op.outputs[0].id in self._apart:
            return None
        if opdef.of(op).family != "sum" or aligned_operands(op, self.shapes):
            return None
        src, like = self.shapes[op.inputs[0].id], self.shapes[op.inputs[1].id]
        if isinstance(src, str) or isinstance(like, str) or not src:
            return None
        if like == ():
            return RowValue(src, tuple(range(-len(src), 0)), "dropped")
        if len(src) != len(like):
            return None
        gone = [i for i, (a, b) in enumerate(zip(src, like, strict=True)) if a != b]
        if not gone or any(like[i] != 1 for i in gone):
            return None
        return RowValue(src, tuple(i - len(src) for i in gone), "kept")

    # -- where they lead ----------------------------------------------------------------------------------------

    def _forward(self, made: dict[int, RowValue]) -> None:
        self.values = {}
        for op in self.ops:
            for tensor in op.outputs[:1]:
                found = made.get(tensor.id) or self._follows(op)
                summed = self._summed.get(tensor.id)
                like = self._near(op).get(op.inputs[1].id) if summed is not None else None
                if found is None and summed is not None and like is not None and summed.is_like(like):
                    found = like  # a sum to the shape of a row value, which no operand has
                    self.sums.add(tensor.id)
                if found is not None:
                    self.values[tensor.id] = found

    def _follows(self, op: Op) -> RowValue | None:
        """The row value that an op makes from others, or None."""
        record = opdef.of(op)
        shape = self.shapes[op.outputs[0].id]
        if op.outputs[0].id in self._apart:
            return None
        if record.family == "shape":
            if self._homes.get(op.inputs[0].id) != self._homes.get(op.outputs[0].id):
                return None
            source = self.values.get(op.inputs[0].id) or self._wanted.get(op.inputs[0].id)
            other = source and source.in_form("kept" if source.form == "dropped" else "dropped")
            return other if other is not None and other.shape == shape else None
        if not record.is_pointwise or len(op.outputs) > 1 or record.index_of is not None or record.by_position:
            return None
        tags = set(self._near(op).values())
        wanted = self._wanted.get(op.outputs[0].id)
        tags |= {wanted} if wanted is not None else set()
        if len(tags) != 1:
            return None
        (tag,) = tags
        if tag.shape != shape or (tag.form == "dropped" and not self._fits_dropped(op, tag)):
            return None
        return tag

    def _near(self, op: Op) -> dict[int, RowValue]:
        """The row values that an op reads, by tensor; for an op with a home, only those made in that home."""
        home = self._homes.get(op.outputs[0].id)
        known = {t.id: self.values[t.id] for t in op.inputs if t.id in self.values}
        return known if home is None else {id: tag for id, tag in known.items() if self._homes.get(id) == home}

    def _fits_dropped(self, op: Op, tag: RowValue) -> bool:
        """True if every operand has the shape without the row axes, or is one number."""
        if aligned_operands(op, self.shapes):
            return False
        return all(self.shapes[t.id] in (tag.shape, ()) for t in op.inputs)

    def _leading_back(self, sums: dict[int, RowValue]) -> set[int]:
        """The sums that are used in the shape that they run over: they are needed before the loop ends."""
        back: set[int] = set()  # row values with such a use
        for op in reversed(self.ops):
            own = self.of(op)
            for tensor in op.inputs:
                tag = self.values.get(tensor.id)
                if tag is None:
                    continue
                if own == tag or (own is not None and own == tag.in_form("kept")):
                    leads = op.outputs[0].id in back
                else:
                    pointwise = opdef.of(op).is_pointwise
                    leads = pointwise and any(self.shapes[t.id] == tag.space for t in op.outputs)
                if leads:
                    back.add(tensor.id)
        return back & sums.keys()

    def _want(self, made: dict[int, RowValue]) -> None:
        """Marks values without row axes that get them only to be combined with rows; the loop computes them as well."""
        known: dict[tuple[int | str, ...], RowValue] = {}
        for tag in made.values():
            known.setdefault(tag.in_form("kept").shape, tag.in_form("dropped"))
        for op in reversed(self.ops):
            record = opdef.of(op)
            wanted = self._wanted.get(op.outputs[0].id) if len(op.outputs) == 1 else None
            if record.family == "shape":
                shape = self.shapes[op.outputs[0].id]
                met = None if isinstance(shape, str) else known.get(shape)
                if met is not None and self.shapes[op.inputs[0].id] == met.shape and op.inputs[0].id not in self.values:
                    self._wanted.setdefault(op.inputs[0].id, met)
                continue
            own = self.of(op)
            wanted = own if own is not None and own.form == "dropped" else wanted
            if wanted is not None and record.is_pointwise and self._fits_dropped(op, wanted):
                for tensor in op.inputs:
                    if not is_scalar_shape(self.shapes[tensor.id]) and tensor.id not in self.values:
                        self._wanted.setdefault(tensor.id, wanted)


def _is_walked(rows: tuple[int, ...], space: tuple[int | str, ...]) -> bool:
    """True if kernels iterate efficiently over such rows of f64: not over many short runs (the groups of GroupNorm with
    channels last; in other dtypes a "grouped reduction"), unless the whole space fits in a cache."""
    run = next(k for k in range(len(rows) + 1) if -1 - k not in rows)
    sizes = [d for d in space[len(space) - run :] if isinstance(d, int)]
    return not (0 < run < len(rows) and len(sizes) == run and prod(sizes) < SHORT_RUN) or is_cached(space)


def is_cached(space: tuple[int | str, ...]) -> bool:
    """True if all sizes are known and the whole space fits in a cache."""
    sizes = [d for d in space if isinstance(d, int)]
    return len(sizes) == len(space) and prod(sizes) <= CACHED
