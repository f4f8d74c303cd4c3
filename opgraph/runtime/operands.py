"""The operands of a kernel: the array that each load reads, and the layout for arrays of given shapes."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from opgraph.errors import InvalidShape
from opgraph.ir import dtypes
from opgraph.ir.logical_tensor import Dims, LogicalTensor, row_major
from opgraph.loops.layout import Layout, bind
from opgraph.loops.lower import Lowered
from opgraph.loops.space import Shape, Strides, lies_over, space_of
from opgraph.runtime.shape_rules import ShapeRules, check_out_shape


class Operands:
    """The loads of a loop, bound to the inputs of a kernel's calls.

    Args:
        lowered: the loop and the tensors of its operands.
        inputs: the tensors of a call, in order; all other operands must be constants.
        rules: the shape rules of the ops.
        sums_last: whether the kernel writes sums only after it has read everything.

    Attributes:
        given: (load, input) for each load that reads an input.
        virtual: the loads without memory.
        store_dtypes: NumPy dtype of each result.
    """

    def __init__(
        self,
        lowered: Lowered,
        inputs: Sequence[LogicalTensor],
        rules: ShapeRules | None = None,
        *,
        sums_last: bool = True,
    ) -> None:
        self._rules, self._sums_last = rules, sums_last
        self.loop = lowered.loop
        order = {t.id: i for i, t in enumerate(inputs)}
        self.given = tuple((i, order[t.id]) for i, t in enumerate(lowered.loads) if t is not None and t.id in order)
        self.virtual = tuple(i for i, x in enumerate(lowered.loop.loads) if x.is_position)
        self.store_dtypes = tuple(dtypes.get(s.dtype).numpy for s in lowered.loop.stores)
        self._constants = {
            i: np.asarray(t.data, order="C")
            for i, t in enumerate(lowered.loads)
            if t is not None and t.data is not None and t.id not in order
        }

    def with_scalars(self, scalars: Mapping[int, float]) -> Operands:
        """Returns the operands with other values for constants, by their loads, rounded to the constants' dtypes."""
        made = copy.copy(self)
        made._constants = dict(self._constants)
        for load, value in scalars.items():
            old = self._constants[load]
            made._constants[load] = np.broadcast_to(np.asarray(value).astype(old.dtype), old.shape).copy()
        return made

    def layout(
        self, shapes: Sequence[Shape], strides: Sequence[Strides], out_strides: Sequence[Strides | None] | None = None
    ) -> Layout:
        """Returns the layout for inputs of these shapes and strides (in elements).

        Args:
            out_strides: the strides of each result; row-major where None.

        Raises:
            InvalidShape: the shapes do not broadcast.
        """
        loads: list[Shape] = [(1,)] * len(self.loop.loads)  # an index: completed when the space is known
        steps: list[Strides] = [(1,)] * len(self.loop.loads)
        for position, source in self.given:
            loads[position], steps[position] = shapes[source], strides[source]
        for position, data in self._constants.items():
            loads[position], steps[position] = data.shape, tuple(s // data.itemsize for s in data.strides)
        indices = [position for position, load in enumerate(self.loop.loads) if load.align == "index"]
        space = space_of(self.loop, loads) if indices else ()
        for position in indices:
            loads[position] = (space[self.loop.loads[position].axis],)
        return bind(self.loop, loads, steps, out_strides)

    def layout_of_call(
        self,
        shapes: Sequence[Shape],
        strides: Sequence[Strides],
        out_shapes: Sequence[Shape | None],
        out_strides: Sequence[Strides | None],
    ) -> Layout | None:
        """The same for a call, with all checks: `out_shapes` are the shapes of the output arrays where given.

        Returns: None if the ops make an empty result of another shape than the loop; `by_definition` runs them.

        Raises:
            InvalidShape: the shapes do not broadcast, an op does not accept them, or an output's shape is wrong.
        """
        if self._rules is not None:
            self._rules.check(shapes)
        may_differ = self._rules is not None and self._rules.may_differ(shapes)
        layout: Layout | None = None
        try:
            layout = self.layout(shapes, strides, out_strides or None)
        except InvalidShape:
            if not may_differ:
                raise
        results = self.results(shapes) if layout is None or may_differ else layout.results
        for shape, result in zip(out_shapes, results):
            if shape is not None:
                check_out_shape(shape, result)
        return layout if layout is not None and tuple(layout.results) == tuple(results) else None

    def results(self, shapes: Sequence[Shape]) -> tuple[Shape, ...]:
        """The shapes of the results, by the rules of the ops. Raises InvalidShape if an op does not accept `shapes`."""
        assert self._rules is not None
        return self._rules.results(shapes)

    def by_definition(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The results for the inputs of a call, computed op by op."""
        assert self._rules is not None
        return self._rules.by_definition(arrays)

    def lies_over(self, source: int, result: int) -> bool:
        """True if a result may be exactly the memory of an input of its dtype, shape and strides; both by position."""
        loads = [load for load, given in self.given if given == source]
        return lies_over(self.loop, loads, result, sums_last=self._sums_last)

    def probable_layout(self, dims: Sequence[Dims], low: int = 24) -> Layout | None:
        """The layout of row-major inputs of these dimensions, with a guess for sizes that are not known yet.

        None if even the number of dimensions is unknown, or the guesses do not fit together.

        Args:
            low: the smallest guess.
        """
        guess: dict[object, int] = {}
        shapes = []
        for shape in dims:
            if shape is None:
                return None
            shapes.append(tuple(d if isinstance(d, int) else guess.setdefault(d, low + 8 * len(guess)) for d in shape))
        try:
            return self.layout(shapes, [row_major(s) for s in shapes])
        except InvalidShape:
            return None

    @property
    def constants(self) -> Mapping[int, np.ndarray]:
        """Row-major values of each load that reads a constant, by its position."""
        return self._constants

    def indices(self, layout: Layout) -> list[tuple[int, int, np.dtype[Any]]]:
        """(load, length, dtype) for each load that reads the positions along an axis: 0, 1, 2, ..."""
        return [
            (position, layout.shape[load.axis], dtypes.get(load.dtype).numpy)
            for position, load in enumerate(self.loop.loads)
            if load.align == "index"
        ]

    def own(self, layout: Layout) -> list[tuple[int, np.ndarray]]:
        """(load, array) for each load that reads no input: constants, and the values of indices."""
        return [*self._constants.items(), *((at, np.arange(n, dtype=dtype)) for at, n, dtype in self.indices(layout))]


def copied_into(out: np.ndarray, result: np.ndarray) -> np.ndarray:
    """Copies a result into `out` and returns `out`.

    Raises:
        InvalidShape: `out` has another shape.
    """
    check_out_shape(out.shape, result.shape)
    np.copyto(out, result, casting="no")
    return out
