"""One program for all sizes of a graph with symbols: it has names for the numbers that follow from sizes.

Programs contain sizes as numbers. Two are made of one graph, for two sets of sizes in which no two numbers are equal by
chance: both compute the meaning of the graph for all sizes. Their texts, and the layouts of their kernels' operands,
differ only in numbers. Each pair of numbers must be the two values of one expression of the symbols, whose name
replaces them. For the sizes of a call, the expressions are evaluated, and the kernels whose operands they lay out are
planned.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.fx import GraphModule

from opgraph.torch.graph.constant_folding import MOST_BYTES_OF_SIZES, SizedConstants
from opgraph.torch.graph.launches import Launch
from opgraph.torch.graph.program import Program, plan_launches, sequence_of
from opgraph.torch.graph.program_text import Checked
from opgraph.torch.graph.size_expressions import Expressions, NotSymbolicError
from opgraph.torch.graph.tensor_locations import Place, filled

#: A number of a program's text.
_NUMBER = re.compile(r"(?<![\w.])\d+(?:\.\d+)?(?:e[+-]?\d+)?(?![\w.])")


@dataclass(frozen=True, slots=True)
class SizedProgram:
    """A symbolic program, for the sizes of a call.

    Attributes:
        run: the function of the program; it empties its list of arguments.
        input_strides: the strides of each argument; None for an argument that is no tensor.
    """

    run: Callable[[list[Any]], Any]
    input_strides: Sequence[tuple[int, ...] | None]


class SymbolicProgram:
    """The common parts of two programs of a graph, with names for the numbers that differ.

    Args:
        module: the graph.
        symbols: the symbols whose values a call provides, in order.
        first, second: the programs for the first two sets of sizes with which `expressions` was made.

    Raises:
        NotSymbolicError: they differ in more than sizes.
    """

    def __init__(
        self, module: GraphModule, symbols: Sequence[Any], first: Program, second: Program, expressions: Expressions
    ) -> None:
        if first.folded != second.folded:
            raise NotSymbolicError
        self._program = first
        self._symbols = symbols
        self._expressions = expressions
        self._constants = SizedConstants(module, first.folded.values())
        self._source = self._text(first.source, second.source)
        self._code = compile(self._source, "<opgraph>", "exec")
        self._launches = {
            name: [self._launch(a, b) for a, b in _pairs(launches, second.kernel_steps[name])]
            for name, launches in first.kernel_steps.items()
        }
        self._checked = [
            (a, [None if s is None else self._numbers(s, t) for s, t in _pairs(a.strides, b.strides)])
            for (_, a), (_, b) in _pairs(first.checked, second.checked)
        ]
        self._constant_strides = {
            name: self._numbers(first.env[name].stride(), second.env[name].stride()) for name in first.folded
        }
        self._input_strides = [
            self._numbers(s, t) if s is not None else None for s, t in _pairs(first.input_strides, second.input_strides)
        ]
        self._values = expressions.values()

    def has_same_names(self, other: SymbolicProgram) -> bool:
        """True if another program has the same numbers and names in the same places."""

        def parts(program: SymbolicProgram) -> tuple[Any, ...]:
            launches = {
                name: [
                    (one.reads, one.writes, {load: repr(number) for load, number in one.numbers.items()})
                    for one in found
                ]
                for name, found in program._launches.items()
            }
            strides = [own for _, own in program._checked], program._constant_strides, program._input_strides
            return program._source, launches, strides

        return parts(self) == parts(other)

    def sized(self, sizes: Sequence[int], watched: Callable[[list[Any]], Any]) -> SizedProgram:
        """The program for these values of the symbols.

        Args:
            watched: runs instead if there are watchers.

        Raises:
            OpGraphError: a kernel does not run on these sizes; one over no elements, for example.
            NotSymbolicError: for these sizes the program differs in more than numbers.
        """
        values = self._values(*sizes)
        env = {**self._program.env, **values, **self._constants_for(sizes, values), "watched": watched}
        launches = {name: [launch.sized(values) for launch in found] for name, found in self._launches.items()}
        plan_launches((one for step in launches.values() for one in step if one.plan is None), self._program.beginnings)
        for name, step in launches.items():
            env.update(sequence_of(name, step, symbolic=True).values)
        for call, strides in self._checked:
            own = [None if s is None else filled(s, values) for s in strides]
            env[call.name] = Checked(env, call.name, call.call, own, call.alignment, call.overwritten)
        exec(self._code, env)
        run = env["run"]
        run._boxed_call = True
        return SizedProgram(run, [None if s is None else filled(s, values) for s in self._input_strides])

    def _constants_for(self, sizes: Sequence[int], values: Mapping[str, Any]) -> Mapping[str, torch.Tensor]:
        if not self._program.folded:
            return {}
        found = self._constants.values(dict(_pairs(self._symbols, sizes)))
        if sum(value.nbytes for value in found.values()) > MOST_BYTES_OF_SIZES:
            raise NotSymbolicError
        made = {name: found[source] for name, source in self._program.folded.items()}
        if any(made[name].stride() != filled(strides, values) for name, strides in self._constant_strides.items()):
            raise NotSymbolicError
        return made

    def _text(self, first: str, second: str) -> str:
        if _NUMBER.sub("#", first) != _NUMBER.sub("#", second):
            raise NotSymbolicError
        others = iter(_NUMBER.findall(second))

        def named(found: re.Match[str]) -> str:
            number, other = found[0], next(others)
            return number if number == other else str(self._expressions.name(_number(number), _number(other)))

        return _NUMBER.sub(named, first)

    def _numbers(self, first: Sequence[int], second: Sequence[int]) -> tuple[Any, ...]:
        return tuple(self._expressions.name(a, b) for a, b in _pairs(first, second))

    def _place(self, first: Place, second: Place) -> Place:
        """The place, with names for numbers that follow from sizes."""
        split, other = first.split, second.split
        if split is not None and other is not None:
            second = replace(second, split=replace(other, size=split.size))
            split = replace(split, size=self._expressions.name(split.size, other.size))
        made = replace(
            first,
            offset=self._expressions.name(first.offset, second.offset),
            size=self._numbers(first.size, second.size),
            stride=self._numbers(first.stride, second.stride),
            split=split,
        )
        if first != replace(second, offset=first.offset, size=first.size, stride=first.stride):
            raise NotSymbolicError
        return made

    def _launch(self, first: Launch, second: Launch) -> Launch:
        """The call, with names for numbers that follow from sizes."""
        ours, others = first.kernel, second.kernel
        if ours.lowered.loop != others.lowered.loop or ours.operands.given != others.operands.given:
            raise NotSymbolicError
        # Unrounded: numbers that follow from sizes may be equal in f16 for both sets.
        names = {
            load: self._expressions.scalar(number, second.numbers[load])
            for load, number in first.numbers.items()
            if repr(number) != repr(second.numbers[load])
        }
        constants, other_constants = ours.operands.constants, others.operands.constants
        for load in constants.keys() - names.keys():
            if not np.array_equal(constants[load], other_constants[load], equal_nan=True):
                raise NotSymbolicError
        reads = tuple(self._place(a, b) for a, b in _pairs(first.reads, second.reads))
        writes = tuple(self._place(a, b) for a, b in _pairs(first.writes, second.writes))
        return replace(first, reads=reads, writes=writes, numbers={**first.numbers, **names})


def _pairs(first: Sequence[Any], second: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
    if len(first) != len(second):
        raise NotSymbolicError
    return zip(first, second)


def _number(text: str) -> Any:
    return int(text) if text.isdigit() else float(text)
