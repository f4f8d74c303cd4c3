"""Masks that an output tells: a branch by the sign of a value may leave that sign to be read from the result."""

from __future__ import annotations

from functools import lru_cache

from opgraph.ir.graph import Graph
from opgraph.ir.logical_tensor import LogicalTensor
from opgraph.partition.pattern import Pattern, compile_pattern
from opgraph.partition.search import Match, find_match
from opgraph.partition.view import View, scalar

#: Spellings of y whose condition holds exactly where y > 0: the positive branch is x itself, so that nothing underflows
#: to 0, and the other one is never positive. NaN is neither. (`x >= 0` is not `y >= 0`: n x may be -0, and -0 >= 0.)
_HOLDS = ("Select({c}, x, $n)", "Select({c}, x, Multiply(x, $n))")
_CONDITION = "OneOf(Greater(x, 0), Less(0, x))"


@lru_cache(maxsize=1)
def _patterns() -> tuple[tuple[Pattern, bool], ...]:
    return tuple(
        (pattern, "Multiply" in text) for text in _HOLDS for pattern in compile_pattern(text.replace("{c}", _CONDITION))
    )


def masks_of_outputs(graph: Graph) -> dict[int, LogicalTensor]:
    """Conditions of a finalized graph that hold exactly where an output is greater than 0: their ids, that output."""
    found: dict[int, LogicalTensor] = {}
    view = View(graph)
    for tensor in graph.outputs:
        op = graph.producer(tensor.id)
        for pattern, is_product in _patterns() if op is not None else ():
            assert op is not None
            if find_match(pattern, op, view, _never_positive if not is_product else _never_negative):
                found[op.inputs[0].id] = tensor
                break
    return found


def _never_positive(match: Match) -> bool:
    return scalar(match.scalars["n"]) <= 0


def _never_negative(match: Match) -> bool:
    return scalar(match.scalars["n"]) >= 0
