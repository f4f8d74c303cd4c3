"""The checks of `Graph.finalize`: mentions agree, tensors have one producer, no cycle, shapes and names fit."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence

from opgraph.errors import InvalidGraph, InvalidShape
from opgraph.ir import dtypes, opdef, schema
from opgraph.ir.graph_storage import Tables, rounded
from opgraph.ir.logical_tensor import LogicalTensor, port_name
from opgraph.ir.op import Op
from opgraph.ir.shapes import ShapeMismatch, unify


def verify_graph(
    tables: Tables, outputs: Sequence[int]
) -> tuple[tuple[Op, ...], dict[int, LogicalTensor], dict[int, list[Op]]]:
    """Checks a graph and completes its shapes; the tables are not changed.

    Args:
        outputs: ids of the graph's outputs.

    Returns: ops in topological order with completed shapes, tensors by id, consumers by tensor id.

    Raises:
        InvalidGraph: two mentions of a tensor disagree, the graph has a cycle, or two inputs or outputs have one name.
        InvalidShape: a declared shape contradicts the inferred one, or shapes do not broadcast.
    """
    for known, mention, op in tables.conflicts:
        first, second = _described(known), _described(mention)
        raise InvalidGraph(
            f"{known.label} is {first} in one place and {second if second != first else 'other data'} in another",
            where=op.where,
            fix="use one equal LogicalTensor wherever an id is mentioned",
        )
    _check_names("input", tables.inputs, tables.tensors)
    _check_names("output", outputs, tables.tensors)
    order = topological_order(tables.ops, tables.producer.get)
    completed, tensors = _complete_shapes(order, _typed(tables.tensors))
    consumers: dict[int, list[Op]] = {}
    for op in completed:
        for tensor in op.inputs:
            consumers.setdefault(tensor.id, []).append(op)
    return completed, tensors, consumers


def _typed(tensors: Mapping[int, LogicalTensor]) -> dict[int, LogicalTensor]:
    """Tensors by id, with constants that are still untyped as f32."""
    return {i: rounded(t, "f32") if t.is_constant and t.dtype == dtypes.UNDEF else t for i, t in tensors.items()}


def _described(t: LogicalTensor) -> str:
    extra = [t.layout] if t.layout != "strided" else [f"strides {t.strides}"] if t.odd_strides else []
    return " ".join([t.type_text, t.property, *extra, *([f'called "{t.name}"'] if t.name else [])])


def _check_names(what: str, ids: Iterable[int], tensors: Mapping[int, LogicalTensor]) -> None:
    seen: dict[str, int] = {}
    for id in ids:
        name = port_name(tensors[id])
        if seen.setdefault(name, id) != id:
            nameless = any(tensors[i].name is None for i in (seen[name], id))
            raise InvalidGraph(
                f"two {what}s are called {name!r}",
                where=f"tensors {seen[name]} and {id}",
                fix=f"give each {what} its own name" + ("; one without goes by t<id>" if nameless else ""),
            )


def topological_order(ops: Mapping[int, Op], producer: Callable[[int], Op | None]) -> list[Op]:
    """Ops with producers first, otherwise in the order of addition.

    Raises:
        InvalidGraph: the graph has a cycle; the message names ops on it.
    """
    rank = {op_id: index for index, op_id in enumerate(ops)}
    before: dict[int, set[int]] = {}
    for op in ops.values():
        makers = [producer(t.id) for t in op.inputs]
        before[op.id] = {m.id for m in makers if m is not None}
    if all(rank[p] < rank[op_id] for op_id, ps in before.items() for p in ps):
        return list(ops.values())
    after: dict[int, list[int]] = {}
    for op_id, ps in before.items():
        for p in ps:
            after.setdefault(p, []).append(op_id)
    waiting = {op_id: len(ps) for op_id, ps in before.items()}
    by_rank = {rank[i]: op for i, op in ops.items()}
    ready = [rank[i] for i, n in waiting.items() if n == 0]
    heapq.heapify(ready)
    order: list[Op] = []
    while ready:
        op = by_rank[heapq.heappop(ready)]
        order.append(op)
        for next_id in after.get(op.id, ()):
            waiting[next_id] -= 1
            if waiting[next_id] == 0:
                heapq.heappush(ready, rank[next_id])
    if len(order) != len(ops):
        done = {op.id for op in order}
        stuck = [op.label for op in ops.values() if op.id not in done]
        raise InvalidGraph(
            "the graph has a cycle",
            where=", ".join(stuck[:5]) + (" ..." if len(stuck) > 5 else ""),
            fix="no op may depend on its own output",
        )
    return order


def _complete_shapes(
    order: list[Op], tensors: dict[int, LogicalTensor]
) -> tuple[tuple[Op, ...], dict[int, LogicalTensor]]:
    completed = []
    for op in order:
        inputs = tuple([tensors[t.id] for t in op.inputs])
        inferred = schema.inferred_dims(opdef.of(op), inputs, op.attrs, op)
        outputs = []
        for index, tensor in enumerate(op.outputs):
            try:
                dims = unify(tensor.dims, inferred[index] if index < len(inferred) else None, tensor.label)
            except ShapeMismatch as error:
                raise InvalidShape(error.what, where=op.where, fix=error.fix) from None
            known = tensors[tensor.id]  # the mention with a name, if there is one
            if dims != known.dims:
                known = tensors[tensor.id] = known.with_(dims=dims)
            outputs.append(known)
        if any(a is not b for a, b in zip((*inputs, *outputs), (*op.inputs, *op.outputs), strict=True)):
            op = Op.locked(op.id, op.kind, inputs, tuple(outputs), op.name, op.attrs)
        completed.append(op)
    return tuple(completed), tensors
