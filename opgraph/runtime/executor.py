"""Runs partitions in order: one by one on any arrays, or from launches prepared for arrays of known shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from opgraph.runtime.bounded_dict import Bounded
from opgraph.runtime.exchange_protocol import Exchange
from opgraph.runtime.io_binding import Looks, UnboundError
from opgraph.runtime.prepared_calls import Frame, ShapeSet, key_of
from opgraph.runtime.runner import Repeated, Runner

#: The number of shape sets for which memory and launches are kept.
MAX_SHAPE_SETS = 16


@dataclass(frozen=True, slots=True)
class Step:
    """One partition: ids of the values that it reads and makes, and of those that no later step reads."""

    run: Runner
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    frees: tuple[int, ...]
    donated: tuple[int | None, ...]


class Chain:
    """The steps of an executable.

    Args:
        steps: in order; the first `static` of them depend on the shapes of the inputs alone.
        inputs, outputs: ids of the graph's, in order.
        names: of every value that a step makes, by id.
        constants: those that are outputs, by id.
        donated: position and name of each input that a result overwrites, and that result's id.
        exchange: imports and exports arrays.
        plans: whether values between steps may lie in planned memory (on a CPU).
    """

    def __init__(
        self,
        steps: Sequence[Step],
        static: int,
        *,
        inputs: Sequence[int],
        outputs: Sequence[int],
        names: Mapping[int, str],
        constants: Mapping[int, Any],
        donated: Sequence[tuple[int, str, int]],
        exchange: Exchange,
        plans: bool,
    ) -> None:
        self.steps = tuple(steps)
        self.inputs, self.outputs = tuple(inputs), tuple(outputs)
        self.names = names
        self._static, self._main = self.steps[:static], self.steps[static:]
        self._constants = dict(constants)
        self._donated, self._exchange = tuple(donated), exchange
        self._sets: Bounded[Any, ShapeSet] = Bounded(MAX_SHAPE_SETS)
        self._plans = plans and not donated

    @property
    def main(self) -> tuple[Step, ...]:
        """The steps that run in every call."""
        return self._main

    def __call__(self, arrays: Sequence[Any], outs: Sequence[Any] | None = None) -> list[Any]:
        """Returns the outputs for checked arrays, both in declaration order.

        The first call with arrays of new shapes determines the shapes between the steps. Later calls run from prepared
        launches on separate memory, so calls may overlap.
        """
        known = self._known(arrays) if self._plans else None
        if known is None:
            return self._one_by_one(arrays, outs, {})
        frame = self._frame(known, arrays, outs)
        if frame is None:
            return self._one_by_one(arrays, outs, known.static, known)
        try:
            results = frame.run(arrays, outs)
        except Exception:  # a library refuses its bound arrays: a node fails, or a shape depends on data after all
            results = self._one_by_one(arrays, outs, known.static, known)  # raises if a node failed
            known.is_fixed = False
        else:
            known.idle.append(frame)
        return results

    def bound(self, arrays: Sequence[Any], outs: Sequence[Any]) -> Repeated | None:
        """Returns a function that repeats a call on the same arrays, and an object that must be kept alive for it.

        None if repeating takes a whole call.
        """
        if not self._plans:
            return self._lone(arrays, outs) if len(self.steps) == 1 else self._of_kernels(arrays, outs)
        self(arrays, outs)  # determines the shapes
        known = self._known(arrays)
        frame = None if known is None else self._frame(known, arrays, outs)
        return None if frame is None else (frame.fixed(arrays, outs), frame)

    def shape_set(self, arrays: Sequence[Any]) -> ShapeSet | None:
        """The ShapeSet of arrays of these shapes; runs the steps if it is not known yet."""
        known = self._known(arrays) if self._plans else None
        if known is not None and known.plan is None:
            self._one_by_one(arrays, None, known.static, known)
        return known

    def _lone(self, arrays: Sequence[Any], outs: Sequence[Any]) -> Repeated | None:
        """The launch of a lone kernel whose operands are the graph's inputs and outputs."""
        step = self.steps[0]
        places = {i: p for p, i in enumerate(self.inputs)}
        if set(step.makes) != set(self.outputs) or not places.keys() >= set(step.reads):
            return None
        ordered = dict(zip(self.outputs, outs, strict=True))
        return step.run.repeated([arrays[places[i]] for i in step.reads], [ordered[i] for i in step.makes])

    def _of_kernels(self, arrays: Sequence[Any], outs: Sequence[Any]) -> Repeated | None:
        """Launches of GPU kernels, in order. Values between them are allocated once, by a run of the kernels."""
        made = {i for step in self.steps for i in step.makes}
        if self._donated or not made >= set(self.outputs):
            return None
        values, targets = dict(zip(self.inputs, arrays)), dict(zip(self.outputs, outs))
        launches = []
        for step in self.steps:
            ins = [values[i] for i in step.reads]
            results = step.run(ins, [targets.get(i) for i in step.makes])
            values.update(zip(step.makes, results))
            again = step.run.repeated(ins, results)
            if again is None:
                return None
            launches.append(again)

        def launch() -> None:
            for one, _ in launches:
                one()

        return launch, (values, launches)

    # -- one by one -------------------------------------------------------------------------------------------------

    def _one_by_one(
        self, arrays: Sequence[Any], outs: Sequence[Any] | None, static: dict[int, Any], known: ShapeSet | None = None
    ) -> list[Any]:
        values: dict[int, Any] = {**self._constants, **static}
        values.update(zip(self.inputs, arrays))
        targets = {} if outs is None else dict(zip(self.outputs, outs))
        taken: set[int] = set()  # donated inputs that overlap an output given by the caller
        for position, name, result in self._donated:
            if targets.get(result) is None:
                array, others = arrays[position], [a for i, a in enumerate(arrays) if i != position]
                self._exchange.check_donated(name, array, others)
                if self._exchange.overlaps(array, (t for t in targets.values() if t is not None)):
                    taken.add(self.inputs[position])
        seen: dict[int, Looks | None] | None = None
        if known is not None and known.plan is None and known.is_fixed:
            seen = {i: _looks_of(v) for i, v in values.items()}
        for step in self.steps if known is None else self._main:
            wanted = [targets.get(i) for i in step.makes]
            for j, source in enumerate(step.donated):
                if source is not None and wanted[j] is None and source not in taken:
                    wanted[j] = values[source]
            given = wanted if any(w is not None for w in wanted) else None
            made = step.run([values[i] for i in step.reads], given)
            values.update(zip(step.makes, made))
            if seen is not None:
                seen.update((i, _looks_of(v)) for i, v in zip(step.makes, made))
            for i in step.frees:
                del values[i]
        if known is not None and seen is not None:
            known.learn(self._main, seen, self.names, self.outputs)
        results = [values[i] for i in self.outputs]
        # Values kept for the next call must not be returned.
        return [r.copy() if i in static else r for i, r in zip(self.outputs, results, strict=True)]

    # -- prepared ---------------------------------------------------------------------------------------------------

    def _known(self, arrays: Sequence[Any]) -> ShapeSet | None:
        try:
            key = key_of(arrays)
        except AttributeError:  # a sequence or text: types that only ONNX has
            return None
        known = self._sets.get(key)
        if known is None:
            known = self._sets[key] = ShapeSet(self._static_values(arrays))
        return known

    def _static_values(self, arrays: Sequence[Any]) -> dict[int, Any]:
        values: dict[int, Any] = dict(zip(self.inputs, arrays))
        kept: dict[int, Any] = {}
        for step in self._static:
            made = dict(zip(step.makes, step.run([values[i] for i in step.reads], None)))
            values.update(made)
            kept.update(made)
        return kept

    def _frame(self, known: ShapeSet, arrays: Sequence[Any], outs: Sequence[Any] | None) -> Frame | None:
        if not known.is_fixed or known.plan is None or (outs is not None and not all(map(_is_dense, outs))):
            return None
        try:
            return known.idle.pop()
        except IndexError:  # more calls run at once than ever before
            pass
        try:
            return Frame(self._main, known, self.inputs, self.outputs, self._constants, arrays)
        except UnboundError:
            known.is_fixed = False
            return None


def _looks_of(value: Any) -> Looks | None:
    """Shape and dtype of a value; None if it is no array of numbers."""
    return (value.shape, value.dtype) if isinstance(value, np.ndarray) and not value.dtype.hasobject else None


def _is_dense(array: Any) -> bool:
    return bool(array.flags.c_contiguous)
