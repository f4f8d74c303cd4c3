"""A fused partition on the CPU: from arrays to the kernel variant that serves their layout, and the call."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from opgraph.codegen.kernel import KernelSource, host_source
from opgraph.errors import InvalidShape
from opgraph.ir import dtypes
from opgraph.ir.logical_tensor import Dims, LogicalTensor, row_major
from opgraph.loops.layout import Layout, Variant, bind, iteration_shape
from opgraph.loops.lower import Lowered
from opgraph.runtime import host, threads

Array: TypeAlias = np.ndarray

#: Results of this many bytes and more are written past the caches: nobody finds them there any more.
STREAMING_BYTES = 16 << 20


#: Combinations of shapes and strides remembered for one kernel.
MAX_PLANS = 1024


@dataclass(frozen=True, slots=True)
class _Plan:
    """What one combination of shapes and strides needs, worked out once."""

    entry: Any
    layout: Any
    layout_address: int
    pointers: type[ctypes.Array[ctypes.c_void_p]]
    size: int
    shape: tuple[int, ...]
    fixed: tuple[tuple[int, int], ...]
    keep: tuple[Array, ...]


class HostKernel:
    """A loop compiled for the CPU; one kernel per variant, compiled when a call first needs it.

    Args:
        lowered: the loop and its operands.
        inputs: the tensors that `__call__` is given, in order; further operands must be constants.
    """

    def __init__(self, lowered: Lowered, inputs: Sequence[LogicalTensor]) -> None:
        self.lowered = lowered
        order = {t.id: i for i, t in enumerate(inputs)}
        # For each load: the position of its array among the inputs, or the constant that it reads.
        self._sources = [None if t is None else order.get(t.id, t.data) for t in lowered.loads]
        self._given = [(i, s) for i, s in enumerate(self._sources) if type(s) is int]
        self._dtypes = [dtypes.get(s.dtype).numpy for s in lowered.loop.stores]
        self._plans: dict[Any, _Plan] = {}
        self.sources: dict[str, KernelSource] = {}

    def prepare(self, dims: Sequence[Dims]) -> None:
        """Compiles the variant that dense arrays of these dimensions will need, as far as they are known."""
        guess: dict[object, int] = {}
        shapes = []
        for shape in dims:
            if shape is None:
                return  # which variant will be needed shows at the first call
            shapes.append(tuple(d if isinstance(d, int) else guess.setdefault(d, 24 + 8 * len(guess)) for d in shape))
        try:
            layout = self._bind(shapes, [row_major(s) for s in shapes], None)
        except InvalidShape:
            return  # the guesses do not fit together; real shapes will
        if layout.size:
            self._entry(layout.variant)

    def __call__(self, arrays: Sequence[Array], outs: Sequence[Array | None] | None = None) -> list[Array]:
        """Runs the kernel.

        Args:
            arrays: one for each input, dtypes and shapes already checked.
            outs: arrays to write to; allocated where None.

        Returns: the results, `outs` where given.

        Raises:
            InvalidShape: an output array does not have the result's shape.
        """
        if outs is None:
            key: Any = tuple([(a.shape, a.strides) for a in arrays])
        else:
            key = tuple([None if a is None else (a.shape, a.strides) for a in (*arrays, None, *outs)])
        plan = self._plans.get(key)
        if plan is None:
            plan = self._remember(key, self._plan(arrays, outs))
        if outs is None:
            results = [np.empty(plan.shape, d) for d in self._dtypes]
        else:
            results = [np.empty(plan.shape, d) if o is None else o for o, d in zip(outs, self._dtypes)]
        if plan.size:
            _launch(plan.entry, self._pointers(plan, arrays, results), plan.layout_address, plan.size)
        return results

    def bound(self, arrays: Sequence[Array], outs: Sequence[Array]) -> Callable[[], None]:
        """The same call, with everything worked out: nothing but the launch is left to do."""
        plan = self._plan(arrays, outs)
        base = self._pointers(plan, arrays, outs)
        keep = (plan, arrays, outs)  # the launch holds addresses only

        def launch(keep: Any = keep) -> None:
            _launch(plan.entry, base, plan.layout_address, plan.size)

        return launch if plan.size else lambda: None

    def _pointers(self, plan: _Plan, arrays: Sequence[Array], results: Sequence[Array]) -> Any:
        base = plan.pointers()
        for position, source in self._given:
            base[position] = arrays[source].__array_interface__["data"][0]
        for position, address in plan.fixed:
            base[position] = address
        for position, out in enumerate(results, start=len(self._sources)):
            base[position] = out.__array_interface__["data"][0]
        return base

    def _remember(self, key: Any, plan: _Plan) -> _Plan:
        if len(self._plans) >= MAX_PLANS:  # shapes that change with every call must not pile up
            self._plans.clear()
        self._plans[key] = plan
        return plan

    # -- planning -----------------------------------------------------------------------------------------------

    def _bind(
        self,
        shapes: Sequence[tuple[int, ...]],
        strides: Sequence[tuple[int, ...]],
        out_strides: Sequence[tuple[int, ...] | None] | None,
    ) -> Layout:
        """The layout for inputs of these shapes and strides (in elements); constants and indices are added here."""
        loop = self.lowered.loop
        loads, steps = [], []
        for source in self._sources:
            if type(source) is int:
                loads.append(shapes[source])
                steps.append(strides[source])
            elif source is None:
                loads.append((1,))  # an index: completed when the space is known
                steps.append((1,))
            else:
                loads.append(source.shape)
                steps.append(_element_strides(source))
        space = iteration_shape(loop.loads, loads)
        for i, load in enumerate(loop.loads):
            if load.align == "index":
                loads[i] = (space[load.axis],)
        return bind(loop, loads, steps, out_strides)

    def _plan(self, arrays: Sequence[Array], outs: Sequence[Array | None] | None) -> _Plan:
        out_strides = None if outs is None else [None if o is None else _element_strides(o) for o in outs]
        layout = self._bind([a.shape for a in arrays], [_element_strides(a) for a in arrays], out_strides)
        for out in outs or ():
            if out is not None and out.shape != layout.shape:
                raise InvalidShape(
                    f"an output array has shape {out.shape}, the result {layout.shape}",
                    where="out",
                    fix="give an array of the result's shape",
                )
        fixed, keep = [], []
        for position, (load, source) in enumerate(zip(self.lowered.loop.loads, self._sources, strict=True)):
            if type(source) is int:
                continue
            if source is None:
                source = np.arange(layout.shape[load.axis], dtype=dtypes.get(load.dtype).numpy)
            keep.append(source)
            fixed.append((position, source.__array_interface__["data"][0]))
        written = sum(d.itemsize for d in self._dtypes) * layout.size
        streaming = written >= STREAMING_BYTES
        numbers = [
            len(layout.dims),
            layout.size,
            int(streaming),
            *layout.dims,
            *(s for st in layout.strides for s in st),
        ]
        packed = (ctypes.c_int64 * len(numbers))(*numbers)
        entry = self._entry(layout.variant) if layout.size else None
        pointers = ctypes.c_void_p * (len(self._sources) + len(self._dtypes))
        return _Plan(
            entry, packed, ctypes.addressof(packed), pointers, layout.size, layout.shape, tuple(fixed), tuple(keep)
        )

    def _entry(self, variant: Variant) -> Any:
        source = host_source(self.lowered.loop, variant)
        self.sources[source.entry] = source
        return host.load(source, self.lowered.labels)


def _launch(entry: Any, base: Any, layout: int, size: int) -> None:
    count, parallel = threads.team(size)
    if parallel is None and count > 1:
        threads.run_in_pool(lambda begin, end: entry(base, layout, begin, end, 1, None), size, count)
    else:
        entry(base, layout, 0, size, count, parallel)


def _element_strides(array: Array) -> tuple[int, ...]:
    return tuple(s // array.itemsize for s in array.strides)
