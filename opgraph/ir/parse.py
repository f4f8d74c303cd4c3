"""The parser of the text form of graphs."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from itertools import count
from typing import Any

import numpy as np

from opgraph.errors import InvalidArguments, OpGraphError
from opgraph.ir import dtypes
from opgraph.ir.constants import constant_data
from opgraph.ir.equality import constant_digest
from opgraph.ir.graph import Graph
from opgraph.ir.logical_tensor import Dim, Dims, LogicalTensor
from opgraph.ir.tokens import Line

#: A value that a line makes: its name in the text, its own name, and its type if the line states it.
_Made = tuple[str, str | None, LogicalTensor | None]
#: Names of the form t<id>, which unnamed values have.
_NUMBERED = re.compile(r"\bt([0-9]{1,18})\b")


def parse(text: str, constants: Mapping[str, np.ndarray] | None = None) -> Graph:
    """Parses a graph that `str(graph)` printed.

    Args:
        text: the text form.
        constants: arrays for constants that print as a sha256, by their name in the text ("%0" for an unnamed one).

    Returns: a finalized graph, equal to the printed one.

    Raises:
        ModelError: the text does not follow the form; the message names the line.
        OpGraphError: an op does not fit its schema, or a shape is impossible; the message names the line.
        InvalidArguments: `text` is not a str, or the text needs no such array as one of `constants`.
    """
    if not isinstance(text, str):
        raise InvalidArguments(f"got {type(text).__name__}", where="parse", fix="pass the text of a graph (str)")
    if constants is not None and not isinstance(constants, Mapping):
        what = f"got {type(constants).__name__} for the constants"
        raise InvalidArguments(what, where="parse", fix="pass a dict of arrays by name")
    reader = _Reader(dict(constants or {}), {int(id) for id in _NUMBERED.findall(text)})
    number = 0
    # Not splitlines(): Unicode has other line separators, which are escaped in quoted names and illegal elsewhere.
    for number, line in enumerate(text.split("\n"), start=1):
        try:
            reader.read(Line(line, number))
        except OpGraphError as error:
            if f"line {number} " not in error.where:
                error.where = f"line {number} of the graph text: {error.where}"
            raise
    return reader.graph_at_end(Line("", number))


class _Reader:
    """The graph so far, and its values by their name in the text."""

    def __init__(self, constants: dict[str, np.ndarray], taken: set[int]) -> None:
        self.constants, self.taken = constants, taken
        self.graph = Graph()
        self.values: dict[str, LogicalTensor] = {}
        self.outputs: list[str] | None = None

    def read(self, line: Line) -> None:
        if not line.tokens:
            return
        if self.outputs is None:
            self.header(line)
        elif line.peek() == ("name", "const"):
            self.constant(line)
        else:
            self.op(line)
        if line.peek()[0] != "end":
            raise line.error(f"unexpected {line.peek()[1]!r}")

    def graph_at_end(self, line: Line) -> Graph:
        if self.outputs is None:
            raise line.error("there is no graph(...) -> (...) line")
        for name in self.outputs:
            if name not in self.values:
                raise line.error(f"output {name} is never made")
        if self.constants:
            raise InvalidArguments(
                f"the text asks for no constant {next(iter(self.constants))!r}",
                where="parse(constants=...)",
                fix="give arrays for the constants that are printed as a sha256",
            )
        self.graph.set_outputs([self.values[n] for n in self.outputs])
        return self.graph.finalize()

    # -- lines --------------------------------------------------------------------------------------------------

    def header(self, line: Line) -> None:
        line.expect("graph")
        line.expect("(")
        while not line.accept(")"):
            called, name = line.value()
            line.expect(":")
            self.define(line, called, self.graph._add_input(self.type(line, name)))
            line.end_item(")")
        line.expect("->")
        line.expect("(")
        outputs = []
        while not line.accept(")"):
            outputs.append(line.value()[0])
            line.end_item(")")
        self.outputs = outputs

    def constant(self, line: Line) -> None:
        line.take()
        called, name = line.value()
        line.expect(":")
        declared = self.type(line, name)
        line.expect("=")
        group, word = line.peek()
        if group == "hash":
            line.take()
            data = self.given_constant(line, name or called, declared, word)
        else:
            values = line.list() if word == "[" else [line.scalar()]
            if len(values) != math.prod(declared.shape):
                raise line.error(f"constant {called} has {len(values)} values for shape {list(declared.shape)}")
            try:
                array = np.array(values, dtype=object).reshape(declared.shape)
            except ValueError as error:  # no elements, but an axis that is longer than NumPy allows
                raise line.error(f"constant {called} cannot be an array: {error}", "give it another shape") from None
            data = constant_data(array, declared.dtype, f"constant {called}")[1]
        made = declared.with_(data=data)
        self.graph._tables.enter_tensor(made)
        self.define(line, called, made)

    def given_constant(self, line: Line, called: str, declared: LogicalTensor, digest: str) -> np.ndarray:
        """The array for a constant that the text represents by a hash."""
        if called not in self.constants:
            raise line.error(
                f"constant {called} printed as a hash", fix=f"pass parse(text, constants={{{called!r}: array}})"
            )
        data = np.asarray(self.constants.pop(called))
        fits = data.dtype == dtypes.get(declared.dtype).numpy and data.shape == declared.shape
        if not fits or constant_digest(declared.with_(data=data)) != digest:
            raise line.error(
                f"the array given for constant {called} is not the one that was printed", "give the same array"
            )
        return data

    def op(self, line: Line) -> None:
        made: list[_Made] = []
        if line.peek(1) != ("sign", "("):
            while not line.accept("="):
                called, name = line.value()
                made.append((called, name, self.type(line, name) if line.accept(":") else None))
                line.end_item("=")
        kind = line.name()
        line.expect("(")
        inputs: list[LogicalTensor] = []
        attrs: dict[str, Any] = {}
        while not line.accept(")"):
            if line.peek(1) == ("sign", "="):
                key = line.name()
                line.take()
                if key in attrs:
                    raise line.error(f"attribute {key} is given twice")
                attrs[key] = line.list() if line.peek()[1] == "[" else line.scalar()
            else:
                inputs.append(self.argument(line))
            line.end_item(")")
        self.add(line, kind, tuple(inputs), attrs, made)

    def add(
        self, line: Line, kind: str, inputs: tuple[LogicalTensor, ...], attrs: dict[str, Any], made: list[_Made]
    ) -> None:
        ids = self.new_ids()
        outputs = tuple(
            LogicalTensor(id, dtypes.UNDEF, None, name=name) if tensor is None else tensor.with_(id=id)
            for id, (_, name, tensor) in zip(ids, made)
        )
        infer = all(tensor is None for _, _, tensor in made)
        op = self.graph._add(self.graph._next_op, kind, inputs, outputs, "", attrs, short=infer)
        for (called, _, _), tensor in zip(made, op.outputs, strict=True):
            self.define(line, called, tensor)

    def define(self, line: Line, called: str, tensor: LogicalTensor) -> None:
        if called in self.values:
            raise line.error(f"{called} is made twice", "give every value its own name")
        self.values[called] = tensor

    # -- parts --------------------------------------------------------------------------------------------------

    def argument(self, line: Line) -> LogicalTensor:
        group, word = line.peek()
        if group == "num" or (group == "name" and word in ("true", "false")):
            value = line.scalar()
            return self.graph.constant("", value)
        called, _ = line.value()
        if called not in self.values:
            raise line.error(f"{called} is used before it is made")
        return self.values[called]

    def type(self, line: Line, name: str | None) -> LogicalTensor:
        dtype = line.name()
        dims = _dims(line)
        extra: dict[str, Any] = {"name": name}
        if line.peek() == ("sign", "("):
            line.take()
            while not line.accept(")"):
                key = line.name()
                if key not in ("layout", "property", "strides", "name"):
                    raise line.error(f"unknown word {key!r} in a type")
                line.expect("=")
                extra[key] = tuple(line.list()) if key == "strides" else line.name()
                line.end_item(")")
        return LogicalTensor(next(self.new_ids()), dtype, dims, **extra)

    def new_ids(self) -> Iterator[int]:
        """Tensor ids whose default name t<id> does not occur in the text."""
        return (id for id in count(self.graph._next_tensor) if id not in self.taken)


def _dims(line: Line) -> Dims:
    line.expect("[")
    if line.peek() == ("sign", "*"):
        line.take()
        line.expect("]")
        return None
    dims: list[Dim] = []
    while not line.accept("]"):
        group, word = line.peek()
        if group == "num":
            size = line.scalar()
            if not isinstance(size, int) or size < 0:
                raise line.error(f"{word} is not a dimension")
            dims.append(size)
        elif (group, word) == ("sign", "?"):
            line.take()
            dims.append(None)
        else:
            dims.append(line.name())
        line.end_item("]")
    return tuple(dims)
