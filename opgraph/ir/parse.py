"""Reading the text form of a graph back."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from opgraph.errors import ModelError, OpGraphError
from opgraph.ir import dtypes
from opgraph.ir.equality import constant_digest
from opgraph.ir.graph import Graph
from opgraph.ir.logical_tensor import Dim, Dims, LogicalTensor

_TOKEN = re.compile(
    r"\s*(?:(?P<string>\"(?:[^\"\\]|\\.)*\")|(?P<hash>sha256:[0-9a-f]{64})"
    r"|(?P<num>[-+]?(?:inf|nan)\b|[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)"
    r"|(?P<name>%?[A-Za-z0-9_]+)|(?P<sign>->|[(),:=\[\]?*])|(?P<comment>#.*))"
)


def parse(text: str, constants: Mapping[str, np.ndarray] | None = None) -> Graph:
    """The graph that `str(graph)` printed.

    Args:
        text: the text form.
        constants: arrays for constants that print as a sha256, by their name in the text.

    Returns: a finalized graph, equal to the printed one.

    Raises:
        ModelError: the text does not follow the form; the message names the line.
        OpGraphError: an op that does not fit its schema.
    """
    reader = _Reader(constants or {})
    for number, line in enumerate(text.splitlines(), start=1):
        reader.read_line(line, number)
    return reader.graph_at_end()


class _Reader:
    """Reads line by line; holds the graph so far and the values by name."""

    def __init__(self, constants: Mapping[str, np.ndarray]) -> None:
        self.constants = constants
        self.graph = Graph()
        self.values: dict[str, LogicalTensor] = {}
        self.outputs: list[str] | None = None
        self.tokens: list[tuple[str, str]] = []
        self.at = 0
        self.line = 0

    # -- lines --------------------------------------------------------------------------------------------------

    def read_line(self, line: str, number: int) -> None:
        self.line, self.at, self.tokens = number, 0, []
        position, line = 0, line.rstrip()
        while position < len(line):
            match = _TOKEN.match(line, position)
            if match is None:
                raise self.error(f"cannot read {line[position : position + 12]!r}")
            if match.lastgroup != "comment":
                self.tokens.append((str(match.lastgroup), match.group(str(match.lastgroup))))
            position = match.end()
        if not self.tokens:
            return
        if self.outputs is None:
            self.header()
        elif self.tokens[0] == ("name", "const"):
            self.constant()
        else:
            self.op()
        if self.at != len(self.tokens):
            raise self.error(f"unexpected {self.tokens[self.at][1]!r}")

    def graph_at_end(self) -> Graph:
        if self.outputs is None:
            raise self.error("there is no graph(...) -> (...) line")
        for name in self.outputs:
            if name not in self.values:
                raise self.error(f"output {name} is never made")
        self.graph.set_outputs([self.values[n] for n in self.outputs])
        return self.graph.finalize()

    def header(self) -> None:
        self.expect("graph")
        self.expect("(")
        while not self.accept(")"):
            name = self.name()
            self.expect(":")
            tensor = self.type(name)
            self.values[name] = self.graph._add_input(tensor)
            self.accept(",")
        self.expect("->")
        self.expect("(")
        self.outputs = []
        while not self.accept(")"):
            self.outputs.append(self.name())
            self.accept(",")

    def constant(self) -> None:
        self.at += 1
        name = self.name()
        self.expect(":")
        declared = self.type(name)
        self.expect("=")
        dtype, shape = dtypes.get(declared.dtype, where=f"line {self.line}"), declared.shape
        group, word = self.peek()
        if group == "hash":
            self.at += 1
            data = self.given_constant(name, dtype)
        else:
            values = self.list() if word == "[" else [self.scalar()]
            if len(values) != int(np.prod(shape)):
                raise self.error(f"constant {name} has {len(values)} values for shape {shape}")
            data = np.array(values, dtype=object).astype(dtype.numpy).reshape(shape)
        made = self.graph.constant(_own_name(name) or "", data)
        if group == "hash" and constant_digest(made) != word.removeprefix("sha256:"):
            raise self.error(f"the array given for constant {name} is not the one that was printed")
        self.values[name] = made

    def given_constant(self, name: str, dtype: dtypes.DType) -> np.ndarray:
        key = _own_name(name) or name
        if key not in self.constants:
            raise self.error(
                f"constant {name} printed as a hash", fix=f"pass parse(text, constants={{{key!r}: array}})"
            )
        return np.asarray(self.constants[key])

    def op(self) -> None:
        outs: list[tuple[str, LogicalTensor | None]] = []
        if self.tokens[1:2] != [("sign", "(")]:
            while not self.accept("="):
                name = self.name()
                outs.append((name, self.type(name) if self.accept(":") else None))
                self.accept(",")
        kind = self.name()
        self.expect("(")
        args: list[LogicalTensor | float] = []
        attrs: dict[str, Any] = {}
        while not self.accept(")"):
            if self.tokens[self.at + 1 : self.at + 2] == [("sign", "=")]:
                key = self.name()
                self.at += 1
                attrs[key] = self.list() if self.peek()[1] == "[" else self.scalar()
            else:
                args.append(self.argument())
            self.accept(",")
        self.add(kind, args, attrs, outs)

    def add(
        self,
        kind: str,
        args: list[LogicalTensor | float],
        attrs: dict[str, Any],
        outs: list[tuple[str, LogicalTensor | None]],
    ) -> None:
        inputs = tuple(a if isinstance(a, LogicalTensor) else self.graph.constant("", a) for a in args)
        next_id = self.graph._next_tensor
        tensors = tuple(
            LogicalTensor(next_id + i, dtypes.UNDEF, None, name=_own_name(name))
            if tensor is None
            else tensor.with_(id=next_id + i)
            for i, (name, tensor) in enumerate(outs)
        )
        try:
            added = self.graph._add(
                self.graph._next_op, kind, inputs, tensors, "", attrs, short=all(t is None for _, t in outs)
            )
        except OpGraphError as error:
            error.where = f"line {self.line}: {error.where}"
            raise
        for (name, _), tensor in zip(outs, added.outputs, strict=True):
            if name in self.values:
                raise self.error(f"{name} is made twice")
            self.values[name] = tensor

    # -- tokens -------------------------------------------------------------------------------------------------

    def peek(self) -> tuple[str, str]:
        return self.tokens[self.at] if self.at < len(self.tokens) else ("end", "the end of the line")

    def accept(self, word: str) -> bool:
        if self.peek()[1] == word and self.peek()[0] != "string":
            self.at += 1
            return True
        if self.at >= len(self.tokens):
            raise self.error(f"expected {word!r}")
        return False

    def expect(self, word: str) -> None:
        if not self.accept(word):
            raise self.error(f"expected {word!r}, found {self.peek()[1]!r}")

    def name(self) -> str:
        group, word = self.peek()
        if group not in ("name", "string", "num"):
            raise self.error(f"expected a name, found {word!r}")
        self.at += 1
        return word

    def argument(self) -> LogicalTensor | float:
        group, word = self.peek()
        if group == "num" or word in ("true", "false"):
            return self.scalar()
        name = self.name()
        if name not in self.values:
            raise self.error(f"{name} is used before it is made")
        return self.values[name]

    def scalar(self) -> Any:
        group, word = self.peek()
        self.at += 1
        if group == "string":
            return json.loads(word)
        if word in ("true", "false"):
            return word == "true"
        if group != "num":
            raise self.error(f"expected a value, found {word!r}")
        return float(word) if re.search(r"[.eEn]", word) else int(word)

    def list(self) -> list[Any]:
        self.expect("[")
        values = []
        while not self.accept("]"):
            values.append(self.scalar())
            self.accept(",")
        return values

    def type(self, name: str) -> LogicalTensor:
        dtype = self.name()
        dims = self.dims()
        extra: dict[str, Any] = {}
        if self.peek()[1] == "(" and self.accept("("):
            while not self.accept(")"):
                key = self.name()
                self.expect("=")
                extra[key] = tuple(self.list()) if key == "strides" else self.name()
                self.accept(",")
        if not extra.keys() <= {"layout", "property", "strides"}:
            raise self.error(f"unknown word in the type of {name}: {', '.join(extra)}")
        return LogicalTensor(self.graph._next_tensor, dtype, dims, name=_own_name(name), **extra)

    def dims(self) -> Dims:
        self.expect("[")
        dims: list[Dim] = []
        while not self.accept("]"):
            group, word = self.peek()
            self.at += 1
            if word == "*" and not dims:
                self.expect("]")
                return None
            if group == "num" and not word.isdigit():
                raise self.error(f"{word} is not a dimension")
            dims.append(None if word == "?" else int(word) if group == "num" else _own_name(word))
            self.accept(",")
        return tuple(dims)

    def error(
        self, what: str, fix: str = "see the text form in the README, or print a graph with str(graph)"
    ) -> ModelError:
        return ModelError(what, where=f"line {self.line} of the graph text", fix=fix)


def _own_name(word: str) -> str | None:
    """The name that a word of the text stands for; %number is no name."""
    if word.startswith('"'):
        return str(json.loads(word))
    return None if word.startswith("%") else word
