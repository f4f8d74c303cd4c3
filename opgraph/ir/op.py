"""Op: one node. It is mutable during construction; a graph keeps a locked copy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from opgraph.errors import InvalidArguments, InvalidGraph
from opgraph.ir.dims import checked_id
from opgraph.ir.logical_tensor import LogicalTensor

AttrValue: TypeAlias = bool | int | float | str | tuple[int, ...] | tuple[float, ...] | tuple[str, ...]


_set = object.__setattr__


class Op:
    """One operation: a kind, its logical tensors in order, its attributes.

    Args:
        id: unique among the ops of a graph.
        kind: a name of the op set (`opgraph ops` lists them).
        inputs, outputs: LogicalTensors, in the order of the kind's schema.
        name: for messages; `Kind_id` if omitted.

    `Graph.add_op` checks the schema, as in oneDNN; the constructor does not.

    Raises:
        InvalidArguments: the id is not a non-negative int, the kind or name is not a str, or inputs or outputs are not
            LogicalTensors.
    """

    __slots__ = ("_attrs", "_inputs", "_locked", "_outputs", "id", "kind", "name")

    id: int
    kind: str
    name: str
    _locked: bool
    _inputs: tuple[LogicalTensor, ...]
    _outputs: tuple[LogicalTensor, ...]
    _attrs: dict[str, AttrValue]

    def __init__(
        self,
        id: int,
        kind: str,
        inputs: Sequence[LogicalTensor] = (),
        outputs: Sequence[LogicalTensor] = (),
        name: str = "",
    ) -> None:
        if type(id) is not int or id < 0:
            id = checked_id(id, "op", f"{kind} op")
        if not isinstance(kind, str) or not isinstance(name, str):
            raise InvalidArguments(f"kind {kind!r} or name {name!r} is no text", where=f"op {id}", fix="give a str")
        self._put(False, id, kind, (), (), name, {})
        _set(self, "_inputs", _tensors(inputs, self))
        _set(self, "_outputs", _tensors(outputs, self))

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
        """Returns the form that a graph keeps: checked, complete and immutable."""
        op: Op = object.__new__(cls)
        op._put(True, id, kind, inputs, outputs, name, attrs)
        return op

    def _put(
        self,
        locked: bool,
        id: int,
        kind: str,
        inputs: tuple[LogicalTensor, ...],
        outputs: tuple[LogicalTensor, ...],
        name: str,
        attrs: dict[str, AttrValue],
    ) -> None:
        # Bypasses __setattr__, whose check of the lock took a fifth of the time of building a graph.
        _set(self, "_locked", locked)
        _set(self, "id", id)
        _set(self, "kind", kind)
        _set(self, "name", name or f"{kind}_{id}")
        _set(self, "_inputs", inputs)
        _set(self, "_outputs", outputs)
        _set(self, "_attrs", attrs)

    @property
    def inputs(self) -> tuple[LogicalTensor, ...]:
        """Inputs in the order of the schema."""
        return self._inputs

    @property
    def outputs(self) -> tuple[LogicalTensor, ...]:
        """Outputs in the order of the schema."""
        return self._outputs

    @property
    def attrs(self) -> dict[str, AttrValue]:
        """A copy of the attributes; in a graph, with the defaults."""
        return dict(self._attrs)

    def attr(self, name: str) -> AttrValue:
        """One attribute.

        Raises:
            InvalidArguments: the attribute is not set.
        """
        try:
            return self._attrs[name]
        except (KeyError, TypeError):
            raise InvalidArguments(
                f"attribute {name!r} is not set", where=self.label, fix=f"it has {', '.join(self._attrs) or 'none'}"
            ) from None

    def add_input(self, tensor: LogicalTensor) -> Op:
        """Appends an input; returns the op, so that calls chain.

        Raises:
            InvalidGraph: the op belongs to a graph already.
            InvalidArguments: `tensor` is not a LogicalTensor.
        """
        return self.add_inputs((tensor,))

    def add_inputs(self, tensors: Sequence[LogicalTensor]) -> Op:
        """Appends inputs, as `add_input` does."""
        self._check_open()
        self._inputs += _tensors(tensors, self)
        return self

    def add_output(self, tensor: LogicalTensor) -> Op:
        """Appends an output; returns the op, so that calls chain.

        Raises:
            InvalidGraph: the op belongs to a graph already.
            InvalidArguments: `tensor` is not a LogicalTensor.
        """
        return self.add_outputs((tensor,))

    def add_outputs(self, tensors: Sequence[LogicalTensor]) -> Op:
        """Appends outputs, as `add_output` does."""
        self._check_open()
        self._outputs += _tensors(tensors, self)
        return self

    def set_attr(self, name: str, value: AttrValue | list[int] | list[float] | list[str]) -> Op:
        """Sets an attribute; returns the op, so that calls chain.

        Raises:
            InvalidGraph: the op belongs to a graph already.
            InvalidArguments: `name` is not a str.
        """
        self._check_open()
        if not isinstance(name, str):
            raise InvalidArguments(f"{name!r} is no name of an attribute", where=self.label, fix="give a str")
        self._attrs[name] = tuple(value) if isinstance(value, list) else value  # type: ignore[assignment]
        return self

    def __setstate__(self, state: tuple[None, dict[str, object]]) -> None:
        for name, value in state[1].items():  # bypasses __setattr__, which reads fields that are not set yet
            object.__setattr__(self, name, value)

    def __setattr__(self, name: str, value: object) -> None:
        if name != "_locked":
            self._check_open()
        object.__setattr__(self, name, value)

    def _check_open(self) -> None:
        if self._locked:
            raise InvalidGraph(
                "an op of a graph cannot be changed", where=self.label, fix="change it before add_op, or add a new op"
            )

    @property
    def label(self) -> str:
        """The name of this op in messages."""
        return f'{self.kind} "{self.name}"'

    @property
    def where(self) -> str:
        """The op and its inputs, for messages."""
        ins = ", ".join(f"{t.name or t.id} {t.type_text}" for t in self._inputs)
        return f"{self.label} (inputs: {ins or 'none'})"

    def __repr__(self) -> str:
        return f"Op({self.id}, {self.kind!r}, {self.name!r})"


def _tensors(given: Sequence[LogicalTensor], op: Op) -> tuple[LogicalTensor, ...]:
    tensors = tuple(given) if isinstance(given, (list, tuple)) else (given,)
    for tensor in tensors:
        if not isinstance(tensor, LogicalTensor):
            raise InvalidArguments(
                f"got {type(tensor).__name__} where a LogicalTensor is expected",
                where=op.label,
                fix="give a list of LogicalTensors: inputs=[x], outputs=[y]",
            )
    return tensors
