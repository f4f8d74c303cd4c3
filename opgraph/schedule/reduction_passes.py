"""The passes over a row: the statements of each pass, and the values that are kept for a later one.

The result of a reduction is available when its pass over the row has ended. So a value that depends on a chain of k
reductions is computed in pass k at the earliest. If a later pass needs a value of an earlier one, it recomputes it from
the operands, which are in the cache by then, or reads it from a buffer if that is cheaper: `Exp` in a softmax is
computed once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from opgraph.loops.loop import Loop, Statement, Store

#: A value that costs at least this many instructions is kept, not recomputed: a store and a load cost about four.
KEEP_COST = 8
#: Most values of an element that are kept.
MAX_KEPT = 3
#: Instructions for a CPU to round a value to 16 bits and widen it again.
ROUNDING = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One walk along the row.

    Attributes:
        statements: statements computed for each element, in order.
        reductions: the reductions, in order.
        kept: values of `statements` that a later pass reads from the buffer.
        read: values that this pass reads from the buffer.
        stores: true if elementwise results and sums are written; the last pass does that.
    """

    statements: tuple[Statement, ...]
    reductions: tuple[Statement, ...]
    kept: tuple[str, ...]
    read: tuple[str, ...]
    stores: bool

    def reads(self, loop: Loop) -> set[str]:
        """Names of the loads and statements whose values it uses."""
        used = {a for s in (*self.statements, *self.reductions) for a in s.args if isinstance(a, str)}
        return used | {s.value for s in loop.stores if self.stores and not s.per_row}


def pass_counts(loop: Loop) -> tuple[int, int, int]:
    """The number of passes, the number of reductions in all passes, and the most reductions in one pass."""
    depth = loop.depths()
    reduced = [depth[s.result] - 1 for s in loop.statements if s.reduces]
    counts = [reduced.count(number) for number in range(_last_pass(loop, depth) + 1)]
    return len(counts), len(reduced), max(counts)


def _last_pass(loop: Loop, depth: Mapping[str, int]) -> int:
    """The pass that writes all results. Results may alias operands, so this is the last pass that reads any operand."""
    most = max((depth[s.result] for s in loop.statements if s.reduces), default=1)
    return max([most - 1, *(depth[s.value] for s in loop.stores if not s.per_row)])


def passes_of(loop: Loop, is_element: Mapping[str, bool], *, keep: bool, rounding: int = 0) -> tuple[Pass, ...]:
    """The passes of a loop over rows.

    Args:
        is_element: for each load and statement: true if it has a value for each element.
        keep: true if there is a buffer for a row.
        rounding: instructions to round a value to 16 bits.
    """
    depth = loop.depths()
    reductions = [s for s in loop.statements if s.reduces]
    written = [s.value for s in loop.stores if not s.per_row]
    last = _last_pass(loop, depth)
    made: dict[str, int] = {}
    kept: dict[str, int] = {}
    needed: list[set[str]] = []
    read: list[set[str]] = []
    by_name = {s.result: s for s in loop.statements if is_element[s.result]}
    for number in range(last + 1):
        cost = _costs(by_name, kept, rounding)
        own: set[str] = set()
        taken: set[str] = set()
        waiting = [a for s in reductions if depth[s.result] == number + 1 for a in s.args if isinstance(a, str)]
        waiting += written if number == last else []
        while waiting:
            name = waiting.pop()
            if name in own or name not in by_name:
                continue
            if keep and made.get(name, number) < number and _is_kept(name, cost, kept):
                kept.setdefault(name, made[name])
                taken.add(name)
                continue
            own.add(name)
            waiting.extend(a for a in by_name[name].args if isinstance(a, str))
        for name in own:
            made.setdefault(name, number)
        needed.append(own)
        read.append(taken)
    return tuple(
        Pass(
            statements=tuple(s for s in by_name.values() if s.result in needed[number]),
            reductions=tuple(s for s in reductions if depth[s.result] == number + 1),
            kept=tuple(name for name in by_name if kept.get(name) == number),
            read=tuple(name for name in by_name if name in read[number]),
            stores=number == last and bool(written),
        )
        for number in range(last + 1)
    )


def cost(one: Pass) -> int:
    """Instructions of a pass for each element, without loads and stores."""
    return sum(s.record.cost for s in (*one.statements, *one.reductions))


def kept_values(passes: tuple[Pass, ...]) -> tuple[str, ...]:
    """All values that are kept, in their order in the buffer."""
    return tuple(name for p in passes for name in p.kept)


def row_stores(loop: Loop) -> list[tuple[int, Store]]:
    """The stores of one value for each row, with their indices."""
    return [(i, s) for i, s in enumerate(loop.stores) if s.per_row]


def _is_kept(name: str, cost: Mapping[str, int], kept: Mapping[str, int]) -> bool:
    return name in kept or (cost[name] >= KEEP_COST and len(kept) < MAX_KEPT)


def _costs(by_name: Mapping[str, Statement], kept: Mapping[str, int], rounding: int) -> dict[str, int]:
    """Instructions to compute each value from the operands and from the values that are already kept."""
    found: dict[str, int] = {}
    for name, s in by_name.items():
        below = sum(found.get(a, 0) for a in s.args if isinstance(a, str))
        own = s.record.cost + rounding * s.rounds
        found[name] = 0 if name in kept else min(own + below, KEEP_COST)
    return found
