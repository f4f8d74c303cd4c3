"""THE table of named units: one row for each spelling that opgraph recognises, in order of priority.

A unit that was found also matches in larger patterns, as the op that it means: `Multiply(x, Sigmoid(x))` also matches a
spelled-out sigmoid. specs/partitioning.md describes the meaning of the whole table.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

from opgraph.errors import InvalidArguments
from opgraph.ir.graph import Graph
from opgraph.partition.rules_activations import ACTIVATIONS, INNER
from opgraph.partition.rules_gates import GATES
from opgraph.partition.rules_norms import NORMS
from opgraph.partition.rules_swish import SWISH
from opgraph.partition.units import Rule, RuleTable, Unit, match_units

__all__ = ["NORMS", "RULES", "Rule", "Unit", "find_units", "rules_without"]

RULES: tuple[Rule, ...] = (*INNER, *SWISH, *ACTIVATIONS, *GATES)


@lru_cache(maxsize=1)
def _indexed() -> RuleTable:
    return RuleTable(RULES)


def find_units(graph: Graph, rules: Sequence[Rule] = RULES) -> tuple[Unit, ...]:
    """Every named unit of a finalized graph, including nested ones, in topological order of their roots.

    Each root op has at most one unit, by the first row of `rules` that applies. Linear in the size of the graph.
    """
    return match_units(graph, _indexed() if rules is RULES else RuleTable(rules))


def rules_without(names: Sequence[str]) -> tuple[Rule, ...]:
    """RULES without those of some units: ops that these would match are computed as written.

    Raises:
        InvalidArguments: no rule has one of the names.
    """
    is_list = isinstance(names, Iterable) and not isinstance(names, str)
    unknown = [name for name in names if not any(rule.name == name for rule in RULES)] if is_list else []
    if not is_list or unknown:
        known = ", ".join(dict.fromkeys(rule.name for rule in RULES))
        what = f"there is no rule {unknown[0]!r}" if is_list else f"{names!r} is no list of names"
        raise InvalidArguments(what, where="disable", fix=f"name some of {known}: disable=('swish',)")
    return tuple(rule for rule in RULES if rule.name not in names) if names else RULES
