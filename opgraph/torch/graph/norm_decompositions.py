"""Decompositions of the norms of captured graphs: those of torch, with other statistics, `eps` and layouts.

For norms of f16 and bf16, mean and inverse deviation reach the backward pass in f32, in which they are computed. On the
CPU torch's decompositions round them to the dtype of the input. Eager torch does so if parameters have that dtype, too;
with f32 parameters, as under autocast, it keeps f32. Rounded statistics are inaccurate: around 100, a bf16 mean is off
by up to 0.25.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Iterator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from opgraph.torch.graph.torch_internals import suggest_memory_format

aten = torch.ops.aten
#: Dtypes whose norms are computed in f32.
NARROW = (torch.float16, torch.bfloat16)
#: Ops whose second and third results are the statistics.
_MAKERS = (
    "_batch_norm_with_update", "_batch_norm_with_update_functional", "_native_batch_norm_legit",
    "_native_batch_norm_legit_functional", "native_batch_norm", "native_group_norm", "native_layer_norm",
)  # fmt: skip
_BATCH_NORMS = (*(name for name in _MAKERS if "batch_norm" in name), "_native_batch_norm_legit_no_training")


def norm_decompositions(
    by_torch: dict[Any, Callable[..., Any]], *, shows_statistics: bool
) -> dict[Any, Callable[..., Any]]:
    """Decompositions of the ops that compute statistics, and of batch norms, by ATen overload.

    Args:
        by_torch: torch's decompositions.
        shows_statistics: True if the graph may return statistics: they then have the dtype of eager torch's.
    """
    made = dict(by_torch)
    made.update((o, _without_eps(made[o])) for o in _overloads(_BATCH_NORMS, by_torch))
    made.update((o, _with_wide_statistics(made[o], shows_statistics)) for o in _overloads(_MAKERS, by_torch))
    made.update((o, _laid_out(made[o])) for o in _overloads(_BATCH_NORMS, by_torch))
    made.update((o, _with_fitting_weights(made[o])) for o in _overloads({*_MAKERS, *_BATCH_NORMS}, by_torch))
    return {o: decomposition for o, decomposition in made.items() if decomposition is not by_torch[o]}


def _with_fitting_weights(decomposed: Callable[..., Any]) -> Callable[..., Any]:
    """Leaves to torch the calls that it refuses: weights of another dtype than the values, except f32 for 16 bits."""

    def chosen(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        dtypes = {a.dtype for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)}
        known = {x.dtype, torch.float32} if x.dtype in NARROW else {x.dtype}
        return decomposed(x, *args, **kwargs) if dtypes <= known else NotImplemented

    return chosen


def _overloads(names: Iterable[str], known: Container[Any]) -> list[Any]:
    packets = [getattr(aten, name) for name in names]
    return [found for packet in packets for o in packet.overloads() if (found := getattr(packet, o)) in known]


def _without_eps(decomposition: Callable[..., Any]) -> Callable[..., Any]:
    """A batch norm whose `eps` may be 0. For a channel of one number, the inverse deviation is 0 in torch's kernels, so
    that the channel becomes the bias. In torch's decompositions it is infinite."""

    def decomposed(x: torch.Tensor, weight: Any, bias: Any, *args: Any) -> tuple[torch.Tensor, ...]:
        y, mean, inverse, *rest = decomposition(x, weight, bias, *args)
        if args[-1] == 0 and inverse.numel():
            inverse = torch.where(inverse == math.inf, 0.0, inverse)
            of_channels = [1, -1] + [1] * (x.dim() - 2)
            y = (x - mean.view(of_channels)) * inverse.view(of_channels)
            y = y if weight is None else y * weight.view(of_channels)
            y = y if bias is None else y + bias.view(of_channels)
        return (y, mean, inverse, *rest)

    return decomposed


def _laid_out(decomposition: Callable[..., Any]) -> Callable[..., Any]:
    """A batch norm whose first result has the layout of torch's kernels on the CPU: contiguous, or channels last if the
    input is. In torch's decompositions it has the layout of the input."""

    def decomposed(x: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        y, *rest = decomposition(x, *args, **kwargs)
        return (y.contiguous(memory_format=suggest_memory_format(x)) if x.device.type == "cpu" else y, *rest)

    return decomposed


def _with_wide_statistics(by_torch: Callable[..., Any], shows_statistics: bool) -> Callable[..., Any]:
    def decomposed(x: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        if x.dtype not in NARROW:
            made: tuple[torch.Tensor, ...] = by_torch(x, *args, **kwargs)
            return made
        y, mean, inverse, *rest = by_torch(x.float(), *args, **kwargs)
        if shows_statistics and x.device.type == "cpu":
            others = [a.dtype for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)]
            kept = others[0] if others else x.dtype
            mean, inverse = mean.to(kept), inverse.to(kept)
        return (y.to(x.dtype), mean, inverse, *rest)

    return decomposed


def shows_statistics(graph: GraphModule) -> bool:
    """True if a graph of torch functions calls an op that returns statistics, so that they may be results."""
    return any(_name(node) in _MAKERS for node in _nodes(graph))


def _name(node: Node) -> str:
    return getattr(node.target, "__name__", "").partition(".")[0]


def _nodes(graph: GraphModule) -> Iterator[Node]:
    for module in graph.modules():
        if isinstance(module, GraphModule):
            yield from module.graph.nodes
