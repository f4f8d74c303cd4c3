"""Adjoints: the contributions to the gradient of each value, and the conditions under which they count.

The gradient of `Select(c, a, b)` with respect to a is d where c holds, and with respect to b it is d where c does not
hold. Writing it immediately as `Select(c, d, 0)` would be wrong: 0 is then multiplied by the derivative of the op that
computed a. That derivative may be infinite or NaN exactly where c does not hold, and 0 * inf is NaN. So a contribution
carries its conditions, and the Select is written at the very end, around the finished product. This is correct because
every gradient rule is linear in d and elementwise: `rule(Select(c, d, 0))` and `Select(c, rule(d), 0)` are the same
wherever the former is finite (tests/ops/test_gradients.py checks this for each rule).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from opgraph.ir.graph_builder import GraphBuilder
from opgraph.ir.logical_tensor import LogicalTensor

#: Pairs (boolean tensor, the value it must have), all of which must hold.
Conditions: TypeAlias = frozenset[tuple[int, bool]]
ALWAYS: Conditions = frozenset()
#: The same, in the order of the conditions' first use.
Path: TypeAlias = tuple[tuple[int, bool], ...]
#: Most single conditions of a contribution; more become one mask, else a chain of n choices would have n^2 / 2.
MOST = 8
#: Most groups of contributions for which each group's conditions are written out.
FEW = 4


@dataclass(frozen=True, slots=True)
class Contribution:
    """A part of a gradient: `value` where the conditions hold, 0 elsewhere."""

    value: LogicalTensor
    conditions: Conditions = ALWAYS


class Conditional:
    """Combines contributions.

    Args:
        builder: the builder to which ops are added.
    """

    def __init__(self, builder: GraphBuilder) -> None:
        self._builder = builder
        self._tensors: dict[int, LogicalTensor] = {}
        self._ranks: dict[int, int] = {}  # order of first use

    def under(self, conditions: Conditions, condition: LogicalTensor, holds: bool) -> Conditions:
        """The given conditions and one more."""
        more = conditions | {self._when(condition, holds)}
        if len(more) <= MOST:
            return more
        mask = self._mask([self._path(more)])
        assert mask is not None
        return frozenset({self._when(mask, True)})

    def spread(self, conditions: Conditions, like: LogicalTensor, attrs: Mapping[str, Any]) -> Conditions:
        """The same conditions broadcast to a shape, as BroadcastTo does with these attributes."""
        to = {id: self._builder("BroadcastTo", self._tensors[id], like, **attrs) for id, _ in self._path(conditions)}
        return frozenset(self._when(to[id], holds) for id, holds in self._path(conditions))

    def total(self, parts: Sequence[Contribution]) -> Contribution:
        """The sum of contributions, as a single contribution to which a rule may be applied."""
        total, own = self._sum(parts)
        mask = self._mask([self._path(conditions) for conditions in own])
        if mask is None:
            return total
        # Where no contribution counts, the sum is 0, and a derivative may be infinite there.
        return Contribution(total.value, total.conditions | {self._when(mask, True)})

    def written_total(self, parts: Sequence[Contribution]) -> LogicalTensor:
        """The sum of contributions, written out."""
        return self.written(self._sum(parts)[0])

    def _sum(self, parts: Sequence[Contribution]) -> tuple[Contribution, Collection[Conditions]]:
        """The sum of contributions, and the further conditions of each of its parts; ALWAYS: a part has none."""
        groups: dict[Conditions, LogicalTensor] = {}
        for part in parts:
            self._add(groups, part.conditions, part.value)
        self._join_complements(groups)
        if len(groups) == 1:
            ((conditions, value),) = groups.items()
            return Contribution(value, conditions), (ALWAYS,)
        if len(groups) > FEW:
            nested = self._nested(groups)
            return nested, [conditions - nested.conditions for conditions in groups]
        common = frozenset.intersection(*groups)
        own = {c - common: v for c, v in groups.items()}
        values = [self.written(Contribution(v, c)) for c, v in own.items()]
        result = values[0]
        for value in values[1:]:
            result = self._builder("Add", result, value)
        return Contribution(result, common), own

    def _when(self, condition: LogicalTensor, holds: bool) -> tuple[int, bool]:
        """One condition."""
        self._tensors[condition.id] = condition
        self._ranks.setdefault(condition.id, len(self._ranks))
        return condition.id, holds

    def _mask(self, paths: Sequence[Path]) -> LogicalTensor | None:
        """A mask that is true where all conditions of at least one path hold; None if that is everywhere.

        A condition that several paths begin with is written once.
        """
        if () in paths:
            return None
        rests = {first: self._mask([path[1:] for path in paths if path[0] == first]) for first, *_ in paths}
        found: LogicalTensor | None = None
        for (id, holds), rest in rests.items():
            if rest is None and rests.get((id, not holds), self) is None:
                return None
            mask = self._tensors[id] if holds else self._builder("Not", self._tensors[id])
            mask = mask if rest is None else self._builder("And", mask, rest)
            found = mask if found is None else self._builder("Or", found, mask)
        return found

    def _path(self, conditions: Conditions) -> Path:
        """Conditions in the order of their first use: those that contributions share come first."""
        return tuple(sorted(conditions, key=lambda pair: (self._ranks[pair[0]], pair[1])))

    def _add(self, groups: dict[Conditions, LogicalTensor], conditions: Conditions, value: LogicalTensor) -> None:
        known = groups.get(conditions)
        groups[conditions] = value if known is None else self._builder("Add", known, value)

    def _join_complements(self, groups: dict[Conditions, LogicalTensor]) -> None:
        """Joins a contribution where c holds with one where it does not hold: Select(c, a, b), without an Add."""
        waiting = deque(groups)
        while waiting and len(groups) > 1:
            conditions = waiting.popleft()
            for id, holds in sorted(conditions):
                other = (conditions - {(id, holds)}) | {(id, not holds)}
                if conditions in groups and other in groups:
                    yes, no = (conditions, other) if holds else (other, conditions)
                    value = self._builder("Select", self._tensors[id], groups.pop(yes), groups.pop(no))
                    rest = conditions - {(id, holds)}
                    self._add(groups, rest, value)
                    waiting.append(rest)  # only this one may have a complement now

    def _nested(self, groups: dict[Conditions, LogicalTensor]) -> Contribution:
        """The sum of many contributions. A shared condition is written once, around the sum of those under it."""
        sums = {self._path(conditions): value for conditions, value in groups.items()}
        levels: list[list[Path]] = [[] for _ in range(MOST + 1)]
        for path in sums:
            levels[len(path)].append(path)
        for depth in range(MOST, 0, -1):
            for path in levels[depth]:
                if len(sums) == 1:
                    break
                if path not in sums:  # joined with its complement
                    continue
                (id, holds), outer = path[-1], path[:-1]
                value, other = sums.pop(path), sums.pop((*outer, (id, not holds)), 0.0)
                value = self._builder("Select", self._tensors[id], *((value, other) if holds else (other, value)))
                if outer in sums:
                    value = self._builder("Add", sums[outer], value)
                else:
                    levels[depth - 1].append(outer)
                sums[outer] = value
        ((path, value),) = sums.items()
        return Contribution(value, frozenset(path))

    def written(self, part: Contribution) -> LogicalTensor:
        """The value with its conditions written out: 0 where they do not hold."""
        value = part.value
        for id, holds in sorted(part.conditions, reverse=True):
            condition = self._tensors[id]
            value = self._builder("Select", condition, *((value, 0.0) if holds else (0.0, value)))
        return value
