"""Op: one node. Mutable while it is being put together; a graph keeps a locked copy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from opgraph.errors import InvalidArguments, InvalidGraph
from opgraph.ir.logical_tensor import LogicalTensor

AttrValue: TypeAlias = bool | int | float | str | tuple[int, ...] | tuple[float, ...] | tuple[str, ...]


class Op:
    """One operation: a kind, its logical tensors in order, its attributes.

    Args:
        id: unique among the ops of a graph.
        kind: a name of the op set (`opgraph ops` lists them).
        inputs, outputs: LogicalTensors, in the order of the kind's schema.
        name: for messages; `Kind_id` when left out.

    Nothing is checked here: `Graph.add_op` checks against the schema, as in oneDNN.
    """

    __slots__ = ("_attrs", "_inputs", "_locked", "_outputs", "id", "kind", "name")

    def __init__(
        self,
        id: int,
        kind: str,
        inputs: Sequence[LogicalTensor] = (),
        outputs: Sequence[LogicalTensor] = (),
        name: str = "",
    ) -> None:
        if type(id) is not int or id < 0:
            raise InvalidArguments(f"op id {id!r} is not a non-negative int", where=f"{kind} op", fix="use 0, 1, ...")
        self.id = id
        self.kind = kind
        self.name = name or f"{kind}_{id}"
        self._inputs = tuple(inputs)
        self._outputs = tuple(outputs)
        self._attrs: dict[str, AttrValue] = {}
        self._locked = False

    @classmethod
    def locked(
        cls,
        id: int,
        kind: str,
        inputs: tuple[LogicalTensor, ...],
        outputs: tuple[LogicalTensor, ...],
        name: str,
        attrs: dict[str, AttrValue],
    ) -> Op:
        """The form that a graph keeps: checked, complete, not to be changed."""
        op = cls(id, kind, inputs, outputs, name)
        op._attrs = attrs
        op._locked = True
        return op

    @property
    def inputs(self) -> tuple[LogicalTensor, ...]:
        return self._inputs

    @property
    def outputs(self) -> tuple[LogicalTensor, ...]:
        return self._outputs

    @property
    def attrs(self) -> dict[str, AttrValue]:
        """A copy of the attributes; in a graph, defaults included."""
        return dict(self._attrs)

    def attr(self, name: str) -> AttrValue:
        """One attribute.

        Raises:
            InvalidArguments: it is not set.
        """
        try:
            return self._attrs[name]
        except KeyError:
            raise InvalidArguments(
                f"attribute {name!r} is not set", where=self.label, fix=f"it has {', '.join(self._attrs) or 'none'}"
            ) from None

    def add_input(self, tensor: LogicalTensor) -> Op:
        self._check_open()
        self._inputs += (tensor,)
        return self

    def add_output(self, tensor: LogicalTensor) -> Op:
        self._check_open()
        self._outputs += (tensor,)
        return self

    def set_attr(self, name: str, value: AttrValue | list[int] | list[float] | list[str]) -> Op:
        """Sets an attribute; returns the op, so that calls chain.

        Raises:
            InvalidGraph: the op belongs to a graph already.
        """
        self._check_open()
        self._attrs[name] = tuple(value) if isinstance(value, list) else value  # type: ignore[assignment]
        return self

    def _check_open(self) -> None:
        if self._locked:
            raise InvalidGraph(
                "an op of a graph cannot be changed", where=self.label, fix="change it before add_op, or add a new op"
            )

    @property
    def label(self) -> str:
        """How messages call this op."""
        return f'{self.kind} "{self.name}"'

    @property
    def where(self) -> str:
        """The op and what it is given, for messages."""
        ins = ", ".join(f"{t.name or t.id} {t.type_text}" for t in self._inputs)
        return f"{self.label} (inputs: {ins or 'none'})"

    def __repr__(self) -> str:
        return f"Op({self.id}, {self.kind!r}, {self.name!r})"
