"""The steps of a trace as an og.Graph, for tensors of one pattern of shapes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from opgraph.ir.graph import Graph
from opgraph.ir.logical_tensor import Dims, LogicalTensor
from opgraph.ir.shapes import broadcast
from opgraph.torch.tracing.proxy import Ref
from opgraph.torch.tracing.session import Number, Step


def pattern(shapes: Iterable[Sequence[int]]) -> tuple[tuple[int | str, ...], ...]:
    """The pattern of shapes: 1 for an axis of size 1, else a symbol, which axes of the same size share.

    Axes share a symbol only at the same position from the last: only these broadcast against each other.
    """
    symbols: dict[tuple[int, int], str] = {}
    result = []
    for shape in shapes:
        rank = len(shape)
        result.append(
            tuple(
                1 if size == 1 else symbols.setdefault((rank - axis, size), f"d{len(symbols)}")
                for axis, size in enumerate(shape)
            )
        )
    return tuple(result)


def needed(steps: Sequence[Step], outputs: Iterable[Ref]) -> tuple[list[Step], set[Ref]]:
    """The steps that the outputs depend on, and the set of the outputs and all values that these steps read."""
    wanted = set(outputs)
    kept = []
    for step in reversed(steps):
        if step.result in wanted:
            kept.append(step)
            wanted.update(o for o in step.operands if isinstance(o, Ref))
    return kept[::-1], wanted


def build(
    steps: Sequence[Step],
    inputs: Sequence[tuple[Ref, str, str, Dims]],
    outputs: Sequence[tuple[Ref, str]],
) -> Graph:
    """Builds a finalized graph.

    Args:
        steps: the steps in order, without unneeded ones.
        inputs: value, name, dtype and dimensions of each.
        outputs: value and name of each.

    Raises:
        InvalidShape: shapes do not broadcast.
    """
    graph = Graph()
    values: dict[Ref, LogicalTensor] = {ref: graph.input(name, dtype, dims) for ref, name, dtype, dims in inputs}
    names = dict(outputs)
    # Numbers broadcast to the shape of a tensor. They need a BroadcastTo only as an output of the graph, or where no
    # other operand has that shape.
    fills: dict[Ref, tuple[Number, LogicalTensor]] = {}
    for step in steps:
        first = step.operands[0]
        if step.kind == "BroadcastTo" and isinstance(first, Number):
            like = step.operands[1]
            assert isinstance(like, Ref)
            source = fills[like][1] if like in fills else values[like]
            fills[step.result] = (first, source)
            if step.result in names:
                values[step.result] = _spread(graph, first, source, names[step.result])
            continue
        given = _operands(graph, step, values, fills)
        made = graph.add_op(
            step.kind, *given, name=names.get(step.result, step.label), dtype=step.dtype, **dict(step.attrs)
        )
        values[step.result] = made
    for ref, name in outputs:
        if values[ref].name != name:  # an input, or a second name of one value
            values[ref] = graph.add_op("Identity", values[ref], name=name)
    graph.set_outputs([values[ref] for ref, _ in outputs])
    return graph.finalize()


def _operands(
    graph: Graph, step: Step, values: dict[Ref, LogicalTensor], fills: dict[Ref, tuple[Number, LogicalTensor]]
) -> list[LogicalTensor]:
    full = [values[o].dims for o in step.operands if isinstance(o, Ref) and o not in fills]
    shape = broadcast(full) if full else ()
    result = []
    for operand in step.operands:
        if isinstance(operand, Number):
            result.append(graph.constant("", operand.value, operand.dtype))
        elif operand in fills:
            number, like = fills[operand]
            if broadcast([shape, like.dims]) == shape:
                result.append(graph.constant("", number.value, number.dtype))
            else:
                result.append(_spread(graph, number, like, ""))
                shape = broadcast([shape, like.dims])
        else:
            result.append(values[operand])
    return result


def _spread(graph: Graph, number: Number, like: LogicalTensor, name: str) -> LogicalTensor:
    made: LogicalTensor = graph.add_op("BroadcastTo", graph.constant("", number.value, number.dtype), like, name=name)
    return made
