"""Graph: the only builder. Ops on logical tensors, connected by tensor id, locked by `finalize`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from opgraph.errors import InvalidArguments, InvalidDataType, InvalidGraph, InvalidGraphOp
from opgraph.ir import dtypes, opdef, schema
from opgraph.ir.logical_tensor import Dim, Dims, LogicalTensor
from opgraph.ir.op import Op
from opgraph.ir.verify import verify_graph

if TYPE_CHECKING:
    from opgraph.partition.partition import Partition
    from opgraph.partition.report import Report

ENGINE_KINDS = ("cpu", "cuda")


class Graph:
    """A directed acyclic graph of ops on logical tensors.

    Two ways to build it, on the same graph: oneDNN's (`add_op(Op(...))` on LogicalTensors that the caller numbers)
    and the short one (`input`, `constant`, `add_op("Kind", x, y, attr=...)`, `output`).

    Args:
        engine: the engine kind that partitions are made for, "cpu" or "cuda".

    Source: oneDNN Graph `graph`.
    """

    def __init__(self, engine: str = "cpu") -> None:
        if engine not in ENGINE_KINDS:
            raise InvalidArguments(
                f"unknown engine kind {engine!r}", where="Graph", fix=f"use one of {', '.join(ENGINE_KINDS)}"
            )
        self.engine = engine
        self._ops: dict[int, Op] = {}
        self._tensors: dict[int, LogicalTensor] = {}
        self._producer: dict[int, Op] = {}
        self._conflicts: list[tuple[LogicalTensor, LogicalTensor, Op]] = []
        self._input_ids: dict[int, None] = {}
        self._output_ids: dict[int, None] = {}
        self._exact_outputs = False
        self._next_tensor = 0
        self._next_op = 0
        self._order: tuple[Op, ...] | None = None
        self._consumers: dict[int, list[Op]] = {}
        #: Remarks of whoever built the graph (an importer), shown by `explain`.
        self.notes: list[str] = []
        #: What the graph was imported from, for an export that keeps names and metadata; not part of its content.
        self.source: object | None = None

    # -- building -----------------------------------------------------------------------------------------------

    def input(self, name: str, dtype: str = "f32", shape: Sequence[Dim] | None = ()) -> LogicalTensor:
        """Declares an input.

        Args:
            name: unique among the inputs; arrays are bound by it.
            shape: int, None (unknown) or a symbol (str) per dimension; None: even their number is unknown.

        Raises:
            InvalidGraph: the graph is finalized, or has an input of that name.
        """
        self._check_open(f'input "{name}"')
        if any(self._tensors[i].name == name for i in self._input_ids):
            raise InvalidGraph(
                f"there are two inputs called {name!r}", where="Graph.input", fix="give each input its own name"
            )
        return self._add_input(
            LogicalTensor(self._next_tensor, dtype, None if shape is None else tuple(shape), name=name)
        )

    def constant(self, name: str, value: Any, dtype: str | None = None) -> LogicalTensor:
        """Declares a constant: a LogicalTensor with data, no op.

        Args:
            value: an array, or a Python number; a number without `dtype` takes the dtype of what it first meets, and
                is rounded to it then.

        Raises:
            InvalidDataType: an array of a dtype that opgraph does not have.
        """
        self._check_open(f'constant "{name}"')
        untyped = dtype is None and isinstance(value, (bool, int, float))
        if untyped:
            data = np.asarray(value)
        elif dtype is not None:
            data = np.asarray(value).astype(dtypes.get(dtype, where=f'constant "{name}"').numpy)
        else:
            data = np.asarray(value)
        kind = dtypes.UNDEF if untyped else dtypes.of_array(data.dtype, where=f'constant "{name}"').name
        tensor = LogicalTensor(self._next_tensor, kind, data.shape, property="constant", name=name or None, data=data)
        self._tensors[tensor.id] = tensor
        self._next_tensor = max(self._next_tensor, tensor.id + 1)
        return tensor

    @overload
    def add_op(self, op: Op, /) -> None: ...
    @overload
    def add_op(
        self,
        op: str,
        /,
        *inputs: LogicalTensor | float,
        name: str = "",
        dtype: str | None = None,
        outputs: int | None = None,
        **attrs: Any,
    ) -> Any: ...
    def add_op(
        self,
        op: Op | str,
        /,
        *inputs: LogicalTensor | float,
        name: str = "",
        dtype: str | None = None,
        outputs: int | None = None,
        **attrs: Any,
    ) -> Any:
        """Adds an op: a complete `Op`, which is copied, or (short way) a kind with its inputs and attributes.

        Args:
            op: an Op, or the name of a kind.
            inputs: LogicalTensors; a Python number stands for a scalar constant.
            name: names the op and its (first) output.
            dtype: dtype of the output where the inputs do not determine it (TypeCast).
            outputs: how many outputs, for kinds with a variable number.
            attrs: attributes by keyword.

        Returns: short way: the output LogicalTensor, a tuple for several. Otherwise None.

        Raises:
            InvalidGraphOp, InvalidDataType, InvalidShape: the op does not fit its schema; the graph is unchanged.
            InvalidGraph: the graph is finalized, or an id is taken.
        """
        if isinstance(op, Op):
            if inputs or attrs or name or dtype is not None:
                raise InvalidArguments(
                    "an Op is added alone", where=op.label, fix="set its inputs and attributes on the Op"
                )
            self._check_open(op.label)
            self._add(op.id, op.kind, op.inputs, op.outputs, op.name, op.attrs)
            return None
        return self._add_short(op, inputs, name, dtype, outputs, attrs)

    def _add_short(
        self,
        kind: str,
        inputs: Sequence[LogicalTensor | float],
        name: str,
        dtype: str | None,
        count: int | None,
        attrs: dict[str, Any],
    ) -> LogicalTensor | tuple[LogicalTensor, ...]:
        op_id = self._next_op
        label = f'{kind} "{name or f"{kind}_{op_id}"}"'
        self._check_open(label)
        record = opdef.get(kind, where=label)
        next_tensor = self._next_tensor
        tensors = []
        for value in inputs:
            if isinstance(value, (bool, int, float)):
                data = np.asarray(value)
                value = LogicalTensor(next_tensor, dtypes.UNDEF, (), property="constant", data=data)
                next_tensor += 1
            elif not isinstance(value, LogicalTensor):
                raise InvalidGraphOp(
                    f"an input is {type(value).__name__}", where=label, fix="pass LogicalTensors or numbers"
                )
            tensors.append(value)
        made = count if count is not None else sum(not p.optional for p in record.outputs)
        outs = tuple(
            LogicalTensor(next_tensor + i, dtype or dtypes.UNDEF, None, name=(name or None) if i == 0 else None)
            for i in range(made)
        )
        added = self._add(op_id, kind, tuple(tensors), outs, name, attrs, short=True)
        return added.outputs[0] if len(added.outputs) == 1 else added.outputs

    def _add(
        self,
        op_id: int,
        kind: str,
        inputs: tuple[LogicalTensor, ...],
        outs: tuple[LogicalTensor, ...],
        name: str,
        attrs: dict[str, Any],
        *,
        short: bool = False,
    ) -> Op:
        """Checks an op against its schema, then enters it; nothing is changed if a check fails."""
        probe = Op(op_id, kind, inputs, outs, name)
        record = opdef.get(kind, where=probe.label)
        if op_id in self._ops:
            raise InvalidGraph(f"op id {op_id} is used twice", where=probe.label, fix="give every op its own id")
        for tensor in outs:
            if tensor.id in self._producer:
                raise InvalidGraph(
                    f"{tensor.label} has two producers",
                    where=f"{probe.label} and {self._producer[tensor.id].label}",
                    fix="give each output its own id",
                )
            if tensor.is_constant:
                raise InvalidGraph(
                    f"{tensor.label} is a constant and an output", where=probe.label, fix="use another id"
                )
        schema.check_arity(record, len(inputs), len(outs), probe.label)
        checked = schema.checked_attrs(record, attrs, probe.label)
        in_types, out_types = schema.bind_dtypes(record, inputs, [t.dtype for t in outs], probe.where)
        inputs = tuple(self._typed(t, d, probe) for t, d in zip(inputs, in_types, strict=True))
        outs = tuple(t if t.dtype == d else t.with_(dtype=d) for t, d in zip(outs, out_types, strict=True))
        if short:
            dims = schema.inferred_dims(record, inputs, checked, probe.where)
            outs = tuple(t.with_(dims=d) for t, d in zip(outs, dims, strict=False)) + outs[len(dims) :]
        op = Op.locked(op_id, kind, inputs, outs, name, checked)
        if record.check is not None:
            record.check(op)
        self._enter(op)
        return op

    def _typed(self, tensor: LogicalTensor, dtype: str, op: Op) -> LogicalTensor:
        """An untyped scalar constant in the dtype that it meets here; any other tensor as it is."""
        if tensor.dtype == dtype or tensor.data is None:
            return tensor
        known = self._tensors.get(tensor.id)
        if known is None or known.dtype == dtypes.UNDEF:
            return _rounded(tensor, dtype)
        if known.dtype != dtype:
            raise InvalidDataType(
                f"the constant {tensor.label} is {known.dtype} elsewhere and meets {dtype} here",
                where=op.where,
                fix="declare one constant for each dtype, or insert a TypeCast",
            )
        return known

    def _enter(self, op: Op) -> None:
        for tensor in (*op.inputs, *op.outputs):
            known = self._tensors.get(tensor.id)
            if known is not None and known is not tensor and not _agree(known, tensor):
                self._conflicts.append((known, tensor, op))  # reported by finalize, as in oneDNN
                continue
            if known is None or known.dtype == dtypes.UNDEF:
                self._tensors[tensor.id] = tensor
            self._next_tensor = max(self._next_tensor, tensor.id + 1)
        for tensor in op.outputs:
            self._producer[tensor.id] = op
            self._input_ids.pop(tensor.id, None)
        for tensor in op.inputs:
            if tensor.id not in self._producer and not tensor.is_constant:
                self._input_ids.setdefault(tensor.id)
        self._ops[op.id] = op
        self._next_op = max(self._next_op, op.id + 1)

    def _add_input(self, tensor: LogicalTensor) -> LogicalTensor:
        self._tensors[tensor.id] = tensor
        self._input_ids.setdefault(tensor.id)
        self._next_tensor = max(self._next_tensor, tensor.id + 1)
        return tensor

    def output(self, *tensors: LogicalTensor) -> None:
        """Marks tensors as outputs (oneDNN's End). Values without a consumer are outputs anyway.

        Raises:
            InvalidGraph: the graph is finalized, or does not know the tensor.
        """
        self._check_open("Graph.output")
        for tensor in tensors:
            if tensor.id not in self._tensors:
                raise InvalidGraph(
                    f"{tensor.label} is not in this graph", where="Graph.output", fix="add the op that makes it first"
                )
            self._output_ids.setdefault(tensor.id)

    def set_outputs(self, tensors: Iterable[LogicalTensor]) -> None:
        """Makes these the only outputs, in this order; other values without a consumer are dropped."""
        self._check_open("Graph.set_outputs")
        self._output_ids.clear()
        self.output(*tensors)
        self._exact_outputs = True

    def _check_open(self, where: str) -> None:
        if self._order is not None:
            raise InvalidGraph("the graph is finalized and cannot be changed", where=where, fix="build a new Graph")

    # -- life cycle ---------------------------------------------------------------------------------------------

    def finalize(self) -> Graph:
        """Connects, checks and locks the graph; does nothing the second time. Returns the graph.

        Raises:
            InvalidGraph: mentions of one tensor disagree, a cycle, ill-named inputs or outputs.
            InvalidShape: shapes that cannot be.
        """
        if self._order is None:
            verified = verify_graph(self._ops, self._tensors, self._producer, self._conflicts, self._declared_io())
            self._order, self._tensors, self._consumers = verified
        return self

    def _declared_io(self) -> tuple[list[int], list[int]]:
        consumed = {t.id for op in self._ops.values() if op.kind != "End" for t in op.inputs}
        outputs = dict(self._output_ids)
        if not self._exact_outputs:
            for op in self._ops.values():
                for tensor in op.inputs if op.kind == "End" else op.outputs:
                    if op.kind == "End" or tensor.id not in consumed:
                        outputs.setdefault(tensor.id)
        return list(self._input_ids), list(outputs)

    @property
    def is_finalized(self) -> bool:
        return self._order is not None

    def get_partitions(self, policy: str = "fusion") -> list[Partition]:
        """Cuts the graph into partitions, in topological order; every op but End is in exactly one.

        Args:
            policy: "fusion", or "debug": every op alone.

        Raises:
            InvalidGraph: not finalized.
            InvalidArguments: unknown policy.
        """
        from opgraph.partition.partitioner import partition  # front door: a later stage

        return list(partition(self, policy=policy).partitions)

    def explain(self) -> Report:
        """For each op, the partition and the rule that took it, or why it stayed unfused; finalizes if need be."""
        from opgraph.partition.partitioner import partition  # front door: a later stage

        return partition(self.finalize()).report

    # -- looking ------------------------------------------------------------------------------------------------

    @property
    def inputs(self) -> tuple[LogicalTensor, ...]:
        """Inputs in declaration order. Constants are not among them."""
        return tuple(self._tensors[i] for i in self._input_ids)

    @property
    def outputs(self) -> tuple[LogicalTensor, ...]:
        """Outputs: those declared, in that order, then all values without a consumer."""
        return tuple(self._tensors[i] for i in self._declared_io()[1])

    @property
    def constants(self) -> tuple[LogicalTensor, ...]:
        return tuple(t for t in self._tensors.values() if t.is_constant)

    @property
    def ops(self) -> tuple[Op, ...]:
        """Ops: in topological order once finalized, before that as added."""
        return self._order if self._order is not None else tuple(self._ops.values())

    def tensor(self, id: int) -> LogicalTensor:
        """The logical tensor of an id, as far as known by now.

        Raises:
            InvalidArguments: unknown id.
        """
        try:
            return self._tensors[id]
        except KeyError:
            raise InvalidArguments(
                f"there is no tensor {id}", where="Graph.tensor", fix="use an id of this graph"
            ) from None

    def producer(self, id: int) -> Op | None:
        """The op that makes a tensor; None for inputs and constants."""
        return self._producer.get(id)

    def consumers(self, id: int) -> list[Op]:
        """The ops that read a tensor, one entry per use; the graph must be finalized."""
        return self._consumers.get(id, [])

    def __iter__(self) -> Iterator[Op]:
        return iter(self.ops)

    def __len__(self) -> int:
        return len(self._ops)

    def __str__(self) -> str:
        from opgraph.ir.text import graph_text  # text.py builds graphs, so it comes after this module

        return graph_text(self)

    def __repr__(self) -> str:
        return f"<Graph: {len(self.inputs)} inputs, {len(self._ops)} ops, {len(self.outputs)} outputs>"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Graph):
            return NotImplemented
        from opgraph.ir.equality import fingerprint

        return self is other or fingerprint(self) == fingerprint(other)

    __hash__ = None  # type: ignore[assignment]  # a graph changes until it is finalized


def _rounded(tensor: LogicalTensor, dtype: str) -> LogicalTensor:
    """An untyped scalar constant, rounded to a dtype."""
    assert tensor.data is not None
    target = dtypes.get(dtype, where=tensor.label)
    value = tensor.data.item()
    if target.category == "int" and not _fits(value, target):
        raise InvalidDataType(
            f"the constant {value!r} is no {dtype}",
            where=tensor.label,
            fix=f"give a whole number in the range of {dtype}, or insert a TypeCast",
        )
    with np.errstate(over="ignore"):  # a number too large for the dtype is infinite in it
        return tensor.with_(dtype=dtype, data=np.asarray(value).astype(target.numpy))


def _fits(value: float, target: dtypes.DType) -> bool:
    info = np.iinfo(target.numpy)
    return value == value and abs(value) != float("inf") and int(value) == value and info.min <= value <= info.max


def _agree(known: LogicalTensor, mention: LogicalTensor) -> bool:
    """Whether two mentions of one id may stand: equal, or one an untyped constant that met its dtype since."""
    if known.is_scalar_constant and mention.is_scalar_constant and dtypes.UNDEF in (known.dtype, mention.dtype):
        return True
    names_agree = known.name == mention.name or known.name is None or mention.name is None
    return names_agree and known.is_equal(mention)
