"""Masks that follow from an output: if a branch depends on the size of a value, the result may show the condition."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from opgraph.ir.graph import Graph
from opgraph.ir.logical_tensor import LogicalTensor
from opgraph.partition.pattern import Pattern, compile_pattern
from opgraph.partition.search import Match, find_match
from opgraph.partition.view import View, scalar

#: Forms of y whose condition holds exactly where y > 0: the positive branch is x itself, so that nothing underflows to
#: 0, and the other branch is never positive. NaN is neither. (`x >= 0` is not `y >= 0`: n x may be -0, and -0 >= 0.)
_HOLDS = ("Select({c}, x, $n)", "Select({c}, x, Multiply(x, $n))")
_CONDITION = "OneOf(Greater(x, 0), Less(0, x))"
#: x between numbers, as relu6, hardtanh, clamp are traced, and as written by hand: y compares with each like x does.
_BETWEEN = (
    "Select(Or(LessOrEqual(x, $low), GreaterEqual(x, $high)), StopGradient(Minimum(Maximum(x, $least), $most)), x)",
    "Select(And(Greater(x, $low), Less(x, $high)), x, StopGradient(Minimum(Maximum(x, $least), $most)))",
    "Select(Greater(x, $low), x, StopGradient(Maximum(x, $least)))",
    "Select(Less(x, $high), x, StopGradient(Minimum(x, $most)))",
    "Select(LessOrEqual(x, $low), $least, Select(GreaterEqual(x, $high), $most, x))",
    "Select(LessOrEqual(x, $low), $least, x)",
    "Select(GreaterEqual(x, $high), $most, x)",
)
#: The bound of each comparison.
_BOUND = {"LessOrEqual": "low", "Greater": "low", "GreaterEqual": "high", "Less": "high"}


@dataclass(frozen=True, slots=True)
class Told:
    """A condition that holds exactly where a comparison of an output with a number holds.

    Attributes:
        output: an output of the graph.
        kind: the op of the comparison.
        bound: the number.
    """

    output: LogicalTensor
    kind: str
    bound: float


@lru_cache(maxsize=1)
def _signs() -> tuple[tuple[Pattern, bool], ...]:
    return tuple(
        (pattern, "Multiply" in text) for text in _HOLDS for pattern in compile_pattern(text.replace("{c}", _CONDITION))
    )


@lru_cache(maxsize=1)
def _between() -> tuple[Pattern, ...]:
    return tuple(pattern for text in _BETWEEN for pattern in compile_pattern(text))


def masks_of_outputs(graph: Graph) -> dict[int, Told]:
    """Conditions of a finalized graph that follow from an output, by id."""
    found: dict[int, Told] = {}
    view = View(graph)
    for tensor in graph.outputs:
        op = graph.producer(tensor.id)
        if op is None:
            continue
        for pattern, is_product in _signs():
            if find_match(pattern, op, view, _never_positive if not is_product else _never_negative):
                found[op.inputs[0].id] = Told(tensor, "Greater", 0.0)
                break
        for pattern in _between():
            match = find_match(pattern, op, view, _keeps_order)
            if match is not None:
                bounds = {k: scalar(match.scalars[n]) for k, n in _BOUND.items() if n in match.scalars}
                told = [o for o in match.ops.values() if o.kind in bounds]
                found.update((o.outputs[0].id, Told(tensor, o.kind, bounds[o.kind])) for o in told)
                break
    return found


def _never_positive(match: Match) -> bool:
    return scalar(match.scalars["n"]) <= 0


def _never_negative(match: Match) -> bool:
    return scalar(match.scalars["n"]) >= 0


def _keeps_order(match: Match) -> bool:
    value = {name: scalar(tensor) for name, tensor in match.scalars.items()}
    low, high = value.get("low"), value.get("high")
    meet = value.get("least") == low and value.get("most") == high
    return meet and (low is None or high is None or low < high)
