"""Tables: the content of a graph by id, and the entry of ops."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from opgraph.errors import InvalidArguments, InvalidGraph
from opgraph.ir import dtypes
from opgraph.ir.constants import converted
from opgraph.ir.logical_tensor import LogicalTensor, port_name
from opgraph.ir.op import Op
from opgraph.ir.shapes import dims_agree

#: The most names that a message lists.
_MOST_NAMES = 4


@dataclass(slots=True, weakref_slot=True)
class Tables:
    """The content of a graph.

    Attributes:
        ops: by id, in the order of addition.
        tensors: by id: the first mention. An untyped constant gets its dtype when an op determines it.
        producer: the op that makes a tensor, by tensor id.
        inputs: ids of tensors that no op makes, in the order of declaration or first use (a dict for its order).
        declared: name -> id of the inputs that were declared, as opposed to only read by an op.
        outputs: ids of the declared outputs, in order.
        exact_outputs: True if these are the only outputs.
        conflicts: mentions that disagree; finalize reports them, as in oneDNN.
        next_tensor, next_op: ids above all ids in use.
    """

    ops: dict[int, Op] = field(default_factory=dict)
    tensors: dict[int, LogicalTensor] = field(default_factory=dict)
    producer: dict[int, Op] = field(default_factory=dict)
    inputs: dict[int, None] = field(default_factory=dict)
    declared: dict[str, int] = field(default_factory=dict)
    outputs: dict[int, None] = field(default_factory=dict)
    exact_outputs: bool = False
    conflicts: list[tuple[LogicalTensor, LogicalTensor, Op]] = field(default_factory=list)
    next_tensor: int = 0
    next_op: int = 0

    def enter(self, op: Op) -> None:
        """Adds a checked op."""
        for tensor in (*op.inputs, *op.outputs):
            self._own(tensor)
            known = self.tensors.get(tensor.id)
            if known is not None and known is not tensor and not agree(known, tensor):
                self.conflicts.append((known, tensor, op))
                continue
            if known is None or known.dtype == dtypes.UNDEF or known.name is None:
                self.enter_tensor(tensor)
        for tensor in op.outputs:
            self.producer[tensor.id] = op
            self.inputs.pop(tensor.id, None)
        for tensor in op.inputs:
            if tensor.id not in self.producer and not tensor.is_constant:
                self.inputs.setdefault(tensor.id)
        self.ops[op.id] = op
        self.next_op = max(self.next_op, op.id + 1)

    def enter_input(self, tensor: LogicalTensor) -> None:
        """Adds a declared input."""
        self.enter_tensor(tensor)
        self.inputs.setdefault(tensor.id)
        self.declared[tensor.name or f"t{tensor.id}"] = tensor.id

    def enter_tensor(self, tensor: LogicalTensor) -> None:
        """Adds a tensor that belongs to no op yet."""
        self._own(tensor)
        self.tensors[tensor.id] = tensor
        self.next_tensor = max(self.next_tensor, tensor.id + 1)

    def _own(self, tensor: LogicalTensor) -> None:
        if tensor._owner is None:
            object.__setattr__(tensor, "_owner", weakref.ref(self))

    def __setstate__(self, state: tuple[None, dict[str, Any]]) -> None:
        for name, value in state[1].items():
            setattr(self, name, value)
        for op in self.ops.values():
            for tensor in (*op.inputs, *op.outputs):
                self._own(tensor)
        for tensor in self.tensors.values():  # unpickled tensors have no owner
            self._own(tensor)

    def check_own(self, tensor: LogicalTensor, where: str) -> None:
        """Checks that a tensor does not belong to another graph. Ids do not distinguish graphs: all count from 0.

        A tensor that is in no graph yet passes. Copies of a graph, and graphs made from it, share its tensors.

        Raises:
            InvalidGraph: the tensor belongs to another graph; the message names both.
        """
        owner, known = tensor._owner, self.tensors.get(tensor.id)
        if owner is None or (known is not None and known._owner is owner):
            return
        other = owner()
        if other is self:
            return
        name = other.label if isinstance(other, Tables) else "a graph that is gone"
        raise InvalidGraph(
            f"{tensor.label} ({tensor.type_text}) is of another graph: {name}; this one is {self.label}",
            where=where,
            fix="pass tensors that this graph's input, constant and add_op gave",
        )

    @property
    def label(self) -> str:
        """The name of the graph in messages: its inputs and outputs."""
        ins, outs = (_listed([port_name(self.tensors[i]) for i in ids]) for ids in (self.inputs, self.output_ids()))
        return f"graph({ins}) -> ({outs})"

    def known_ids(self, tensors: Iterable[LogicalTensor], where: str) -> list[int]:
        """The ids of tensors of this graph.

        Raises:
            InvalidArguments: an item is not a LogicalTensor.
            InvalidGraph: a tensor belongs to another graph, or has another name or type than this graph's.
        """
        ids = []
        for tensor in tensors:
            if not isinstance(tensor, LogicalTensor):
                raise InvalidArguments(
                    f"got {type(tensor).__name__} as an output", where=where, fix="pass LogicalTensors of this graph"
                )
            self.check_own(tensor, where)
            known = self.tensors.get(tensor.id)
            if known is None:
                raise InvalidGraph(
                    f"{tensor.label} is not in this graph", where=where, fix="add the op that makes it first"
                )
            if not _may_be(known, tensor):
                raise InvalidGraph(
                    f"{tensor.label} ({tensor.type_text}) is not {known.label} ({known.type_text}) of this graph, "
                    f"though both have id {tensor.id}",
                    where=where,
                    fix="pass the tensor that the graph gave; `name` of input and add_op names it",
                )
            ids.append(tensor.id)
        return ids

    def output_ids(self) -> list[int]:
        """Ids of outputs: declared ones, inputs of End, then values without a consumer."""
        if self.exact_outputs:
            return list(self.outputs)
        consumed = {t.id for op in self.ops.values() if op.kind != "End" for t in op.inputs}
        outputs = dict(self.outputs)
        for op in self.ops.values():
            for tensor in op.inputs if op.kind == "End" else op.outputs:
                if op.kind == "End" or tensor.id not in consumed:
                    outputs.setdefault(tensor.id)
        return list(outputs)


def _listed(names: list[str]) -> str:
    return ", ".join(names[:_MOST_NAMES]) + (", ..." if len(names) > _MOST_NAMES else "")


def agree(known: LogicalTensor, mention: LogicalTensor) -> bool:
    """True if two mentions of one id are equal, or the first is an untyped constant that gets its dtype now."""
    if known.is_constant and mention.is_constant and dtypes.UNDEF == known.dtype != mention.dtype:
        known = rounded(known, mention.dtype)
    names_agree = known.name == mention.name or known.name is None or mention.name is None
    return names_agree and known.is_equal(mention)


def _may_be(known: LogicalTensor, mention: LogicalTensor) -> bool:
    """True if the name, dtype and dims of a mention fit the known tensor; unstated parts fit anything."""
    return (
        mention.name in (None, known.name)
        and (dtypes.UNDEF in (mention.dtype, known.dtype) or mention.dtype == known.dtype)
        and (mention.dims is None or known.dims is None or dims_agree(mention.dims, known.dims))
    )


def rounded(tensor: LogicalTensor, dtype: str) -> LogicalTensor:
    """An untyped scalar constant in a dtype: rounded once to a float dtype, else exact.

    Raises:
        InvalidDataType: the dtype does not hold the number.
    """
    assert tensor.data is not None
    return tensor.with_(dtype=dtype, data=converted(tensor.data, dtypes.get(dtype, where=tensor.label), tensor.label))
