"""Values that are surely positive, and the powers of them: their logarithm needs no sign, and is computed once."""

from __future__ import annotations

from opgraph.loops.loop import Loop, Statement


def powers_of_positives(loop: Loop) -> frozenset[str]:
    """Results of the powers and logarithms whose first operand is positive or NaN: og::positive has a form for them.

    A base is known to be positive where it is a choice by a comparison with zero or more, of the compared value and a
    positive number: `where(x > 0, x, 1)`, which is how a function that is made of pieces keeps its powers apart. A
    logarithm belongs to them only beside a power of the same base.
    """
    made = {s.result: s for s in loop.statements}
    powers = [s for s in loop.statements if s.record.powers]
    bases = {s.args[0] for s in powers if len(s.record.inputs) > 1}
    positive = {b for b in bases if isinstance(b, str) and b in made and _is_positive(made[b], made)}
    return frozenset(s.result for s in powers if s.args[0] in positive)


def _is_positive(choice: Statement, made: dict[str, Statement]) -> bool:
    if choice.kind != "Select" or not isinstance(choice.args[0], str) or choice.args[0] not in made:
        return False
    condition, kept, other = made[choice.args[0]], choice.args[1], choice.args[2]
    above = condition.kind == "Greater" and condition.args[0] == kept and _at_least(condition.args[1], 0.0)
    return above and _at_least(other, 1e-30)


def _at_least(arg: object, least: float) -> bool:
    return isinstance(arg, (int, float)) and not isinstance(arg, bool) and arg >= least
