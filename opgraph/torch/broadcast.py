"""The shape in which tensors meet. `torch.broadcast_shapes` says the same, but its first call loads sympy (0.5 s)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

_of_symbols: Callable[..., torch.Size] = torch.broadcast_shapes
_of_two: Callable[[torch.Size, torch.Size], torch.Size] = torch._C._infer_size


def broadcast_shapes(shapes: Iterable[Iterable[Any]]) -> torch.Size:
    """The shape that shapes broadcast to.

    Args:
        shapes: of sizes, or of torch's symbols for them while it traces; of none the result is ().

    Raises:
        RuntimeError: they do not broadcast; torch's own words.
    """
    result = torch.Size(())
    given = [tuple(shape) for shape in shapes]
    if not all(type(extent) is int for shape in given for extent in shape):
        return _of_symbols(*given)
    for shape in given:
        result = _of_two(result, torch.Size(shape))
    return result
