"""The torch provider: torch tensors in and out of the CPU engine, and loops run in torch's ops."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from opgraph.ir import dtypes, opdef
from opgraph.loops.cuts import has_cuts, run_cut, spread
from opgraph.loops.loop import Loop
from opgraph.loops.space import broadcasts, row_shape, space_of, summed_axes, summed_to
from opgraph.ops.conversion import cast
from opgraph.runtime.providers.torch_dtypes import TORCH_DTYPES

_BF16 = dtypes.get("bf16").numpy


def torch_dtype(name: str) -> torch.dtype:
    """Torch's dtype, by our name."""
    return TORCH_DTYPES[name]


def known_dtype(name: str) -> torch.dtype | None:
    """Torch's dtype, by our name; None where nothing is declared, or torch has none."""
    return TORCH_DTYPES.get(name)


class _Memory:
    """What NumPy needs to look at a tensor's memory; keeps the tensor."""

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
    if plain.dtype is torch.bfloat16:
        return to_numpy(plain.view(torch.uint16)).view(_BF16)
    if plain.numel() == 0 or plain.is_neg() or plain.device.type != "cpu" or plain.dtype.is_complex:
        return plain.numpy()
    # `.numpy()` makes the storage one that cannot be resized for ever, which sharded training does with parameters.
    return np.asarray(_Memory(plain))


def from_numpy(array: np.ndarray) -> torch.Tensor:
    """A tensor on the same memory."""
    if array.dtype == _BF16:
        return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _writable(array: np.ndarray) -> np.ndarray:
    """The array, or a copy where torch has no word for its memory: read-only, turned around, unaligned."""
    if any(step < 0 or step % array.itemsize for step in array.strides):
        return np.array(array, order="C")
    return np.require(array, requirements="W")


def interpret(loop: Loop, arrays: Sequence[np.ndarray | None]) -> list[np.ndarray]:
    """The results of a loop, each statement one torch op; as `opgraph.loops.interpret.interpret` does in NumPy."""
    if has_cuts(loop):
        return run_cut(loop, arrays, interpret)
    shapes = [(1,) if a is None else a.shape for a in arrays]
    space = space_of(loop, shapes)
    values: dict[str, Any] = {}
    for load, array in zip(loop.loads, arrays, strict=True):
        if load.is_position:
            values[load.name] = torch.arange(math.prod(space)).reshape(space)
            continue
        tensor = torch.arange(space[load.axis]) if array is None else from_numpy(_writable(array))
        if array is None or not broadcasts(load, array.shape):
            axis = min(1, len(space) - 1) if load.align == "channel" else load.axis % len(space)
            tensor = tensor.reshape([-1 if i == axis else 1 for i in range(len(space))])
        elif load.rows:
            tensor = tensor.reshape(spread(load, tuple(tensor.shape)))
        values[load.name] = tensor.to(_compute(load.dtype))
    types = loop.dtype_of()
    for s in loop.statements:
        record = opdef.get(s.kind, where="a loop")
        assert record.torch is not None
        args = [
            values[a] if isinstance(a, str) else torch.tensor(a, dtype=_compute(s.literal_dtype(types, i)))
            for i, a in enumerate(s.args)
        ]
        if s.reduces:
            wide = args[0].to(torch.float64).expand(space)  # in f64, as the kernel does it
            result = record.torch(torch, wide, axes=loop.row_axes, keep_dims=True)
        elif record.is_cast and dtypes.get(s.dtype).category == "int":
            result = from_numpy(cast(to_numpy(args[0]), s.dtype))  # torch leaves what does not fit undefined
        elif record.is_cast or record.index_of:
            result = args[0]
        elif record.by_position:
            result = record.torch(torch, *args[:-1], position=args[-1], **dict(s.attrs))
        else:
            result = record.torch(torch, *args, **dict(s.attrs))
        if s.rounds:
            result = result.to(TORCH_DTYPES[s.dtype])
        values[s.result] = result.to(_compute(s.dtype))
    results = []
    for store in loop.stores:
        if store.per_row:
            rows = tuple(a + len(space) for a in loop.row_axes)
            kept = [1 if a in rows else d for a, d in enumerate(space)]
            value = values[store.value].expand(kept).reshape(row_shape(store, space, rows))
            results.append(to_numpy(value.to(TORCH_DTYPES[store.dtype]).contiguous()))
            continue
        value = values[store.value].expand(space)
        if store.to is not None:
            shape, like = summed_to(loop, store.to, shapes)
            axes = summed_axes(like, shape, space)
            value = value.to(torch.float64).sum(axes) if axes else value  # in f64, as the kernel does it
            value = value.reshape(shape)
        results.append(to_numpy(value.to(TORCH_DTYPES[store.dtype]).contiguous()))
    return results


def _compute(dtype: str) -> torch.dtype:
    return torch.float32 if dtype in ("f16", "bf16") else TORCH_DTYPES[dtype]
