"""The hooks that tensors saved for backward go through: what was noted down under some is saved by them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


def saved_tensor_hooks() -> Any:
    """The hooks that tensors saved for backward go through now; None without."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


@contextlib.contextmanager
def _pushed(hooks: Any) -> Iterator[None]:
    pack, unpack = hooks or (_same, _same)
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def hooked(hooks: Any) -> contextlib.AbstractContextManager[None]:
    """What was noted down under some hooks is saved by them."""
    return contextlib.nullcontext() if saved_tensor_hooks() == hooks else _pushed(hooks)
