"""Opens ops whose records spell them in smaller ops, so that kernels can be generated for the smaller ops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from opgraph.errors import OpGraphError
from opgraph.ir import opdef
from opgraph.ir.graph_builder import GraphBuilder
from opgraph.ir.logical_tensor import LogicalTensor
from opgraph.ir.op import Op

#: The first id of inner tensors and ops, and the number of ids per op. They are above the ids of any likely graph.
_FIRST, _EACH = 1 << 48, 1 << 12


def spelled_ops(op: Op) -> tuple[Op, ...]:
    """The smaller ops that make the outputs of an op, in order; empty if its record does not spell it.

    Inputs and outputs are the tensors of the op itself; tensors in between have new ids, the same on each call.
    """
    record = opdef.of(op)
    if record.spelled is None:
        return ()
    plain = _without_layouts(op)
    builder = GraphBuilder.inside(plain, _FIRST + _EACH * op.id)
    try:
        made = record.spelled(builder, plain)
    except OpGraphError:  # an unknown rank, for example: the op runs whole
        return ()
    outputs = {inner.id: outer for inner, outer in zip(made, op.outputs, strict=True)}
    if len(outputs) < len(op.outputs):
        return ()
    left = _without_casts_of_sums(builder.ops, outputs)
    ops: list[Op] = []
    found: set[int] = set()
    for inner in left:
        outs = tuple(outputs.get(t.id, t) for t in inner.outputs)
        ins = tuple(outputs.get(t.id, t) for t in inner.inputs)
        found.update(t.id for t in outs)
        ops.append(Op.locked(inner.id, inner.kind, ins, outs, op.name, inner.attrs))
    return tuple(ops) if all(t.id in found for t in op.outputs) else ()


def _without_casts_of_sums(ops: Sequence[Op], outputs: dict[int, LogicalTensor]) -> list[Op]:
    """The ops without the casts from a result of SumTo to the dtype of an output; SumTo makes the output instead.

    A loop ends with its sums and rounds them when it stores them; a cast would need a separate loop.
    """
    sums = {op.outputs[0].id for op in ops if op.kind == "SumTo"}
    left = []
    for op in ops:
        if op.kind == "TypeCast" and op.inputs[0].id in sums and op.outputs[0].id in outputs:
            outputs[op.inputs[0].id] = outputs.pop(op.outputs[0].id)
        else:
            left.append(op)
    return left


def _without_layouts(op: Op) -> Op:
    """The same op on tensors without specific layouts, on which its result does not depend."""
    inputs, outputs = (tuple(replace(t, strides=None, layout="strided") for t in ts) for ts in (op.inputs, op.outputs))
    return Op.locked(op.id, op.kind, inputs, outputs, op.name, op.attrs)
