"""How the body of a CPU kernel iterates over elements: one loop over 16 floats or one element at a time, statement by
statement, or two branches, one for each element.

This depends only on the loop and on how operands move. It is chosen when a kernel is generated, not for each call.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from opgraph.ir import dtypes
from opgraph.loops.loop import Arg, Loop, Statement
from opgraph.partition.split import MAX_COST, STATEMENT_COST
from opgraph.schedule.levels import ELEMENT, Levels

#: Types that og::load_lanes reads and og::store_lanes writes.
_IN_MEMORY = frozenset({"f32", "f16", "bf16", "boolean"})
#: The limit in place of MAX_COST for kernels not of f32 alone, whose loop the compiler has to vectorise: 0.45 s.
WIDE_COST = 600
#: Cost of packing in instructions per element and vector: fixed, for each operand and for each result (measured).
PACK, PACK_OPERAND, PACK_RESULT = 8, 8, 5
#: If a comparison holds: the results of other comparisons of the same two values. (If it fails, one may be NaN.)
_IMPLIED = {
    "Greater": {"GreaterEqual": True, "Equal": False, "Less": False, "LessOrEqual": False},
    "Less": {"LessOrEqual": True, "Equal": False, "Greater": False, "GreaterEqual": False},
}
#: Most conditions that are tried: each takes a walk over the loop.
TRIED = 16
#: Types that can be packed.
_STORED = frozenset({"f32", "f16", "bf16"})


class Form(Enum):
    """How a CPU kernel iterates over its elements. The way it is compiled depends on this."""

    LOOP = "one loop"
    BRANCHES = "two branches, of which each element takes one"  # kernels/cpu/branch_compaction.h
    STRIPS = "statement by statement"  # kernels/cpu/strip_mining.h
    LANE_STRIPS = "statement by statement, 16 floats at a time"


@dataclass(frozen=True, slots=True)
class Body:
    """How a kernel iterates over its elements.

    Attributes:
        form: the kind of iteration.
        by_lanes: true if it takes 16 floats at a time, where the machine has such vectors.
        branches: the two branches, if there are two.
    """

    form: Form
    by_lanes: bool
    branches: Branches | None = None


@dataclass(frozen=True, slots=True)
class Side:
    """The rest of a loop if a condition is known.

    Attributes:
        statements: the statements that are still used.
        results: the value of each store.
    """

    statements: tuple[Statement, ...]
    results: tuple[Arg, ...]

    def makes(self, k: int) -> bool:
        """True if result k is not the constant 0.0."""
        return isinstance(self.results[k], str) or str(self.results[k]) != "0.0"


@dataclass(frozen=True, slots=True)
class Branches:
    """A loop split by one condition.

    Attributes:
        condition: the statements that compute it; the last one is the condition.
        sides: the loop if it fails, and if it holds.
    """

    condition: tuple[Statement, ...]
    sides: tuple[Side, Side]


def body_of(values: Levels) -> Body:
    """The body of a loop that reduces no rows."""
    by_lanes = goes_by_lanes(values)
    if goes_by_strips(values, by_lanes):
        return Body(Form.LANE_STRIPS if by_lanes else Form.STRIPS, by_lanes)
    branches = branches_of(values) if by_lanes else None
    return Body(Form.BRANCHES if branches else Form.LOOP, by_lanes, branches)


def goes_by_lanes(values: Levels) -> bool:
    """True if all values of an element are f32 or truth values; in memory they may be f16 or bf16.

    A row of one element may sum an f64 that is computed before the row. Its addends are doubles, so it has no lanes.
    """
    loop = values.loop
    per_element = (name for name, level in values.levels.items() if level == ELEMENT)
    computed = {dtypes.BY_NAME[values.dtypes[name]].compute for name in per_element}
    stored = {x.dtype for x in values.element_loads()} | {s.dtype for s in loop.stores}
    return (
        computed <= {"float", "bool"}
        and stored <= _IN_MEMORY
        and values.addend() == "float"
        and not any(x.is_position for x in values.element_loads())
    )


def goes_by_strips(values: Levels, by_lanes: bool) -> bool:
    """True if one loop over all statements would take too long to compile, and strips are not slower."""
    by_position = any(x.is_position for x in values.element_loads())
    most = MAX_COST if by_lanes else WIDE_COST
    return values.cost > max(most, STATEMENT_COST * len(values.varying()) - 1) and not by_position


def branches_of(values: Levels) -> Branches | None:
    """The branches that save most; None if no choice pays for all data. Either side alone has to cost more than
    packing, so that it pays however often each side is taken."""
    loop = values.loop
    packed = [x.dtype for x in values.element_loads()] + [s.dtype for s in loop.stores]
    if not set(packed) <= _STORED:
        return None
    spent = PACK + PACK_OPERAND * len(values.element_loads()) + PACK_RESULT * len(values.elementwise())
    whole = _cost(values, loop.statements)
    best, saved = None, spent
    for same in _conditions(values):
        condition = _needed(loop.statements, {next(iter(same))})
        sides = (_side(loop, same, False), _side(loop, same, True))
        spared = whole - max(_cost(values, side.statements) for side in sides) - _cost(values, condition)
        if spared > saved:
            best, saved = Branches(condition, sides), spared
    return best


def _conditions(values: Levels) -> Sequence[Mapping[str, None]]:
    """The conditions that most Selects use, each with all statements that compute the same value, in order."""
    chosen_by = Counter(s.args[0] for s in values.loop.statements if s.kind == "Select")
    alike: dict[object, dict[str, None]] = {}
    for s in values.loop.statements:
        if s.result in chosen_by and values.levels[s.result] == ELEMENT:
            alike.setdefault((s.kind, s.args, s.attrs), {})[s.result] = None
    found = list(alike.values())
    most = sorted(range(len(found)), key=lambda i: -sum(chosen_by[r] for r in found[i]))[:TRIED]
    return [found[i] for i in sorted(most)]


def _side(loop: Loop, same: Mapping[str, None], holds: bool) -> Side:
    """The loop under the assumption that the conditions `same` hold, or fail."""
    known: dict[str, bool] = dict.fromkeys(same, holds)
    condition = next(s for s in loop.statements if s.result in same)
    taken: dict[str, Arg] = {}
    left = []
    for s in loop.statements:
        args = tuple(taken.get(a, a) if isinstance(a, str) else a for a in s.args)
        told = [known.get(a) if isinstance(a, str) else None for a in s.args]
        if s.kind == "Select" and told[0] is not None and not s.rounds:
            taken[s.result] = args[1] if told[0] else args[2]
            continue
        if holds and s.args == condition.args and s.kind in _IMPLIED.get(condition.kind, {}):
            known[s.result] = _IMPLIED[condition.kind][s.kind]
        elif s.kind == "Not" and told[0] is not None:
            known[s.result] = not told[0]
        elif s.kind == "And" and False in told:
            known[s.result] = False
        elif s.kind == "And" and True in told:
            taken[s.result] = args[1 - told.index(True)]
        left.append(replace(s, args=args))
    results = tuple(taken.get(store.value, store.value) for store in loop.stores)
    return Side(_needed(left, {r for r in results if isinstance(r, str)}), results)


def _needed(statements: Sequence[Statement], results: set[str]) -> tuple[Statement, ...]:
    """The statements that the given results depend on."""
    wanted, left = set(results), []
    for s in reversed(statements):
        if s.result in wanted:
            left.append(s)
            wanted.update(a for a in s.args if isinstance(a, str))
    return tuple(reversed(left))


def _cost(values: Levels, statements: Sequence[Statement]) -> int:
    """Instructions of an element, by the costs in the records."""
    varying = (s for s in statements if values.levels[s.result] == ELEMENT)
    return sum(s.record.cost for s in varying)
