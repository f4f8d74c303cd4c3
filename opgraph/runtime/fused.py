"""A fused partition on the CPU: from arrays to the kernel variant that serves their layout, and the call."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from opgraph.codegen.kernel import KernelSource, host_source
from opgraph.ir.logical_tensor import Dims, LogicalTensor
from opgraph.loops.layout import Variant
from opgraph.loops.lower import Lowered
from opgraph.runtime import host, threads
from opgraph.runtime.operands import Operands, check_outputs

Array: TypeAlias = np.ndarray

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
        self._operands = Operands(lowered, inputs)
        self._given = self._operands.given
        self._dtypes = self._operands.store_dtypes
        self._plans: dict[Any, _Plan] = {}
        self.sources: dict[str, KernelSource] = {}

    def prepare(self, dims: Sequence[Dims]) -> None:
        """Compiles the variant that dense arrays of these dimensions will need, as far as they are known."""
        layout = self._operands.probable_layout(dims)
        if layout is not None and layout.size:
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
        for position, out in enumerate(results, start=len(self.lowered.loads)):
            base[position] = out.__array_interface__["data"][0]
        return base

    def _remember(self, key: Any, plan: _Plan) -> _Plan:
        if len(self._plans) >= MAX_PLANS:  # shapes that change with every call must not pile up
            self._plans.clear()
        self._plans[key] = plan
        return plan

    # -- planning -----------------------------------------------------------------------------------------------

    def _plan(self, arrays: Sequence[Array], outs: Sequence[Array | None] | None) -> _Plan:
        layout = self._operands.layout(
            [a.shape for a in arrays],
            [_element_strides(a) for a in arrays],
            None if outs is None else [None if o is None else _element_strides(o) for o in outs],
        )
        check_outputs(layout, [None if o is None else o.shape for o in outs or ()])
        own = self._operands.own(layout)
        fixed = tuple((position, array.__array_interface__["data"][0]) for position, array in own)
        numbers = [len(layout.dims), layout.size, *layout.dims, *(s for st in layout.strides for s in st)]
        packed = (ctypes.c_int64 * len(numbers))(*numbers)
        entry = self._entry(layout.variant) if layout.size else None
        pointers = ctypes.c_void_p * len(layout.strides)
        address = ctypes.addressof(packed)
        return _Plan(entry, packed, address, pointers, layout.size, layout.shape, fixed, tuple(a for _, a in own))

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
