"""What loops over rows have apart from those without, on the CPU and on the GPU."""

from __future__ import annotations

from opgraph.codegen.arithmetic import compute_type
from opgraph.codegen.emit import Emitter
from opgraph.loops.layout import Variant
from opgraph.loops.loop import Loop, Statement, Store
from opgraph.loops.passes import row_stores


class OverRows(Emitter):
    """An emitter of a loop that reduces rows.

    Attributes:
        kinds: how each load moves, by name.
        depth: how many reductions each value waits for, one after the other.
        per_row: the stores of one value for each row, with their places.
    """

    def __init__(self, loop: Loop, variant: Variant, approximate: frozenset[str]) -> None:
        super().__init__(loop, variant, approximate)
        self.kinds = {x.name: k for x, k in self.loads}
        self.depth = loop.depths()
        self.per_row = row_stores(loop)

    def is_hoisted(self, s: Statement) -> bool:
        """What waits for a reduction is not."""
        return self.depth[s.result] == 0

    def elementwise(self) -> list[tuple[int, Store]]:
        """The stores of one value for each element, with their places."""
        return [(i, s) for i, s in super().elementwise() if not s.per_row]

    def pointers(self) -> list[tuple[int, str, str, str]]:
        """Those of elements, and of what is stored once a row."""
        n = len(self.loop.loads)
        return super().pointers() + [(n + i, f"y{i}", s.dtype, "") for i, s in self.per_row]

    def addend(self) -> str:
        """The type that addends of all reductions and sums have."""
        reduced = [s.dtype for s in self.loop.statements if s.reduces]
        summed = [self.loop.stores[i].dtype for i in self.sums]
        return "double" if any(compute_type(d) == "double" for d in (*reduced, *summed)) else "float"
