"""The broadcast shape. `torch.broadcast_shapes` returns the same, but its first call loads sympy (0.5 s)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from opgraph.runtime.providers.torch_internals import broadcast_of_two

_of_symbols: Callable[..., torch.Size] = torch.broadcast_shapes


def broadcast_shapes(shapes: Iterable[Iterable[Any]]) -> torch.Size:
    """The shape to which shapes broadcast.

    Args:
        shapes: of sizes, or of torch's symbols for them while it traces; without any shape the result is ().

    Raises:
        RuntimeError: they do not broadcast; with torch's own message.
    """
    result = torch.Size(())
    given = [tuple(shape) for shape in shapes]
    if not all(type(extent) is int for shape in given for extent in shape):
        return _of_symbols(*given)
    for shape in given:
        result = broadcast_of_two(result, torch.Size(shape))
    return result
