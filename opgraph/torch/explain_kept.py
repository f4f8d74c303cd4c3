"""What a fused op keeps for backward, in bytes, and what the same calls keep in torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from opgraph.ir import dtypes
from opgraph.ir.logical_tensor import port_name
from opgraph.torch.lazy.node import Node
from opgraph.torch.lazy.run import Kernel, one_by_one


def kept_by_op(kernel: Kernel, tensors: Sequence[torch.Tensor], outputs: Sequence[Node]) -> int:
    """Bytes that a fused op keeps on these tensors; parameters, which exist anyway, are not counted."""
    assert kernel.op is not None
    given = [tensors[i] for i in kernel.order]
    inputs = dict(zip(map(port_name, kernel.op.graph.inputs), given))
    largest = max(n.shape.numel() for n in outputs)
    total = 0
    for entry in kernel.op.saved(tuple(t.requires_grad for t in given)):
        if entry.role == "input":
            tensor = inputs[entry.name]
            total += 0 if isinstance(tensor, torch.nn.Parameter) else tensor.nbytes
        elif entry.role != "shape":
            total += largest * dtypes.get(entry.dtype).itemsize
    return total


def kept_by_torch(nodes: Sequence[Node], outputs: Sequence[Node]) -> int:
    """Bytes that the same calls keep when torch runs them one by one; runs them once."""
    copies: dict[int, torch.Tensor] = {}
    parameters = set()

    def leaf(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in copies:
            copies[id(tensor)] = tensor.detach().requires_grad_(tensor.requires_grad)
            if isinstance(tensor, torch.nn.Parameter):
                parameters.add(tensor.untyped_storage()._cdata)
        return copies[id(tensor)]

    kept: dict[int, Any] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        values = one_by_one(nodes, leaf)
    del values
    return sum(storage.nbytes() for key, storage in kept.items() if key not in parameters)
