"""The reads of each pass of a CUDA row kernel, the values held in registers between passes, and their cost."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import final

from opgraph.ir import dtypes
from opgraph.loops.layout import KEPT, RUN, Variant
from opgraph.loops.loop import Load, Loop
from opgraph.schedule.levels import ELEMENT, Levels
from opgraph.schedule.reduction_passes import Pass, kept_values, passes_of


@dataclass(frozen=True, slots=True)
class Held:
    """The cost of each element for a thread that reads its row once.

    Attributes:
        loaded: bytes that the first pass loads before it computes.
        waiting: most bytes held in registers between two passes.
        added: bytes in registers for sums over rows.
        instructions: approximate instructions in all passes.
        is_wide: true if it is computed in f64.
    """

    loaded: int
    waiting: int
    added: int
    instructions: int
    is_wide: bool


def held_by(loop: Loop, variant: Variant, small: frozenset[str]) -> Held:
    """The cost of an element of a row.

    Args:
        small: loads that are not held in registers.
    """
    return RowReads(Levels(loop, variant)).footprint(small)


@final
class RowReads:
    """The values that each pass over a row reads and keeps.

    Attributes:
        values: the levels of the loop's values.
        held, again: the passes if a row is held in registers, and if it is read again.
        kept: the values that are held.
    """

    def __init__(self, levels: Levels) -> None:
        self.values = levels
        is_element = {name: level == ELEMENT for name, level in levels.levels.items()}
        self.held = passes_of(levels.loop, is_element, keep=True)
        self.again = passes_of(levels.loop, is_element, keep=False)
        self.kept = kept_values(self.held)

    def of(self, one: Pass) -> list[Load]:
        """The loads that a pass reads element by element, without those that have no memory."""
        used = one.reads(self.values.loop)
        return [x for x in self.values.element_loads() if x.name in used and not x.is_position]

    @cached_property
    def first(self) -> dict[str, int]:
        """The pass of a held row that first needs each load."""
        found: dict[str, int] = {}
        for number, one in enumerate(self.held):
            for load in self.of(one):
                found.setdefault(load.name, number)
        return found

    def fetched_in(self, name: str) -> int:
        """The pass of a held row that loads an operand as large as the space: one before the first use, so that the
        load is in flight while threads synchronize."""
        return max(self.first[name] - 1, 0)

    def footprint(self, small: frozenset[str]) -> Held:
        """The cost of an element of a row, if the loads `small` are not held in registers."""
        values = self.values
        size = {x.name: dtypes.BY_NAME[x.dtype].itemsize for x in values.element_loads()}
        size |= {name: 0 for name in size if name in small or values.kinds[name] == RUN}
        waiting = [0]
        for number in range(1, len(self.held)):
            later = {x.name for one in self.held[number:] for x in self.of(one)}
            loaded = sum(size[name] for name in later if self.fetched_in(name) < number)
            needed = {name for one in self.held[number:] for name in one.read}
            made = {name for one in self.held[:number] for name in one.kept}
            waiting.append(loaded + sum(_width(values.dtypes[name]) for name in needed & made))
        first = sum(size[name] for name in self.first if self.fetched_in(name) == 0)
        is_wide = values.addend() == "double"
        added = values.store_kinds.count(KEPT) * (8 if is_wide else 4)
        cost = sum(s.record.cost for one in self.held for s in one.statements)
        return Held(first, max(waiting), added, cost, is_wide)


def _width(dtype: str) -> int:
    """Bytes of a value in a register, in the type in which it is computed."""
    return 8 if dtypes.BY_NAME[dtype].compute in ("double", "og::i64") else 4
