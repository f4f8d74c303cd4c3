"""Selects the ops to open: those whose records spell them in smaller ops that all fit into one loop."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from opgraph.ir import opdef
from opgraph.ir.op import Op
from opgraph.ops.shape import RESHAPES
from opgraph.partition.reduction_analysis import Rows
from opgraph.partition.reshape_fusion import Viewed, viewed
from opgraph.partition.spelled import spelled_ops
from opgraph.partition.symbols import Shape, shapes_of
from opgraph.partition.traits import aligned_operands


def opened(ops: Iterable[Op]) -> dict[int, tuple[Op, ...]]:
    """The smaller ops of each op that is opened, by its id."""
    found: dict[int, tuple[Op, ...]] = {}
    for op in ops:
        if opdef.of(op).spelled is not None:
            inner = spelled_ops(op)
            if inner and is_one_loop(inner, {t.id for t in op.outputs}):
                found[op.id] = inner
    return found


@dataclass(frozen=True, slots=True)
class Opened:
    """The ops of a graph, opened for partitioning.

    Attributes:
        inside: the smaller ops of each op that is opened, by its id.
        owners: for each op of `seen`, the op of the graph that it belongs to.
        seen: all ops, with their shapes.
        rows: the analysis of their rows.
    """

    inside: dict[int, tuple[Op, ...]]
    owners: list[Op]
    seen: Viewed
    rows: Rows


#: After this many rounds, no opened op takes part in rows that begin outside it.
_ROUNDS = 3


def opened_ops(whole: Sequence[Op]) -> Opened:
    """Opens ops, and includes reshapes in loops."""
    inside, closed, rounds = opened(whole), set[int](), 0
    while True:
        owners = [op for op in whole for _ in inside.get(op.id, (op,))]
        ops = [inner for op in whole for inner in inside.get(op.id, (op,))]
        places = [place for place, owner in enumerate(owners) if owner.id in inside]
        seen = viewed(ops, shapes_of(ops), places)
        # The surrounding ops may keep an op's reshapes out of the loop; the op is then not one loop.
        lost = {owners[p].id for p in places if ops[p].kind in RESHAPES and p not in seen.reshapes}
        made = {t.id: place for place, op in enumerate(ops) for t in op.outputs}
        lost |= {owners[p].id for p in places for id in seen.apart.get(p, ()) if owners[made[id]] is owners[p]}
        lost |= {owners[p].id for p, other in seen.conflicts if owners[p] is owners[other]}
        if not lost:
            homes = {t.id: owners[p].id for p in places if owners[p].id in closed for t in ops[p].outputs}
            outside = {t.id for p in seen.plain for t in seen.ops[p].outputs}
            rows = Rows(seen.ops, seen.shapes, outside, homes)
            # An operand may be a row value of another loop; values computed from it then belong to that loop.
            torn = _torn(owners, places, seen, rows) if rows.values else set()
            if not torn:
                return Opened(inside, owners, seen, rows)
            lost, rounds = torn & closed, rounds + 1
            closed |= torn if rounds <= _ROUNDS else inside.keys()
        inside = {id: inner for id, inner in inside.items() if id not in lost}


def _torn(owners: Sequence[Op], places: Iterable[int], seen: Viewed, rows: Rows) -> set[int]:
    """The opened ops that are not one loop any more once rows begin around them or lead there."""
    inner: dict[int, list[int]] = {}
    whole: dict[int, Op] = {}
    for place in places:
        inner.setdefault(owners[place].id, []).append(place)
        whole[owners[place].id] = owners[place]
    return {id for id, own in inner.items() if not _loops(own, seen, rows, {t.id for t in whole[id].outputs})}


def is_one_loop(ops: Sequence[Op], outputs: set[int]) -> bool:
    """True if one loop can compute all of these ops: over one shape, with rows along the same axes.

    Args:
        outputs: ids of the values that are needed outside.
    """
    seen = viewed(ops, shapes_of(ops), range(len(ops)))
    return _loops(range(len(ops)), seen, Rows(seen.ops, seen.shapes), outputs)


def _loops(places: Sequence[int], seen: Viewed, rows: Rows, outputs: set[int]) -> bool:
    """True if one loop can compute the ops at these places."""
    ops = [seen.ops[p] for p in places]
    tags = [rows.values[t.id] for op in ops for t in op.outputs if t.id in rows.values]
    spaces = {(tag.space, tag.axes) for tag in tags}
    if len(spaces) > 1 or any(set(pair) <= set(places) for pair in seen.conflicts):
        return False
    space: Shape = next(iter(spaces))[0] if spaces else seen.shapes_at(places[-1])[ops[-1].outputs[0].id]
    made: set[int] = set()
    ended: set[int] = set()  # sums, which no op inside may read
    for place, op in zip(places, ops, strict=True):
        record, shapes = opdef.of(op), seen.shapes_at(place)
        read = {t.id for t in op.inputs}
        if read & ended or {*aligned_operands(op, seen.axes), *rows.misread(op), *seen.apart.get(place, ())} & made:
            return False
        if record.family == "sum" and rows.of(op) is None:
            if shapes[op.inputs[0].id] != space or op.inputs[1].id in rows.without_known_shape & made:
                return False
            ended.update(t.id for t in op.outputs)
        elif rows.of(op) is None and not (record.is_pointwise and len(op.outputs) == 1):
            return False
        elif rows.of(op) is None and shapes[op.outputs[0].id] != space and op.outputs[0].id in outputs:
            return False  # a smaller output: the loop would write it in the larger shape
        made.update(t.id for t in op.outputs)
    return True
