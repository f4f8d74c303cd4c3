"""The kernels of a fused partition as text, without compiling them and without the device they are for."""

from __future__ import annotations

from opgraph.codegen.kernel import KernelSource
from opgraph.loops.lower import lower
from opgraph.partition.partition import Partition
from opgraph.runtime.cpu_kernel import HostKernel
from opgraph.runtime.cuda_sources import probable_sources


def kernel_sources(partition: Partition, device: str = "cpu") -> list[KernelSource]:
    """The kernels that dense arrays of the declared shapes need, in the order of their launches.

    None where a number of dimensions is unknown. The engine itself decides; where sizes that are not known make a
    difference, a call may compile others.
    """
    kernel = HostKernel(lower(partition), partition)
    dims = [t.dims for t in partition.input_ports]
    if device == "cuda":
        return probable_sources(kernel.operands, dims)
    source = kernel.probable_source(dims)
    return [] if source is None else [source]
