"""Under ONNX export, arithmetic of parameters alone is done at once and becomes numbers.

ONNX has no Lgamma and a trace no branch on a value; what a function computes from its parameters of no dimension alone
is the same at every call of an exported model. A parameter that meets data itself stays a parameter.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_unflatten


def is_in_onnx_export() -> bool:
    """`torch.onnx.is_in_onnx_export()`, without loading that module (50 ms) where nobody exports."""
    exporter = sys.modules.get("torch.onnx")
    return exporter is not None and exporter.is_in_onnx_export()


def called_for_onnx(call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What `call` returns; under ONNX export with what it computes from parameters alone as numbers."""
    if torch.compiler.is_dynamo_compiling() or not is_in_onnx_export():
        return call(*args, **kwargs)
    with _Folding():
        return call(*args, **kwargs)


#: What makes a tensor of a number, among other things.
_MAKERS = (torch.tensor, torch.scalar_tensor)


class _Folding(TorchFunctionMode):
    """Calls on numbers alone (tensors of no dimension whose values are known) run at once, on real tensors."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        leaves, structure = tree_flatten((args, kwargs or {}))
        known = [_value(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        tensors = [value for leaf, value in zip(leaves, known) if isinstance(leaf, torch.Tensor)]
        makes_number = func in _MAKERS and not tensors
        if makes_number or (tensors and all(value is not None for value in tensors)):
            args, kwargs = tree_unflatten(known, structure)
            # Told of no_grad, torch.export notes a region for each call, and takes a second to undo it.
            with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
                result = func(*args, **kwargs)
            if not makes_number or not result.dim():
                return result
        # What was computed here is no tensor of the trace; it goes there as a number.
        met = [leaf.item() if type(leaf) is torch.Tensor and not leaf.dim() else leaf for leaf in leaves]
        args, kwargs = tree_unflatten(met, structure)
        return func(*args, **kwargs)


def _value(tensor: torch.Tensor) -> torch.Tensor | None:
    """The real tensor of no dimension behind a tensor of a trace; None where it is data."""
    if tensor.dim():
        return None
    if not isinstance(tensor, FakeTensor):
        return tensor if type(tensor) in (torch.Tensor, torch.nn.Parameter) else None
    if tensor.constant is not None:
        return tensor.constant
    converter = tensor.fake_mode.fake_tensor_converter.meta_converter
    for real, number in converter.describer.lookup_tensor.items():  # type: ignore[no-untyped-call]
        if isinstance(real, torch.nn.Parameter) and converter.tensor_memo.get(number) is tensor:
            return real
    return None
