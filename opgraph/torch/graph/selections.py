"""Comparisons of a value with elements that were selected from it, in graphs of ATen ops: the value is computed once.

`opgraph.transforms.selections` explains why, and has the search.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, Node

from opgraph.runtime.providers.torch_internals import OpOverload
from opgraph.torch.graph.aten import packet, value_of
from opgraph.torch.graph.views import is_view, keeps_elements
from opgraph.transforms.selections import COMPARISON, VIEW, Origins, Role

aten, prims = torch.ops.aten, torch.ops.prims

#: In the meta of a value that no second kernel may compute, for any reader in its part of a joint graph.
COMPUTED_ONCE = "opgraph_computed_once"

_SELECTIONS = (
    aten.adaptive_max_pool2d, aten.adaptive_max_pool3d, aten.amax, aten.amin, aten.aminmax, aten.cummax, aten.cummin,
    aten.fractional_max_pool2d, aten.fractional_max_pool3d, aten.gather, aten.index, aten._unsafe_index,
    aten.index_select, aten.kthvalue, aten.linalg_vector_norm, aten.masked_select, aten.max,
    aten.max_pool2d_with_indices, aten.max_pool3d_with_indices, aten.median, aten.min, aten.mode, aten.nanmedian,
    aten.sort, aten.take, aten.topk,
)  # fmt: skip
_MOVES = (
    aten.cat, aten.constant_pad_nd, aten.flip, aten.index_put, aten.masked_scatter, aten.repeat, aten.roll,
    aten.scatter, aten.scatter_reduce, aten.select_scatter, aten.slice_scatter, aten.stack,
)  # fmt: skip
_EDGED = (
    aten.acos, aten.acosh, aten.asin, aten.atanh, aten.ceil, aten.erfinv, aten.floor, aten.frac, aten.log, aten.log10,
    aten.log1p, aten.log2, aten.logical_not, aten.pow, aten.reciprocal, aten.rsqrt, aten.sgn, aten.sign,
    aten.signbit, aten.sqrt, aten.trunc,
)  # fmt: skip
_ROLES: dict[Any, int] = {
    **dict.fromkeys((aten.eq, aten.ne, aten.lt, aten.le, aten.gt, aten.ge), COMPARISON),
    **dict.fromkeys(_SELECTIONS, Role.SELECTS),
    **dict.fromkeys(_MOVES, Role.MOVES),
    **dict.fromkeys(_EDGED, Role.POINTWISE | Role.EDGED),
    **dict.fromkeys((aten.fmod, aten.remainder), Role.POINTWISE | Role.EDGED | Role.MEETS),
    **dict.fromkeys((aten.abs, aten.neg, aten.clone, aten._to_copy, prims.convert_element_type), VIEW),
    **dict.fromkeys((aten.maximum, aten.minimum, aten.fmax, aten.fmin), Role.POINTWISE | Role.MOVES | Role.MEETS),
    **dict.fromkeys(
        (aten.clamp, aten.clamp_min, aten.clamp_max, aten.relu, aten.where),
        Role.POINTWISE | Role.MOVES | Role.KEEPS_SIDES,
    ),
    **dict.fromkeys((aten.sub, aten.rsub), Role.POINTWISE | Role.MEETS),
    aten.div: Role.POINTWISE | Role.MEETS | Role.KEEPS_SIDES,
    aten.mul: Role.POINTWISE | Role.KEEPS_SIDES,
}


def comparisons_with_selections(graph: Graph) -> dict[Node, list[Node]]:
    """The values that a graph of ATen ops, in which equal calls are merged, compares with elements that were selected
    from them -> the nodes that read the value for this."""
    roles = [(n, _role(n)) for n in graph.nodes if n.op == "call_function"]
    if not any(role & (Role.SELECTS | Role.MOVES) for _, role in roles):
        return {}
    found: dict[Node, dict[Node, None]] = {}
    origins: Origins[Node] = Origins()
    for node, role in roles:
        sources = node.all_input_nodes
        for value in origins.add(node, role, sources[:1] if role & Role.SELECTS else sources):
            made = value_of(value)
            if isinstance(made, torch.Tensor) and not made.is_floating_point():
                continue  # integers, such as positions, are exact
            readers = (n for n in origins.between(value, node) if value in n.all_input_nodes)
            found.setdefault(value, {}).update(dict.fromkeys(readers))
    return {value: list(readers) for value, readers in found.items()}


def compared_values(graph: Graph) -> set[Node]:
    """The values of a graph that are compared with their own elements: no second kernel may compute them."""
    marked = {n for n in graph.nodes if COMPUTED_ONCE in n.meta}
    return marked | comparisons_with_selections(graph).keys()


def _role(node: Node) -> int:
    if node.target is operator.getitem:
        return VIEW
    if is_view(node):
        return VIEW if keeps_elements(node) else VIEW | Role.MOVES
    is_pointwise = isinstance(node.target, OpOverload) and torch.Tag.pointwise in node.target.tags
    role = _ROLES.get(packet(node), Role.POINTWISE if is_pointwise else Role.OPAQUE)
    if role == VIEW:
        made = value_of(node)
        if isinstance(made, torch.Tensor) and not made.is_floating_point():
            return Role.POINTWISE | Role.EDGED
    if node.target is aten.div.Tensor_mode and node.kwargs.get("rounding_mode"):
        return role | Role.EDGED
    if packet(node) in (aten.add, aten.sub, aten.rsub) and any(
        a in (0, 1, -1) for a in node.args if isinstance(a, (int, float))
    ):
        return role | Role.KEEPS_SIDES
    return role
