"""What the passes of a CUDA kernel over rows read, what waits in registers between them, and what that costs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from opgraph.codegen.arithmetic import ELEMENT, PER_ROW, compute_type
from opgraph.codegen.over_rows import OverRows
from opgraph.ir import dtypes, opdef
from opgraph.loops.layout import KEPT, RUN, Variant
from opgraph.loops.loop import Load, Loop, Statement
from opgraph.loops.passes import Pass, kept_values, passes_of


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
    return RowReader(loop, variant, frozenset()).footprint(small)


class RowReader(OverRows):
    """What each pass over a row reads, keeps and computes; `opgraph.codegen.cuda_row_functor` writes it down."""

    def __init__(self, loop: Loop, variant: Variant, approximate: frozenset[str]) -> None:
        super().__init__(loop, variant, approximate)
        is_element = {name: level == ELEMENT for name, level in self.levels.items()}
        #: Where a row waits in registers, and where it is read again.
        self.held = passes_of(loop, is_element, keep=True)
        self.again = passes_of(loop, is_element, keep=False)
        self.kept = kept_values(self.held)
        self.divisors: list[str] = []
        self.divisors = list(dict.fromkeys(str(s.args[1]) for s in loop.statements if self.divides_a_row(s)))

    def divides_a_row(self, s: Statement) -> bool:
        """Whether elements are divided by what reductions made of their row: by a product with its inverse."""
        divisor = s.args[-1] if len(s.args) == 2 else None
        if not isinstance(divisor, str) or self.depth[divisor] == 0 or self.levels[s.result] != ELEMENT:
            return False
        is_float = compute_type(self.dtypes[divisor]) == "float" and self.levels[divisor] == PER_ROW
        operands = f"div({self.argument(s, 0)}, {divisor})"
        return is_float and super().expression(s) in (f"og::{operands}", f"og::fast::{operands}")

    def expression(self, s: Statement) -> str:
        """As of elements; a division by a value of the row is a product."""
        if self.divisors and self.divides_a_row(s):
            return f"og::times({self.argument(s, 0)}, {s.args[1]}_inverse)"
        return super().expression(s)

    # -- what goes through memory and registers -----------------------------------------------------------------

    def reads_of(self, one: Pass) -> list[Load]:
        """The loads that a pass reads element by element, those without memory aside."""
        used = {a for s in (*one.statements, *one.reductions) for a in s.args if isinstance(a, str)}
        used |= {s.value for s in self.loop.stores if one.stores and not s.per_row}
        return [x for x in self.element_loads() if x.name in used and not x.is_position]

    @cached_property
    def first_read(self) -> dict[str, int]:
        """The pass of a held row that a load is first needed in."""
        found: dict[str, int] = {}
        for number, one in enumerate(self.held):
            for load in self.reads_of(one):
                found.setdefault(load.name, number)
        return found

    def fetched_in(self, name: str) -> int:
        """The pass of a held row that an operand as large as the space is loaded in: one before it is needed, so that
        it is under way while threads meet."""
        return max(self.first_read[name] - 1, 0)

    def footprint(self, small: frozenset[str]) -> Held:
        """What an element of a row costs, if the loads `small` do not wait in registers."""
        size = {x.name: dtypes.BY_NAME[x.dtype].itemsize for x in self.element_loads()}
        size |= {name: 0 for name in size if name in small or self.kinds[name] == RUN}
        waiting = [0]
        for number in range(1, len(self.held)):
            later = {x.name for one in self.held[number:] for x in self.reads_of(one)}
            loaded = sum(size[name] for name in later if self.fetched_in(name) < number)
            needed = {name for one in self.held[number:] for name in one.read}
            made = {name for one in self.held[:number] for name in one.kept}
            waiting.append(loaded + sum(_width(self.dtypes[name]) for name in needed & made))
        first = sum(size[name] for name in self.first_read if self.fetched_in(name) == 0)
        added = sum(_width("f64" if self.addend() == "double" else "f32") for k in self.sums if self.is_column(k))
        cost = sum(opdef.get(s.kind, where="a row").cost for one in self.held for s in one.statements)
        return Held(first, max(waiting), added, cost, self.addend() == "double")

    def is_column(self, store: int) -> bool:
        """Whether a sum is one for each column."""
        return self.store_kinds[store] == KEPT


def _width(dtype: str) -> int:
    """Bytes of a value in the type that it is computed in, in a register."""
    return 8 if compute_type(dtype) in ("double", "og::i64") else 4
