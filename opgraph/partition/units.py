"""Units: named compositions of ops, found by rules. A rule has a pattern, the equivalent single op and two examples."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from opgraph.errors import InvalidArguments
from opgraph.ir import opdef
from opgraph.ir.expression import Call, Param, Var, parse_expression
from opgraph.ir.graph import Graph
from opgraph.ir.logical_tensor import LogicalTensor
from opgraph.ir.op import AttrValue, Op
from opgraph.ir.schema import f32
from opgraph.partition.pattern import Pattern, compile_pattern
from opgraph.partition.search import Match, find_match
from opgraph.partition.view import View, scalar


@dataclass(frozen=True, slots=True, eq=False)
class Unit:
    """A named composition found in a graph.

    Attributes:
        name: "swish", "gelu" ...
        root: the op whose first output is the unit's result.
        ops: all matched ops, including those of nested units, in topological order; `root` is the last.
        kind: the kind of the equivalent single op; "" if the unit is a name only.
        inputs, attrs: of that single op; for a name only, the values that the pattern names.
        captured: the tensors bound to the pattern's names, including scalar constants.
    """

    name: str
    root: Op
    ops: tuple[Op, ...]
    kind: str
    inputs: tuple[LogicalTensor, ...]
    attrs: dict[str, AttrValue] = field(default_factory=dict)
    captured: Mapping[str, LogicalTensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One row of the table of units.

    Attributes:
        name: of the unit; several rows may share it.
        pattern: in the notation of `opgraph.ir.expression`, as `opgraph.partition.pattern` reads it.
        becomes: the equivalent single op, over the pattern's names; "" for a name only.
        given: attributes of that op as products: {"alpha": (-1.0, "c")} is minus the captured $c. If f32 does not hold
            a product, its graph constant stays an operand: `Swish(x, alpha=-1)` with the constant as factor, if the
            kind has such an operand; otherwise the rule does not apply.
        condition: a further condition on a match of the pattern.
        takes, leaves: an example that the rule matches and one that it does not match, in the graph text form.
        why: one sentence.
    """

    name: str
    pattern: str
    becomes: str = ""
    given: Mapping[str, tuple[float | str, ...]] = field(default_factory=dict)
    condition: Callable[[Match], bool] | None = None
    takes: str
    leaves: str
    why: str


@dataclass(frozen=True, slots=True, eq=False)
class _Row:
    rule: Rule
    pattern: Pattern
    call: Call | None
    place: int


class RuleTable:
    """Rules, indexed by the kind of their root and two kinds that must be below it."""

    def __init__(self, rules: Iterable[Rule]) -> None:
        self._rows: dict[tuple[str, str, str], list[_Row]] = {}
        self.root_kinds: set[str] = set()
        for place, rule in enumerate(rules):
            call = parse_expression(rule.becomes) if rule.becomes else None
            if call is not None and not isinstance(call, Call):
                raise InvalidArguments("a rule becomes one op", where=f"rule {rule.name}", fix="write Kind(x, ...)")
            for pattern in compile_pattern(rule.pattern):
                row = _Row(rule, pattern, call, place)
                for kind, under in pattern.below:
                    self._rows.setdefault((pattern.root, kind, under), []).append(row)
                self.root_kinds.add(pattern.root)

    def rows(self, op: Op, view: View) -> list[_Row]:
        """The rows that may apply to an op, in order of priority."""
        below = (*view.kinds_below(op), ("", ""))
        found = {id(row): row for kind, under in below for row in self._rows.get((op.kind, kind, under), ())}
        return sorted(found.values(), key=lambda row: row.place)


