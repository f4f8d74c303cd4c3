"""Selects the reshapes that a loop could include, and those that it should."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from opgraph.ir import opdef
from opgraph.ir.op import Op
from opgraph.ops.shape import RESHAPES
from opgraph.partition.axis_factors import Pieces, common_pieces
from opgraph.partition.symbols import Shape


def cuttable(ops: Sequence[Op], shapes: Mapping[int, Shape]) -> dict[int, tuple[Pieces, Pieces]]:
    """The places of the reshapes whose two shapes have the same pieces, with these pieces."""
    found: dict[int, tuple[Pieces, Pieces]] = {}
    for place, op in enumerate(ops):
        if op.kind in RESHAPES:
            src, dst = shapes[op.inputs[0].id], shapes[op.outputs[0].id]
            pieces = None if isinstance(src, str) or isinstance(dst, str) else common_pieces(src, dst)
            if pieces is not None:
                found[place] = pieces
    return found


def wanted(
    ops: Sequence[Op],
    shapes: Mapping[int, Shape],
    users: Mapping[int, Sequence[int]],
    candidates: Collection[int],
    inside: Collection[int],
) -> list[int]:
    """The candidates among `inside`, and those with fusible ops on both sides that are connected to a reduction of
    rows."""
    both = [
        place
        for place in candidates
        if place in inside
        or all(
            any(other != place and is_fusible(ops[other]) for other in users[t.id])
            for t in (ops[place].inputs[0], ops[place].outputs[0])
        )
    ]
    with_rows: set[int] = set()  # tensors in the shapes around a reduction
    waiting = [op.inputs[0].id for op in ops if opdef.of(op).row is not None or op.kind == "SumTo"]
    crossed = set(both)
    while waiting:
        id = waiting.pop()
        if id in with_rows:
            continue
        with_rows.add(id)
        for place in users[id]:
            op = ops[place]
            if place in crossed:
                waiting += [op.inputs[0].id, op.outputs[0].id]
            elif is_fusible(op):
                shape = shapes[id]
                waiting += [t.id for t in (*op.inputs, *op.outputs) if shapes[t.id] == shape]
    return [place for place in both if place in inside or ops[place].inputs[0].id in with_rows]


def is_fusible(op: Op) -> bool:
    """True if a loop over pieces may compute an op: a reduction, a sum, or an elementwise op without positions."""
    record = opdef.of(op)
    if record.row is not None or record.family == "sum":
        return True
    return record.is_pointwise and len(op.outputs) == 1 and record.index_of is None and not record.by_position
