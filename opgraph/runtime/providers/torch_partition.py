"""Runs a library partition on a GPU: torch executes its ops on the caller's stream, and on memory of any library."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import torch
import torch.utils.dlpack

from opgraph.ir.op import Op
from opgraph.runtime import cuda
from opgraph.runtime.cuda_arrays import library_of, raw_stream, seen
from opgraph.runtime.device_array import DeviceArray
from opgraph.runtime.engine import Stream
from opgraph.runtime.library_partition import Program
from opgraph.runtime.providers.torch import from_numpy, to_numpy
from opgraph.runtime.providers.torch_cuda import TORCH
from opgraph.runtime.providers.torch_device_ops import DeviceOps
from opgraph.runtime.providers.torch_ops import plain
from opgraph.runtime.runner import NO_SOURCES
from opgraph.runtime.shape_rules import check_out_shape


class CudaPartition:
    """A partition on one GPU.

    Args:
        program: its ops, native ones and ONNX nodes that `runs_node` accepts.
        device: index of the GPU.
        sizes: ids of the values that stay on the host; among inputs and outputs they are NumPy arrays.
    """

    runs_in = "torch"
    sources = NO_SOURCES
    spins = False

    def __init__(self, program: Program, device: int, sizes: Collection[int] = ()) -> None:
        self._program = program
        self._device = device
        self._place = torch.device("cuda", device)
        self._sizes = sizes
        ops = [step.op for step in program.steps]
        self._ops = DeviceOps(ops, program.constants, {*sizes, *_sizes_inside(program, ops)}, self._place)
        torch.cuda.synchronize(self._place)  # other streams do not wait for the constants

    def repeated(self, arrays: Sequence[Any], outs: Sequence[Any]) -> None:
        """See Runner; None, since every call allocates."""

    def __call__(
        self, arrays: Sequence[Any], outs: Sequence[Any] | None = None, stream: Stream | None = None
    ) -> list[Any]:
        """Runs the ops; arguments as for CudaKernel. Results are arrays of the inputs' library.

        `arrays` may have more entries than there are inputs: these only determine that library.
        """
        given = [a if isinstance(a, np.ndarray) else seen(a, self._device, "an input") for a in arrays]
        library = library_of([a for a in given if not isinstance(a, np.ndarray)])
        asked = None if stream is None else raw_stream(stream)
        current = library.stream(self._device) if asked is None else asked
        with torch.cuda.device(self._place), TORCH.using(current, self._device), plain("cuda"):
            values = dict(self._ops.constants)
            values.update((id, _tensor(v)) for id, v in zip(self._program.inputs, given))
            taken = {_memory(t) for t in values.values()}
            made = [value.contiguous() for value in self._program.run(self._ops, values)]
            for index, value in enumerate(made):
                # A reshape is a view: a result must not share memory with an input or another result.
                if _memory(value) in taken:
                    made[index] = value.clone()
                taken.add(_memory(made[index]))
            targets = [None] * len(made) if outs is None else outs
            results = zip(self._program.outputs, made, targets, strict=True)
            return [self._given(id, value, target, library) for id, value, target in results]

    def _given(self, id: int, value: torch.Tensor, target: Any, library: Any) -> Any:
        if target is None and id in self._sizes:
            return to_numpy(value.cpu())
        there = value if value.is_cuda else value.to(self._place)
        if target is None:
            return cuda.as_cupy(there) if library is cuda.CUPY else there
        view = seen(target, self._device, "an output")
        check_out_shape(view.shape, tuple(there.shape))
        _tensor(view).copy_(there)
        return view.owner


def _sizes_inside(program: Program, ops: Sequence[Op]) -> Collection[int]:
    """The sizes inside a partition; only ONNX nodes make them."""
    if all(op.kind != "Wildcard" for op in ops):
        return ()
    from opgraph.runtime.providers.torch_onnx.sizes import sizes_of  # needs onnx

    return sizes_of([(op,) for op in ops], program.constants.keys())


def _memory(tensor: torch.Tensor) -> int:
    """A number that all views of one memory share."""
    return int(tensor.untyped_storage()._cdata)


def _tensor(view: DeviceArray | np.ndarray) -> torch.Tensor:
    """A tensor on the memory of an array."""
    if isinstance(view, np.ndarray):
        return from_numpy(view)
    owner = view.owner
    tensor = owner.detach() if isinstance(owner, torch.Tensor) else torch.utils.dlpack.from_dlpack(owner)
    # An operand that only provides its shape is one broadcast element (CudaExchange.zeros).
    return tensor if tensor.shape == view.shape else tensor.expand(view.shape)
