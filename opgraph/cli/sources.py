"""The kernel of a fused partition as text, without compiling it and without the device it is for."""

from __future__ import annotations

from opgraph.codegen.kernel import KernelSource, cuda_source, cuda_variant, host_source
from opgraph.errors import InvalidShape
from opgraph.ir.logical_tensor import LogicalTensor, row_major
from opgraph.loops.layout import bind
from opgraph.loops.lower import lower
from opgraph.loops.space import iteration_shape
from opgraph.partition.partition import Partition


def kernel_sources(partition: Partition, device: str = "cpu") -> list[KernelSource]:
    """The kernel that dense arrays of the declared shapes need; none where a number of dimensions is unknown.

    Unknown sizes and symbols are taken for large and different ones. The kernel that runs is chosen by the arrays'
    real strides when they arrive.
    """
    lowered = lower(partition)
    guesses: dict[object, int] = {}
    shapes = []
    for tensor in lowered.loads:
        shape = (1,) if tensor is None else _guessed(tensor, guesses)
        if shape is None:
            return []
        shapes.append(shape)
    try:
        space = iteration_shape(lowered.loop.loads, shapes)
        for i, load in enumerate(lowered.loop.loads):
            if load.align == "index":
                shapes[i] = (space[load.axis],)
        layout = bind(lowered.loop, shapes, [row_major(s) for s in shapes])
    except InvalidShape:  # two unknown sizes that turn out equal
        return []
    if device == "cuda":
        return [cuda_source(lowered.loop, cuda_variant(lowered.loop, layout))]
    return [host_source(lowered.loop, layout.variant, several=layout.row_rank > 1)]


def _guessed(tensor: LogicalTensor, guesses: dict[object, int]) -> tuple[int, ...] | None:
    if tensor.data is not None:
        return tensor.data.shape
    if tensor.dims is None:
        return None
    # An unknown size is unlike every other; a symbol is itself again.
    return tuple(
        d
        if isinstance(d, int)
        else guesses.setdefault(d if d is not None else (tensor.id, i), 1024 + 64 * len(guesses))
        for i, d in enumerate(tensor.dims)
    )
