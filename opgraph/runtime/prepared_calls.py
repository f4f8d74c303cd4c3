"""Calls prepared for arrays of known shapes: planned memory, and a list of launches that are bound to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from opgraph.runtime.io_binding import BoundRunner, Looks
from opgraph.runtime.memory_plan import ALIGNMENT, MemoryPlan, Value, planned

if TYPE_CHECKING:
    from opgraph.runtime.executor import Step

#: The function that binds an operand of a step, the operand, and its place among the inputs or outputs of the call.
Move: TypeAlias = tuple[Callable[[int, np.ndarray], None], int, int]


def key_of(arrays: Sequence[Any]) -> Any:
    """The key of calls that may share a frame: shapes and strides."""
    return tuple([(a.shape, a.strides) for a in arrays])


class ShapeSet:
    """The prepared data for one set of shapes of the inputs.

    Args:
        static: the values that depend on the shapes alone, by id; they are never written to.

    Attributes:
        looks: shape and dtype of every other value that a step makes, once they are known.
        plan: the memory plan of the values that are not outputs.
        is_fixed: False if the steps cannot be prepared, for example because a shape depends on data.
        idle: frames that no call is using.
    """

    def __init__(self, static: dict[int, Any]) -> None:
        self.static = static
        self.looks: dict[int, Looks] = {}
        self.plan: MemoryPlan | None = None
        self.is_fixed = True
        self.idle: list[Frame] = []

    def learn(
        self, steps: Sequence[Step], seen: Mapping[int, Looks | None], names: Mapping[int, str], outputs: Sequence[int]
    ) -> None:
        """Plans memory.

        Args:
            seen: shape and dtype of the values that the steps read and make; None for a value that is no numeric array.
            names: names of the values that steps make.
        """
        looks = {i: found for i, found in seen.items() if found is not None}
        if len(looks) != len(seen) or not all(isinstance(step.run, BoundRunner) for step in steps):
            self.is_fixed = False
            return
        self.looks = {i: looks[i] for step in steps for i in step.makes}
        self.plan = planned(_values(steps, looks, names, set(outputs)))


def _values(
    steps: Sequence[Step], looks: Mapping[int, Looks], names: Mapping[int, str], outputs: set[int]
) -> list[Value]:
    """The values between steps. Outputs are excluded: the caller owns them, and they are not in planned memory."""
    made = {i for step in steps for i in step.makes}
    last = {i: place for place, step in enumerate(steps) for i in step.reads}
    values = []
    for place, step in enumerate(steps):
        over = _over(step, looks, {i for i in step.reads if last[i] == place and i in made and i not in outputs})
        for index, i in enumerate(step.makes):
            if i not in outputs:
                size = _size(looks[i])
                value = Value(
                    id=i, name=names[i], size=size, first=place, last=last.get(i, place), may_lie_over=over[index]
                )
                values.append(value)
    return values


def _over(step: Step, looks: Mapping[int, Looks], dying: set[int]) -> list[tuple[int, ...]]:
    """For each value that a step makes, those of `dying` whose memory it may take."""
    if not dying:
        return [()] * len(step.makes)
    assert isinstance(step.run, BoundRunner)
    allowed = step.run.may_write_over([looks[i] for i in step.reads], [looks[i] for i in step.makes])
    return [tuple(step.reads[k] for k in places if step.reads[k] in dying) for places in allowed]


def _size(looks: Looks) -> int:
    shape, dtype = looks
    return int(np.prod(shape, dtype=np.int64)) * dtype.itemsize


class Frame:
    """Memory and launches for one call at a time.

    Args:
        steps: those that run in every call.
        known: the shape set, with a plan.
        inputs, outputs: ids of the graph's.
        constants: those that are outputs, by id.
        arrays: inputs of these shapes and strides.

    Raises:
        UnboundError: a step does not run on given memory.
    """

    def __init__(
        self,
        steps: Sequence[Step],
        known: ShapeSet,
        inputs: Sequence[int],
        outputs: Sequence[int],
        constants: Mapping[int, np.ndarray],
        arrays: Sequence[np.ndarray],
    ) -> None:
        assert known.plan is not None
        between = {**known.static, **_laid_out(known.plan, known.looks)}
        # The caller owns the outputs, or each call makes new ones. These arrays only have their shapes and dtypes.
        made = {i: np.empty(*known.looks[i]) for i in outputs if i in known.looks}
        values = {**between, **made, **dict(zip(inputs, arrays, strict=True))}
        place_in = {i: place for place, i in enumerate(inputs)}
        place_out = {i: place for place, i in enumerate(outputs) if i in made}
        self._made = [known.looks.get(i) for i in outputs]
        self._echoed = [(place, place_in[i]) for place, i in enumerate(outputs) if i in place_in]
        kept = {**known.static, **constants}
        self._kept = [(place, kept[i], i in known.static) for place, i in enumerate(outputs) if i in kept]
        self._reading: list[Move] = []
        self._writing: list[Move] = []
        self._launches: list[Callable[[], None]] = []
        self._kept_alive: list[Any] = [between]  # launches hold addresses only
        for step in steps:
            assert isinstance(step.run, BoundRunner)
            bound = step.run.bound([values[i] for i in step.reads], [values[i] for i in step.makes])
            self._launches.append(bound.launch)
            self._kept_alive.append(bound)
            self._reading += [(bound.read, k, place_in[i]) for k, i in enumerate(step.reads) if i in place_in]
            # An output may be read by later steps.
            self._writing += [(bound.read, k, place_out[i]) for k, i in enumerate(step.reads) if i in place_out]
            self._writing += [(bound.write, k, place_out[i]) for k, i in enumerate(step.makes) if i in place_out]

    def run(self, arrays: Sequence[np.ndarray], outs: Sequence[np.ndarray] | None) -> list[np.ndarray]:
        """Runs one call.

        Returns: the outputs, in `outs` where given. For an output that is an input or a constant, that array itself is
            returned, so the caller copies it.
        """
        results = self._bound(arrays, outs)
        for launch in self._launches:
            launch()
        return results

    def fixed(self, arrays: Sequence[np.ndarray], outs: Sequence[np.ndarray]) -> Callable[[], None]:
        """Returns a function that repeats a call on these arrays; keep them and the frame; do not reuse the frame."""
        results = self._bound(arrays, outs)
        launches = tuple(self._launches)
        copies = [(out, result) for out, result in zip(outs, results, strict=True) if out is not result]

        def run() -> None:
            for launch in launches:
                launch()
            for out, result in copies:
                out[...] = result

        return run

    def _bound(self, arrays: Sequence[np.ndarray], outs: Sequence[np.ndarray] | None) -> list[np.ndarray]:
        """Binds all launches to the inputs and outputs of a call; returns the outputs."""
        results: list[Any] = [looks and np.empty(*looks) for looks in self._made] if outs is None else list(outs)
        for read, k, place in self._reading:
            read(k, arrays[place])
        for move, k, place in self._writing:
            move(k, results[place])
        for place, source in self._echoed:
            results[place] = arrays[source]
        for place, value, is_static in self._kept:
            results[place] = value.copy() if is_static else value
        return results


def _laid_out(plan: MemoryPlan, looks: Mapping[int, Looks]) -> dict[int, np.ndarray]:
    """Returns the arrays of a plan, on a new block of memory."""
    block = np.empty(plan.size + ALIGNMENT, np.uint8)
    start = -block.__array_interface__["data"][0] % ALIGNMENT
    found = {}
    for buffer in plan.buffers:
        shape, dtype = looks[buffer.value.id]
        begin = start + buffer.offset
        found[buffer.value.id] = block[begin : begin + buffer.value.size].view(dtype).reshape(shape)
    return found
