"""Conditions of gradient rules as forward values: a byte for each element may be saved instead of a float.

The derivative of ReLU, Clamp, Maximum or ReduceMax reads its operands only for a comparison. In the forward graph this
comparison is a value like any other. A minimum cut (`opgraph.transforms.cut`) chooses it if nothing else needs the
operands.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from opgraph.ir import opdef
from opgraph.ir.copy_graph import rebuilt
from opgraph.ir.expression import Call, Expr, Num, Param, Var
from opgraph.ir.graph import Graph
from opgraph.ir.graph_builder import GraphBuilder
from opgraph.ir.logical_tensor import LogicalTensor
from opgraph.ir.op import Op
from opgraph.ops.reduction_gradients import has_places, is_extreme
from opgraph.transforms.selections import selects


@dataclass(frozen=True, slots=True)
class Conditioned:
    """A graph with the conditions of its gradients as further values, which nothing reads.

    Attributes:
        graph: the given graph, with the same ids and outputs, and the conditions.
        chosen: by id of each op whose rule is a Backward kind: ids of the conditions that the rule's Select form reads.
    """

    graph: Graph
    chosen: Mapping[int, frozenset[int]] = field(default_factory=dict)


def with_conditions(graph: Graph) -> Conditioned:
    """Adds the conditions of the rules that read an operand only for a condition."""
    asked = [(op, found) for op in graph.ops if (found := list(_rules(op)))]
    selections = [op for op in graph.ops if selects(op) and has_places(op)]
    if not asked and not selections:
        return Conditioned(graph)
    builder = GraphBuilder(graph)
    for tensor in (*graph.inputs, *graph.constants):
        builder.input(tensor)
    for op in graph.ops:
        builder.enter(op)
    chosen: dict[int, frozenset[int]] = {}
    for op, rules in asked:
        values = _values(op)
        for tree, is_spelled in rules:
            entered = [builder.expression(c, values, op.attrs) for c in _conditions(tree)]
            ids = frozenset(c.id for c in entered if isinstance(c, LogicalTensor))
            if is_spelled:
                chosen[op.id] = chosen.get(op.id, frozenset()) | ids
    for op in selections:
        is_extreme(builder, op)
    result = rebuilt(graph, builder.ops)
    result.set_outputs(graph.outputs)
    return Conditioned(result.finalize(), chosen)


def by_choice(tree: Expr | None) -> Expr | None:
    """A rule that is one Backward op, in the Select form of its record; None if it has no such form."""
    if not isinstance(tree, Call) or tree.kind == "Select":
        return None
    record = opdef.get(tree.kind, where="a gradient rule")
    names = [p.name for p in record.with_optional(len(tree.args))]
    if not record.is_pointwise or "diff_dst" not in names:
        return None
    attrs = {**record.default_attrs(), **{n: v for n, v in tree.attrs if not isinstance(v, Param)}}
    inner = record.decompose(attrs, names)
    if not isinstance(inner, Call) or inner.kind != "Select":
        return None
    return _substituted(inner, dict(zip(names, tree.args, strict=True)), dict(tree.attrs))


def _substituted(tree: Expr, values: Mapping[str, Expr], attrs: Mapping[str, object]) -> Expr:
    """An expression with `values` in place of its names, and attributes of the enclosing op in place of its own."""
    if isinstance(tree, Var):
        return values[tree.name]
    if isinstance(tree, Param):
        value = attrs[tree.name]
        return value if isinstance(value, Param) else Num(float(str(value)))
    if isinstance(tree, Num):
        return tree
    return Call(tree.kind, tuple(_substituted(a, values, attrs) for a in tree.args), tree.attrs)


def _rules(op: Op) -> Iterator[tuple[Expr, bool]]:
    """The rules of an op that read a name only in conditions, each with true if that requires `by_choice`."""
    record = opdef.get(op.kind, where=op.label)
    if not record.is_pointwise or not isinstance(record.gradient, Mapping) or record.channel_inputs:
        return
    names = [p.name for p in record.with_optional(len(op.inputs))]
    for name in names:
        tree = record.gradient_of(name, op.attrs, names)
        other = by_choice(tree)
        if other is not None and _is_told(other):
            yield other, True
        elif tree is not None and _is_told(tree):
            yield tree, False


def _is_told(tree: Expr) -> bool:
    """True if the conditions of a choice read a name that its branches do not read."""
    asked = {name for c in _conditions(tree) for name in _names(c)}
    return bool(asked - {name for branch in _branches(tree) for name in _names(branch)})


def _conditions(tree: Expr) -> Iterator[Expr]:
    """The conditions of nested choices, outermost first."""
    if isinstance(tree, Call) and tree.kind == "Select":
        yield tree.args[0]
        yield from _conditions(tree.args[1])
        yield from _conditions(tree.args[2])


def _branches(tree: Expr) -> Iterator[Expr]:
    """The branches of nested choices, without the choices."""
    if isinstance(tree, Call) and tree.kind == "Select":
        yield from _branches(tree.args[1])
        yield from _branches(tree.args[2])
    else:
        yield tree


def _names(tree: Expr) -> Iterator[str]:
    if isinstance(tree, Var):
        yield tree.name
    elif isinstance(tree, Call):
        for arg in tree.args:
            yield from _names(arg)


def _values(op: Op) -> dict[str, LogicalTensor]:
    """The tensors of the forward graph for the names in an op's rules."""
    record = opdef.get(op.kind, where=op.label)
    names = [p.name for p in record.with_optional(len(op.inputs))]
    values = dict(zip(names, op.inputs, strict=True))
    values.update((p.name, t) for p, t in zip(record.outputs, op.outputs))
    return values
