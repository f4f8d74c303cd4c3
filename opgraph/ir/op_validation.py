"""Checks an op against its schema and determines its types before a graph takes it; a graph holds only checked ops."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from opgraph.errors import InvalidDataType, InvalidGraph, InvalidGraphOp
from opgraph.ir import dtypes, opdef, schema
from opgraph.ir.constants import constant_data
from opgraph.ir.graph_storage import Tables, rounded
from opgraph.ir.logical_tensor import LogicalTensor
from opgraph.ir.op import Op


def short_form(
    tables: Tables,
    kind: str,
    given: Sequence[Any],
    name: str,
    dtype: str | None,
    count: int | None,
) -> tuple[tuple[LogicalTensor, ...], tuple[LogicalTensor, ...]]:
    """The inputs and the (untyped, unshaped) outputs of an op in the short form: a kind and its operands.

    Raises:
        InvalidGraphOp: the kind is unknown, an input is neither a tensor nor a number, or a count is impossible.
        InvalidGraph: the id of a tensor belongs to another tensor in this graph.
    """
    label = f'{kind} "{name or f"{kind}_{tables.next_op}"}"'
    record = opdef.get(kind, where=label)
    if count is not None and (type(count) is not int or count < 0):
        raise InvalidGraphOp(f"outputs={count!r} is not a number of outputs", where=label, fix="give an int >= 0")
    next_id = max([tables.next_tensor, *[v.id + 1 for v in given if isinstance(v, LogicalTensor)]])
    inputs = []
    for value in given:
        if isinstance(value, LogicalTensor):
            _check_known(tables, value, label)
        else:
            value = _number(value, next_id, label)
            next_id += 1
        inputs.append(value)
    if count is None:
        count = sum(not p.optional for p in record.outputs)
    schema.check_arity(record, len(inputs), count, label)  # before `count` outputs are made
    outputs = tuple(
        LogicalTensor(next_id + i, dtype or dtypes.UNDEF, None, name=name if i == 0 else None) for i in range(count)
    )
    return tuple(inputs), outputs


def _number(value: object, id: int, label: str) -> LogicalTensor:
    """A scalar constant for a Python number, or for a NumPy number, which has a dtype."""
    if getattr(value, "shape", ()) != () or isinstance(value, (str, bytes, list, tuple)) or value is None:
        raise InvalidGraphOp(
            f"an input is {type(value).__name__}",
            where=label,
            fix="pass LogicalTensors or numbers, one by one; Graph.constant takes arrays",
        )
    dtype, data = constant_data(value, None, label)
    return LogicalTensor(id, dtype, (), property="constant", data=data)


def _check_known(tables: Tables, tensor: LogicalTensor, label: str) -> None:
    """Raises InvalidGraph for a tensor of another graph, or one that differs from this graph's tensor of its id."""
    tables.check_own(tensor, label)
    known = tables.tensors.get(tensor.id)
    if known is None or known is tensor:
        return
    same = (known.name, known.is_constant, known.layout, known.property) == (
        tensor.name, tensor.is_constant, tensor.layout, tensor.property
    )  # fmt: skip
    # dtype and dims of a constant may be out of date: it was untyped before its first use.
    if not same or (not known.is_constant and (known.dtype, known.dims) != (tensor.dtype, tensor.dims)):
        raise InvalidGraph(
            f"{tensor.label} ({tensor.type_text}) is not {known.label} ({known.type_text}) of this graph, "
            f"though both have id {tensor.id}",
            where=label,
            fix="pass tensors of this graph; those of another one have ids of their own",
        )


def checked_op(
    tables: Tables,
    op_id: int,
    kind: str,
    inputs: tuple[LogicalTensor, ...],
    outputs: tuple[LogicalTensor, ...],
    name: str,
    attrs: Mapping[str, Any],
    *,
    infer: bool = False,
) -> Op:
    """The op in the form that a graph keeps; the tables are not touched.

    Args:
        infer: fill in the outputs' dimensions by the op's shape rule.

    Raises:
        InvalidGraphOp, InvalidDataType, InvalidShape: the op does not fit its schema.
        InvalidGraph: an id is taken.
    """
    probe = Op(op_id, kind, inputs, outputs, name)
    record = opdef.get(kind, where=probe.label)
    _check_ids(tables, probe)
    schema.check_arity(record, len(inputs), len(outputs), probe.label)
    checked = schema.checked_attrs(record, attrs, probe.label)
    in_types, out_types = schema.bind_dtypes(record, inputs, [t.dtype for t in outputs], probe)
    inputs = tuple(t if t.dtype == d else _typed(tables, t, d, probe) for t, d in zip(inputs, in_types, strict=True))
    dims = schema.inferred_dims(record, inputs, checked, probe) if infer else ()
    outputs = tuple(
        t if t.dtype == d and i >= len(dims) else t.with_(dtype=d, dims=dims[i] if i < len(dims) else t.dims)
        for i, (t, d) in enumerate(zip(outputs, out_types, strict=True))
    )
    op = Op.locked(op_id, kind, inputs, outputs, name, checked)
    if record.check is not None:
        record.check(op)
    return op


def _check_ids(tables: Tables, op: Op) -> None:
    if op.id in tables.ops:
        raise InvalidGraph(f"op id {op.id} is used twice", where=op.label, fix="give every op its own id")
    seen: set[int] = set()
    for tensor in op.outputs:
        other = tables.producer.get(tensor.id)
        if other is not None or tensor.id in seen:
            raise InvalidGraph(
                f"{tensor.label} has two producers",
                where=f"{op.label} and {other.label}" if other else f"{op.label}, twice",
                fix="give each output its own id",
            )
        seen.add(tensor.id)
        known = tables.tensors.get(tensor.id, tensor)
        if tensor.is_constant or known.is_constant:
            raise InvalidGraph(f"{tensor.label} is a constant and an output", where=op.label, fix="use another id")
        if known.name is not None and tables.declared.get(known.name) == tensor.id:
            raise InvalidGraph(
                f"{known.label} is declared as an input and an output of an op", where=op.label, fix="use another id"
            )


def _typed(tables: Tables, tensor: LogicalTensor, dtype: str, op: Op) -> LogicalTensor:
    """An untyped scalar constant in the dtype that the op requires.

    Raises:
        InvalidDataType: another op gave it another dtype, or this dtype does not hold its value.
    """
    if tensor.data is None:  # the dtype of an opaque value is not needed
        return tensor
    known = tables.tensors.get(tensor.id)
    if known is not None and known.dtype not in (dtypes.UNDEF, dtype):
        raise InvalidDataType(
            f"the constant {tensor.label} is {known.dtype} elsewhere and meets {dtype} here",
            where=op.where,
            fix="declare one constant for each dtype, or insert a TypeCast",
        )
    typed = rounded(tensor, dtype)
    return known if known is not None and known.is_equal(typed) and known.name == typed.name else typed
