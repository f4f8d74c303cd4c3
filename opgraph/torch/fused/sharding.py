"""DTensor: the allowed shardings of the tensors of a fused call. Sums over a sharded axis are partial sums."""

from __future__ import annotations

from typing import Any

from torch.distributed.tensor import Partial, Replicate, Shard

from opgraph.ir import opdef
from opgraph.ir.graph import Graph
from opgraph.torch.fused.library import op_of

#: The state of a value along one axis of the mesh: whole, a piece, or a partial sum.
_WHOLE, _PIECE, _PART = range(3)


def placements(*args: Any) -> list[tuple[list[Any], list[Any]]]:
    """Combinations of placements of results and of arguments, in the form for `register_sharding`.

    Args:
        args: the arguments of the op, with the specification of a DTensor in place of each tensor.
    """
    *specs, _, text, rounding = args
    graph = op_of(text, rounding).graph
    shapes = [tuple(s.shape) for s in specs]
    rest = [None, None, None]
    found: list[tuple[list[Any], list[Any]]] = [
        ([Replicate()] * len(graph.outputs), [*[Replicate()] * len(specs), *rest])
    ]
    for axis in range(1, max((len(s) for s in shapes), default=0) + 1):
        states = _along(graph, shapes, axis)
        if states is not None:
            ins, outs = states
            ranks = [len(s) for s in shapes]
            results = [t.ndim or 0 for t in graph.outputs]
            found.append((_placed(outs, results, axis), [*_placed(ins, ranks, axis), *rest]))
    return found


def _placed(states: list[int], ranks: list[int], axis: int) -> list[Any]:
    whole: Any = Replicate()
    part: Any = Partial()
    return [
        whole if state == _WHOLE else part if state == _PART else Shard(rank - axis)
        for state, rank in zip(states, ranks, strict=True)
    ]


def _along(graph: Graph, shapes: list[tuple[int, ...]], axis: int) -> tuple[list[int], list[int]] | None:
    """The states of inputs and outputs if the axis (counted from the last, from 1) is cut; None if it cannot be cut.

    Every input that has the axis is cut along it; one that is broadcast along it stays whole.
    """
    extents = {s[-axis] for s in shapes if len(s) >= axis} - {1}
    if len(extents) != 1:
        return None
    states = {
        t.id: _PIECE if len(s) >= axis and s[-axis] != 1 else _WHOLE for t, s in zip(graph.inputs, shapes, strict=True)
    }
    for constant in graph.constants:
        data = opdef.array_of(constant)
        if data.ndim >= axis and data.shape[-axis] != 1:
            return None
        states[constant.id] = _WHOLE
    for op in graph.ops:
        record = opdef.get(op.kind, where=op.label)
        given = [states[t.id] for t in op.inputs]
        ranks = [t.ndim for t in op.inputs]
        along = any(record.lies_along_channel(i, ranks, op.attrs) for i in record.channel_inputs if i < len(ranks))
        if along or record.index_of or record.by_position or _PART in given or None in ranks:
            return None
        if record.family == "sum":
            state = given[0] if given[1] == _PIECE or given[0] == _WHOLE else _PART
        elif record.is_pointwise:
            state = _PIECE if _PIECE in given else _WHOLE
        else:
            return None
        states.update((t.id, state) for t in op.outputs)
    return [states[t.id] for t in graph.inputs], [states[t.id] for t in graph.outputs]
