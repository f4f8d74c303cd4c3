"""What the passes of a CUDA kernel over rows read, what waits in registers between them, and what that costs."""

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
    """What each element costs a thread that reads its row once.

    Attributes:
        loaded: bytes that the first pass loads before it computes.
        waiting: bytes that wait in registers between two passes, at most.
        added: bytes in registers for sums over rows.
        instructions: roughly, in all passes.
        is_wide: whether it is computed in f64.
    """

    loaded: int
    waiting: int
    added: int
    instructions: int
    is_wide: bool


def held_by(loop: Loop, variant: Variant, small: frozenset[str]) -> Held:
    """What an element of a row costs.

    Args:
        small: loads that do not wait in registers.
    """
    return RowReads(Levels(loop, variant)).footprint(small)


@final
class RowReads:
    """What each pass over a row reads and keeps.

    Attributes:
        values: of the loop.
        held, again: the passes where a row waits in registers, and where it is read again.
        kept: the values that wait.
    """

    def __init__(self, levels: Levels) -> None:
        self.values = levels
        is_element = {name: level == ELEMENT for name, level in levels.levels.items()}
        self.held = passes_of(levels.loop, is_element, keep=True)
        self.again = passes_of(levels.loop, is_element, keep=False)
        self.kept = kept_values(self.held)

    def of(self, one: Pass) -> list[Load]:
        """The loads that a pass reads element by element, those without memory aside."""
        used = one.reads(self.values.loop)
        return [x for x in self.values.element_loads() if x.name in used and not x.is_position]

    @cached_property
    def first(self) -> dict[str, int]:
        """The pass of a held row that a load is first needed in."""
        found: dict[str, int] = {}
        for number, one in enumerate(self.held):
            for load in self.of(one):
                found.setdefault(load.name, number)
        return found

    def fetched_in(self, name: str) -> int:
        """The pass of a held row that an operand as large as the space is loaded in: one before it is needed, so that
        it is under way while threads meet."""
        return max(self.first[name] - 1, 0)

    def footprint(self, small: frozenset[str]) -> Held:
        """What an element of a row costs, if the loads `small` do not wait in registers."""
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
    """Bytes of a value in the type that it is computed in, in a register."""
    return 8 if dtypes.BY_NAME[dtype].compute in ("double", "og::i64") else 4
