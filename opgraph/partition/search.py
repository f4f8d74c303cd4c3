"""Matches a pattern against the ops around one op of a graph, by backtracking of bounded depth."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from opgraph.ir import dtypes, opdef
from opgraph.ir.expression import Call, Expr, Num, Param, Var
from opgraph.ir.logical_tensor import LogicalTensor
from opgraph.ir.op import AttrValue, Op
from opgraph.ir.schema import f32
from opgraph.ops.families import LAYOUT_ATTRS
from opgraph.partition.pattern import ONE_OF, Pattern
from opgraph.partition.view import Form, View, equals_number, is_scalar


@dataclass(slots=True)
class Match:
    """The bindings of a pattern's names (values, scalar constants, attributes), and the matched ops, by id."""

    root: Op
    tensors: dict[str, LogicalTensor] = field(default_factory=dict)
    scalars: dict[str, LogicalTensor] = field(default_factory=dict)
    attrs: dict[str, AttrValue] = field(default_factory=dict)
    ops: dict[int, Op] = field(default_factory=dict)


def find_match(pattern: Pattern, op: Op, view: View, accept: Callable[[Match], bool]) -> Match | None:
    """The first match of a pattern at `op` for which `accept` returns True, or None."""
    if op.kind != pattern.root or not op.outputs or op.outputs[0].dtype not in dtypes.FLOATS:
        return None
    search = _Search(view, Match(op), accept)
    return search.match if search.read(pattern.tree, Form(op.kind, op.inputs, op.attrs, (op,)), None) else None


@dataclass(frozen=True, slots=True)
class _Goal:
    """`tensor`, an operand next to `peers`, must match `expr`."""

    expr: Expr
    tensor: LogicalTensor
    peers: tuple[LogicalTensor, ...]
    then: _Goals


@dataclass(frozen=True, slots=True)
class _Assign:
    """`leaves`, in some order, must match `args`."""

    args: tuple[Expr, ...]
    leaves: tuple[LogicalTensor, ...]
    peers: tuple[LogicalTensor, ...]
    then: _Goals


_Goals: TypeAlias = "_Goal | _Assign | None"


