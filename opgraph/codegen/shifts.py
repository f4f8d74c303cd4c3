"""Exponentials of one value minus several numbers, e^(x - c): on the CPU they share the costly part, e^x."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from opgraph.codegen.emitter import Emitter
from opgraph.loops.loop import Arg, Statement
from opgraph.schedule.levels import CALL, ELEMENT


@dataclass(frozen=True, slots=True)
class Shifted:
    """An exponential of a value and a number.

    Attributes:
        base: the value.
        amount: the number, the same for a row at least.
        taken: true if it is subtracted.
    """

    base: str
    amount: Arg
    taken: bool


def shifted_exponentials(emitter: Emitter, statements: Sequence[Statement]) -> Mapping[str, Shifted]:
    """The exponentials among some statements whose base occurs more than once, by their results."""
    made = {s.result: s for s in statements}
    found: dict[str, Shifted] = {}
    for s in statements:
        if s.kind == "Exp" and not s.rounds and s.result not in emitter.approximate and isinstance(s.args[0], str):
            found[s.result] = _taken_apart(emitter, s.args[0], made)
    bases = [x.base for x in found.values() if emitter.levels[x.base] == ELEMENT]
    return {result: x for result, x in found.items() if bases.count(x.base) > 1}


def _taken_apart(emitter: Emitter, argument: str, made: Mapping[str, Statement]) -> Shifted:
    """The base and the number of an exponential; without a number, the number is 0."""
    s = made.get(argument)
    if s is not None and s.kind in ("Subtract", "Add") and not s.rounds:
        first, second = s.args
        if isinstance(first, str) and level_of(emitter, second) < ELEMENT:
            return Shifted(first, second, s.kind == "Subtract")
        if isinstance(second, str) and level_of(emitter, first) < ELEMENT and s.kind == "Add":
            return Shifted(second, first, False)
    return Shifted(argument, 0.0, False)


def level_of(emitter: Emitter, arg: Arg) -> int:
    """The level of an argument: when it changes."""
    return emitter.levels[arg] if isinstance(arg, str) else CALL


def emit_shift_members(emitter: Emitter) -> None:
    """Adds a member for each number."""
    for result in emitter.shifted:
        emitter.put(f"  og::Shift {member(result)};")


def shift_lines(emitter: Emitter, level: int) -> Iterator[str]:
    """The lines that compute the numbers of one level."""
    for result, x in emitter.shifted.items():
        if level_of(emitter, x.amount) == level:
            amount = emitter.value(x.amount) if isinstance(x.amount, str) else emitter.literal(x.amount, "float", False)
            yield f"    {member(result)} = og::shift_by({'-' if x.taken else ''}({amount}));"


def member(result: str) -> str:
    """The member that holds the number of an exponential."""
    return f"shift_{result}"
