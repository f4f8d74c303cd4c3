"""Patterns: small trees of ops in a text notation, compiled for matching.

The notation is that of `opgraph.ir.expression`, with two additions:

- `OneOf(p, q, ...)`: any of these;
- a commutative op with more than two arguments, `Multiply(0.5, x, y)`: a product in any order and association.

Operands of commutative ops match in either order. One name is one tensor. `$p` is a scalar constant; a number is a
scalar constant of that value, rounded to the constant's dtype. An attribute that a pattern does not mention must have
its default. All values of a match have the same float dtype, except conditions. Inner values may have other uses.
"""

from __future__ import annotations

from dataclasses import dataclass

from opgraph.errors import InvalidArguments
from opgraph.ir import opdef
from opgraph.ir.expression import Call, Expr, Num, Param, parse_expression

#: The word for alternatives.
ONE_OF = "OneOf"


@dataclass(frozen=True, slots=True)
class Pattern:
    """A compiled pattern.

    Attributes:
        root: kind of its root.
        below: pairs of a kind below the root and a kind under that ("" for any); one of them must be present. A cheap
            test before the match.
    """

    root: str
    below: tuple[tuple[str, str], ...]
    tree: Call


def compile_pattern(text: str) -> tuple[Pattern, ...]:
    """The patterns of one text: one pattern, or one for each alternative if the root is a OneOf.

    Raises:
        InvalidArguments: the text is not a pattern: the root is not an op, an op is unknown, or has too many arguments.
    """
    tree = parse_expression(text)
    if not isinstance(tree, Call):
        raise InvalidArguments("a pattern is an op", where=f"pattern {text!r}", fix="write Kind(arg, ...)")
    return tuple(Pattern(root.kind, _kinds_needed(root), root) for root in map(_specific_first, _alternatives(tree)))


def _alternatives(tree: Expr) -> list[Call]:
    if isinstance(tree, Call) and tree.kind == ONE_OF:
        return [call for arg in tree.args for call in _alternatives(arg)]
    if not isinstance(tree, Call):
        raise InvalidArguments("an alternative of the root is no op", where=repr(tree), fix="write Kind(arg, ...)")
    return [tree]


def _specific_first(call: Call) -> Call:
    """The same call, checked, with the arguments of commutative ops ordered so that a mismatch is found early."""
    args = tuple(_specific_first(a) if isinstance(a, Call) else a for a in call.args)
    if call.kind == ONE_OF:
        return Call(call.kind, args)
    record = opdef.get(call.kind, where="a pattern")
    if record.commutative and len(args) > 4:
        raise InvalidArguments(f"{call.kind} of {len(args)} arguments", where="a pattern", fix="use four at most")
    if record.commutative:
        args = tuple(sorted(args, key=_vagueness))
    return Call(call.kind, args, call.attrs)


def _vagueness(expr: Expr) -> int:
    if isinstance(expr, Call):
        return 1 if expr.kind == ONE_OF else 0
    return 2 if isinstance(expr, Num) else 3 if isinstance(expr, Param) else 4


def _kinds_needed(root: Call) -> tuple[tuple[str, str], ...]:
    calls = _calls_below(root, 3)  # `View.kinds_below` looks through one op of the root's kind
    pairs = [(call.kind, under.kind) for call in calls for under in _calls_below(call, 2)]
    pairs += [(call.kind, "") for call in calls if not _calls_below(call, 2)]
    return tuple(dict.fromkeys(pairs)) or (("", ""),)


def _calls_below(call: Call, most: int) -> list[Call]:
    """Calls, one of which must be below this one; empty if that is uncertain, as in products of more than `most`
    factors."""
    if len(call.args) > most and opdef.get(call.kind, where="a pattern").commutative:
        return []
    choices = [_alternatives(a) for a in call.args if isinstance(a, Call) and _is_sure(a)]
    # The most specific operand: Add(1, Erf(...)) rather than Divide(x, 2).
    return max(choices, key=lambda calls: min(map(_depth, calls)), default=[])


def _is_sure(call: Call) -> bool:
    return call.kind != ONE_OF or all(isinstance(a, Call) and _is_sure(a) for a in call.args)


def _depth(expr: Expr) -> int:
    return 1 + max(map(_depth, expr.args), default=0) if isinstance(expr, Call) else 0
