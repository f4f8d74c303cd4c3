"""Calls that torch's kernels refuse for the dtypes of operands, or for numbers that the dtype cannot represent: a
captured graph leaves them to torch, which raises.

Compilers trace with fake tensors, for which torch has other kernels: these accept `1.0 - mask` of truth values like any
other difference, and `masked_fill(-1e9)` of f16 values, too.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch

from opgraph.runtime.providers.torch_internals import OpOverload, without_modes
from opgraph.torch.graph.torch_internals import hint, tree_flatten, tree_unflatten


def is_refused(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """True if torch raises an error for operands of these dtypes, or for a number: a truth value, a large one, 0.

    The test runs the op in torch on one element of each operand. There is no test if all operands have floating-point
    dtypes that can represent the numbers, and no number is 0.

    Args:
        op: an overload whose result follows from the elements of its operands, and not from their shapes.
        args, kwargs: those of the call, with real or fake tensors.
    """
    leaves, structure = tree_flatten((tuple(args), dict(kwargs)))
    dtypes = [a.dtype for a in leaves if isinstance(a, torch.Tensor)]
    numbers = [a for a in leaves if isinstance(a, (int, float))]
    are_floats = all(dtype.is_floating_point for dtype in dtypes)
    if are_floats and all(n and not isinstance(n, bool) and all(has_number(d, n) for d in dtypes) for n in numbers):
        return False
    return _raises(op, tuple(map(_described, leaves)), structure)


def has_number(dtype: torch.dtype, number: float) -> bool:
    """True if torch converts a number to a floating-point dtype: a finite one to a finite value."""
    return not math.isfinite(number) or abs(number) <= torch.finfo(dtype).max


def unless_refused(op: OpOverload, decomposed: Callable[..., Any]) -> Callable[..., Any]:
    """A decomposition that leaves to torch the calls that torch refuses."""

    def chosen(*args: Any, **kwargs: Any) -> Any:
        return NotImplemented if is_refused(op, args, kwargs) else decomposed(*args, **kwargs)

    return chosen


def _described(leaf: Any) -> Any:
    """The properties of an argument on which an error may depend; equal for equal arguments."""
    if isinstance(leaf, torch.Tensor):
        return torch.Tensor, leaf.dtype, leaf.dim(), leaf.device
    if isinstance(leaf, torch.SymInt):
        return int, hint(leaf)
    if isinstance(leaf, torch.SymFloat):
        return float, 1.0
    return type(leaf), leaf


@lru_cache(maxsize=4096)
def _raises(op: OpOverload, described: tuple[Any, ...], structure: Any) -> bool:
    with without_modes(), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        args, kwargs = tree_unflatten([_example(*leaf) for leaf in described], structure)
        try:
            op(*args, **kwargs)
        except RuntimeError:  # NotImplementedError is one
            return True
    return False


def _example(kind: type, value: Any, dim: int = 0, device: torch.device | None = None) -> Any:
    """An argument with one element; an integer is 0, which is a valid index everywhere."""
    if kind is not torch.Tensor:
        return value
    return torch.full((1,) * dim, value.is_floating_point, dtype=value, device=device)
