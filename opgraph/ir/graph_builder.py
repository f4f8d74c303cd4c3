"""Builds derived graphs: equal ops are entered once, and ops that no output needs are dropped."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from opgraph.errors import OpGraphError
from opgraph.ir import dtypes, opdef, schema
from opgraph.ir.attributes import typed_literal
from opgraph.ir.constants import constant_data
from opgraph.ir.copy_graph import needed_ops
from opgraph.ir.expression import Call, Expr, Num, Param, Var
from opgraph.ir.graph import Graph
from opgraph.ir.graph_storage import rounded
from opgraph.ir.logical_tensor import LogicalTensor
from opgraph.ir.op import Op


class GraphBuilder:
    """Builds a graph op by op; equal ops on equal operands are one op.

    Args:
        source: a graph whose tensors and ops may be copied; new tensors and ops get ids above all ids of it.

    Attributes:
        ops: every op so far, producers first.
        active: ids of the tensors whose gradients are requested.
    """

    def __init__(self, source: Graph) -> None:
        self.graph = Graph(source.engine)
        self.graph._tables.next_tensor = source._next_tensor
        self.graph._tables.next_op = source._next_op
        self.ops: list[Op] = []
        self.active: set[int] = set()
        self._known: dict[object, Op] = {}
        self._instead: dict[int, LogicalTensor] = {}
        self._inputs: list[LogicalTensor] = []

    @classmethod
    def inside(cls, op: Op, first: int) -> GraphBuilder:
        """A builder for the parts of an op: on its inputs, all of them active, with new ids from `first` on."""
        builder = cls(Graph())
        for tensor in op.inputs:
            builder.graph._tables.enter_tensor(tensor)
            builder.active.add(tensor.id)
        builder.graph._tables.next_tensor = builder.graph._tables.next_op = first
        return builder

    def input(self, tensor: LogicalTensor) -> LogicalTensor:
        """Declares an input (or a constant), unchanged."""
        if tensor.is_constant:
            self.graph._tables.enter_tensor(tensor)
        else:
            self._inputs.append(self.graph._add_input(tensor))
        return tensor

    def new_input(self, name: str, like: LogicalTensor) -> LogicalTensor:
        """Declares an input with another tensor's dtype and dimensions."""
        return self.input(LogicalTensor(self.graph._next_tensor, like.dtype, like.dims, name=name))

    def copy(self, op: Op, tensors: Mapping[int, LogicalTensor]) -> Op:
        """Enters an op of the source, under its own id.

        Args:
            tensors: the tensors that replace its inputs, by id.

        Returns: the op, or an equal one that was entered before.
        """
        inputs = tuple(tensors[t.id] for t in op.inputs)
        key = _key(op.kind, inputs, op.attrs, op.outputs[0].dtype if op.outputs else None, len(op.outputs))
        foreign = opdef.get(op.kind, where=op.label).foreign  # two equal ones may draw different random numbers
        known = None if foreign else self._known.get(key)
        if known is None:
            known = self.graph._add(op.id, op.kind, inputs, op.outputs, op.name, op.attrs)
            self._enter(known)
        return known

    def enter(self, op: Op) -> None:
        """Enters an op of the source unchanged, even if an equal one was entered before."""
        self._enter(self.graph._add(op.id, op.kind, op.inputs, op.outputs, op.name, op.attrs))

    def __call__(self, kind: str, /, *inputs: LogicalTensor | float, dtype: str | None = None, **attrs: Any) -> Any:
        """Like the short form of `Graph.add_op`: returns the output, or a tuple of outputs."""
        record = opdef.get(kind, where="a derived graph")
        count = sum(not p.optional for p in record.outputs)
        typed = _typed(record, inputs, dtype, count)
        key = _key(kind, typed, {**record.default_attrs(), **attrs}, dtype, count)
        known = self._known.get(key) if typed else None
        outputs = self.fresh(kind, *inputs, dtype=dtype, **attrs) if known is None else known.outputs
        return self._instead.get(outputs[0].id, outputs[0]) if len(outputs) == 1 else outputs

    def stand_in(self, made: LogicalTensor, value: LogicalTensor) -> None:
        """Makes calls of this builder that would return the value `made` return `value` instead."""
        self._instead[made.id] = value

    def fresh(
        self, kind: str, /, *inputs: LogicalTensor | float, dtype: str | None = None, **attrs: Any
    ) -> tuple[LogicalTensor, ...]:
        """Enters an op, even if an equal one was entered before; returns its outputs."""
        made = self.graph.add_op(kind, *inputs, dtype=dtype, **attrs)
        op = self.graph.producer((made[0] if isinstance(made, tuple) else made).id)
        assert op is not None
        self._enter(op)
        return op.outputs

    def wants(self, tensor: LogicalTensor) -> bool:
        """True if the gradient of a tensor is requested."""
        return tensor.id in self.active

    def like(
        self,
        kind: str,
        inputs: Sequence[LogicalTensor],
        outputs: Sequence[LogicalTensor],
        name: str,
        attrs: opdef.Attrs,
    ) -> tuple[LogicalTensor, ...]:
        """Enters an op whose outputs have the dtypes and shapes of `outputs`; returns its outputs."""
        first = self.graph._next_tensor
        made = tuple(LogicalTensor(first + i, t.dtype, t.dims) for i, t in enumerate(outputs))
        op = self.graph._add(self.graph._next_op, kind, tuple(inputs), made, name, dict(attrs))
        self._enter(op)
        return op.outputs

    def _enter(self, op: Op) -> None:
        self.ops.append(op)
        # A request may state the dtype of the output, or none; the dtype then follows from the operands.
        for dtype in (op.outputs[0].dtype, *([None] if _follows(op) else [])) if op.outputs else ():
            self._known.setdefault(_key(op.kind, op.inputs, op.attrs, dtype, len(op.outputs)), op)

    def expression(
        self, tree: Expr, values: Mapping[str, LogicalTensor], attrs: opdef.Attrs, dtype: str | None = None
    ) -> LogicalTensor | float:
        """Enters an expression in the one-line notation.

        Args:
            values: the values of its names.
            attrs: the values of its parameters.
            dtype: bf16 or f16: the requested result dtype if the op may take f32 operands as well.
        """
        # Expressions are written by hand on one line, so the recursion depth is bounded.
        if isinstance(tree, Var):
            return values[tree.name]
        if isinstance(tree, Num):
            return tree.value
        if isinstance(tree, Param):
            return float(attrs[tree.name])
        return self.call(tree, values, attrs, dtype)

    def call(
        self, tree: Call, values: Mapping[str, LogicalTensor], attrs: opdef.Attrs, wanted: str | None = None
    ) -> LogicalTensor:
        """Enters one call of an expression, and its arguments."""
        record = opdef.get(tree.kind, where="an expression")
        args = [self.expression(arg, values, attrs) for arg in tree.args]
        own: dict[str, Any] = {
            n: attrs[v.name] if isinstance(v, Param) else typed_literal(record.attr(n), v) for n, v in tree.attrs
        }
        met = {a.dtype for a in args if isinstance(a, LogicalTensor)}
        dtype = next(iter(met)) if len(met) == 1 and met <= {"bf16", "f16"} and _may_mix(record) else None
        exact: list[Any] = list(args)
        if wanted in ("bf16", "f16") and met == {wanted, "f32"} and _may_mix(record):
            dtype = wanted
        elif dtype is not None:  # a number that the dtype lacks stays f32: 0.01 in bf16 is off by a thousandth
            exact = [a if isinstance(a, LogicalTensor) or _holds(dtype, a) else np.float32(a) for a in args]
        made = self(tree.kind, *exact, dtype=dtype, **own)
        assert isinstance(made, LogicalTensor)
        return made

    def finish(self, outputs: Mapping[str, LogicalTensor]) -> Graph:
        """The finalized graph with only the inputs (in order of declaration) and ops that the outputs need.

        Args:
            outputs: name -> tensor; each tensor is made by an op and has one name.
        """
        names = {t.id: name for name, t in outputs.items()}
        kept, needed = needed_ops(self.ops, names)
        graph = Graph(self.graph.engine)
        tensors: dict[int, LogicalTensor] = {}
        for tensor in self._inputs:
            if tensor.id in needed:
                tensors[tensor.id] = graph._add_input(tensor)
        for op in kept:
            ins = tuple(tensors.get(t.id, t) for t in op.inputs)
            outs = tuple(t.with_(name=names.get(t.id, t.name)) for t in op.outputs)
            tensors.update((t.id, t) for t in outs)
            graph._add(op.id, op.kind, ins, outs, op.name, op.attrs)
        graph.set_outputs(tensors[t.id] for t in outputs.values())
        return graph.finalize()


