"""The kernels of a fused partition as text. Neither a compiler nor the kernels' device is needed."""

from __future__ import annotations

from collections.abc import Sequence

from opgraph.codegen.kernel import KernelSource, host_source
from opgraph.ir.logical_tensor import Dims
from opgraph.loops.lower import lower
from opgraph.partition.partition import Partition
from opgraph.runtime import cuda_sources
from opgraph.runtime.cpu_kernel import HostKernel
from opgraph.schedule.schedule import CpuSchedule, Schedule


def kernel_schedule(partition: Partition, device: str = "cpu", shapes: Sequence[Dims] | None = None) -> Schedule | None:
    """The schedule for dense arrays; None if a number of dimensions is unknown.

    The engine's own rules choose it. If it depends on unknown sizes, a call may get another schedule.

    Args:
        shapes: of the partition's inputs. Default: the declared ones.
    """
    kernel = HostKernel(lower(partition), partition)
    dims = [t.dims for t in partition.input_ports] if shapes is None else shapes
    if device == "cuda":
        return cuda_sources.probable_schedule(kernel.operands, dims)
    return kernel.probable_schedule(dims)


def kernel_sources(partition: Partition, device: str = "cpu") -> list[KernelSource]:
    """The kernels of this schedule, in the order of their launches."""
    schedule = kernel_schedule(partition, device)
    return [] if schedule is None else sources_of(schedule)


def sources_of(schedule: Schedule) -> list[KernelSource]:
    """The kernels of a schedule, in the order of their launches."""
    return [host_source(schedule)] if isinstance(schedule, CpuSchedule) else cuda_sources.sources_of(schedule)
