"""Questions about a tensor that need none of its data, and their answers for a value of a trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from opgraph.torch.tracing.proxy import Proxy

_ANSWERS: dict[str, Callable[..., Any]] = {
    "is_floating_point": lambda x: x.dtype.is_floating_point,
    "is_complex": lambda x: False,
    "is_tensor": lambda x: True,
    "numel": lambda x: x.shape.numel(),
    "nelement": lambda x: x.shape.numel(),
    "ndimension": lambda x: x.dim(),
    "dim": lambda x: x.dim(),
    "size": lambda x, *dim, **named: x.size(*dim, **named),
    "element_size": lambda x: x.dtype.itemsize,
    "itemsize": lambda x: x.dtype.itemsize,
    "nbytes": lambda x: x.shape.numel() * x.dtype.itemsize,
    "is_signed": lambda x: x.dtype.is_signed,
    "is_cuda": lambda x: x.device.type == "cuda",
    "is_cpu": lambda x: x.device.type == "cpu",
    "is_mps": lambda x: x.device.type == "mps",
    "is_xpu": lambda x: x.device.type == "xpu",
    "is_meta": lambda x: x.device.type == "meta",
    "is_sparse": lambda x: False,
    "is_sparse_csr": lambda x: False,
    "is_quantized": lambda x: False,
    "is_nested": lambda x: False,
    "is_mkldnn": lambda x: False,
    "get_device": lambda x: x.device.index if x.device.index is not None else -1,
    "layout": lambda x: torch.strided,
    "is_same_size": lambda x, other: x.shape == other.shape,
    "result_type": lambda *both: torch.result_type(*(_empty(a) for a in both)),
    "_is_param": lambda x: False,
}
#: What may be asked of a real tensor without its value; a value of a trace answers the first few itself.
QUESTIONS = frozenset(("shape", "dtype", "device", "ndim", "requires_grad", "__len__", *_ANSWERS))
#: Questions about how a tensor lies in memory.
LAYOUT = ("is_contiguous", "stride", "storage_offset")


def answer(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[bool, Any]:
    """(True, the answer) where a call only asks for what is known of a tensor without its data."""
    x = args[0] if args else None
    if not isinstance(x, Proxy):
        return False, None
    if name in LAYOUT:
        return _layout(name, x, args[1:], kwargs)
    known = _ANSWERS.get(name)
    return (False, None) if known is None else (True, known(*args, **kwargs))


def _layout(name: str, x: Proxy, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[bool, Any]:
    """How a tensor lies in memory: of a computed value, only that it is contiguous where all that it comes from is.

    Noted as calls that tell Python a value: no plan compares such things.
    """
    asked = getattr(torch.Tensor, name)
    if x.actual is not None:
        return True, x.session.eager(asked, (x.actual, *args), kwargs)
    found = name == "is_contiguous" and all(x.session.eager(asked, (t, *args), kwargs) for t in x.sources())
    return found, found


def _empty(value: Any) -> Any:
    return torch.empty(value.shape, dtype=value.dtype, device="meta") if isinstance(value, torch.Tensor) else value
