"""The memory layout that torch would give the results of a traced function: repeats its calls on small tensors.

torch orders the axes of a result by all operands of a call at once. A call often becomes several ops of a graph, which
one after the other would give another order: the condition of a Select comes first, but torch's call has none. The
calls are made on the CPU, because the meta device splits many of them into smaller ones, too (torch._refs).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from opgraph.runtime.providers.torch_internals import tree_iter, tree_map_only
from opgraph.torch.tracing.proxy import Proxy, Ref
from opgraph.torch.tracing.session import Session, TorchCall


class Layout:
    """The calls of one path through a function that its results depend on.

    Args:
        calls: all calls, in order.
        inputs, outputs: the values that are given and requested.
    """

    __slots__ = ("_calls", "_inputs", "_outputs")

    def __init__(self, calls: Sequence[TorchCall], inputs: Sequence[Ref], outputs: Sequence[Ref]) -> None:
        self._inputs, self._outputs = tuple(inputs), tuple(outputs)
        wanted, kept = set(outputs), []
        for call in reversed(calls):
            if call.result in wanted:
                kept.append(call)
                wanted.update(v for v in tree_iter((call.args, call.kwargs)) if isinstance(v, Ref))
        self._calls = tuple(reversed(kept))

    def orders(self, tensors: Sequence[torch.Tensor]) -> list[Sequence[int]] | None:
        """The axes of each result, the outermost in memory first.

        Args:
            tensors: one for each input; their data are not read.

        Returns: None if a call cannot be repeated like this.
        """
        values: dict[Any, torch.Tensor] = dict(zip(self._inputs, map(_small, tensors), strict=True))
        try:
            with torch.no_grad():
                for call in self._calls:
                    args, kwargs = tree_map_only(Ref, values.__getitem__, (call.args, call.kwargs))
                    made = call.func(*args, **kwargs)
                    # A tensor that torch expands without a copy has its own memory here. Ones avoid integer division
                    # by 0.
                    values[call.result] = torch.ones_like(made)
        except Exception:  # a call for another device, or of a function outside torch
            return None
        return [_order(values[ref]) for ref in self._outputs]


def _small(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of ones with axes in the same order, of size 2 instead of every size but 1."""
    sizes = [1 if size == 1 else 2 for size in tensor.shape]
    strides, step = [0] * len(sizes), 1
    for axis in sorted(range(len(sizes)), key=lambda i: (tensor.stride(i), sizes[i])):
        if tensor.stride(axis):
            strides[axis] = step
            step *= sizes[axis]
    return torch.ones(step, dtype=tensor.dtype, device="cpu").as_strided(sizes, strides)


def _order(tensor: torch.Tensor) -> tuple[int, ...]:
    strides: Sequence[int] = tensor.stride()
    return tuple(sorted(range(tensor.dim()), key=lambda axis: -strides[axis]))


def torch_call(
    session: Session, result: Ref, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> TorchCall:
    """A call in the form that the tree stores."""

    def named(tensor: torch.Tensor) -> Ref:
        return tensor.ref if isinstance(tensor, Proxy) else session.capture(tensor)

    return TorchCall(result, func, *tree_map_only(torch.Tensor, named, (args, kwargs)))
