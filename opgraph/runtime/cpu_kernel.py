"""Runs a fused partition on the CPU: selects the kernel variant for the layout of the arrays, and calls it."""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np

from opgraph.codegen.kernel import KernelSource, host_source
from opgraph.errors import InvalidArguments
from opgraph.ir.logical_tensor import Dims, row_major
from opgraph.ir.stage_log import logged
from opgraph.loops.layout import Layout
from opgraph.loops.loop import Loop
from opgraph.loops.lower import Lowered
from opgraph.loops.space import Shape, Strides
from opgraph.partition.partition import Partition
from opgraph.runtime import cpu_compiler
from opgraph.runtime.bounded_dict import Bounded
from opgraph.runtime.cpu_plan import Plan, launch
from opgraph.runtime.io_binding import BoundKernel
from opgraph.runtime.operands import Operands
from opgraph.runtime.runner import GENERATED, Repeated
from opgraph.runtime.shape_rules import ShapeRules
from opgraph.schedule.cpu import Cpu
from opgraph.schedule.cpu_arguments import arguments
from opgraph.schedule.schedule import PERSISTENT_INNER, TRANSPOSED_INNER, CpuSchedule
from opgraph.schedule.table import choose_schedule

Array: TypeAlias = np.ndarray
#: Shapes and strides of arrays, in elements.
Looks: TypeAlias = Sequence[tuple[Shape, Strides]]

#: The number of cached combinations of shapes and strides for one kernel: of calls, and of programs. Programs hold
#: their own plans, and programs for other sizes use some of the same plans.
MAX_PLANS, MAX_PLANS_FOR = 1024, 256


class _NotCompiledError(Exception):
    """The kernel that a plan needs has not been compiled."""


