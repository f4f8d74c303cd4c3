"""The tokenizer for one line of the graph text, and the methods that read its tokens."""

from __future__ import annotations

import json
import re
from typing import Any

from opgraph.errors import ModelError
from opgraph.ir.dims import quoted

_TOKEN = re.compile(
    r"\s*(?:(?P<name>%?[A-Za-z_][A-Za-z0-9_]*|%[0-9]+)|(?P<sign>->|[(),:=\[\]?*])"
    r"|(?P<num>[-+]?(?:inf|nan)\b|[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?)"
    r"|(?P<string>\"(?:[^\"\\]|\\.)*\")|(?P<comment>#.*))"
)
_HASH = re.compile(r":[0-9a-f]{64}")
_FLOAT_MARKS = frozenset(".eEn")

Token = tuple[str, str]
END: Token = ("end", "the end of the line")


class Line:
    """The tokens of a line, and the current reading position.

    Args:
        text: without its line break.
        number: for messages.

    Raises:
        ModelError: a part of the text is not a token.
    """

    __slots__ = ("at", "number", "tokens")

    def __init__(self, text: str, number: int) -> None:
        self.number = number
        self.at = 0
        self.tokens: list[Token] = []
        position, text = 0, text.rstrip()
        while position < len(text):
            match = _TOKEN.match(text, position)
            if match is None:
                raise self.error(f"cannot read {text[position : position + 12]!r}")
            group = str(match.lastgroup)
            word, position = match[group], match.end()
            if word == "sha256" and (rest := _HASH.match(text, position)):
                group, word, position = "hash", rest[0][1:], rest.end()
            elif word in ("inf", "nan"):
                group = "num"
            elif group == "comment":
                continue
            self.tokens.append((group, word))

    def error(self, what: str, fix: str = "see specs/text.md, or what str(graph) prints of a graph") -> ModelError:
        """An error that names this line."""
        return ModelError(what, where=f"line {self.number} of the graph text", fix=fix)

    def peek(self, ahead: int = 0) -> Token:
        """The next token, or one further ahead, without consuming it."""
        at = self.at + ahead
        return self.tokens[at] if at < len(self.tokens) else END

    def take(self) -> Token:
        """Consumes and returns the next token."""
        token = self.peek()
        self.at += 1
        return token

    def accept(self, sign: str) -> bool:
        """True if the next token is this one; it is then consumed.

        Raises:
            ModelError: the line ends here.
        """
        group, found = self.peek()
        if found == sign and group in ("sign", "name"):
            self.at += 1
            return True
        if group == "end":
            raise self.error(f"expected {sign!r}")
        return False

    def expect(self, sign: str) -> None:
        """Consumes this token; raises ModelError if the next one is another."""
        if not self.accept(sign):
            raise self.error(f"expected {sign!r}, found {self.peek()[1]!r}")

    def end_item(self, close: str) -> None:
        """Consumes the comma after an item of a list, unless the list is closed here."""
        if not self.accept(",") and self.peek() != ("sign", close):
            raise self.error(f"expected ',' or {close!r}, found {self.peek()[1]!r}")

    def name(self) -> str:
        """A name, quoted or not."""
        group, found = self.take()
        if group == "string":
            return self._unquoted(found)
        if group != "name":
            raise self.error(f"expected a name, found {found!r}")
        return found

    def value(self) -> tuple[str, str | None]:
        """A value of the graph: its name in this text, and its own name (None for %0)."""
        group, found = self.peek()
        name = self.name()
        return (name, None) if group == "name" and found.startswith("%") else (quoted(name), name)

    def scalar(self) -> bool | int | float | str:
        """A literal: a number, true, false or a quoted text."""
        group, found = self.take()
        if group == "string":
            return self._unquoted(found)
        if found in ("true", "false") and group == "name":
            return found == "true"
        if group != "num":
            raise self.error(f"expected a value, found {found!r}")
        try:
            return float(found) if _FLOAT_MARKS.intersection(found) else int(found)
        except ValueError as error:  # an int with more digits than Python parses
            raise self.error(f"cannot read a number: {error}") from None

    def list(self) -> list[Any]:
        """Literals in brackets."""
        self.expect("[")
        values = []
        while not self.accept("]"):
            values.append(self.scalar())
            self.end_item("]")
        return values

    def _unquoted(self, text: str) -> str:
        try:
            return str(json.loads(text))
        except ValueError as error:
            raise self.error(f"cannot read {text[:40]}: {error}") from None
