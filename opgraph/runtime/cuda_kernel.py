"""A fused partition on a GPU: from arrays to the kernel variant that serves their layout, and the launch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from opgraph.codegen.kernel import BLOCK_SIZE, KernelSource, cuda_layout, cuda_source, cuda_variant
from opgraph.ir.logical_tensor import Dims, LogicalTensor
from opgraph.loops.layout import CONTIGUOUS, STRIDED
from opgraph.loops.lower import Lowered
from opgraph.runtime import cuda
from opgraph.runtime.cuda_arrays import library_of, raw_stream, seen
from opgraph.runtime.device_array import DeviceArray, alignment
from opgraph.runtime.engine import Engine, Stream
from opgraph.runtime.operands import Operands, check_outputs

#: Combinations of shapes, strides and alignments remembered for one kernel.
MAX_PLANS = 1024
_BLOCK = (BLOCK_SIZE,)


@dataclass(frozen=True, slots=True)
class _Plan:
    """What one combination of shapes, strides and alignments needs, worked out once.

    Attributes:
        function: CuPy's compiled function; None where there is nothing to compute.
        grid: blocks.
        args: of the launch, with gaps for the addresses of inputs and outputs.
        shape: of every result.
    """

    function: Any
    grid: tuple[int]
    args: tuple[Any, ...]
    shape: tuple[int, ...]


class CudaKernel:
    """A loop compiled for a GPU; one kernel per variant, compiled when a call first needs it.

    Args:
        lowered: the loop and its operands.
        inputs: the tensors that `__call__` is given, in order; further operands must be constants.
        engine: the GPU.

    Attributes:
        sources: the kernels so far, by name.
    """

    def __init__(self, lowered: Lowered, inputs: Sequence[LogicalTensor], engine: Engine) -> None:
        self.lowered = lowered
        self.device = engine.index
        self._operands = Operands(lowered, inputs)
        self._given = self._operands.given
        self._dtypes = self._operands.store_dtypes
        self._first_store = len(lowered.loop.loads)
        self._plans: dict[Any, _Plan] = {}
        self._uploaded: dict[Any, Any] = {}
        self.sources: dict[str, KernelSource] = {}

    def prepare(self, dims: Sequence[Dims]) -> None:
        """Compiles the variant that dense arrays of these dimensions will need, as far as they are known."""
        layout = self._operands.probable_layout(dims)
        if layout is not None and layout.size:
            self._function(cuda_source(self.lowered.loop, cuda_variant(self.lowered.loop, layout)))

    def __call__(
        self, arrays: Sequence[Any], outs: Sequence[Any] | None = None, stream: Stream | None = None
    ) -> list[Any]:
        """Launches the kernel; returns without waiting for it.

        Args:
            arrays: one for each input, dtypes and shapes already checked: of any library, or DeviceArrays.
            outs: arrays to write to; allocated by the inputs' library where None.
            stream: where to; the library's current stream without it, or where it has no handle.

        Returns: the results, `outs` where given.

        Raises:
            InvalidArguments: an array that is not on the kernel's GPU.
            InvalidShape: an output array does not have the result's shape.
            DeviceError: a kernel that does not compile.
        """
        ins = [seen(a, self.device, "an input of a kernel") for a in arrays]
        targets = [None] * len(self._dtypes) if outs is None else self._targets(outs)
        with cuda.OnDevice(self.device):
            plan = self._plan(ins, targets)
            library = library_of([*ins, *targets])
            args = list(plan.args)
            for position, source in self._given:
                args[position] = ins[source].pointer
            results = []
            for position, target in enumerate(targets):
                if target is None:
                    owner, pointer = library.empty(plan.shape, self._dtypes[position], self.device)
                else:
                    owner, pointer = target.owner, target.pointer
                results.append(owner)
                args[self._first_store + position] = pointer
            if plan.function is not None:
                raw = None if stream is None else raw_stream(stream)
                plan.function(plan.grid, _BLOCK, args, 0, library.stream(self.device) if raw is None else raw)
        return results

    def bound(self, arrays: Sequence[Any], outs: Sequence[Any]) -> Callable[[], None]:
        """The same call with everything worked out: what it returns only launches, on the then current stream.

        May be called during CUDA graph capture, and allocates nothing.
        """
        ins, targets = [seen(a, self.device, "an input of a kernel") for a in arrays], self._targets(outs)
        with cuda.OnDevice(self.device):
            plan = self._plan(ins, targets)
        args = list(plan.args)
        for position, source in self._given:
            args[position] = ins[source].pointer
        for position, target in enumerate(targets, start=self._first_store):
            assert target is not None, "bind is given every output"
            args[position] = target.pointer
        library, device = library_of([*ins, *targets]), self.device
        keep = (ins, targets, plan)  # the launch holds addresses only

        def launch(function: Any = plan.function, grid: Any = plan.grid, args: Any = args, keep: Any = keep) -> None:
            with cuda.OnDevice(device):
                function(grid, _BLOCK, args, 0, library.stream(device))

        return launch if plan.function is not None else lambda: None

    # -- planning -----------------------------------------------------------------------------------------------

    def _plan(self, ins: Sequence[DeviceArray], outs: Sequence[DeviceArray | None]) -> _Plan:
        key = tuple([None if a is None else a.key for a in (*ins, *outs)])
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= MAX_PLANS:  # shapes that change with every call must not pile up
                self._plans.clear()
            plan = self._plans[key] = self._new_plan(ins, outs)
        return plan

    def _new_plan(self, ins: Sequence[DeviceArray], outs: Sequence[DeviceArray | None]) -> _Plan:
        layout = self._operands.layout(
            [a.shape for a in ins], [a.strides for a in ins], [None if o is None else o.strides for o in outs]
        )
        check_outputs(layout, [None if o is None else o.shape for o in outs])
        if layout.size == 0:
            return _Plan(None, (0,), (None,) * (self._first_store + len(outs)), layout.shape)
        kinds = layout.variant.operands
        # Own arrays and newly allocated ones are aligned better than a kernel needs.
        moving = [ins[s].pointer for position, s in self._given if kinds[position] == CONTIGUOUS]
        moving += [
            o.pointer for o, kind in zip(outs, kinds[self._first_store :]) if o is not None and kind == CONTIGUOUS
        ]
        variant = cuda_variant(self.lowered.loop, layout, alignment=alignment(moving))
        source = cuda_source(self.lowered.loop, variant)
        count = layout.size if layout.variant.flat else layout.size // variant.vector
        own = {position: self._uploaded_at(position, array) for position, array in self._operands.own(layout)}
        args: list[Any] = [own.get(i) for i in range(self._first_store + len(outs))]
        if layout.variant.flat:
            args += [s[-1] for s, kind in zip(layout.strides, kinds, strict=True) if kind == STRIDED]
            args.append(count)
        else:
            args += [cuda.by_value(cuda_layout(layout, variant)), np.uint32(count) if variant.narrow else count]
        return _Plan(self._function(source), (-(-count // variant.tile),), tuple(args), layout.shape)

    def _uploaded_at(self, position: int, array: np.ndarray) -> int:
        """The address of a constant or of index values on the device; each is uploaded once and kept."""
        key = (position, array.shape)
        if key not in self._uploaded:
            self._uploaded[key] = cuda.uploaded(array)
        return int(self._uploaded[key].ptr)

    def _function(self, source: KernelSource) -> Any:
        self.sources[source.entry] = source
        return cuda.function(source, self.device, self.lowered.labels)

    def _targets(self, outs: Sequence[Any]) -> list[DeviceArray | None]:
        return [None if o is None else seen(o, self.device, "an output of a kernel") for o in outs]
