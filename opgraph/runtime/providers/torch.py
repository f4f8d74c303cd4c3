"""The torch provider: import and export of torch tensors for the CPU engine, and loops run with torch's ops."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from opgraph.ir import dtypes
from opgraph.ir.opdef import OpDef
from opgraph.loops.interpret import Library
from opgraph.ops.conversion import cast
from opgraph.runtime.providers.torch_dtypes import TORCH_DTYPES

#: Floats that NumPy knows as dtypes of ml_dtypes, which torch does not read: tensors are exchanged as their bits.
_BITS = {
    torch.bfloat16: (torch.uint16, dtypes.get("bf16").numpy),
    torch.float8_e4m3fn: (torch.uint8, dtypes.get("f8_e4m3").numpy),
    torch.float8_e5m2: (torch.uint8, dtypes.get("f8_e5m2").numpy),
}
_OF_BITS = {numpy: (np.dtype(f"u{numpy.itemsize}"), torch_dtype) for torch_dtype, (_, numpy) in _BITS.items()}


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype for opgraph's name."""
    return TORCH_DTYPES[name]


def known_dtype(name: str) -> torch.dtype | None:
    """The torch dtype for opgraph's name; None if nothing is declared, or torch has none."""
    return TORCH_DTYPES.get(name)


class _Memory:
    """NumPy's interface to a tensor's memory; keeps the tensor alive."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        size, dtype = tensor.element_size(), tensor.dtype
        kind = "b" if dtype is torch.bool else "f" if dtype.is_floating_point else "i" if dtype.is_signed else "u"
        self.__array_interface__ = {
            "version": 3,
            "data": (tensor.data_ptr(), False),
            "shape": tuple(tensor.shape),
            "strides": tuple(size * s for s in tensor.stride()),
            "typestr": f"{'|' if size == 1 else '<'}{kind}{size}",
        }


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """A NumPy array on the same memory."""
    plain = tensor.detach()
    if plain.dtype in _BITS:
        bits, dtype = _BITS[plain.dtype]
        return to_numpy(plain.view(bits)).view(dtype)
    if plain.numel() == 0 or plain.is_neg() or plain.device.type != "cpu" or plain.dtype.is_complex:
        return plain.numpy()
    # `.numpy()` makes the storage non-resizable for ever, but sharded training resizes storages of parameters.
    return np.asarray(_Memory(plain))


def from_numpy(array: np.ndarray) -> torch.Tensor:
    """A tensor on the same memory."""
    if array.dtype in _OF_BITS:
        bits, dtype = _OF_BITS[array.dtype]
        return torch.from_numpy(array.view(bits)).view(dtype)
    return torch.from_numpy(array)


def _writable(array: np.ndarray) -> np.ndarray:
    """Returns the array, or a copy if torch does not support its memory: read-only, negative strides, unaligned."""
    if any(step < 0 or step % array.itemsize for step in array.strides):
        return np.array(array, order="C")
    return np.require(array, requirements="W")


def _cast(tensor: torch.Tensor, dtype: str) -> torch.Tensor:
    # In torch, values that do not fit are undefined, and f64 is rounded to 16 bits through f32.
    if dtypes.get(dtype).category == "int" or tensor.dtype is torch.float64:
        return from_numpy(np.asarray(cast(to_numpy(tensor), dtype)))  # NumPy returns a scalar if there are no axes
    return tensor.to(TORCH_DTYPES[dtype])


def _meaning(record: OpDef) -> Callable[..., torch.Tensor] | None:
    if record.kind == "Mod":
        return partial(_remainder, record)
    return record.torch and partial(record.torch, torch)


def _remainder(record: OpDef, a: torch.Tensor, b: torch.Tensor, **attrs: Any) -> torch.Tensor:
    """torch's remainder; exact, like C's fmod, where torch's vector code gives NaN because a / b overflows."""
    assert record.torch is not None
    rest: torch.Tensor = record.torch(torch, a, b, **attrs)
    if not rest.is_floating_point():
        return rest
    a, b = a.expand_as(rest), b.expand_as(rest)
    lost = rest.isnan() & a.isfinite() & b.isfinite() & (b != 0)
    if not bool(lost.any()):
        return rest
    a, b = a[lost], b[lost]
    exact = torch.from_numpy(np.fmod(a.double().numpy(), b.double().numpy())).to(rest.dtype)
    if not attrs["fmod"]:
        exact = torch.where((exact != 0) & ((exact < 0) != (b < 0)), exact + b, exact)
    return rest.masked_scatter(lost, exact)


#: A loop's steps as torch's ops.
TORCH = Library(
    taken=lambda array: from_numpy(_writable(array)),
    given=lambda tensor: to_numpy(tensor.contiguous()),
    count=partial(torch.arange, device="cpu"),  # not on the caller's default device
    number=lambda value, dtype: torch.tensor(value, dtype=TORCH_DTYPES[dtype], device="cpu"),
    convert=lambda tensor, dtype: tensor.to(TORCH_DTYPES[dtype]),
    cast=_cast,
    broadcast=torch.Tensor.expand,
    meaning=_meaning,
)
