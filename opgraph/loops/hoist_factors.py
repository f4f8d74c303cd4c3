"""Moves a factor that is one number for a row out of the row's sum: sum(a r) = r sum(a).

The gradient of a norm sums dy (x - mean) r, where r depends on the variance. Without r, the sum is computed in the pass
of the variance, which saves one pass over the row. If products overflow that a tiny r would have kept in bounds, so
does the sum; the squares of the variance overflow first. If r is infinite and elements have both signs, the sum is
infinite instead of NaN. A largest or smallest element stays inside: for a row of no elements it is infinite, and its
product with their sum is NaN.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from opgraph.loops.loop import Arg, Loop, Statement

#: A product of more factors is not changed.
_MOST = 8


@dataclass(frozen=True, slots=True)
class _Product:
    """The product that a sum adds up.

    Attributes:
        factors: the factors that differ by element.
        of_row: the statements that apply factors that are one number for a row, and these factors.
        like: a statement that is a product, as a template.
    """

    factors: tuple[Arg, ...]
    of_row: tuple[tuple[Statement, str], ...]
    like: Statement


def without_row_factors(loop: Loop, numbers: Collection[str] = ()) -> Loop:
    """The loop in which every sum that does not depend on its row factors is computed before them.

    Args:
        numbers: names of loads that stand for literals.
    """
    if not loop.row_axes:
        return loop
    depth = loop.depths()
    found = _Products(loop, numbers)
    count = len(loop.statements)
    statements: list[Statement] = []
    for s in loop.statements:
        product = found.of(s)
        early = max((depth[f] for f in product.factors if isinstance(f, str)), default=0) + 1 if product else 0
        if product is None or early >= depth[s.result]:
            statements.append(s)
            continue
        value, *others = product.factors
        for other in others:
            statements.append(replace(product.like, result=f"t{count}", args=(value, other), tag=s.tag))
            value, count = f"t{count}", count + 1
        statements.append(replace(s, result=f"t{count}", args=(value,)))
        for number, (apply, factor) in enumerate(product.of_row, start=1):
            is_last = number == len(product.of_row)
            result = s.result if is_last else f"t{count + 1}"
            args = (f"t{count}", factor)
            statements.append(replace(apply, result=result, args=args, tag=s.tag))
            count += 1
        count += 1
    return replace(loop, statements=tuple(statements)).with_stores(range(len(loop.stores)))


class _Products:
    """The products in a loop that have factors with one value for each row."""

    def __init__(self, loop: Loop, numbers: Collection[str]) -> None:
        self.made: dict[str, Statement] = {}
        self.of_row = {load.name for load in loop.loads if load.align == "rows"}
        for s in loop.statements:
            if s.reduces and not s.row.is_sum:
                continue
            if s.reduces or all(a in self.of_row or a in numbers for a in s.args if isinstance(a, str)):
                self.of_row.add(s.result)
            elif self._is_product(s):
                self.made[s.result] = s

    def _is_product(self, s: Statement) -> bool:
        if s.rounds:
            return False
        if s.kind == "Divide":
            return s.args[1] in self.of_row
        return s.kind == "Multiply" and any(a in self.of_row or a in self.made for a in s.args)

    def of(self, s: Statement) -> _Product | None:
        """The factors of the product that a sum adds up; None if it does not add up such a product."""
        arg = s.args[0]
        if not (s.reduces and s.row.is_sum) or s.rounds or arg not in self.made:
            return None
        factors: list[Arg] = []
        of_row: list[tuple[Statement, str]] = []
        like: Statement | None = None
        waiting: list[tuple[Arg, Statement]] = [(arg, s)]
        while waiting and len(factors) + len(waiting) <= _MOST:
            arg, reader = waiting.pop()
            own = self.made.get(arg) if isinstance(arg, str) else None
            if arg in self.of_row:
                of_row.append((reader, str(arg)))
            elif own is None or own.dtype != s.dtype:
                factors.append(arg)
            elif own.kind == "Divide":
                of_row.append((own, str(own.args[1])))
                waiting.append((own.args[0], own))
            else:
                like = like or own
                waiting.extend((a, own) for a in reversed(own.args))
        if waiting or not of_row:
            return None
        return _Product(tuple(factors), tuple(of_row), like or s)
