"""One program for all sizes of a graph with symbols: numbers that follow from sizes stand in it under names.

Programs hold sizes as numbers. Two are made of one graph, for two sets of sizes in which no two numbers are equal by
chance: both compute what the graph means for all sizes. Their texts, and the layouts of their kernels' operands, differ in
numbers alone, and each pair of numbers has to be the two values of one expression of the symbols, whose name takes
their place. For the sizes of a call the expressions are evaluated, and kernels whose operands they lay out are planned.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import CodeType
from typing import Any

import numpy as np

from opgraph.torch.graph.expressions import Expressions, NotSymbolicError
from opgraph.torch.graph.launches import Launch
from opgraph.torch.graph.places import Place
from opgraph.torch.graph.program import KernelStep, Program, sequence_of
from opgraph.torch.graph.steps import Checked

#: A number of a program's text.
_NUMBER = re.compile(r"(?<![\w.])\d+(?:\.\d+)?(?:e[+-]?\d+)?(?![\w.])")


@dataclass(frozen=True, slots=True)
class SizedProgram:
    """A symbolic program, for the sizes of a call.

    Attributes:
        run: takes the arguments out of the list that it is called with.
        input_strides: of each argument; None of what is no tensor.
    """

    run: Callable[[list[Any]], Any]
    input_strides: Sequence[tuple[int, ...] | None]


class SymbolicProgram:
    """What two programs of a graph have in common.

    Args:
        first, second: the programs, of the first two of the sets of sizes that `expressions` was made with.

    Raises:
        NotSymbolicError: they differ in more than sizes.
    """

    def __init__(self, first: Program, second: Program, expressions: Expressions) -> None:
        self._program = first
        self._expressions = expressions
        self._code = self._text(first.source, second.source)
        self._steps = [
            _SymbolicStep(a, [self._launch(x, y) for x, y in zip(a.launches, b.launches, strict=True)])
            for a, b in zip(first.kernel_steps, second.kernel_steps, strict=True)
        ]
        self._checked = [
            (a, [None if s is None else self._numbers(s, t) for s, t in zip(a.strides, b.strides, strict=True)])
            for (_, a), (_, b) in zip(first.checked, second.checked, strict=True)
        ]
        self._input_strides = [
            self._numbers(s, t) if s is not None else None
            for s, t in zip(first.input_strides, second.input_strides, strict=True)
        ]
        self._values = expressions.values()

    def sized(self, sizes: Sequence[int], watched: Callable[[list[Any]], Any]) -> SizedProgram:
        """The program for these values of the symbols.

        Args:
            watched: runs instead, where somebody looks on.

        Raises:
            OpGraphError: a kernel does not run on these sizes; one over no elements, for example.
        """
        values = self._values(*sizes)
        env = {**self._program.env, **values, "watched": watched}
        for step in self._steps:
            env.update(step.sized(values, self._program))
        for call, strides in self._checked:
            own = [None if s is None else _filled(s, values) for s in strides]
            env[call.name] = Checked(env, call.name, call.call, own, call.alignment, call.overwritten)
        exec(self._code, env)
        run = env["run"]
        run._boxed_call = True
        return SizedProgram(run, [None if s is None else _filled(s, values) for s in self._input_strides])

    def _text(self, first: str, second: str) -> CodeType:
        if _NUMBER.sub("#", first) != _NUMBER.sub("#", second):
            raise NotSymbolicError
        others = iter(_NUMBER.findall(second))

        def named(found: re.Match[str]) -> str:
            number, other = found[0], next(others)
            return number if number == other else str(self._expressions.name(_number(number), _number(other)))

        return compile(_NUMBER.sub(named, first), "<opgraph>", "exec")

    def _numbers(self, first: Sequence[int], second: Sequence[int]) -> tuple[Any, ...]:
        return tuple(self._expressions.name(a, b) for a, b in zip(first, second, strict=True))

    def _place(self, first: Place, second: Place) -> Place:
        """The place, with names for numbers that follow from sizes."""
        split = first.split
        if split is not None and second.split is not None:
            split = replace(split, size=self._expressions.name(split.size, second.split.size))
            second = replace(second, split=replace(second.split, size=first.split.size))
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

    def _launch(self, first: Launch, second: Launch) -> _SymbolicLaunch:
        ours, others = first.kernel, second.kernel
        if ours.lowered.loop != others.lowered.loop or ours.operands.given != others.operands.given:
            raise NotSymbolicError
        constants, other_constants = ours.operands.constants, others.operands.constants
        scalars = {
            place: self._expressions.scalar(constants[place], other_constants[place])
            for place in constants
            if not np.array_equal(constants[place], other_constants[place], equal_nan=True)
        }
        pairs = [
            [self._place(a, b) for a, b in zip(x, y, strict=True)]
            for x, y in ((first.reads, second.reads), (first.writes, second.writes))
        ]
        return _SymbolicLaunch(first, tuple(pairs[0]), tuple(pairs[1]), scalars)


@dataclass(frozen=True, slots=True)
class _SymbolicLaunch:
    """A kernel call; the sizes of its places are numbers or names, and so are scalars of its kernel."""

    launch: Launch
    reads: tuple[Place, ...]
    writes: tuple[Place, ...]
    scalars: Mapping[int, str]

    @property
    def is_fixed(self) -> bool:
        """Whether it is the same for all sizes."""
        return not self.scalars and (self.reads, self.writes) == (self.launch.reads, self.launch.writes)

    def sized(self, values: Mapping[str, Any], program: Program) -> Launch:
        """The call for these sizes."""
        if self.is_fixed:
            return self.launch
        kernel = self.launch.kernel
        if self.scalars:
            kernel = kernel.with_scalars({place: values[name] for place, name in self.scalars.items()})
        reads, writes = ([_sized_place(p, values) for p in places] for places in (self.reads, self.writes))
        plan = self.launch.target.plan(kernel, reads, writes, program.beginnings)
        return replace(self.launch, kernel=kernel, reads=tuple(reads), writes=tuple(writes), plan=plan)


@dataclass(frozen=True, slots=True)
class _SymbolicStep:
    step: KernelStep
    launches: Sequence[_SymbolicLaunch]

    def sized(self, values: Mapping[str, Any], program: Program) -> Mapping[str, Any]:
        """What stands under the names of the step's lines."""
        if all(launch.is_fixed for launch in self.launches):
            return {}
        made = sequence_of(self.step.name, [launch.sized(values, program) for launch in self.launches], direct=False)
        if made.lines != self.step.lines:  # it needs other memory
            raise NotSymbolicError
        return made.values


def _filled(numbers: Sequence[Any], values: Mapping[str, Any]) -> tuple[int, ...]:
    return tuple([n if type(n) is int else values[n] for n in numbers])


def _sized_place(place: Place, values: Mapping[str, Any]) -> Place:
    offset, size = _filled((place.offset, 0 if place.split is None else place.split.size), values)
    split = None if place.split is None else replace(place.split, size=size)
    return replace(
        place, offset=offset, size=_filled(place.size, values), stride=_filled(place.stride, values), split=split
    )


def _number(text: str) -> Any:
    return int(text) if text.isdigit() else float(text)
