"""What a captured network keeps for backward: the least number of bytes, without running a library op twice.

The cut is torch's (`min_cut_rematerialization_partition`). Which nodes may be computed again is decided here: pointwise
ops, views, casts, fills and copies; never a library op, and never anything random. With a budget torch's own rules
decide, which may run library ops again.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import torch
from torch.fx import Node
from torch.utils.checkpoint import CheckpointPolicy

from opgraph.errors import InvalidArguments
from opgraph.torch.graph.aten import VIEWS, packet

aten, prims = torch.ops.aten, torch.ops.prims

Memory: TypeAlias = Literal["least", "fast"] | float

#: Computed again at the cost of the bytes that they read and write.
_CHEAP = frozenset(
    (
        aten.arange, aten.cat, aten.clone, aten.constant_pad_nd, aten.copy, aten.empty, aten.expand, aten.eye, aten.flip,
        aten.full, aten.full_like, aten.lift_fresh_copy, aten.masked_fill, aten.new_empty, aten.new_zeros, aten.ones,
        aten.ones_like, aten.repeat, aten.roll, aten.scalar_tensor, aten.slice_scatter, aten.stack, aten.tril, aten.triu,
        aten.where, aten.zeros, aten.zeros_like, aten._to_copy, prims.convert_element_type, prims.iota,
    )
)  # fmt: skip


def may_be_recomputed(node: Node) -> bool:
    """Whether a node may run again in backward."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return True  # arithmetic on sizes, an element of a tuple: what it is an element of decides
    if torch.Tag.nondeterministic_seeded in node.target.tags:
        return False
    return torch.Tag.pointwise in node.target.tags or packet(node) in VIEWS or packet(node) in _CHEAP


def check_memory(memory: object) -> None:
    """Raises InvalidArguments where this is no choice of what to keep."""
    is_budget = isinstance(memory, (int, float)) and not isinstance(memory, bool) and 0 <= memory <= 1
    if memory not in ("least", "fast") and not is_budget:
        raise InvalidArguments(
            f"memory={memory!r} is no choice", where="fuse", fix='use "least", "fast", or a budget from 0.0 to 1.0'
        )


def partitioner(memory: Memory) -> Callable[..., Any]:
    """What splits a joint graph into forward and backward, as AOTAutograd calls it.

    Args:
        memory: "least", "fast", or torch's activation memory budget.

    Raises:
        InvalidArguments: none of these.
    """
    check_memory(memory)

    def split(joint: torch.fx.GraphModule, inputs: Any, **arguments: Any) -> Any:
        from torch._functorch import config
        from torch._functorch.partitioners import min_cut_rematerialization_partition as cut

        if memory == "fast":
            return cut(joint, inputs, **arguments)
        if memory != "least":
            with config.patch(activation_memory_budget=float(memory)):
                return cut(joint, inputs, **arguments)
        for node in joint.graph.nodes:
            if node.target is not operator.getitem and "recompute" not in node.meta and not may_be_recomputed(node):
                node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        with config.patch(aggressive_recomputation=True, recompute_views=True, activation_memory_budget=1.0):
            return cut(joint, inputs, **arguments)

    return split
