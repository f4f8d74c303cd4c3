"""torch.vmap: the same graph with one axis more, in front of all others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from opgraph.ir import opdef
from opgraph.ir.graph import Graph
from opgraph.ir.logical_tensor import LogicalTensor

if TYPE_CHECKING:
    from opgraph.torch.fused.op import FusedOp


def batched_call(
    op: FusedOp, tensors: Sequence[torch.Tensor], in_dims: Sequence[int | None], size: int
) -> tuple[torch.Tensor, ...]:
    """The results of a call for each index along a batch axis, stacked along axis 0.

    Args:
        in_dims: where each tensor has the batch axis; None: the same tensor every time.
        size: of the batch axis.
    """
    moved = [
        t.unsqueeze(0).expand(size, *t.shape) if at is None else t.movedim(at, 0) for t, at in zip(tensors, in_dims)
    ]
    graph = op.cached("batched", lambda: batched(op.graph))
    if graph is None:
        rows = [op(*[t[i] for t in moved]) for i in range(size)]
        if not rows:
            rows, size = [op(*[t.new_zeros(t.shape[1:]) for t in moved])], 0
        return tuple(torch.stack(parts)[:size] for parts in zip(*rows, strict=True))
    rank = graph.inputs[0].ndim or 0
    padded = [t.reshape(size, *[1] * (rank - t.ndim), *t.shape[1:]) for t in moved]
    made = op.derived(graph)(*padded)
    ranks = [t.ndim or 0 for t in op.graph.outputs]
    return tuple(r.reshape(size, *r.shape[r.ndim - n :]) for r, n in zip(made, ranks, strict=True))


def batched(graph: Graph) -> Graph | None:
    """The same function of tensors that have one more axis in front, then axes of size 1 up to a common rank.

    None where that is another function: with library ops, operands along the channel axis, or unknown ranks.
    """
    tensors = [*graph.inputs, *graph.constants, *(t for op in graph.ops for t in op.outputs)]
    if any(t.ndim is None for t in tensors) or not graph.inputs:
        return None
    rank = max(t.ndim or 0 for t in tensors)
    taken = {d for t in graph.inputs for d in t.dims or () if isinstance(d, str)}
    batch = "batch" if "batch" not in taken else f"batch{len(taken)}"
    result = Graph(graph.engine)
    values: dict[int, LogicalTensor] = {}
    for tensor in graph.inputs:
        dims = (batch, *[1] * (rank - (tensor.ndim or 0)), *(tensor.dims or ()))
        values[tensor.id] = result.input(tensor.name or f"t{tensor.id}", tensor.dtype, dims)
    for tensor in graph.constants:
        values[tensor.id] = result.constant(tensor.name or "", opdef.array_of(tensor), tensor.dtype)
    for op in graph.ops:
        record = opdef.get(op.kind, where=op.label)
        ranks = [t.ndim for t in op.inputs]
        along = any(record.lies_along_channel(i, ranks, op.attrs) for i in record.channel_inputs if i < len(ranks))
        is_sum = record.family == "sum"
        if record.by_position or len(op.outputs) > 1:  # each call alone would stand elsewhere in the batch
            return None
        if not (record.is_pointwise or is_sum) or along or (is_sum and op.inputs[1].is_constant):
            return None
        attrs: dict[str, Any] = dict(op.attrs)
        if record.index_of:
            attrs[record.index_of] = int(attrs[record.index_of]) % (ranks[0] or 1) - (ranks[0] or 1)
        given = [values[t.id] for t in op.inputs]
        made = result.add_op(op.kind, *given, dtype=op.outputs[0].dtype, **attrs)
        values[op.outputs[0].id] = made
    outputs = [values[t.id] for t in graph.outputs]
    result.set_outputs(outputs)
    return result.finalize()
