"""Graphs whose sizes are symbols: a program with names for sizes, or one program for each set of sizes.

Dynamo traces a graph again with symbols in place of the sizes that differ from call to call. The symbols of such a
graph are replaced by numbers, and programs are made of it: two for all calls, which `symbolic_program` merges into one
with names; or, if these differ in more than numbers, one for each set of sizes. Kernels have no sizes and are not
compiled again.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from threading import Lock
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from opgraph.errors import OpGraphError
from opgraph.runtime.bounded_dict import Bounded
from opgraph.runtime.providers.torch_internals import FakeTensorMode, tree_map, without_modes
from opgraph.torch.graph.aten import FROM_SIZES, TRACED_BYTES, packet, value_of
from opgraph.torch.graph.constant_folding import MOST_BYTES_OF_SIZES, fold_constants
from opgraph.torch.graph.program import Program
from opgraph.torch.graph.size_expressions import (
    SYMBOLIC,
    Expressions,
    NotSymbolicError,
    UnknownSizeError,
    number_of,
    sample_sizes,
)
from opgraph.torch.graph.symbolic_program import SizedProgram, SymbolicProgram
from opgraph.torch.graph.torch_internals import hint, is_nested_size, neg_view

#: The most sets of sizes whose programs are cached for one graph.
MAX_SETS = 64


def has_symbols(module: GraphModule) -> bool:
    """True if a size in the graph is a symbol."""
    return any(_is_symbolic(value_of(node)) for node in module.graph.nodes)


class SizedPrograms:
    """The programs of a graph with symbols.

    Args:
        module: as for `Program`, except that there are symbols among the sizes.
        make: makes the program of a graph without symbols; its keywords are those of `Program`.

    Attributes:
        programs: the programs used so far, by the sizes of a call.
    """

    def __init__(self, module: GraphModule, make: Callable[..., Program]) -> None:
        self.module = module
        self._make = make
        self._making = Lock()  # threads may call at once
        self.programs: Bounded[tuple[int, ...], Program | SizedProgram] = Bounded(MAX_SETS)
        #: The symbolic programs, by the most bytes of constants that they hold.
        self._symbolic: dict[int, SymbolicProgram | None] = {}
        #: Symbol -> (position of an argument, axis of it; None if the argument is the size).
        self._found: dict[Any, tuple[int, int | None]] = {}
        #: The values of the symbols when the graph was traced.
        self._traced: list[int] = []
        for size, position, axis in sorted(_given_sizes(module), key=lambda found: not found[0].node.expr.is_Symbol):
            expression = size.node.expr
            if expression.is_Symbol and expression not in self._found:
                self._traced.append(hint(size))
            if expression.is_Symbol or (axis is None and not expression.free_symbols <= self._found.keys()):
                self._found.setdefault(expression, (position, axis))

    def run(self, args: list[Any]) -> Any:
        """Runs the program for the sizes of these arguments; empties the list."""
        return self.sized(args).run(args)

    def sized(self, args: list[Any]) -> Program | SizedProgram:
        """The program for the sizes of these arguments."""
        key = tuple([int(args[p] if axis is None else args[p].shape[axis]) for p, axis in self._found.values()])
        program = self.programs.get(key)
        if program is None:
            with self._making, without_modes():  # dispatch modes see the program run, not its compilation
                program = self.programs.get(key) or self._sized(key)
                self.programs[key] = program
        return program

    def _sized(self, sizes: tuple[int, ...]) -> Program | SizedProgram:
        def watched(args: list[Any]) -> Any:
            with self._making, without_modes():
                program = self._own(sizes)
            return program.run(args)

        for most_constants in (MOST_BYTES_OF_SIZES, 0):
            if most_constants not in self._symbolic:
                self._symbolic[most_constants] = self._symbolic_program(most_constants)
            program = self._symbolic[most_constants]
            with suppress(OpGraphError, NotSymbolicError):  # a kernel over no elements; constants of many bytes
                if program is not None:
                    return program.sized(sizes, watched)
        return self._own(sizes)

    def _own(self, sizes: tuple[int, ...]) -> Program:
        return self._make(self._filled(sizes), most_constants=MOST_BYTES_OF_SIZES)

    def _symbolic_program(self, most_constants: int) -> SymbolicProgram | None:
        """The program for all sizes; None if sizes change more than numbers in it.

        A number of two programs may be equal by chance although it follows from sizes: an offset may be a product of
        two symbols. So where there are several symbols, a third program has to give the same names.
        """
        symbols = list(self._found)
        if not all(symbol.is_Symbol for symbol in symbols):
            return None
        fold_constants(self.module)
        try:
            samples = sample_sizes(self.module, symbols, self._traced, 3)
            make = partial(self._make, most_constants=most_constants, symbolic=True)
            first = make(self._filled(samples[0], as_traced=True))

            def merged(other: int) -> SymbolicProgram:
                second = make(self._filled(samples[other], as_traced=True), like=first)
                ordered = [samples[0], samples[other], samples[3 - other]]
                expressions = Expressions(self.module, symbols, ordered)
                return SymbolicProgram(self.module, symbols, first, second, expressions)

            program = merged(1)
            return program if len(symbols) == 1 or program.has_same_names(merged(2)) else None
        except (NotSymbolicError, OpGraphError, ArithmeticError, IndexError, RuntimeError, ValueError):
            # Guards may allow sizes on which a graph does not run: an index may be out of range there, for example.
            return None

    run._boxed_call = True  # type: ignore[attr-defined]

    def _filled(self, sizes: Sequence[int], *, as_traced: bool = False) -> GraphModule:
        """The graph with numbers in place of symbols.

        Args:
            as_traced: True if nodes count the bytes of their values for the sizes that the graph was traced with.
        """
        known = dict(zip(self._found, sizes, strict=True))
        module = copy.copy(self.module)
        graph = torch.fx.Graph()
        renamed: dict[Node, Node] = {}
        numbers: dict[Node, Any] = {}

        def number(value: Any) -> Any:
            return number_of(value, known) if isinstance(value, SYMBOLIC) else value

        def argument(node: Node) -> Any:
            return numbers[node] if node in numbers else renamed[node]

        fakes = FakeTensorMode(allow_non_fake_inputs=True)
        for node in self.module.graph.nodes:
            value = value_of(node)
            try:
                if isinstance(value, SYMBOLIC):
                    numbers[node] = number(value)
                    if node.op != "placeholder":
                        continue
                value = _concrete(value, number, fakes)
            except UnknownSizeError:
                value = None
            whole = _WHOLE_SLICES.get(packet(node))
            if whole is not None and _is_same(value, value_of(renamed[node.args[whole]])):
                renamed[node] = renamed[node.args[whole]]
                continue
            made = graph.create_node(
                node.op, node.target, _mapped(node.args, argument, number), _mapped(node.kwargs, argument, number),
                node.name, node.type,
            )  # fmt: skip
            given = [*enumerate(node.args), *node.kwargs.items()]
            symbols = [name for name, a in given if isinstance(a, SYMBOLIC) or (isinstance(a, Node) and a in numbers)]
            made.meta = {**node.meta, "val": value, FROM_SIZES: symbols}
            if as_traced:
                made.meta[TRACED_BYTES] = _traced_bytes(value_of(node))
            renamed[node] = made
        return GraphModule(module, graph)


def _given_sizes(module: GraphModule) -> Iterator[tuple[torch.SymInt, int, int | None]]:
    """The symbolic sizes among the arguments of a graph, with position and axis; numbers come before tensors."""
    places = [value_of(n) for n in module.graph.find_nodes(op="placeholder")]
    for position, value in enumerate(places):
        if isinstance(value, torch.SymInt) and not is_nested_size(value):
            yield value, position, None
    for position, value in enumerate(places):
        for axis, size in enumerate(value.shape if isinstance(value, torch.Tensor) else ()):
            if isinstance(size, torch.SymInt):
                yield size, position, axis


#: Slice op -> the place of the argument that it returns if it reads or writes all of it. For known sizes AOTAutograd
#: omits such slices.
_WHOLE_SLICES = {torch.ops.aten.slice: 0, torch.ops.aten.slice_scatter: 1}


def _is_same(value: Any, other: Any) -> bool:
    if value is None or other is None:
        return False
    return (value.shape, value.stride(), value.dtype) == (other.shape, other.stride(), other.dtype)


def _traced_bytes(value: Any) -> int:
    if not isinstance(value, torch.Tensor):
        return 0
    return math.prod(map(hint, value.shape)) * value.dtype.itemsize


def _mapped(arguments: Any, argument: Callable[[Node], Any], number: Callable[[Any], Any]) -> Any:
    return tree_map(number, map_arg(arguments, argument))


def _is_symbolic(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return any(isinstance(s, torch.SymInt) for s in (*value.shape, *value.stride(), value.storage_offset()))
    if isinstance(value, (list, tuple)):
        return any(map(_is_symbolic, value))
    return isinstance(value, SYMBOLIC)


def _concrete(value: Any, number: Callable[[Any], Any], fakes: FakeTensorMode) -> Any:
    """A tensor without data like this one, with numbers for sizes."""
    if isinstance(value, (list, tuple)):
        return type(value)(_concrete(v, number, fakes) for v in value)
    if not isinstance(value, torch.Tensor):
        return number(value)
    if not _is_symbolic(value):
        return value
    size, stride = [number(s) for s in value.shape], [number(s) for s in value.stride()]
    offset = number(value.storage_offset())
    span = offset + sum((n - 1) * s for n, s in zip(size, stride)) + 1 if all(size) else offset
    with fakes:
        made = torch.empty(span, dtype=value.dtype, device=value.device).as_strided(size, stride, offset)
        made = made.conj() if value.is_conj() else made
        return neg_view(made) if value.is_neg() else made
