"""A one-line notation for small compositions of ops: `Multiply(x, Sigmoid(Multiply(x, $alpha)))`.

Fusion rules and the decompositions of op records use it. A bare name is any value (the same name is the same value).
`$name` is a scalar constant or an attribute. A number is a scalar constant of that value. `Kind(..., key=value)` is an
op with attributes: numbers, words, true and false, and lists such as `[0, 2]`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TypeAlias

from opgraph.errors import InvalidArguments


@dataclass(frozen=True, slots=True)
class Var:
    """Any value."""

    name: str


@dataclass(frozen=True, slots=True)
class Param:
    """`$name`: a scalar constant in a pattern, an attribute in a decomposition."""

    name: str


@dataclass(frozen=True, slots=True)
class Num:
    """A scalar constant of this value."""

    value: float


@dataclass(frozen=True, slots=True)
class Call:
    """An op. Attribute values are literals, or a Param that a match captures or a decomposition fills in."""

    kind: str
    args: tuple[Expr, ...]
    attrs: tuple[tuple[str, Literal | Param], ...] = ()


Expr: TypeAlias = Var | Param | Num | Call
#: Value of an attribute.
Literal: TypeAlias = bool | int | float | str | tuple[int | float, ...]

_TOKEN = re.compile(
    r"\s*(?:(?P<num>[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)"
    r"|(?P<name>\$?[A-Za-z_]\w*(?:/[A-Za-z_]\w*)?)"  # oneDNN calls inputs src/dst
    r"|(?P<sign>[(),=\[\]]))"
)


def parse_expression(text: str) -> Expr:
    """The tree of one expression.

    Raises:
        InvalidArguments: `text` does not follow the notation; the message shows where.
    """
    tokens = _tokens(text)
    expr, rest = _expr(tokens, 0, text)
    if rest != len(tokens):
        raise _error(text, f"unexpected {tokens[rest][1]!r} after the expression")
    return expr


def _tokens(text: str) -> list[tuple[str, str]]:
    found, at, text = [], 0, text.rstrip()
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise _error(text, f"cannot read {text[at : at + 10]!r}")
        found.append((str(match.lastgroup), match.group(str(match.lastgroup))))
        at = match.end()
    return found


def _expr(tokens: list[tuple[str, str]], at: int, text: str) -> tuple[Expr, int]:
    group, word = tokens[at] if at < len(tokens) else ("", "end")
    if group == "num":
        return Num(float(word)), at + 1
    if group != "name":
        raise _error(text, f"expected a value, found {word!r}")
    if word.startswith("$"):
        return Param(word[1:]), at + 1
    if at + 1 == len(tokens) or tokens[at + 1] != ("sign", "("):
        return Var(word), at + 1
    return _call(word, tokens, at + 2, text)


def _call(kind: str, tokens: list[tuple[str, str]], at: int, text: str) -> tuple[Call, int]:
    # Expressions are written by hand, so the depth of the mutual recursion with _expr is bounded.
    args: list[Expr] = []
    attrs: list[tuple[str, Literal | Param]] = []
    while at < len(tokens) and tokens[at] != ("sign", ")"):
        if tokens[at + 1 : at + 2] == [("sign", "=")]:
            value, after = _attribute(tokens, at + 2, text)
            attrs.append((tokens[at][1], value))
        else:
            arg, after = _expr(tokens, at, text)
            args.append(arg)
        at = after + 1 if after < len(tokens) and tokens[after] == ("sign", ",") else after
    if at >= len(tokens):
        raise _error(text, f"{kind}( is not closed")
    return Call(kind, tuple(args), tuple(attrs)), at + 1


def _attribute(tokens: list[tuple[str, str]], at: int, text: str) -> tuple[Literal | Param, int]:
    if tokens[at : at + 1] == [("sign", "[")]:
        items: list[int | float] = []
        at += 1
        while at < len(tokens) and tokens[at][0] == "num":
            items.append(_number(tokens[at][1]))
            at += 2 if tokens[at + 1 : at + 2] == [("sign", ",")] else 1
        if tokens[at : at + 1] != [("sign", "]")]:
            raise _error(text, "a list of numbers is not closed")
        return tuple(items), at + 1
    value, after = _expr(tokens, at, text)
    if isinstance(value, Call):
        raise _error(text, f"attribute {tokens[at - 2][1]!r} must be a literal")
    if isinstance(value, Num):
        return _number(tokens[at][1]), after
    if isinstance(value, Var):
        return {"true": True, "false": False}.get(value.name, value.name), after
    return value, after


def _number(word: str) -> int | float:
    """The number, as an int if it has no point or exponent: attributes distinguish integers from floats."""
    return int(word) if word.lstrip("+-").isdigit() else float(word)


def _error(text: str, what: str) -> InvalidArguments:
    return InvalidArguments(
        what, where=f"expression {text!r}", fix="write Kind(arg, ..., key=value), names, $params and numbers"
    )