def _key(kind: str, inputs: Iterable[LogicalTensor], attrs: opdef.Attrs, dtype: object, outputs: int) -> object:
    operands = tuple(map(_operand_key, inputs))
    return kind, operands, tuple(sorted((n, repr(v)) for n, v in attrs.items())), dtype, outputs


def _operand_key(tensor: LogicalTensor) -> object:
    """The id of a tensor, or the dtype and text of a constant number. 2 and 2.0 in one dtype have the same key, but an
    integer that a float does not hold exactly keeps its own text."""
    if tensor.data is None or tensor.data.ndim > 0:
        return tensor.id
    number = tensor.data.item()
    return tensor.dtype, repr(float(number)) if float(number) == number else repr(number)


def _typed(
    record: opdef.OpDef, inputs: Sequence[LogicalTensor | float], dtype: str | None, outputs: int
) -> Sequence[LogicalTensor]:
    """Operands of an op, with numbers as constants of the dtypes that the op gives them; empty if they do not fit."""
    given = [v if isinstance(v, LogicalTensor) else _constant(v) for v in inputs]
    if all(isinstance(value, LogicalTensor) for value in inputs):
        return given
    try:
        found, _ = schema.bind_dtypes(record, given, [dtype] * outputs, record.kind)
    except OpGraphError:
        return ()
    return [t if t.dtype == d else rounded(t, d) for t, d in zip(given, found, strict=True)]


def _constant(value: float) -> LogicalTensor:
    """A number as a constant; its id is a dummy."""
    dtype, data = constant_data(value, None, "a number")
    return LogicalTensor(0, dtype, (), data=data)


def _follows(op: Op) -> bool:
    """True if the result has the dtype that is inferred when none is requested."""
    record, port = opdef.of(op), opdef.of(op).outputs[0]
    if port.type not in record.types or any(p.type == port.type for p in record.inputs):
        return True
    try:
        _, found = schema.bind_dtypes(record, op.inputs, [None] * len(op.outputs), op)
    except OpGraphError:  # a cast
        return False
    return found[0] == op.outputs[0].dtype


def _may_mix(record: opdef.OpDef) -> bool:
    """True if operands and result may have different dtypes, so that a number need not be rounded to theirs."""
    return len({p.type for p in (*record.inputs, *record.outputs)} & record.types.keys()) > len(record.inputs) > 1


def _holds(dtype: str, value: float) -> bool:
    return float(dtypes.get(dtype).numpy.type(value)) == value
