"""The loop form: one loop nest over one iteration space.

    loop(parallel *)
      x0 = load f32
      x1 = load f32 align=channel
      t0: f32 = Sigmoid(x0, alpha=1.0)  # 0
      t1: f32 = Multiply(t0, x1)  # 1
      store f32 t1
      store f32 t0 summed to x1

It has no sizes: extents and strides are bound when a kernel is called (`opgraph.loops.layout`), so one loop serves
every shape. `parallel *` stands for any number of axes along which the elements are computed independently. A store may
be a sum over the axes along which the loads that it names were broadcast to the iteration space. Such a result is
complete only when the loop has ended, so no statement reads it.

With `reduce -1` (the last axis; `reduce -2,-1`: the last two), the elements along these axes are a row, which
statements may reduce:

    loop(parallel *, reduce -1)
      x0 = load f32
      t0: f32 = ReduceMax(x0)  # 0
      t1: f32 = Subtract(x0, t0)  # 1
      t2: f32 = Exp(t1)  # 2
      t3: f32 = ReduceSum(t2)  # 3
      t4: f32 = Divide(t2, t3)  # 4
      store f32 t4
      store f32 t3 per row

A result that depends only on reductions of rows and on numbers has one value for each row. It is stored `per row` (with
size 1 along the row's axes) or `per row dropped` (without these axes). Kernels iterate over a row in passes, one for
each reduction that depends on another.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

from opgraph.ir import opdef
from opgraph.ir.op import AttrValue

#: An argument of a statement: the name of a load or of an earlier statement, or a literal.
Arg: TypeAlias = str | bool | int | float

#: For each axis of an operand, the sizes of the loop axes into which it is split, 0 if unknown; an empty entry is an
#: axis of size 1 that the operand lacks. An empty cut: the axes are those of the loop (`opgraph.loops.axis_splits`).
Cut: TypeAlias = tuple[tuple[int, ...], ...]

ALIGNMENTS = ("right", "channel", "index", "position", "rows")
#: The values of `Store.per_row`.
PER_ROW = ("", "kept", "dropped")


@dataclass(frozen=True, slots=True, kw_only=True)
class Axes:
    """A group of axes of the iteration space.

    Attributes:
        kind: "parallel" or "reduce".
        which: "*" for all axes of the operands that are not named; else axes counted from the last, such as "-2,-1".
    """

    kind: str
    which: str = "*"


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """One operand read from memory.

    Attributes:
        name: its identifier, x0, x1, ...
        dtype: the dtype in memory; computations use its compute type.
        align: how its dimensions are aligned with the iteration space: "right" (NumPy broadcasting), "channel" (one
            dimension, along axis 1), "rows" (NumPy broadcasting, after the row axes are inserted), "index" (not the
            caller's memory: the index along `axis`), or "position" (no memory at all: the row-major index of the
            element in the iteration space, an s64).
        axis: for "index".
        rows: for "rows": the axes of a row, counted from the last.
        cut: the split of its axes into more axes.
    """

    name: str
    dtype: str
    align: str = "right"
    axis: int = 0
    rows: tuple[int, ...] = ()
    cut: Cut = ()

    @property
    def is_position(self) -> bool:
        """True if its value is the position of the element, which is computed instead of being read."""
        return self.align == "position"

    def broadcasts(self, shape: tuple[int, ...]) -> bool:
        """True if an array of this shape broadcasts as in NumPy; an array along the channel axis is 1-d."""
        return self.align in ("right", "rows") or (self.align == "channel" and len(shape) != 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Statement:
    """result = kind(args), for one element.

    Attributes:
        result: its identifier, t0, t1, ...
        dtype: of the result. f16 and bf16 results are kept in f32 until something rounds them.
        kind, args, attrs: an op of the registry, its arguments and its attributes.
        rounds: True if the result is rounded to its dtype here (explicit TypeCast, or rounding after each op).
        tag: index, within the partition, of the op that the statement came from.
    """

    result: str
    dtype: str
    kind: str
    args: tuple[Arg, ...]
    attrs: tuple[tuple[str, AttrValue], ...] = ()
    rounds: bool = False
    tag: int = 0

    @property
    def record(self) -> opdef.OpDef:
        """The record of its op."""
        return opdef.get(self.kind, where="a loop")

    @property
    def reduces(self) -> bool:
        """True if it reduces a whole row to one value."""
        return self.record.row is not None

    @property
    def row(self) -> opdef.Row:
        """The row reduction of a statement that reduces."""
        assert self.record.row is not None, f"{self.kind} is no reduction"
        return self.record.row

    def literal_dtype(self, types: Mapping[str, str], place: int | None = None) -> str:
        """The dtype of a literal: that of its port, else that of the operands other than conditions.

        Args:
            types: dtype of every load and earlier statement, by name.
            place: index of the argument; None for attributes.
        """
        record = self.record
        args = self.args[:-1] if record.by_position else self.args
        ports = record.with_optional(len(args))
        if place is not None and ports[place].type not in record.types:
            return ports[place].type
        named = [types[a] for a, p in zip(args, ports) if isinstance(a, str) and p.type in record.types]
        values = [dtype for dtype in named if dtype != "boolean"]
        if not values and self.dtype == "boolean":  # a comparison of literals alone
            literals = {type(a) for a in self.args}
            return "f64" if float in literals else "s64" if int in literals else self.dtype
        return values[0] if values else self.dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class Store:
    """One result written to memory, rounded to its dtype.

    Attributes:
        value: a load or a statement.
        to: for a sum: the loads whose common shape is that of the result; empty for a result without dimensions. None:
            every element is stored.
        per_row: for one value for each row: "kept" with size 1 along the row axes, "dropped" without these axes. "":
            every element is stored.
        cut: the split of the axes of the result into more axes.
        total: for a sum or a mean: C++ for the result over `{total}` and `{count}`, in double.
    """

    value: str
    dtype: str
    to: tuple[str, ...] | None = None
    per_row: str = ""
    cut: Cut = ()
    total: str = "{total}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """Axes, loads, statements in order, stores. Equal loops are one kernel."""

    axes: tuple[Axes, ...]
    loads: tuple[Load, ...]
    statements: tuple[Statement, ...]
    stores: tuple[Store, ...]

    def dtype_of(self) -> dict[str, str]:
        """dtype of every load and statement, by name."""
        return {**{x.name: x.dtype for x in self.loads}, **{s.result: s.dtype for s in self.statements}}

    def reads(self) -> set[str]:
        """Names of the loads and statements whose values are read; other loads only provide a shape."""
        return {a for s in self.statements for a in s.args if isinstance(a, str)} | {s.value for s in self.stores}

    def with_stores(self, places: Iterable[int]) -> Loop:
        """The loop with some of its stores, and the statements that these need."""
        stores = tuple(self.stores[i] for i in places)
        needed = {s.value for s in stores}
        kept = []
        for statement in reversed(self.statements):
            if statement.result in needed:
                needed.update(a for a in statement.args if isinstance(a, str))
                kept.append(statement)
        return replace(self, statements=tuple(reversed(kept)), stores=stores)

    @property
    def has_sums(self) -> bool:
        """True if a store is a sum."""
        return any(store.to is not None for store in self.stores)

    @property
    def row_axes(self) -> tuple[int, ...]:
        """The axes of a row, counted from the last (-1), in ascending order; empty if nothing is reduced."""
        return tuple(int(axis) for a in self.axes if a.kind == "reduce" for axis in a.which.split(","))

    def depths(self) -> dict[str, int]:
        """For each load and statement, the length of the longest chain of dependent reductions up to it."""
        found = {load.name: 0 for load in self.loads}
        for s in self.statements:
            below = max((found[a] for a in s.args if isinstance(a, str)), default=0)
            found[s.result] = below + s.reduces
        return found

    def __str__(self) -> str:
        from opgraph.loops.text import loop_text  # it imports this module

        return loop_text(self)