class HostKernel:
    """A loop compiled for the CPU; one kernel per variant, compiled when a call first needs it.

    Args:
        lowered: the loop of the partition, and its operands.
        partition: `__call__` takes arrays for its input ports.
    """

    runs_in = GENERATED
    spins = False

    def __init__(self, lowered: Lowered, partition: Partition) -> None:
        self.lowered = lowered
        self.operands = Operands(lowered, partition.input_ports, ShapeRules(partition))
        self.given = self.operands.given
        self._dtypes = self.operands.store_dtypes
        self._plans: Bounded[Any, Plan] = Bounded(MAX_PLANS)
        #: By shapes and strides in elements.
        self._plans_for: Bounded[Any, Plan] = Bounded(MAX_PLANS_FOR)
        self.sources: dict[str, KernelSource] = {}
        self._entries: dict[Hashable, tuple[Loop, Any]] = {}

    def with_scalars(self, scalars: Mapping[int, float]) -> HostKernel:
        """Returns the same kernel with other values for constants, by their loads; both share the compiled code."""
        made = copy.copy(self)
        made.operands = self.operands.with_scalars(scalars)
        made._plans, made._plans_for = Bounded(MAX_PLANS), Bounded(MAX_PLANS_FOR)
        return made

    def prepare(self, dims: Sequence[Dims]) -> None:
        """Compiles the variant that dense arrays of these dimensions will need, as far as they are known."""
        schedule = self.probable_schedule(dims)
        if schedule is not None:
            self._entry(schedule)

    def probable_schedule(self, dims: Sequence[Dims]) -> CpuSchedule | None:
        """The schedule of the kernel that `prepare` compiles; None if it compiles none."""
        layout = self.operands.probable_layout(dims)
        if layout is None or not layout.size:
            return None
        schedule = self._schedule(layout)
        if _are_known(dims):
            return schedule
        if schedule.name in (PERSISTENT_INNER, TRANSPOSED_INNER) and not self._is_certain(dims, schedule):
            schedule = self._schedule(layout, of_any_length=True)  # guessed sizes are short
        return replace(schedule, fits=False)

    def _is_certain(self, dims: Sequence[Dims], schedule: CpuSchedule) -> bool:
        """True if the kernel does not depend on the guesses for sizes that are not known yet."""
        longer = self.operands.probable_layout(dims, 1000)
        return longer is not None and self._schedule(longer).key == schedule.key

    def _schedule(self, layout: Layout, *, of_any_length: bool = False) -> CpuSchedule:
        return choose_schedule(self.lowered.loop, layout, Cpu(cpu_compiler.has_lanes()), of_any_length=of_any_length)

    def __call__(self, arrays: Sequence[Array], outs: Sequence[Array | None] | None = None) -> list[Array]:
        """Runs the kernel.

        Args:
            arrays: one for each input, dtypes and shapes already checked.
            outs: arrays to write to; allocated where None.

        Returns: the results, `outs` where given.

        Raises:
            InvalidShape: an output array does not have the result's shape.
            InvalidArguments: the strides of an array are not multiples of its element size.
        """
        if outs is None:
            key: Any = tuple([(a.shape, a.strides) for a in arrays])
        else:
            key = tuple([None if a is None else (a.shape, a.strides) for a in (*arrays, None, *outs)])
        plan = self._plans.get(key)
        if plan is None:
            plan = self._remember(key, self._plan(arrays, outs))
        if outs is None:
            results = [np.empty(shape, dtype) for shape, dtype in plan.results]
        else:
            results = [np.empty(*made) if o is None else o for o, made in zip(outs, plan.results)]
        if plan.size:
            launch(plan, self.pointers(plan, arrays, results))
        else:
            self.of_nothing(arrays, results)
        return results

    def of_nothing(self, arrays: Sequence[Array], results: Sequence[Array]) -> None:
        """Fills the results if the space has no elements: an empty sum is 0, an empty mean is NaN."""
        if not self.lowered.loop.row_axes:
            for result in results:
                result.fill(0)
            return
        for result, value in zip(results, self.operands.by_definition(arrays), strict=True):
            result[...] = value

    def bound(self, arrays: Sequence[Array], outs: Sequence[Array]) -> BoundKernel:
        """Returns the prepared call: only the launch remains."""
        return BoundKernel(self, self._plan(arrays, outs), arrays, outs)

    def repeated(self, arrays: Sequence[Array], outs: Sequence[Array]) -> Repeated:
        """See Runner."""
        found = self.bound(arrays, outs)
        return found.launch, found

    def may_write_over(
        self, arrays: Sequence[tuple[tuple[int, ...], Any]], outs: Sequence[tuple[tuple[int, ...], Any]]
    ) -> list[list[int]]:
        """For each output, the inputs that it may overwrite, given row-major arrays of these shapes and dtypes.

        This is allowed where each element is read before it is written, in the same iteration of the loop.
        """
        layout = self.operands.layout([shape for shape, _ in arrays], [row_major(shape) for shape, _ in arrays])
        if self.lowered.loop.has_sums or layout.row_rank or self._schedule(layout).boxes is not None:
            return [[] for _ in outs]
        return [[k for k, looks in enumerate(arrays) if looks == out and out[0] == layout.shape] for out in outs]

    def pointers(self, plan: Plan, arrays: Sequence[Array], results: Sequence[Array]) -> Any:
        """The addresses of all operands, as the entry point takes them."""
        base = plan.pointers()
        for position, source in self.given:
            base[position] = arrays[source].__array_interface__["data"][0]
        for position, address in plan.fixed:
            base[position] = address
        for position, out in enumerate(results, start=len(self.lowered.loads)):
            base[position] = out.__array_interface__["data"][0]
        return base

    def _remember(self, key: Any, plan: Plan) -> Plan:
        self._plans[key] = plan
        return plan

    # -- planning -----------------------------------------------------------------------------------------------

    @property
    def reads(self) -> tuple[int, ...]:
        """The inputs that the kernel reads, one entry per read, in the order of a sequence's operands."""
        return tuple(source for _, source in self.given)

    def plan(self, arrays: Sequence[Array], outs: Sequence[Array]) -> Plan:
        """Returns the plan of a call on arrays with these layouts; `outs` share no memory with `arrays`.

        Raises:
            InvalidShape: the shapes do not broadcast, or an output does not have the result's shape.
            InvalidArguments: the strides of an array are not multiples of its element size.
        """
        return self._plan(arrays, outs, apart=True)

    def plan_for(self, inputs: Looks, outs: Looks, *, compiles: bool = True) -> Plan | None:
        """As `plan`, for arrays of these shapes and strides in elements.

        Args:
            compiles: if False, returns None where the plan needs a compiler.
        """
        key = *inputs, None, *outs
        plan = self._plans_for.get(key)
        if plan is None:
            try:
                plan = self._plans_for[key] = self._planned(inputs, outs, at_once=True, compiles=compiles)
            except _NotCompiledError:
                return None
        return plan

    def _plan(self, arrays: Sequence[Array], outs: Sequence[Array | None] | None, *, apart: bool = False) -> Plan:
        inputs = [(a.shape, _element_strides(a)) for a in arrays]
        given = [(None, None) if o is None else (o.shape, _element_strides(o)) for o in outs or ()]
        return self._planned(inputs, given, at_once=apart or outs is None)

    def _planned(self, inputs: Looks, outs: Sequence[Any], *, at_once: bool, compiles: bool = True) -> Plan:
        shapes = [shape for shape, _ in inputs]
        layout = self.operands.layout_of_call(
            shapes, [steps for _, steps in inputs], [shape for shape, _ in outs], [steps for _, steps in outs]
        )
        if layout is None:
            nothing = (ctypes.c_int64 * 0)()
            made = zip(self.operands.results(shapes), self._dtypes, strict=True)
            return Plan(
                None,
                nothing,
                0,
                ctypes.c_void_p * (len(self.lowered.loads) + len(self._dtypes)),
                size=0,
                boxes=0,
                work=0,
                results=tuple(made),
                fixed=(),
                keep=(),
            )
        own = self.operands.own(layout)
        fixed = tuple((position, array.__array_interface__["data"][0]) for position, array in own)
        fixed += tuple((position, 0) for position in self.operands.virtual)
        schedule = self._schedule(layout)
        # An output from the caller may overlap an input that other boxes still read.
        numbers, work = arguments(schedule, at_once=at_once)
        boxes, operands = 0, len(schedule.layout.strides)
        if schedule.boxes is not None:
            boxes, operands = schedule.boxes.count * schedule.stages, operands + 1
        packed = (ctypes.c_int64 * len(numbers))(*numbers)
        entry = self._entry(schedule, compiles=compiles) if layout.size else None
        if entry is not None:
            entry = logged(entry, entry.__name__, (shapes, layout.results), _threads)
        return Plan(
            entry=entry,
            layout=packed,
            layout_address=ctypes.addressof(packed),
            pointers=ctypes.c_void_p * operands,
            size=layout.size,
            boxes=boxes,
            work=work,
            stages=schedule.stages,
            results=tuple(zip(layout.results, self._dtypes, strict=True)),
            fixed=fixed,
            keep=tuple(a for _, a in own),
        )

    def _entry(self, schedule: CpuSchedule, *, compiles: bool = True) -> Any:
        loop = schedule.loop
        known = self._entries.get(schedule.key)
        if known is None and schedule.fits:  # a source for rows of any length works here, too, with the same bits
            known = self._entries.get(replace(schedule, fits=False).key)
        if known is not None and known[0] == loop:  # generating a large kernel's source again takes tens of ms
            return known[1]
        if not compiles:
            raise _NotCompiledError
        source = host_source(schedule)
        self.sources[source.entry] = source
        entry = cpu_compiler.load(source, self.lowered.labels, flat=schedule.layout.variant.flat and not loop.row_axes)
        self._entries[schedule.key] = loop, entry
        return entry


def _are_known(dims: Sequence[Dims]) -> bool:
    return all(isinstance(size, int) for shape in dims for size in shape or ())


def _threads(base: Any, layout: Any, begin: int, end: int, threads: int, parallel: Any) -> str:
    return f"{threads} threads" if threads > 1 else f"1 thread, from {begin} to {end}"


def _element_strides(array: Array) -> tuple[int, ...]:
    size = array.itemsize
    if any(s % size and d > 1 for s, d in zip(array.strides, array.shape)) and array.size:  # as in a field of records
        raise InvalidArguments(
            f"elements of {size} bytes lie {', '.join(map(str, array.strides))} bytes apart, which is no multiple",
            where=f"an array of {array.dtype}{list(array.shape)}",
            fix="give a copy of it: array.copy()",
        )
    return tuple(s // size for s in array.strides)
