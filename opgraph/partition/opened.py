"""Which ops are opened: those that their records spell in smaller ones, all of which fit into one loop."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from opgraph.ir import opdef
from opgraph.ir.op import Op
from opgraph.ops.shape import RESHAPES
from opgraph.partition.rows import Rows
from opgraph.partition.spelled import spelled_ops
from opgraph.partition.symbols import Shape, shapes_of
from opgraph.partition.traits import aligned_operands
from opgraph.partition.views import Viewed, viewed


def opened(ops: Iterable[Op], *, with_rows: bool) -> dict[int, tuple[Op, ...]]:
    """The smaller ops of each op that is opened, by its id.

    Args:
        with_rows: whether a loop may reduce rows.
    """
    found: dict[int, tuple[Op, ...]] = {}
    for op in ops:
        if opdef.of(op).spelled is not None:
            inner = spelled_ops(op)
            if not with_rows and any(opdef.get(i.kind, where=op.label).row is not None for i in inner):
                continue
            if inner and is_one_loop(inner, {t.id for t in op.outputs}):
                found[op.id] = inner
    return found


@dataclass(frozen=True, slots=True)
class Opened:
    """The ops of a graph as a cutter takes them.

    Attributes:
        inside: the smaller ops of each op that is opened, by its id.
        owners: for each op of `seen`, the op of the graph that it belongs to.
        seen: all of them, with their shapes.
    """

    inside: dict[int, tuple[Op, ...]]
    owners: list[Op]
    seen: Viewed


def opened_ops(whole: Sequence[Op], *, with_rows: bool) -> Opened:
    """Opens ops, and takes reshapes into loops.

    Args:
        with_rows: whether a loop may reduce rows.
    """
    inside = opened(whole, with_rows=with_rows)
    while True:
        owners = [op for op in whole for _ in inside.get(op.id, (op,))]
        ops = [inner for op in whole for inner in inside.get(op.id, (op,))]
        places = [place for place, owner in enumerate(owners) if owner.id in inside]
        seen = viewed(ops, shapes_of(ops), places if with_rows else None)
        # What stands around an op may keep its reshapes out of the loop; it is then no loop.
        lost = {owners[p].id for p in places if ops[p].kind in RESHAPES and p not in seen.reshapes}
        made = {t.id: place for place, op in enumerate(ops) for t in op.outputs}
        lost |= {owners[p].id for p in places for id in seen.apart.get(p, ()) if owners[made[id]] is owners[p]}
        if not lost:
            return Opened(inside, owners, seen)
        inside = {id: inner for id, inner in inside.items() if id not in lost}


def is_one_loop(ops: Sequence[Op], outputs: set[int]) -> bool:
    """Whether one loop does all of these ops: over one shape, with rows along the same axes.

    Args:
        outputs: ids of what is needed outside.
    """
    seen = viewed(ops, shapes_of(ops), range(len(ops)))
    ops, shapes = seen.ops, seen.shapes
    rows = Rows(ops, shapes)
    spaces = {(tag.space, tag.axes) for tag in rows.values.values()}
    if len(spaces) > 1:
        return False
    space: Shape = next(iter(spaces))[0] if spaces else shapes[ops[-1].outputs[0].id]
    made: set[int] = set()
    ended: set[int] = set()  # sums, which nothing inside may read
    for place, op in enumerate(ops):
        record = opdef.of(op)
        read = {t.id for t in op.inputs}
        if read & ended or {*aligned_operands(op, shapes), *rows.misread(op), *seen.apart.get(place, ())} & made:
            return False
        if record.family == "sum" and rows.of(op) is None:
            if shapes[op.inputs[0].id] != space:
                return False
            ended.update(t.id for t in op.outputs)
        elif rows.of(op) is None and not (record.is_pointwise and len(op.outputs) == 1):
            return False
        elif rows.of(op) is None and shapes[op.outputs[0].id] != space and op.outputs[0].id in outputs:
            return False  # smaller: as part of the loop it would be written in the larger shape
        made.update(t.id for t in op.outputs)
    return True
