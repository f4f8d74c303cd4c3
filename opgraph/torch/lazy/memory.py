"""Whose memory a call touches, and whose a node that has not run will read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from opgraph.torch.lazy.node import Node


def tensors_in(values: Any) -> Iterator[torch.Tensor]:
    """The tensors with memory of their own or of others among arguments, in lists, tuples and dicts too."""
    waiting = [values]
    while waiting:
        value = waiting.pop()
        if isinstance(value, torch.Tensor):
            if value.layout is torch.strided:
                yield value
        elif isinstance(value, (list, tuple)):
            waiting += value
        elif isinstance(value, dict):
            waiting += value.values()


def storages_read(node: Node) -> Iterator[int]:
    """The storages that a node that has not run reads."""
    waiting: list[Node | torch.Tensor] = [node]
    while waiting:
        item = waiting.pop()
        if type(item) is Node and item.value is None:
            waiting += item.operands
        else:
            tensor = item.value if type(item) is Node else item
            yield tensor.untyped_storage()._cdata  # type: ignore[union-attr]
