"""Torch tensors on a GPU: viewed by address without DLPack, allocated by torch, on torch's current stream."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from opgraph.ir import dtypes
from opgraph.runtime.device_array import Adopted, DeviceArray, RawStream
from opgraph.runtime.providers import torch_internals
from opgraph.runtime.providers.torch import from_numpy, to_numpy
from opgraph.runtime.providers.torch_dtypes import TORCH_DTYPES

_NUMPY = {dtype: dtypes.get(name).numpy for name, dtype in TORCH_DTYPES.items()}
_TORCH = {numpy: dtype for dtype, numpy in _NUMPY.items()}


class TorchLibrary:
    """Torch as the owner of arrays on a GPU."""

    name = "torch"
    keeps_for_graphs = True

    def view(self, owner: torch.Tensor) -> DeviceArray:
        """Describes a tensor by address, shape and strides.

        Raises:
            TypeError: the dtype has no counterpart.
            ValueError: the tensor has no plain strided memory (sparse, lazily negated, a wrapper such as DTensor).
        """
        if owner.layout is not torch.strided or owner.is_neg() or owner.is_conj():
            raise ValueError("its memory is not plain strided values")
        dtype = _NUMPY.get(owner.dtype)
        if dtype is None:
            raise TypeError(f"its dtype {owner.dtype} has no counterpart")
        pointer = owner.data_ptr()
        if pointer == 0 and owner.numel():
            raise ValueError("it has no memory of its own (a wrapper, a fake or a meta tensor)")
        return DeviceArray(
            owner, pointer, dtype, owner.shape, owner.stride(), owner.get_device() if owner.is_cuda else -1, self
        )

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any], device: int) -> tuple[torch.Tensor, int]:
        """Allocates a tensor from torch's caching allocator.

        Raises:
            torch.cuda.OutOfMemoryError: torch's own error with its sizes, which programs that retry with less catch; a
                note names the purpose of the memory.
        """
        try:
            owner = torch.empty(shape, dtype=_TORCH[dtype], device=torch.device("cuda", device))
        except torch.cuda.OutOfMemoryError as error:
            size = int(np.prod(shape)) * dtype.itemsize / 2**30
            error.add_note(f"opgraph: for a result of {dtype} {shape}, {size:.2f} GiB; give `out=` or `donate=`")
            raise
        return owner, owner.data_ptr()

    def dense(self, owner: torch.Tensor) -> torch.Tensor:
        """Returns the tensor in row-major order, copied on the device if necessary."""
        return owner.detach().contiguous()

    def adopted(self, memory: Adopted, dtype: np.dtype[Any], device: int) -> torch.Tensor:
        """Creates a tensor of that dtype on foreign memory."""
        return torch.as_tensor(memory, device=torch.device("cuda", device)).view(_TORCH[dtype])

    def stream(self, device: int) -> RawStream:
        """Torch's current stream of this thread; a captured one during CUDA graph capture."""
        return RawStream(ptr=torch_internals.current_stream(device))

    def using(self, stream: Any, device: int) -> Any:
        """Returns a context manager that makes a stream torch's current one of this thread."""
        if stream.ptr == torch_internals.current_stream(device):
            return torch.cuda.stream(None)
        return torch.cuda.stream(torch.cuda.get_stream_from_external(stream.ptr, device))  # 0: the default stream

    def to_host(self, owner: torch.Tensor) -> np.ndarray:
        """A copy in host memory."""
        return to_numpy(owner.detach().cpu())

    def from_host(self, array: np.ndarray, device: int) -> torch.Tensor:
        """A copy on the device."""
        return from_numpy(np.require(array, requirements=("C", "W"))).to(torch.device("cuda", device))


TORCH = TorchLibrary()
