"""When each value of a loop changes (once per call, once per row, with every element), and the cost of an element."""

from __future__ import annotations

from opgraph.ir import dtypes
from opgraph.loops.layout import ADDED, CONTIGUOUS, GROUP, KEPT, ROW, RUN, STRIDED, UNIFORM, Variant
from opgraph.loops.loop import Load, Loop, Statement, Store

#: When a value changes: once per call, once per row, with every element.
CALL, PER_ROW, ELEMENT = 0, 1, 2
_LEVEL = {UNIFORM: CALL, ROW: PER_ROW, GROUP: PER_ROW, RUN: ELEMENT, CONTIGUOUS: ELEMENT, STRIDED: ELEMENT}


class Levels:
    """The values of one loop and one variant.

    Attributes:
        loop: the loop.
        variant: how its operands move.
        dtypes: dtypes of all values.
        loads: the loads that are read, and how they move. (Other loads only shape the iteration space.)
        levels: name of a value -> when it changes.
        kinds: how each load moves, by name.
        store_kinds: how each store moves.
        sums: the stores that are summed.
    """

    def __init__(self, loop: Loop, variant: Variant) -> None:
        self.loop = loop
        self.variant = variant
        self.dtypes = loop.dtype_of()
        used = loop.reads()
        self.loads = [(x, k) for x, k in zip(loop.loads, variant.operands) if x.name in used]
        self.levels: dict[str, int] = {x.name: _LEVEL[k] for x, k in self.loads}
        for s in loop.statements:
            level = max((self.levels[a] for a in s.args if isinstance(a, str)), default=CALL)
            self.levels[s.result] = PER_ROW if s.reduces else level
        self.kinds = {x.name: kind for x, kind in self.loads}
        self.store_kinds = variant.operands[len(loop.loads) :]
        self.sums = [i for i, kind in enumerate(self.store_kinds) if kind in (ADDED, KEPT)]

    @property
    def cost(self) -> int:
        """Instructions of one element, by the costs in the records."""
        return sum(s.record.cost for s in self.varying())

    def varying(self) -> list[Statement]:
        """The statements whose values change with every element."""
        return [s for s in self.loop.statements if self.levels[s.result] == ELEMENT]

    def element_loads(self) -> list[Load]:
        """The loads that each element reads."""
        return [x for x, _ in self.loads if self.levels[x.name] == ELEMENT]

    def elementwise(self) -> list[tuple[int, Store]]:
        """The stores of one value for each element, with their indices."""
        return [(i, s) for i, s in enumerate(self.loop.stores) if i not in self.sums and not s.per_row]

    def addend(self) -> str:
        """The common type of the addends of all reductions and sums."""
        reduced = [s.dtype for s in self.loop.statements if s.reduces]
        summed = [self.loop.stores[i].dtype for i in self.sums]
        wide = any(dtypes.BY_NAME[d].compute == "double" for d in (*reduced, *summed))
        return "double" if wide else "float"
