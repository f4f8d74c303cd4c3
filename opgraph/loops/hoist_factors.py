"""Moves a factor that is one number for a row out of the row's sum: sum(a r) = r sum(a).

The gradient of a norm sums dy (x - mean) r, where r depends on the variance. Without r, the sum is computed in the pass
of the variance, which saves one pass over the row. That of a softmax sums dy e / s, where s is the sum of e.

Without r, a product may leave the range of f32: for p = x / sum(x), p p is at most 1 where x x may be infinite, or 0.
So r moves only if one other factor remains, or two of which one bounds r: (x - mean) if r follows from the sum of its
squares, which overflows first; e if it is the exponential of x minus the largest x, and s is its sum.

If r is infinite and elements have both signs, the sum is infinite instead of NaN. A largest or smallest element stays
inside: for a row of no elements it is infinite, and its product with their sum is NaN.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from opgraph.loops.loop import Arg, Loop, Statement

#: A product of more factors is not changed.
_MOST = 8
#: Ops by which a scale may follow from a sum over its row.
_SCALES = ("Add", "Sqrt", "Rsqrt", "Reciprocal")


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
        self.numbers = numbers
        self.statements = {s.result: s for s in loop.statements}
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
        if waiting or not of_row or not self._is_in_range(factors, [factor for _, factor in of_row]):
            return None
        return _Product(tuple(factors), tuple(of_row), like or s)

    def _is_in_range(self, factors: Sequence[Arg], of_row: Sequence[str]) -> bool:
        """True if the products of these factors stay in the range of f32 where the loop's other values do."""
        if len(factors) != 2:
            return len(factors) == 1
        sums = [self._sums_that_bound(factor) for factor in factors]
        return any(all(self._follows(factor, own) for factor in of_row) for own in sums)

    def _sums_that_bound(self, factor: Arg) -> set[str]:
        """The sums over a row that show how large a factor is: of its squares, or its own if it is at most 1."""
        added = {s.result for s in self.statements.values() if s.kind == "Square" and s.args == (factor,)}
        added |= {s.result for s in self.statements.values() if s.kind == "Multiply" and s.args == (factor, factor)}
        if self._is_shifted_exponential(factor):
            added.add(str(factor))
        return {s.result for s in self.statements.values() if s.reduces and s.row.is_sum and s.args[0] in added}

    def _is_shifted_exponential(self, factor: Arg) -> bool:
        """True for Exp(x - ReduceMax(x))."""
        exponential = self.statements.get(str(factor))
        shifted = self.statements.get(str(exponential.args[0])) if exponential and exponential.kind == "Exp" else None
        if shifted is None or shifted.kind != "Subtract":
            return False
        largest = self.statements.get(str(shifted.args[1]))
        return largest is not None and largest.kind == "ReduceMax" and largest.args[0] == shifted.args[0]

    def _follows(self, factor: str, sums: Collection[str]) -> bool:
        """True if a row factor follows from one of these sums, by adding numbers, roots and reciprocals alone."""
        made = self.statements.get(factor)
        if factor in sums or made is None or made.kind not in _SCALES:
            return factor in sums
        read = [a for a in made.args if isinstance(a, str) and a not in self.numbers]
        return len(read) == 1 and self._follows(read[0], sums)
