"""Constant folding under ONNX export: arithmetic on parameters alone runs at once and becomes numbers.

ONNX has no Lgamma, and a trace cannot branch on a value. The values that a function computes from its 0-d parameters
alone are the same at every call of an exported model. A parameter that is itself an operand next to data stays a
parameter.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from opgraph.runtime.providers.torch_internals import (
    FakeTensor,
    tree_flatten,
    tree_unflatten,
    without_modes,
    without_torch_function,
)


def is_in_onnx_export() -> bool:
    """`torch.onnx.is_in_onnx_export()`, without loading that module (50 ms) when no export runs."""
    exporter = sys.modules.get("torch.onnx")
    return exporter is not None and exporter.is_in_onnx_export()


def called_for_onnx(call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of `call`; under ONNX export, values that it computes from parameters alone become numbers."""
    if torch.compiler.is_dynamo_compiling() or not is_in_onnx_export():
        return call(*args, **kwargs)
    with _Folding():
        return call(*args, **kwargs)


#: Functions that make a tensor from a number, among other things.
_MAKERS = (torch.tensor, torch.scalar_tensor)


class _Folding(TorchFunctionMode):
    """Runs calls on numbers alone (0-d parameters, and values computed from them) at once, on real tensors."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, torch.Tensor] = {}  # by id; a tensor that is kept has an id of its own

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        leaves, structure = tree_flatten((args, kwargs or {}))
        known = [self._value(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        tensors = [value for leaf, value in zip(leaves, known) if isinstance(leaf, torch.Tensor)]
        makes_number = func in _MAKERS and not tensors
        if makes_number or (tensors and all(value is not None for value in tensors)):
            args, kwargs = tree_unflatten(known, structure)
            # If torch.export sees no_grad, it records a region for each call, and takes a second to undo it.
            with without_modes(), without_torch_function(), torch.no_grad():
                result = func(*args, **kwargs)
            if not makes_number or not result.dim():
                if type(result) is torch.Tensor and not result.dim():
                    self._made[id(result)] = result
                return result
        # A value that was computed here is no tensor of the trace; it enters the trace as a number. The object of a
        # method has to be a tensor.
        met = [leaf.item() if id(leaf) in self._made else leaf for leaf in leaves]
        first = self._made.get(id(args[0])) if args else None
        if first is not None and _writes(func):
            met[0] = self._made.pop(id(first))
        elif first is not None:
            met[0] = torch.scalar_tensor(met[0], dtype=first.dtype, device=first.device)
        args, kwargs = tree_unflatten(met, structure)
        return func(*args, **kwargs)

    def _value(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The real 0-d tensor behind a tensor; None if it depends on data."""
        if id(tensor) in self._made:
            return tensor
        return None if tensor.dim() else _parameter(tensor)


def _writes(func: Callable[..., Any]) -> bool:
    """True if it is a method that changes its tensor."""
    name = getattr(func, "__name__", "")
    return name.endswith("_") and not name.endswith("__")


def _parameter(tensor: torch.Tensor) -> torch.Tensor | None:
    """The parameter that a tensor is, or represents in a trace; or the number that a trace has for it."""
    if not isinstance(tensor, FakeTensor):
        return tensor if isinstance(tensor, torch.nn.Parameter) else None
    if tensor.constant is not None:
        return tensor.constant
    converter = tensor.fake_mode.fake_tensor_converter.meta_converter
    for real, number in converter.describer.lookup_tensor.items():  # type: ignore[no-untyped-call]
        if isinstance(real, torch.nn.Parameter) and converter.tensor_memo.get(number) is tensor:
            return real
    return None
