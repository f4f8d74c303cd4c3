"""A library partition on a GPU: torch's ops on the caller's memory and stream, whoever allocated it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.utils.dlpack

from opgraph.runtime import cuda
from opgraph.runtime.cuda_arrays import library_of, raw_stream, seen
from opgraph.runtime.device_array import DeviceArray
from opgraph.runtime.engine import Stream
from opgraph.runtime.native import Program
from opgraph.runtime.providers.torch import from_numpy
from opgraph.runtime.providers.torch_cuda import TORCH
from opgraph.runtime.providers.torch_ops import TorchOps, plain
from opgraph.runtime.runner import NO_SOURCES
from opgraph.runtime.shape_rules import check_out_shape


class CudaPartition:
    """A partition on one GPU.

    Args:
        device: index of the GPU.
    """

    runs_in = "torch"
    sources = NO_SOURCES
    spins = False

    def __init__(self, program: Program, device: int) -> None:
        self._program = program
        self._device = device
        self._ops = TorchOps()
        self._place = torch.device("cuda", device)
        self._constants = {id: from_numpy(array.copy()).to(self._place) for id, array in program.constants.items()}
        torch.cuda.synchronize(self._place)  # other streams do not wait for these copies by themselves

    def repeated(self, arrays: Sequence[Any], outs: Sequence[Any]) -> None:
        """See Runner: every call allocates."""

    def __call__(
        self, arrays: Sequence[Any], outs: Sequence[Any] | None = None, stream: Stream | None = None
    ) -> list[Any]:
        """Runs the ops; arguments as of CudaKernel. Results are arrays of the library that the inputs are of."""
        views = [seen(a, self._device, "an input") for a in arrays]
        library = library_of(views)
        given = None if stream is None else raw_stream(stream)
        current = library.stream(self._device) if given is None else given
        with torch.cuda.device(self._place), TORCH.using(current, self._device), plain("cuda"):
            values = dict(self._constants)
            values.update((id, _tensor(v)) for id, v in zip(self._program.inputs, views, strict=True))
            taken = [t.untyped_storage().data_ptr() for t in values.values()]
            made = [value.contiguous() for value in self._program.run(self._ops, values)]
            for index, value in enumerate(made):
                # A reshape is a view: what leaves must not change with what came in, nor with another result.
                if value.untyped_storage().data_ptr() in taken:
                    made[index] = value.clone()
                taken.append(made[index].untyped_storage().data_ptr())
            targets = [None] * len(made) if outs is None else outs
            return [self._given(value, target, library) for value, target in zip(made, targets, strict=True)]

    def _given(self, value: torch.Tensor, target: Any, library: Any) -> Any:
        if target is None:
            return cuda.as_cupy(value) if library is cuda.CUPY else value
        view = seen(target, self._device, "an output")
        check_out_shape(view.shape, tuple(value.shape))
        _tensor(view).copy_(value)
        return view.owner


def _tensor(view: DeviceArray) -> torch.Tensor:
    """A tensor on the memory of an array."""
    owner = view.owner
    if isinstance(owner, torch.Tensor):
        return owner.detach()
    tensor: torch.Tensor = torch.utils.dlpack.from_dlpack(owner)
    return tensor
