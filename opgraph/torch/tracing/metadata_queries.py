"""Questions about a tensor that need none of its data, and their answers for a value of a trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from opgraph.runtime.providers.torch_internals import tree_map_only
from opgraph.torch.tracing.proxy import Proxy

_ANSWERED = (
    "is_floating_point", "is_complex", "is_tensor", "numel", "nelement", "ndimension", "dim", "size", "element_size",
    "itemsize", "nbytes", "is_signed", "is_cuda", "is_cpu", "is_mps", "is_xpu", "is_meta", "is_sparse", "is_sparse_csr",
    "is_quantized", "is_nested", "is_mkldnn", "get_device", "layout", "is_same_size", "result_type", "_is_param",
)  # fmt: skip
#: What may be asked of a real tensor without its value; a value of a trace answers the first few itself.
QUESTIONS = frozenset(("shape", "dtype", "device", "ndim", "requires_grad", "__len__", *_ANSWERED))
#: Questions about how a tensor lies in memory.
LAYOUT = ("is_contiguous", "stride", "storage_offset")


def answer(func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[bool, Any]:
    """(True, the answer) where a call only asks for what is known of a tensor without its data."""
    x = args[0] if args else None
    if not isinstance(x, Proxy):
        return False, None
    if name in LAYOUT:
        return _layout(name, x, args[1:], kwargs)
    if name not in _ANSWERED:
        return False, None
    args, kwargs = tree_map_only(Proxy, _alike, (args, kwargs))
    return True, func(*args, **kwargs)


def _layout(name: str, x: Proxy, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[bool, Any]:
    """How a tensor lies in memory: of a computed value, only that it is contiguous where all that it comes from is.

    Noted as calls that tell Python a value: no plan compares such things.
    """
    asked = getattr(torch.Tensor, name)
    if x.actual is not None:
        return True, x.session.eager(asked, (x.actual, *args), kwargs)
    found = name == "is_contiguous" and all(x.session.eager(asked, (t, *args), kwargs) for t in x.sources())
    return found, found


def _alike(x: Proxy) -> torch.Tensor:
    """A tensor of one element that has the shape, dtype and device of a value."""
    return torch.empty((), dtype=x.dtype, device=x.device).expand(x.shape)
