"""The devices of a program's kernels, the CPU or a GPU: they compile kernels and write the lines that launch them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from opgraph.ir.dtypes import get as dtype_of
from opgraph.partition.partition import Partition
from opgraph.runtime.compiled_partition import runner
from opgraph.runtime.cpu_kernel import HostKernel
from opgraph.runtime.engine import Engine, engine_of
from opgraph.runtime.kernel_sequence import KernelLaunch, KernelSequence
from opgraph.runtime.providers import torch_internals
from opgraph.runtime.providers.torch_dtypes import NAMES
from opgraph.torch.graph.tensor_locations import PACK, Beginnings, Place


@dataclass(slots=True)
class Lines:
    """Lines of a program's function.

    Attributes:
        values: name in the lines -> its value.
        makes: the variables that the lines assign.
    """

    lines: list[str]
    values: dict[str, Any] = field(default_factory=dict)
    makes: list[str] = field(default_factory=list)


class HostTarget:
    """The CPU.

    Attributes:
        engine: the device.
        allocate: the function's name for the allocation by size, strides and dtype; no op of torch has this name.
        alignment: the alignment in bytes that kernels expect of the results of library calls.
        packs: True if kernels may read and write several elements at once, which must be aligned.
        values: name in the lines -> its value.
    """

    engine = Engine("cpu")
    allocate = "allocate"
    alignment = 1
    packs = False
    values: Mapping[str, Any] = {"allocate": torch_internals.empty_cpu}

    def kernel(self, partition: Partition, rounding: str, arguments: Collection[int]) -> HostKernel | None:
        """The compiled loop of a fused partition; None if it cannot be launched by address.

        Args:
            arguments: ids of the scalar constants that are operands and not part of its text; see `lower`.
        """
        made = runner(partition, self.engine, rounding=rounding, arguments=arguments)
        return made if isinstance(made, HostKernel) else None

    def plan(
        self, kernel: Any, reads: Sequence[Place], writes: Sequence[Place], begin: Beginnings, *, compiles: bool
    ) -> Any:
        """The prepared call on tensors at these places, wherever they begin.

        Args:
            compiles: False: nothing is compiled, and None is returned if a compiler may be needed.
        """
        return kernel.plan_for(_looks(reads), _looks(writes), compiles=compiles)

    def packed(self, plan: Any) -> Sequence[bool]:
        """True for each tensor, those that a kernel reads first, then those that it writes, if it must be aligned."""
        return ()

    def sequence(self, name: str, launches: Sequence[KernelLaunch[Any]], addresses: Sequence[str]) -> Lines:
        """The lines of one native call for consecutive kernels.

        Args:
            name: the name of the call in the function.
            addresses: the expressions of the addresses; the launches refer to them by their places.
        """
        made = KernelSequence(launches, len(addresses))
        given, own = ", ".join(addresses), {f"own_{name}": made}  # the function's calls hold addresses only
        if made.direct is None:
            return Lines([f"{name}({given})"], {name: made})
        entry, pack = made.direct
        return Lines([f"{name}(pack_{name}({given}))"], {**own, name: entry, f"pack_{name}": pack})

    def symbolic_sequence(self, name: str, launches: Sequence[KernelLaunch[Any]], addresses: Sequence[str]) -> Lines:
        """The same, with lines that do not depend on plans. If launches have no plans yet, the names of the lines have
        no values."""
        made = KernelSequence(launches, len(addresses)) if launches[0].plan is not None else None
        return Lines([f"{name}({', '.join(addresses)})"], {} if made is None else {name: made})

    def first(self, has_constants: bool) -> Sequence[str]:
        """The first lines of the function.

        Args:
            has_constants: True if it reads memory that only the program holds.
        """
        return ()

    def aligned(self, inputs: Sequence[str]) -> Lines:
        """Lines that copy inputs that are not aligned to 16 bytes."""
        return Lines([])


class CudaTarget:
    """A GPU. Kernels are launched on torch's current stream, and memory comes from torch's allocator.

    Args:
        index: the index of the GPU.

    Raises:
        DeviceError: CuPy is missing, or there is no such GPU.
    """

    allocate = "allocate_cuda"
    alignment = PACK
    packs = True

    def __init__(self, index: int) -> None:
        self.engine = engine_of(f"cuda:{index}")
        from opgraph.runtime import cuda_memory  # needs CuPy, as the engine does
        from opgraph.runtime.providers import torch_cuda_prepared

        self.values: Mapping[str, Any] = {
            "allocate_cuda": torch_internals.empty_cuda, "stream_of": torch_internals.current_stream,
            "current_gpu": torch_internals.current_gpu, "on_gpu": torch_cuda_prepared.on_gpu,
            "bytes_dtype": torch.uint8,
            "is_capturing": torch.cuda.is_current_stream_capturing, "keep": cuda_memory.keep,
        }  # fmt: skip

    def kernel(self, partition: Partition, rounding: str, arguments: Collection[int]) -> Any:
        """As HostTarget."""
        return runner(partition, self.engine, rounding=rounding, arguments=arguments)

    def plan(
        self, kernel: Any, reads: Sequence[Place], writes: Sequence[Place], begin: Beginnings, *, compiles: bool
    ) -> Any:
        """As HostTarget, with packs as wide as the places allow."""
        if not compiles:
            return None
        return kernel.plan([self._array(p, begin) for p in reads], [self._array(p, begin) for p in writes])

    def packed(self, plan: Any) -> Sequence[bool]:
        """As HostTarget."""
        packs: Sequence[bool] = plan.packs
        return packs

    def sequence(self, name: str, launches: Sequence[KernelLaunch[Any]], addresses: Sequence[str]) -> Lines:
        """As HostTarget. A workspace is freed after the launch: the allocator reuses it on the same stream."""
        from opgraph.runtime.cuda_sequence import CudaSequence

        made = CudaSequence(launches, len(addresses), self.engine.index)
        lines, makes = [], []
        given = [f"stream_of({self.engine.index})", *addresses]
        if made.workspace:
            makes.append(f"work_{name}")
            lines.append(f"work_{name} = {self.allocate}(({made.workspace},), (1,), bytes_dtype)")
            given.append(f"work_{name}.data_ptr()")
        arguments = ", ".join(given)
        if made.direct is None:
            return Lines([*lines, f"{name}({arguments})"], {name: made}, makes)
        entry, pack = made.direct
        lines += [
            f"given = {arguments}",
            f"if refused := {name}(pack_{name}(*given)): recover_{name}(refused, *given)",
        ]
        return Lines(lines, {name: entry, f"pack_{name}": pack, f"recover_{name}": made.recover}, makes)

    def symbolic_sequence(self, name: str, launches: Sequence[KernelLaunch[Any]], addresses: Sequence[str]) -> Lines:
        """As HostTarget. Each call has a workspace, perhaps of 0 bytes."""
        from opgraph.runtime.cuda_sequence import CudaSequence

        work = f"work_{name}"
        given = ", ".join([f"stream_of({self.engine.index})", *addresses, f"{work}.data_ptr()"])
        lines = [f"{work} = {self.allocate}((bytes_{name},), (1,), bytes_dtype)", f"{name}({given})"]
        if launches[0].plan is None:
            return Lines(lines, makes=[work])
        made = CudaSequence(launches, len(addresses), self.engine.index)
        call = made if made.workspace else lambda *given: made(*given[:-1])
        return Lines(lines, {name: call, f"bytes_{name}": made.workspace}, [work])

    def first(self, has_constants: bool) -> Sequence[str]:
        """As HostTarget: allocation and launches use the current GPU. A captured CUDA graph may outlive the program."""
        index = self.engine.index
        lines = [f"if current_gpu() != {index}:", f"    with on_gpu({index}): return run(args)"]
        return [*lines, "if is_capturing(): keep([run])"] if has_constants else lines

    def aligned(self, inputs: Sequence[str]) -> Lines:
        """As HostTarget."""
        if not inputs:
            return Lines([])
        addresses, names = " | ".join(f"{n}.data_ptr()" for n in inputs), "".join(f"{n}, " for n in inputs)
        lines = [f"if ({addresses}) & {PACK - 1}:", f"    {names}= map(aligned, ({names}))"]
        return Lines(lines, {"aligned": aligned})

    def _array(self, place: Place, begin: Beginnings) -> Any:
        from opgraph.runtime.cuda import CUPY
        from opgraph.runtime.device_array import DeviceArray

        dtype = dtype_of(NAMES[place.dtype]).numpy
        return DeviceArray(
            None, begin.of(place), dtype, place.kernel_size, place.kernel_stride, self.engine.index, CUPY
        )


#: A device of a program.
Target: TypeAlias = HostTarget | CudaTarget


def target_of(device: torch.device) -> Target:
    """The target of a torch device.

    Raises:
        DeviceError: it is a GPU, and CuPy is missing or there is no such GPU.
    """
    return CudaTarget(device.index or 0) if device.type == "cuda" else _HOST


_HOST = HostTarget()


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy with the same strides if it is not aligned to 16 bytes."""
    if tensor.data_ptr() % PACK == 0:
        return tensor
    span = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride()))
    with torch.no_grad():
        return tensor.as_strided((span,), (1,)).clone().as_strided(tensor.shape, tensor.stride(), 0)


def _looks(places: Sequence[Place]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    return [(place.kernel_size, place.kernel_stride) for place in places]