def match_units(graph: Graph, table: RuleTable) -> tuple[Unit, ...]:
    """Every unit of a finalized graph, in topological order of roots; at most one for each root.

    Linear: each op is compared with the few rows that fit the kinds around it. In larger patterns, a unit that was
    found also matches as its equivalent single op.
    """
    view = View(graph)
    position: dict[int, int] = {}
    units: list[Unit] = []
    for index, op in enumerate(graph.ops):
        position[op.id] = index
        if op.kind not in table.root_kinds:
            continue
        for row in table.rows(op, view):
            unit = _applied(row, op, view, position)
            if unit is not None:
                units.append(unit)
                if unit.kind and unit.kind != op.kind:
                    view.stands_for(op, unit.kind, unit.inputs, unit.attrs, unit.ops)
                break
    return tuple(units)


def _applied(row: _Row, op: Op, view: View, position: Mapping[int, int]) -> Unit | None:
    built: list[tuple[tuple[LogicalTensor, ...], dict[str, AttrValue]]] = []

    def accept(match: Match) -> bool:
        if row.rule.condition is not None and not row.rule.condition(match):
            return False
        made = _single_op(row, match)
        if made is not None:
            built.append(made)
        return made is not None

    match = find_match(row.pattern, op, view, accept)
    if match is None:
        return None
    ops = tuple(sorted(match.ops.values(), key=lambda o: position[o.id]))
    inputs, attrs = built[-1]
    captured = {**match.tensors, **match.scalars}
    return Unit(row.rule.name, op, ops, row.call.kind if row.call else "", inputs, attrs, captured)


def _single_op(row: _Row, match: Match) -> tuple[tuple[LogicalTensor, ...], dict[str, AttrValue]] | None:
    """Inputs and attributes of the equivalent single op; None if f32 attributes and inputs of one dtype cannot express
    it."""
    if row.call is None:
        return tuple(match.tensors.values()), {}
    record = opdef.get(row.call.kind, where=f"rule {row.rule.name}")
    inputs = [match.tensors[a.name] for a in row.call.args if isinstance(a, Var)]
    attrs: dict[str, AttrValue] = dict(record.default_attrs())
    for name, value in row.call.attrs:
        attrs[name] = match.attrs[value.name] if isinstance(value, Param) else value
    for name, product in row.rule.given.items():
        exact, operand = _exact_product(product, match)
        if exact is None or (operand is not None and len(inputs) == len(record.inputs)):
            return None
        attrs[name] = exact
        inputs += [] if operand is None else [operand]
    if any(t.dtype != match.root.outputs[0].dtype for t in inputs):
        return None  # an f32 number next to f16 and bf16, which can stay f32 only as an attribute
    return tuple(inputs), {name: f32(v) if isinstance(v, float) else v for name, v in attrs.items()}


def _exact_product(product: Sequence[float | str], match: Match) -> tuple[float | None, LogicalTensor | None]:
    """A product as an f32, or as an f32 times a constant of the graph; (None, None) if neither is exact."""
    constants = [name for name in product if isinstance(name, str) and name in match.scalars]
    exact = _as_f32([_factor(f, match) for f in product])
    if exact is not None:
        return exact, None
    if len(constants) != 1:
        return None, None
    rest = _as_f32([_factor(f, match) for f in product if f != constants[0]])
    return (rest, match.scalars[constants[0]]) if rest is not None else (None, None)


def _factor(factor: float | str, match: Match) -> float:
    if not isinstance(factor, str):
        return factor
    if factor in match.scalars:
        return scalar(match.scalars[factor])
    value = match.attrs[factor]
    assert isinstance(value, float)
    return value


def _as_f32(factors: Sequence[float]) -> float | None:
    from fractions import Fraction  # imports decimal as well, and few graphs have such a product

    product = Fraction(1)
    for factor in factors:
        if factor != factor or abs(factor) == float("inf"):
            return None
        product *= Fraction(factor)
    value = f32(float(product)) if abs(product) < 2**1000 else float("inf")
    # A zero product loses its sign in Fraction; no rule that multiplies depends on the sign of 0.
    return value if abs(value) != float("inf") and Fraction(value) == product else None
