"""One reverse pass: each op's gradient rule, applied from the outputs back to the inputs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from opgraph.errors import InvalidArguments, Unimplemented
from opgraph.ir import dtypes, opdef
from opgraph.ir.expression import Call, Expr, Num
from opgraph.ir.graph import Graph
from opgraph.ir.graph_builder import GraphBuilder
from opgraph.ir.logical_tensor import LogicalTensor, port_name
from opgraph.ir.op import Op
from opgraph.transforms.adjoint import Conditional, Conditions, Contribution
from opgraph.transforms.conditions import by_choice
from opgraph.transforms.cut import kept_name
from opgraph.transforms.masks import Told


class Reverse:
    """One reverse pass; arguments are those of `differentiated`."""

    def __init__(
        self,
        graph: Graph,
        wrt: Sequence[str],
        given: Collection[int],
        from_outputs: Collection[int],
        masks: Mapping[int, Told],
        by_choice: Collection[int],
    ) -> None:
        self.source = graph
        self.builder = GraphBuilder(graph)
        self.conditional = Conditional(self.builder)
        self.from_outputs, self.by_choice = from_outputs, by_choice
        #: The builder's tensor for each tensor of the graph.
        self.values: dict[int, LogicalTensor] = {}
        self.parts: dict[int, list[Contribution]] = {}
        #: Tensors of the builder that need a gradient, because they depend on `wrt`.
        self.active = self.builder.active
        #: The value that receives the gradient of another: for the result of an op without a rule, the same value
        #: computed by smaller ops; for a given value, the result of the op that computes it.
        self.stands_in: dict[int, int] = {}
        #: The given value that rules read in place of the result of the op here.
        self.given: dict[int, LogicalTensor] = {}
        for tensor in (*graph.inputs, *graph.constants):
            self.values[tensor.id] = self.builder.input(tensor)
        by_name = {port_name(t): t for t in graph.inputs}
        self.wrt = [(name, by_name[name]) for name in wrt]
        self.active.update(t.id for _, t in self.wrt)
        #: Forward values that are inputs here, by their id in the graph.
        self.kept: dict[int, LogicalTensor] = {}
        self.masks = {i: self.builder(told.kind, self._keep(told.output), told.bound) for i, told in masks.items()}
        for op in graph.ops:
            if op.kind != "End":
                self._forward(op, given)

    def graph(self, outputs: Collection[str] | None) -> Graph:
        """The gradient graph."""
        seeds = []
        forward = list(self.builder.ops)
        for tensor in self.source.outputs:
            value = self.values[tensor.id]
            is_given = outputs is None or port_name(tensor) in outputs
            if is_given and value.id in self.active and value.dtype in dtypes.FLOATS:
                seeds.append((f"d_{port_name(tensor)}", value))
        taken = {port_name(t) for t in self.source.inputs}
        for name, value in seeds:
            if name in taken:
                raise InvalidArguments(
                    f'the gradient graph would have two inputs called "{name}"',
                    where="gradient",
                    fix="rename the input or the output of the graph",
                )
            self._add(value, Contribution(self.builder.new_input(name, value)))
        for op in reversed(forward):
            self._reverse(op)
        return self.builder.finish(self._results())

    # -- forward ------------------------------------------------------------------------------------------------

    def _forward(self, op: Op, given: Collection[int]) -> None:
        """Adds a forward op, and inputs in place of its results that are given."""
        copied = self.builder.copy(op, self.values)
        self.values.update((t.id, made) for t, made in zip(op.outputs, copied.outputs, strict=True))
        is_active = any(t.id in self.active for t in copied.inputs)
        record = opdef.get(op.kind, where=op.label)
        if is_active:
            # A value without a dtype (a sequence) may hold floats; the rule determines which of its parts count.
            self.active.update(t.id for t in copied.outputs if t.dtype in dtypes.FLOATS or t.dtype == dtypes.UNDEF)
            if record.gradient is None and record.decomposition is not None and record.is_pointwise:
                self._decompose(copied, record)
            elif record.gradient is None and record.spelled is not None:
                self._spell(copied, record.spelled)
        for tensor, made in zip(op.outputs, copied.outputs, strict=True):
            if tensor.id in self.masks:
                self.given[made.id] = self.masks[tensor.id]
            elif tensor.id in given and made.id not in self.given:
                value = self.given[made.id] = self._keep(tensor)
                self.builder.stand_in(made, value)
                self.stands_in[value.id] = self.stands_in.get(made.id, made.id)
                self.active.update({value.id} if made.id in self.active else ())
            self.values[tensor.id] = self.given.get(made.id, made)

    def _keep(self, tensor: LogicalTensor) -> LogicalTensor:
        """The input that holds a forward value."""
        if tensor.id not in self.kept:
            self.kept[tensor.id] = self.builder.new_input(kept_name(self.source, tensor), tensor)
        return self.kept[tensor.id]

    def _decompose(self, op: Op, record: opdef.OpDef) -> None:
        names = [p.name for p in record.with_optional(len(op.inputs))]
        tree = record.decompose(op.attrs, names)
        assert isinstance(tree, Call)
        before = len(self.builder.ops)
        root = self.builder.call(tree, dict(zip(names, self._aligned(record, op), strict=True)), op.attrs)
        self._activate(before)
        self.stands_in[op.outputs[0].id] = root.id

    def _spell(self, op: Op, speller: opdef.Speller) -> None:
        """Adds the same op as smaller ones, which its gradient passes through."""
        before = len(self.builder.ops)
        for tensor, made in zip(op.outputs, speller(self.builder, op), strict=True):
            self.stands_in[tensor.id] = made.id
        self._activate(before)

    def _activate(self, before: int) -> None:
        """Marks the results of the ops added since `before` that depend on `wrt`."""
        for added in self.builder.ops[before:]:
            if any(t.id in self.active for t in added.inputs):
                self.active.update(t.id for t in added.outputs if t.dtype in dtypes.FLOATS)

    def _aligned(self, record: opdef.OpDef, op: Op) -> list[LogicalTensor]:
        """Operands of an op here. Those along a channel axis are broadcast, so that formulas may use them directly."""
        operands = list(op.inputs)
        ranks = [t.ndim for t in op.inputs]
        for index in record.channel_inputs:
            if record.lies_along_channel(index, ranks, op.attrs):
                like = operands[1 - index]
                operands[index] = self.builder("BroadcastTo", operands[index], like, **_channel(op))
        return operands

    # -- backward -----------------------------------------------------------------------------------------------

    def _add(self, tensor: LogicalTensor, part: Contribution) -> None:
        self.parts.setdefault(self.stands_in.get(tensor.id, tensor.id), []).append(part)

    def _reverse(self, op: Op) -> None:
        """Passes the gradients of an op's outputs on to its inputs."""
        parts = [self.parts.pop(t.id, None) for t in op.outputs]
        wanted = [t.id in self.active for t in op.inputs]
        if not any(parts) or not any(wanted):
            return
        record = opdef.get(op.kind, where=op.label)
        if callable(record.gradient):
            written = [None if p is None else self.conditional.written_total(p) for p in parts]
            kept = tuple(self.given.get(t.id, t) for t in op.outputs)
            seen = Op.locked(op.id, op.kind, op.inputs, kept, op.name, op.attrs)
            for tensor, value in zip(op.inputs, record.gradient(self.builder, seen, written), strict=True):
                if value is not None and tensor.id in self.active:
                    self._to_operand(tensor, Contribution(value), {})
            return
        if not isinstance(record.gradient, Mapping):
            raise _refused(op, record)
        if parts[0] is None:
            return
        total = self.conditional.total(parts[0])
        names = [p.name for p in record.with_optional(len(op.inputs))]
        values = dict(zip(names, self._aligned(record, op), strict=True))
        values.update((p.name, self.given.get(t.id, t)) for p, t in zip(record.outputs, op.outputs))
        values["d"], conditions = total.value, total.conditions
        ranks = [t.ndim for t in op.inputs]
        if record.family == "sum" and record.lies_along_channel(1, ranks, op.attrs):  # broadcast like d
            conditions = self.conditional.spread(conditions, op.inputs[0], _channel(op))
        for index, (name, tensor) in enumerate(zip(names, op.inputs, strict=True)):
            if not wanted[index]:
                continue
            tree = record.gradient_of(name, op.attrs, names)
            if op.id in self.from_outputs:
                tree = record.gradient_of(None, op.attrs, names) or tree
            elif op.id in self.by_choice:
                tree = by_choice(tree) or tree
            if tree is None:
                raise _refused(op, record, name)
            channel = _channel(op) if record.lies_along_channel(index, ranks, op.attrs) else {}
            # In 16 bits if the operand is. In f32 (numbers like 0.1 stay in f32), a TypeCast would round it here.
            dtype = tensor.dtype if total.value.dims == tensor.dims and not channel else None
            for part in self._branches(tree, values, op.attrs, conditions, dtype):
                self._to_operand(tensor, part, channel)

    def _branches(
        self,
        tree: Expr,
        values: Mapping[str, LogicalTensor],
        attrs: opdef.Attrs,
        conditions: Conditions,
        dtype: str | None,
    ) -> list[Contribution]:
        """The contributions of a rule; a Select between a value and 0 is kept as a condition.

        Args:
            dtype: the operand's dtype, which the contribution has even if its op has f32 operands.
        """
        if tree == Num(0):
            return []
        if isinstance(tree, Call) and tree.kind == "Select":
            condition = self.builder.expression(tree.args[0], values, attrs)
            assert isinstance(condition, LogicalTensor)
            if Num(0) in tree.args[1:]:
                holds = tree.args[2] == Num(0)
                inner = self.conditional.under(conditions, condition, holds)
                return self._branches(tree.args[1 if holds else 2], values, attrs, inner, dtype)
        value = self.builder.expression(tree, values, attrs, dtype)
        assert isinstance(value, LogicalTensor)
        return [Contribution(value, conditions)]

    def _to_operand(self, tensor: LogicalTensor, part: Contribution, channel: dict[str, Any]) -> None:
        """Adds a contribution to an operand: summed to its shape if it was broadcast, in its dtype."""
        value = part.value
        if channel or value.dims is None or value.dims != tensor.dims or None in value.dims:
            value = self.conditional.written(part)
            if (value.dtype, tensor.dtype) in (("bf16", "f32"), ("f16", "f32")):  # the sum is not rounded to 16 bits
                value = self.builder("TypeCast", value, dtype="f32")
            part = Contribution(value := self.builder("SumTo", value, tensor, **channel))
        if value.dtype != tensor.dtype:
            part = Contribution(self.builder("TypeCast", part.value, dtype=tensor.dtype), part.conditions)
        self._add(tensor, part)

    def _results(self) -> dict[str, LogicalTensor]:
        """The outputs by name; each is a separate tensor."""
        results: dict[str, LogicalTensor] = {}
        used: set[int] = set()
        for name, tensor in self.wrt:
            if tensor.id in self.parts:
                value = self.conditional.written_total(self.parts[tensor.id])
            else:
                zero = self.builder.graph.constant("", 0.0, dtype=tensor.dtype)
                value = self.builder("BroadcastTo", zero, tensor)
            if value.id in used or self.builder.graph.producer(value.id) is None:
                (value,) = self.builder.fresh("BroadcastTo", value, tensor)
            used.add(value.id)
            results[f"d_{name}"] = value
        return results


def _channel(op: Op) -> dict[str, Any]:
    """The attributes that define the axis of a channel operand."""
    return {k: value for k, value in op.attrs.items() if k in ("data_format", "per_channel_broadcast")}


def _refused(op: Op, record: opdef.OpDef, name: str = "") -> Unimplemented:
    of = f" with respect to {name}" if name else ""
    said = record.gradient.get(name) if isinstance(record.gradient, Mapping) else record.gradient
    if isinstance(said, str):
        what = f"{op.kind} has no gradient{of}: {said.removeprefix('none: ')}"
        fix = "leave what depends on it out of wrt"
    else:
        what = f"nobody has written the gradient of {op.kind}{of}"
        fix = "compose it of ops that have one (`opgraph ops` says which), or leave what depends on it out of wrt"
    return Unimplemented(what, where=op.where, fix=fix)
