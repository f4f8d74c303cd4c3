"""What shows in the tensors of a call: the shape of its result, and whether it can wait."""

from __future__ import annotations

from typing import Any

import torch

from opgraph.torch.lazy.node import Node

NO_DIMENSION = "it has no dimension"


def meeting(operands: list[Node | torch.Tensor]) -> tuple[torch.Size | None, Any, str]:
    """The shape and device of a result; or None, None and why there is none."""
    shape: Any = None
    device = None
    pending = floating = False
    for operand in operands:
        if type(operand) is Node:
            pending, dtype = True, operand.spec.dtype
        else:
            dtype = operand.dtype  # type: ignore[union-attr]
        floating = floating or dtype.is_floating_point
        size = operand.shape
        if device is None or (size and not shape):
            device = operand.device
        if shape is None or shape == size:
            shape = size
        else:
            shape = _broadcast(shape, size)
            if shape is None:
                return None, None, "its shapes do not broadcast"
    if not shape:
        return None, None, NO_DIMENSION
    if any(o.device != device for o in operands):
        return None, None, "its tensors are on several devices"
    if not (floating or pending):
        return None, None, "it is arithmetic of integers"
    return shape, device, ""


def _broadcast(a: torch.Size, b: torch.Size) -> torch.Size | None:
    if len(a) < len(b):
        a, b = b, a
    result = list(a)
    for i in range(1, len(b) + 1):
        if result[-i] != b[-i]:
            if result[-i] == 1:
                result[-i] = b[-i]
            elif b[-i] != 1:
                return None
    return torch.Size(result)


def is_own(tensor: Any) -> bool:
    """Whether a tensor was computed in this forward pass and nobody else sees its memory: no view, no saved result.

    Only with gradients: what has a gradient node is no buffer, and no result of an earlier call.
    """
    if type(tensor) is not torch.Tensor or tensor.grad_fn is None or tensor._is_view() or not torch.is_grad_enabled():
        return False
    if tensor.retains_grad or tensor._backward_hooks is not None or tensor.layout is not torch.strided:
        return False
    storage = tensor.untyped_storage()
    # One reference by the tensor, one by `storage`.
    return bool(torch._C._storage_Use_Count(storage._cdata) == 2)
