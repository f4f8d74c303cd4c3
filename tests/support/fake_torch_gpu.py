"""A fake GPU for torch: tensors have device `cuda:0`, and are in host memory. Copies between the two are counted.

torch has no CUDA here, so torch's own dispatch catches each operation and runs it on the host memory of its operands;
the results are tensors of the GPU again. Operands on two devices are refused, as in torch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from emulator import FakeArray, FakeCupy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from opgraph.runtime.providers import torch_internals

GPU = torch.device("cuda", 0)
_COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)


class GpuTensor(torch.Tensor):
    """A tensor of the GPU; `host` is its memory."""

    host: torch.Tensor

    @staticmethod
    def __new__(cls, host: torch.Tensor) -> GpuTensor:
        like = {"strides": host.stride(), "storage_offset": host.storage_offset(), "dtype": host.dtype}
        made = torch.Tensor._make_wrapper_subclass(cls, host.shape, device=GPU, **like)
        made.host = host
        return made

    def data_ptr(self) -> int:
        return self.host.data_ptr()

    def untyped_storage(self) -> Any:
        return self.host.untyped_storage()

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {**self.host.numpy().__array_interface__, "stream": None}

    def contiguous(self, *_: Any, **__: Any) -> torch.Tensor:  # torch's own first queries CUDA for the current device
        return self if self.is_contiguous() else self.clone(memory_format=torch.contiguous_format)

    def __getitem__(self, at: Any) -> torch.Tensor:  # the same here
        places = at if isinstance(at, tuple) else (at,)
        assert not any(isinstance(i, torch.Tensor) and i.dim() and not isinstance(i, GpuTensor) for i in places)
        with torch._C._DisableTorchDispatch():
            return GpuTensor(self.host[tuple(map(_host, places))])

    def tolist(self) -> Any:
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} outside of a TorchGpu")


class TorchGpu(TorchDispatchMode):
    """A block in which torch has a GPU. `copies`: ("to host" or "to device", bytes) of each copy."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: list[tuple[str, int]] = []

    def put(self, tensor: torch.Tensor) -> GpuTensor:
        """A tensor on the GPU; this copy is not counted."""
        return GpuTensor(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        tensors = [a for a in tree_leaves((args, kwargs)) if isinstance(a, torch.Tensor)]
        there = [isinstance(t, GpuTensor) for t in tensors]
        asked = kwargs.get("device")
        on_gpu = any(there) if asked is None else torch.device(asked).type == "cuda"
        if func is torch.ops.aten._local_scalar_dense.default and on_gpu:
            self.copies.append(("to host", tensors[0].element_size()))
        elif func in _COPIES:
            source, onto = there[-1], there[0] if len(tensors) > 1 else on_gpu
            if source != onto:
                self.copies.append(("to device" if onto else "to host", tensors[-1].nbytes))
            on_gpu = onto
        elif on_gpu and any(not g and t.dim() for t, g in zip(tensors, there)):
            raise RuntimeError(f"Expected all tensors to be on the same device: {func}")
        if asked is not None:
            kwargs["device"] = torch.device("cpu")
        by_host = {id(t.host): t for t in tensors if isinstance(t, GpuTensor)}
        made = func(*tree_map(_host, args), **tree_map(_host, kwargs))
        if func is torch.ops.aten._to_copy.default and made.data_ptr() == _host(tensors[0]).data_ptr():
            made = made.clone()
        if not on_gpu:
            return made
        return tree_map(lambda t: by_host.get(id(t)) or GpuTensor(t) if isinstance(t, torch.Tensor) else t, made)


def _host(value: Any) -> Any:
    return value.host if isinstance(value, GpuTensor) else value


@contextlib.contextmanager
def torch_gpu(cupy: FakeCupy, patch: pytest.MonkeyPatch) -> Iterator[TorchGpu]:
    """A block in which torch and the emulator's CuPy share a GPU."""

    def nothing(*_: Any) -> Any:
        return contextlib.nullcontext()

    def from_dlpack(array: Any) -> Any:
        assert isinstance(array, FakeArray)
        with torch._C._DisableTorchDispatch():
            return GpuTensor(torch.from_numpy(array.host))

    patch.setattr(torch.cuda, "is_available", lambda: True)
    patch.setattr(torch.cuda, "_lazy_init", lambda: None)
    patch.setattr(torch.cuda, "synchronize", nothing)
    patch.setattr(torch.cuda, "device", nothing)
    patch.setattr(torch.cuda, "stream", nothing)
    patch.setattr(torch_internals, "current_stream", lambda device: cupy.stream.ptr)
    patch.setattr(torch.utils.dlpack, "from_dlpack", from_dlpack)
    with TorchGpu() as gpu:
        yield gpu
