"""Comparisons of a value with elements that were selected from it, as `v == v.amax(0)`: both are of one computation.

Kernels round as they please within an op's bounds: what a row is divided by may become a factor, and a norm in small
ops is one unit. So a value that is computed a second time, in another kernel, may differ in its last bit. Then no
element of it equals its own maximum, the gradient of `amax`, in equal parts to all that are largest, is 0 / 0, and
`(v.amax(0) - v).sqrt()` is NaN. Such a value is computed once.

Found are the values that reach one operand of a comparison by pointwise ops, and another one by a selection, too. A
difference or quotient of such operands counts as a comparison where a function with a jump or an edge (`sign`, `sqrt`)
reads it.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from opgraph.runtime.providers.torch_internals import OpOverload
from opgraph.torch.graph.aten import packet, value_of
from opgraph.torch.graph.views import is_view, keeps_elements

aten, prims = torch.ops.aten, torch.ops.prims

#: In the meta of a value that no second kernel may compute, whatever reads it in its part of a joint graph.
COMPUTED_ONCE = "opgraph_computed_once"

_COMPARISONS = frozenset((aten.eq, aten.ne, aten.lt, aten.le, aten.gt, aten.ge))
#: Their results are elements of the first argument, or sizes of elements.
_SELECTIONS = frozenset(
    (
        aten.adaptive_max_pool2d, aten.adaptive_max_pool3d, aten.amax, aten.amin, aten.aminmax, aten.cummax,
        aten.cummin, aten.fractional_max_pool2d, aten.fractional_max_pool3d, aten.gather, aten.index,
        aten._unsafe_index, aten.index_select, aten.kthvalue, aten.linalg_vector_norm, aten.masked_select, aten.max,
        aten.max_pool2d_with_indices, aten.max_pool3d_with_indices, aten.median, aten.min, aten.mode, aten.nanmedian,
        aten.sort, aten.take, aten.topk,
    )
)  # fmt: skip
#: Elements of all arguments, at other places or chosen at each place.
_MOVES = frozenset(
    (
        aten.cat, aten.clamp, aten.constant_pad_nd, aten.flip, aten.index_put, aten.masked_scatter, aten.maximum,
        aten.minimum, aten.fmax, aten.fmin, aten.relu, aten.repeat, aten.roll, aten.scatter, aten.scatter_reduce,
        aten.select_scatter, aten.slice_scatter, aten.stack, aten.where,
    )
)  # fmt: skip
#: They have the bits of their argument, or tell them, whichever kernel computes them.
_EXACT = frozenset((aten.abs, aten.neg, aten.clone, aten._to_copy, prims.convert_element_type))
#: Zero, one or an operand itself where the operands are equal.
_MEETINGS = frozenset((aten.sub, aten.rsub, aten.div, aten.maximum, aten.minimum, aten.fmax, aten.fmin))
#: They leave zeros, ones and their neighbours on the side on which they are.
_KEEPS_SIDES = frozenset(
    (*_EXACT, aten.mul, aten.div, aten.clamp, aten.clamp_min, aten.clamp_max, aten.relu, aten.where)
)
#: Functions that jump, or end, at zero or one.
_EDGED = frozenset(
    (
        *_COMPARISONS, aten.acos, aten.acosh, aten.asin, aten.atanh, aten.ceil, aten.floor, aten.fmod, aten.frac,
        aten.log, aten.log10, aten.log2, aten.logical_not, aten.reciprocal, aten.remainder, aten.round, aten.rsqrt,
        aten.sgn, aten.sign, aten.signbit, aten.sqrt, aten.trunc,
    )
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Comparison:
    """A comparison of a value with elements that were selected from it.

    Attributes:
        value: the value.
        readers: the nodes that read it for this.
    """

    value: Node
    readers: tuple[Node, ...]


@dataclass(slots=True)
class _Origin:
    """What a node is made of: sets of nodes, a bit for each.

    Attributes:
        direct: by pointwise ops alone.
        moved: likewise, and an element may be one of another place.
        selected: through a selection.
        met: values whose elements met selected ones, in a difference that is zero where they are equal.
    """

    direct: int = 0
    moved: int = 0
    selected: int = 0
    met: int = 0


def comparisons_with_selections(graph: Graph) -> list[Comparison]:
    """Those of a graph of ATen ops, in which calls of equal meaning are one; one of each value, with all readers."""
    nodes = [n for n in graph.nodes if n.op == "call_function"]
    if not any(packet(n) in _SELECTIONS or packet(n) in _MOVES or is_view(n) for n in nodes):
        return []
    found: dict[Node, dict[Node, None]] = {}
    origins = _Origins()
    for node in nodes:
        for value in origins.add(node):
            found.setdefault(value, {}).update(dict.fromkeys(origins.readers(value, node)))
    return [Comparison(value, tuple(readers)) for value, readers in found.items()]


def compared_values(graph: Graph) -> set[Node]:
    """The values of a graph that are compared with elements of their own: no second kernel may compute them."""
    marked = {n for n in graph.nodes if COMPUTED_ONCE in n.meta}
    return marked | {comparison.value for comparison in comparisons_with_selections(graph)}


class _Origins:
    """The origins of the nodes of a graph, which are added in its order."""

    def __init__(self) -> None:
        self._of: dict[Node, _Origin] = {}
        self._nodes: list[Node] = []

    def add(self, node: Node) -> list[Node]:
        """Notes the origin of a node. Returns the values that it compares with elements of their own."""
        op, sources = packet(node), [n for n in node.all_input_nodes if n in self._of]
        given = [self._of[n] for n in sources]
        made = _joined(given)
        compared = 0
        if node.target is operator.getitem or is_view(node):
            if is_view(node) and not keeps_elements(node):
                made.moved |= made.direct
            self._of[node] = made
            return []
        own = 1 << len(self._nodes)
        self._nodes.append(node)
        if op in _EDGED:
            compared = made.met
        if op in _COMPARISONS:
            compared |= _meeting([g.direct for g in given], [g.selected for g in given])
            # Two parts of a value have no element in common: an element meets itself where one operand has it in place.
            compared |= _meeting([g.direct & ~g.moved for g in given], [g.moved for g in given])
            made = _Origin()
        elif op in _SELECTIONS:
            data = self._of.get(node.all_input_nodes[0], _Origin())
            made = _Origin(selected=data.direct | data.moved | data.selected)
        elif op in _MOVES or _is_pointwise(node):
            made.met = made.met if op in _KEEPS_SIDES else 0
            if op in _MEETINGS:
                made.met |= _meeting([g.direct for g in given], [g.selected for g in given])
            if op in _MOVES:
                made.moved |= made.direct
        else:
            made = _Origin()
        made.direct |= own
        self._of[node] = made
        return self._last(compared)

    def _last(self, values: int) -> list[Node]:
        """Those of some values of which no other one is made, before casts and changes of sign."""
        found: dict[Node, None] = {}
        while values:
            node = self._nodes[values.bit_length() - 1]
            values &= ~self._of[node].direct
            while is_view(node) or packet(node) in _EXACT:
                if node.all_input_nodes[0] not in self._of:
                    break
                node = node.all_input_nodes[0]
            value = value_of(node)
            if not isinstance(value, torch.Tensor) or value.is_floating_point():  # integers are exact, as positions are
                found[node] = None
        return list(found)

    def readers(self, value: Node, comparison: Node) -> Iterator[Node]:
        """The nodes that read a value, and that a comparison is made of."""
        seen: set[Node] = set()
        waiting = [comparison]
        while waiting:
            node = waiting.pop()
            if node in seen or node is value or node not in self._of:
                continue
            seen.add(node)
            if value in node.all_input_nodes:
                yield node
            waiting += node.all_input_nodes


def _joined(origins: Sequence[_Origin]) -> _Origin:
    made = _Origin()
    for origin in origins:
        made.direct |= origin.direct
        made.moved |= origin.moved
        made.selected |= origin.selected
        made.met |= origin.met
    return made


def _meeting(values: Sequence[int], others: Sequence[int]) -> int:
    """What is among the values of one operand, and among the others of another one."""
    met = 0
    for place, found in enumerate(values):
        for other in (*others[:place], *others[place + 1 :]):
            met |= found & other
    return met


def _is_pointwise(node: Node) -> bool:
    return isinstance(node.target, OpOverload) and (torch.Tag.pointwise in node.target.tags or packet(node) in _EXACT)