class _Search:
    """Backtracking over operand orders and alternatives; its depth depends on the pattern, not on the graph."""

    def __init__(self, view: View, match: Match, accept: Callable[[Match], bool]) -> None:
        self.view = view
        self.match = match
        self.accept = accept

    def solve(self, goal: _Goals) -> bool:
        if goal is None:
            return _one_float_dtype(self.match) and self.accept(self.match)
        if isinstance(goal, _Assign):
            return self.assign(goal)
        if isinstance(goal.expr, Call):
            return self.call(goal.expr, goal)
        if isinstance(goal.expr, Var):
            return self.bind(self.match.tensors, goal.expr.name, goal.tensor, goal.then)
        if not is_scalar(goal.tensor, goal.peers):
            return False
        if isinstance(goal.expr, Num):
            return equals_number(goal.tensor, goal.expr.value) and self.solve(goal.then)
        return self.bind(self.match.scalars, goal.expr.name, goal.tensor, goal.then)

    def bind(self, names: dict[str, LogicalTensor], name: str, tensor: LogicalTensor, then: _Goals) -> bool:
        known = names.get(name)
        if known is not None:
            return known.id == tensor.id and self.solve(then)
        names[name] = tensor
        if self.solve(then):
            return True
        del names[name]
        return False

    def call(self, call: Call, goal: _Goal) -> bool:
        if call.kind == ONE_OF:
            return any(self.solve(_Goal(arg, goal.tensor, goal.peers, goal.then)) for arg in call.args)
        op = self.view.producer(goal.tensor)
        if op is None or not self.view.reads_as(op, call.kind):
            return False
        return any(self.read(call, form, goal.then) for form in self.view.forms(op) if form.kind == call.kind)

    def read(self, call: Call, form: Form, then: _Goals) -> bool:
        """Matches a call with one reading of an op."""
        bound = self.bind_attrs(call, form.attrs)
        if bound is None:
            return False
        added = [op for op in form.ops if op.id not in self.match.ops]
        self.match.ops.update((op.id, op) for op in added)
        if self.operands(call, form, then):
            return True
        for op in added:
            del self.match.ops[op.id]
        for name in bound:
            del self.match.attrs[name]
        return False

    def bind_attrs(self, call: Call, given: dict[str, AttrValue]) -> list[str] | None:
        """Names bound to attributes; None if an attribute differs from the pattern."""
        stated = dict(call.attrs)
        bound: list[str] = []
        for name, value in given.items():
            want = stated.pop(name, None)
            if isinstance(want, Param):
                if want.name not in self.match.attrs:
                    self.match.attrs[want.name] = value
                    bound.append(want.name)
                elif self.match.attrs[want.name] != value:
                    break
            elif want is None:
                if name not in LAYOUT_ATTRS and value != _default(call.kind, name):
                    break
            elif value != (f32(want) if isinstance(want, float) else want):
                break
        else:
            if not stated:
                return bound
        for name in bound:
            self.match.attrs.pop(name, None)
        return None

    def operands(self, call: Call, form: Form, then: _Goals) -> bool:
        commutative = opdef.get(call.kind, where="a pattern").commutative
        if not commutative:
            if len(call.args) != len(form.inputs):
                return False
            for arg, tensor in zip(call.args, form.inputs, strict=True):
                then = _Goal(arg, tensor, form.inputs, then)
            return self.solve(then)
        for leaves, inner in self.flattened(form, len(call.args)):
            added = [op for op in inner if op.id not in self.match.ops]
            self.match.ops.update((op.id, op) for op in added)
            if self.solve(_Assign(call.args, leaves, leaves, then)):
                return True
            for op in added:
                del self.match.ops[op.id]
        return False

    def flattened(self, form: Form, count: int) -> list[tuple[tuple[LogicalTensor, ...], tuple[Op, ...]]]:
        """The ways to read a tree of one commutative kind as `count` operands, and the ops in between."""
        found: list[tuple[tuple[LogicalTensor, ...], tuple[Op, ...]]] = [(form.inputs, ())]
        for _ in range(count - len(form.inputs)):
            wider: dict[tuple[int, ...], tuple[tuple[LogicalTensor, ...], tuple[Op, ...]]] = {}
            for leaves, inner in found:
                for index, leaf in enumerate(leaves):
                    op = self.view.producer(leaf)
                    if op is not None and op.kind == form.kind:
                        opened = (*leaves[:index], *op.inputs, *leaves[index + 1 :])
                        wider.setdefault(tuple(sorted(t.id for t in opened)), (opened, (*inner, op)))
            found = list(wider.values())
        return [entry for entry in found if len(entry[0]) == count]

    def assign(self, goal: _Assign) -> bool:
        if not goal.args:
            return self.solve(goal.then)
        tried: set[int] = set()
        for index, leaf in enumerate(goal.leaves):
            if leaf.id in tried:
                continue
            tried.add(leaf.id)
            rest = _Assign(goal.args[1:], goal.leaves[:index] + goal.leaves[index + 1 :], goal.peers, goal.then)
            if self.solve(_Goal(goal.args[0], leaf, goal.peers, rest)):
                return True
        return False


def _default(kind: str, name: str) -> AttrValue | None:
    attr = opdef.get(kind, where="a pattern").attr(name)
    default = None if attr is None else attr.default
    return f32(default) if isinstance(default, float) else default


def _one_float_dtype(match: Match) -> bool:
    """True if all values, except conditions, have one float dtype.

    A number next to f16 and bf16 may be f32: they are computed in f32, and 1.702 is another number in bf16.
    """
    tensors = [t for op in match.ops.values() for t in (*op.inputs, *op.outputs)]
    names = {t.dtype for t in tensors if not t.is_scalar_constant} - {"boolean"}
    numbers = {t.dtype for t in tensors if t.is_scalar_constant} - names
    if len(names) != 1 or not names <= set(dtypes.FLOATS):
        return False
    return not numbers or (numbers == {"f32"} and names <= {"f16", "bf16"})
