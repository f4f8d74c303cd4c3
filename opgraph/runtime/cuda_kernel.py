"""Runs a fused partition on a GPU: selects the kernel variant for the layout of the arrays, and launches it."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from opgraph.codegen.cuda_rows import launches as launches_of
from opgraph.codegen.kernel import KernelSource, cuda_layout, cuda_source
from opgraph.errors import InvalidShape
from opgraph.ir.logical_tensor import Dims
from opgraph.ir.stage_log import Shapes, logged
from opgraph.loops.layout import CONTIGUOUS, STRIDED
from opgraph.loops.lower import Lowered
from opgraph.partition.partition import Partition
from opgraph.runtime import cuda, cuda_memory
from opgraph.runtime.bounded_dict import Bounded
from opgraph.runtime.cuda_arrays import library_of, raw_stream, seen
from opgraph.runtime.cuda_plan import Launch, Plan, struct_of
from opgraph.runtime.cuda_sources import (
    launched_sources,
    sources_ahead,
)
from opgraph.runtime.device_array import DeviceArray, Library, alignment
from opgraph.runtime.engine import Engine, Stream
from opgraph.runtime.operands import Operands
from opgraph.runtime.runner import GENERATED, Repeated
from opgraph.runtime.shape_rules import ShapeRules
from opgraph.schedule.cuda import Cuda
from opgraph.schedule.schedule import CudaPointwise, Schedule
from opgraph.schedule.table import choose_schedule

#: The number of cached combinations of shapes, strides and alignments for one kernel.
MAX_PLANS = 1024
_NO_WORK = (0, np.dtype(np.float64))


class CudaKernel:
    """A loop compiled for a GPU; one kernel per variant, compiled when a call first needs it.

    Args:
        lowered: the loop of the partition, and its operands.
        partition: `__call__` takes arrays for its input ports.
        engine: the GPU.
    """

    runs_in = GENERATED
    spins = False

    def __init__(self, lowered: Lowered, partition: Partition, engine: Engine) -> None:
        self.lowered = lowered
        self.device = engine.index
        # If sums need several kernels, one kernel has written sums before the next one reads operands.
        self.operands = Operands(lowered, partition.input_ports, ShapeRules(partition), sums_last=False)
        self._given = self.operands.given
        self._dtypes = self.operands.store_dtypes
        self._first_store = len(lowered.loop.loads)
        self._plans: Bounded[Any, Plan] = Bounded(MAX_PLANS)
        self._constants: dict[int, cuda_memory.Uploaded] = {}
        self._is_capturing = cuda.capture_query()
        self.sources: dict[str, KernelSource] = {}

    def with_scalars(self, scalars: Mapping[int, float]) -> CudaKernel:
        """Returns the same kernel with other values for constants, by their loads."""
        made = copy.copy(self)
        made.operands, made._plans, made._constants = self.operands.with_scalars(scalars), Bounded(MAX_PLANS), {}
        return made

    def prepare(self, dims: Sequence[Dims]) -> None:
        """Compiles the kernels that dense arrays of these dimensions will need, as far as they are known."""
        self._functions(sources_ahead(self.operands, dims))

    def __call__(
        self, arrays: Sequence[Any], outs: Sequence[Any] | None = None, stream: Stream | None = None
    ) -> list[Any]:
        """Launches the kernel; returns without waiting for it.

        Args:
            arrays: one for each input, dtypes and shapes already checked: of any library, or DeviceArrays.
            outs: arrays to write to; allocated by the inputs' library where None.
            stream: the stream of the launch; if None or without a handle, the library's current stream.

        Returns: the results, `outs` where given.

        Raises:
            InvalidArguments: an array is not on the kernel's GPU.
            InvalidShape: an output array does not have the result's shape.
            DeviceError: a kernel does not compile.
        """
        ins = [seen(a, self.device, "an input of a kernel") for a in arrays]
        targets = [None] * len(self._dtypes) if outs is None else self._targets(outs)
        with cuda.OnDevice(self.device):
            plan = self._plan(ins, targets)
            library = library_of([*ins, *targets])
            if stream is None or (raw := raw_stream(stream)) is None:
                return self._launched(plan, ins, targets, library)
            # Libraries reuse memory in the order of the stream that it was allocated on.
            with library.using(raw, self.device):
                return self._launched(plan, ins, targets, library)

    def _launched(
        self, plan: Plan, ins: Sequence[DeviceArray], targets: Sequence[DeviceArray | None], library: Library
    ) -> list[Any]:
        """Puts all work on the library's current stream; returns the results."""
        addresses = self._addresses(plan, ins)
        results: list[Any] = []
        for position, target in enumerate(targets, start=self._first_store):
            shape, dtype = plan.results[len(results)], self._dtypes[len(results)]
            made = library.empty(shape, dtype, self.device) if target is None else (target.owner, target.pointer)
            results.append(made[0])
            addresses[position] = made[1]
        self._clear([results[i] for i in plan.cleared])
        if plan.launches:
            where = library.stream(self.device)
            kept, work = self._workspace(plan, library)
            if (kept is not None or self._constants) and where.ptr and self._is_capturing(where.ptr):
                cuda_memory.keep(self._held(None if library.keeps_for_graphs else kept))
            for launch in plan.launches:
                launch.function(launch.grid, launch.block, launch.filled(addresses, work), 0, where)
            # The stream is done with the workspace before the library reuses its memory.
        return results

    def repeated(self, arrays: Sequence[Any], outs: Sequence[Any]) -> Repeated:
        """Returns the prepared call: a function that only launches, on the stream that is current then.

        The function may be called during CUDA graph capture, and allocates nothing.
        """
        ins, targets = [seen(a, self.device, "an input of a kernel") for a in arrays], self._targets(outs)
        library, device = library_of([*ins, *targets]), self.device
        with cuda.OnDevice(device):
            plan = self._plan(ins, targets)
            kept, work = self._workspace(plan, library)
        addresses = self._addresses(plan, ins)
        for position, target in enumerate(targets, start=self._first_store):
            assert target is not None, "bind is given every output"
            addresses[position] = target.pointer
        launches = [(item.function, item.grid, item.block, item.filled(addresses, work)) for item in plan.launches]
        cleared = [t.owner for i in plan.cleared if (t := targets[i]) is not None]
        held = self._held(kept)
        is_capturing, keep_for_graph = self._is_capturing, cuda_memory.keep
        keep = (ins, targets, plan, kept)  # the launches hold addresses only
        current, make_current = cuda.current_device()
        stream_of = library.stream

        def launch(keep: Any = keep) -> None:
            # No `with`, no objects: for small tensors these calls are the cost of a launch.
            if cuda.forked:
                cuda.refuse_fork()
            before = current()
            if before != device:
                make_current(device)
            try:
                stream = stream_of(device)
                if cleared:
                    self._clear(cleared)
                if held and stream.ptr and is_capturing(stream.ptr):
                    keep_for_graph(held)
                for function, grid, block, args in launches:
                    function(grid, block, args, 0, stream)
            finally:
                if before != device:
                    make_current(before)

        return launch, launch

    def _addresses(self, plan: Plan, ins: Sequence[DeviceArray]) -> list[int]:
        addresses = list(plan.fixed)
        for position, source in self._given:
            addresses[position] = ins[source].pointer
        return addresses

    def _workspace(self, plan: Plan, library: Library) -> tuple[Any, int]:
        """Memory for the partial sums of tiles, from the caller's allocator."""
        count, dtype = plan.work
        return library.empty((count,), dtype, self.device) if count else (None, 0)

    def _held(self, workspace: Any) -> list[Any]:
        """Memory that launches read and the caller does not own; a captured graph may be the last to read it."""
        return [*self._constants.values(), *([] if workspace is None else [workspace])]

    def _clear(self, results: Sequence[Any]) -> None:
        """Sets sums over no elements to 0."""
        for owner in results:
            if 0 not in owner.shape:
                owner[...] = 0

    # -- planning -----------------------------------------------------------------------------------------------

    @property
    def reads(self) -> tuple[int, ...]:
        """The inputs that the kernel reads, one entry per read, in the order of a sequence's operands."""
        return tuple(source for _, source in self._given)

    def plan(self, arrays: Sequence[Any], outs: Sequence[Any], *, aligned: bool = False) -> Plan:
        """Returns the plan of a call on arrays with these layouts; compiles its kernels.

        Args:
            aligned: if True, the plan is for arrays at multiples of 16 bytes; else for the alignment of these arrays.

        Raises:
            InvalidArguments, InvalidShape, DeviceError: as for a call.
        """
        ins, targets = [seen(a, self.device, "an input of a kernel") for a in arrays], self._targets(outs)
        if aligned:
            ins = [a.at(0) for a in ins]
            targets = [None if o is None else o.at(0) for o in targets]
        with cuda.OnDevice(self.device):
            return self._plan(ins, targets)

    def _plan(self, ins: Sequence[DeviceArray], outs: Sequence[DeviceArray | None]) -> Plan:
        key = tuple([None if a is None else a.key for a in (*ins, *outs)])
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = self._new_plan(ins, outs)
        return plan

    def _new_plan(self, ins: Sequence[DeviceArray], outs: Sequence[DeviceArray | None]) -> Plan:
        layout = self.operands.layout_of_call(
            *([a.shape for a in ins], [a.strides for a in ins]),
            *([None if o is None else o.shape for o in outs], [None if o is None else o.strides for o in outs]),
        )
        count = self._first_store + len(outs)
        brought = (*(position for position, _ in self._given), *range(self._first_store, count))
        if layout is None:
            results = self.operands.results([a.shape for a in ins])
            if self.lowered.loop.row_axes and any(map(prod, results)):
                raise InvalidShape(
                    "a reshape of no elements makes another shape than one of other sizes would",
                    where="arrays of one fused kernel",
                    fix="give arrays whose sizes other than 0 fit together",
                )
            every = tuple(range(len(results)))
            return Plan((), (0,) * count, brought, results, _NO_WORK, every)
        rows = prod(layout.dims[: len(layout.dims) - layout.row_rank]) if layout.row_rank else 0
        cleared: tuple[int, ...] = ()
        if layout.size == 0:  # a sum over nothing is 0; a result of each row is computed, even if the row is empty
            cleared = tuple(i for i, store in enumerate(self.lowered.loop.stores) if not (rows and store.per_row))
            if not rows:
                return Plan((), (0,) * count, brought, layout.results, _NO_WORK, cleared)
        kinds = layout.variant.operands
        # Own arrays and newly allocated ones are aligned better than a kernel needs.
        moving = [ins[s].pointer for position, s in self._given if kinds[position] == CONTIGUOUS]
        moving += [
            o.pointer for o, kind in zip(outs, kinds[self._first_store :]) if o is not None and kind == CONTIGUOUS
        ]
        constants = {at: self._constant(at, array) for at, array in self.operands.constants.items()}
        own = {at: memory.ptr for at, memory in constants.items()}
        own.update((at, cuda_memory.positions(n, d, self.device)) for at, n, d in self.operands.indices(layout))
        fixed = tuple(own.get(i, 0) for i in range(count))
        keep = tuple(constants.values())
        aligned = alignment(moving)
        packs = tuple(kinds[position] == CONTIGUOUS for position in brought)
        loop = self.lowered.loop if layout.size else self.lowered.plain
        schedule = choose_schedule(loop, layout, Cuda(aligned))
        shapes = [a.shape for a in ins], layout.results
        if isinstance(schedule, CudaPointwise):
            launches, work = self._pointwise_launches(schedule, shapes), _NO_WORK
        else:
            launches, work = self._sum_launches(schedule, shapes)
        return Plan(launches, fixed, brought, layout.results, work, cleared, keep, packs, aligned)

    def _pointwise_launches(self, schedule: CudaPointwise, shapes: Shapes) -> tuple[Launch, ...]:
        layout, source = schedule.layout, cuda_source(schedule)
        count = layout.size if layout.variant.flat else layout.size // schedule.vector
        args: list[Any] = [None] * len(layout.strides)
        if layout.variant.flat:
            args += [s[-1] for s, kind in zip(layout.strides, layout.variant.operands, strict=True) if kind == STRIDED]
            args.append(count)
        else:
            args += [struct_of(cuda_layout(schedule)), np.uint32(count) if schedule.narrow else count]
        places = tuple((i, i) for i in range(len(layout.strides)))
        grid = (-(-count // schedule.tile),)
        return (Launch(self._functions([source], shapes)[0], grid, tuple(args), cuda.passed(args), places),)

    def _sum_launches(self, schedule: Schedule, shapes: Shapes) -> tuple[tuple[Launch, ...], tuple[int, np.dtype[Any]]]:
        """The launches of a schedule with sums or rows, and the workspace that they share."""
        made = launches_of(schedule)
        functions = iter(self._functions(launched_sources(made), shapes))
        launches = []
        for item in made:
            operands = tuple((i, place) for i, place in enumerate(item.places) if place is not None)
            args = (*[None] * len(item.places), struct_of(item.words[0]), None)
            grid, block = (item.blocks[0],), (item.threads,)
            found = Launch(next(functions), grid, args, cuda.passed(args), operands, len(args) - 1, block, item.inside)
            launches.append(found)
            if item.totals is not None:
                results = tuple((i, self._first_store + store) for i, store in enumerate(item.sums))
                args = (*[None] * len(results), struct_of(item.words[1]), None)
                grid = (item.blocks[1],)
                launches.append(Launch(next(functions), grid, args, cuda.passed(args), results, len(args) - 1))
        size = max((item.bytes for item in made), default=0)
        return tuple(launches), (-(-size // 8), np.dtype(np.float64))

    def _constant(self, position: int, array: np.ndarray) -> cuda_memory.Uploaded:
        """A constant on the device, where it is uploaded once and kept."""
        found = self._constants.get(position)
        if found is None:  # if two threads upload at once, one upload stays
            found = self._constants.setdefault(position, cuda_memory.uploaded(array))
        return found

    def _functions(self, sources: Sequence[KernelSource], shapes: Shapes = ((), ())) -> list[Any]:
        self.sources.update((source.entry, source) for source in sources)
        found = cuda.functions(sources, self.device, self.lowered.labels)
        return [logged(f, s.entry, shapes, _threads) for f, s in zip(found, sources, strict=True)]

    def _targets(self, outs: Sequence[Any]) -> list[DeviceArray | None]:
        return [None if o is None else seen(o, self.device, "an output of a kernel") for o in outs]


def _threads(grid: tuple[int], block: tuple[int], *_: Any) -> str:
    return f"{grid[0]} blocks of {block[0]} threads"
