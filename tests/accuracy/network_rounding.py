"""Measures the differences that rounding causes between a random network's results (`random_networks.py`): in eager
torch with every op's result changed by a few units in the last place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

#: The maximum number of units in the last place by which a result is changed.
_MOST = 2


class Moved(TorchDispatchMode):
    """A mode that randomly changes each op's floating-point results by a few units in the last place.

    Args:
        seed: the seed of the changes, which do not use torch's own generator.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._source = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {_memory(t) for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        made = func(*args, **(kwargs or {}))
        for t in tree_leaves(made):
            is_number = isinstance(t, torch.Tensor) and (t.is_floating_point() or t.is_complex()) and t.numel()
            if is_number and (func._schema.is_mutable or _memory(t) not in given):
                moves = torch.randint(-_MOST, _MOST + 1, t.shape, generator=self._source)
                t.mul_(moves.to(t.dtype).mul_(torch.finfo(t.dtype).eps).add_(1))
        return made


def _memory(t: torch.Tensor) -> int:
    return t.untyped_storage().data_ptr()


def spread(runs: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """For each entry, the largest distance of any run from the first one; infinite where entries are not comparable."""
    first, *others = runs
    return {name: max((_distance(run.get(name), value) for run in others), default=0) for name, value in first.items()}


def _distance(a: Any, b: Any) -> float:
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return 0.0 if type(a) is type(b) and a == b else float("inf")
    if a.shape != b.shape or a.dtype != b.dtype:
        return float("inf")
    kind = torch.complex128 if a.is_complex() else torch.float64
    difference = (a.to(kind) - b.to(kind)).abs()
    difference[(a == b) | (a.isnan() & b.isnan())] = 0
    return difference.nan_to_num(nan=float("inf")).max().item() if a.numel() else 0.0
