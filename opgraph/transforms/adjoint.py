"""Adjoints: what has been gathered for the gradient of each value, and under which conditions it counts.

The gradient of `Select(c, a, b)` is d where c holds for a, and d where it does not for b. Writing that as
`Select(c, d, 0)` at once would be wrong: 0 then meets the derivative of what made a, which may be infinite or NaN
exactly where c does not hold, and 0 * inf is NaN. So a contribution carries its conditions along instead, and the
Select is written at the very end, around the finished product. That is right because every gradient rule is linear in
d and works element by element: `rule(Select(c, d, 0))` and `Select(c, rule(d), 0)` are the same wherever the former is
finite (tests/test_ops_gradients.py holds each rule to that).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from opgraph.ir.logical_tensor import LogicalTensor
from opgraph.transforms.draft import Draft

#: Pairs (boolean tensor, the value it must have), all of which must hold.
Conditions: TypeAlias = frozenset[tuple[int, bool]]
ALWAYS: Conditions = frozenset()


@dataclass(frozen=True, slots=True)
class Contribution:
    """A part of a gradient: `value` where the conditions hold, 0 elsewhere."""

    value: LogicalTensor
    conditions: Conditions = ALWAYS


class Conditional:
    """Combines contributions.

    Args:
        draft: where ops are added.
    """

    def __init__(self, draft: Draft) -> None:
        self._draft = draft
        self._tensors: dict[int, LogicalTensor] = {}

    def when(self, condition: LogicalTensor, holds: bool) -> tuple[int, bool]:
        """One condition."""
        self._tensors[condition.id] = condition
        return condition.id, holds

    def total(self, parts: Sequence[Contribution]) -> Contribution:
        """The sum of contributions, as one."""
        groups: dict[Conditions, LogicalTensor] = {}
        for part in parts:
            known = groups.get(part.conditions)
            groups[part.conditions] = part.value if known is None else self._draft("Add", known, part.value)
        self._join_complements(groups)
        if len(groups) == 1:
            ((conditions, value),) = groups.items()
            return Contribution(value, conditions)
        common = frozenset.intersection(*groups)
        values = [self.written(Contribution(v, c - common)) for c, v in groups.items()]
        result = values[0]
        for value in values[1:]:
            result = self._draft("Add", result, value)
        return Contribution(result, common)

    def _join_complements(self, groups: dict[Conditions, LogicalTensor]) -> None:
        """Joins what counts where c holds with what counts where it does not: Select(c, a, b), without an Add."""
        again = True
        while again and len(groups) > 1:
            again = False
            for conditions in list(groups):
                for id, holds in sorted(conditions):
                    other = (conditions - {(id, holds)}) | {(id, not holds)}
                    if conditions in groups and other in groups:
                        yes, no = (conditions, other) if holds else (other, conditions)
                        value = self._draft("Select", self._tensors[id], groups.pop(yes), groups.pop(no))
                        rest = conditions - {(id, holds)}
                        known = groups.get(rest)
                        groups[rest] = value if known is None else self._draft("Add", known, value)
                        again = True

    def written(self, part: Contribution) -> LogicalTensor:
        """The value with its conditions written out: 0 where they do not hold."""
        value = part.value
        for id, holds in sorted(part.conditions, reverse=True):
            condition = self._tensors[id]
            value = self._draft("Select", condition, *((value, 0.0) if holds else (0.0, value)))
        return value
