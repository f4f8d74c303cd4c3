"""Moves views below the arithmetic that reads them, so that this arithmetic fuses with the kernel above the view.

A kernel computes elements from elements at the same place, so a transposed or reshaped view between two computed nodes
would end it. But arithmetic does not depend on the order of axes. It is rewritten in the axis order of the value that
it reads: the views of its other operands are permuted back, and a view permutes its result. No value moves in memory:
a result keeps its strides, and so does a copy into another layout, which a kernel then stores directly. A sum over a
view becomes a sum over the source of the view, if the reduced axes are whole axes there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, TypeAlias

import torch
from torch.fx import Graph, Node

from opgraph.torch.graph.aten import is_elementwise, is_reduction, keeps_axes, packet, reduced_axes, value_of
from opgraph.torch.graph.views import is_view

aten = torch.ops.aten

#: Reductions of all axes -> the overloads of the same ops with an argument for the axes.
_WITH_AXES: dict[Any, Any] = {aten.sum.default: aten.sum.dim_IntList, aten.mean.default: aten.mean.dim}

#: For each axis of a view, the axis of its source; None for axes of one element.
Order: TypeAlias = tuple[int | None, ...]

_TURNS = frozenset((aten.permute, aten.transpose, aten.t))
_RESHAPES = frozenset(
    (aten.view, aten.reshape, aten._unsafe_view, aten.squeeze, aten.unsqueeze, aten.expand, aten.alias, aten.detach)
)


def move_views_down(graph: Graph, computed: set[Node]) -> None:
    """Rewrites computed nodes in the axis order of the computed values that they read through views.

    Args:
        graph: a graph of ATen ops with `val` in each node's meta; it is changed.
        computed: the nodes that kernels compute; it is kept up to date.
    """
    views = _Views(graph)
    for node in list(graph.nodes):
        if node not in computed:
            continue
        for operand in node.all_input_nodes:
            _without_views(views, node, operand, computed)
        made = _reduction(views, node, computed) if is_reduction(node) else _elementwise(views, node, computed)
        if made is None:
            continue
        new, result = made
        computed.discard(node)
        computed.add(new)
        node.replace_all_uses_with(result)
        views.erase(node)


class _Views:
    """The views of a graph."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.turned: set[Node] = set()  # nodes that were replaced by others
        #: Values without data, by op and operands: equal layers share them, and torch takes 0.3 ms for each.
        self._values: dict[Any, torch.Tensor] = {}

    def step(self, node: Node) -> Order | None:
        """The axis order of one view; None if its axes are not those of its source, or the node is no view."""
        if not is_view(node) or not isinstance(value_of(node), torch.Tensor):
            return None
        (source,) = node.all_input_nodes
        if not isinstance(value_of(source), torch.Tensor):  # an element of a tuple
            return None
        sizes, own = value_of(source).shape, value_of(node).shape
        if packet(node) in _TURNS:
            turned = self._turned(node, len(sizes))
            return tuple(axis if sizes[axis] != 1 else None for axis in turned)
        if packet(node) not in _RESHAPES:
            return None
        axes = [axis for axis, size in enumerate(sizes) if size != 1]
        if [sizes[a] for a in axes] != [s for s in own if s != 1]:
            return None
        left = iter(axes)
        return tuple(next(left) if size != 1 else None for size in own)

    def _turned(self, node: Node, rank: int) -> Sequence[int]:
        order = list(range(rank))
        if packet(node) is aten.permute:
            given: Any = node.args[1]
            return [axis % rank for axis in given]
        swapped: Any = (0, 1) if packet(node) is aten.t else node.args[1:3]
        if rank > 1:
            first, second = (axis % rank for axis in swapped)
            order[first], order[second] = second, first
        return order

    def order(self, node: Node) -> tuple[Node, Order]:
        """The base of a chain of such views, and the order of the base's axes in the last view."""
        found: Order = tuple(axis if size != 1 else None for axis, size in enumerate(value_of(node).shape))
        while (step := self.step(node)) is not None:
            found = tuple(None if axis is None else step[axis] for axis in found)
            (node,) = node.all_input_nodes
        return node, found

    def reordered(self, node: Node, order: Order, before: Node) -> Node:
        """A view of a node.

        Args:
            order: for each axis of the view, the axis of the node; None for an axis of one element.
            before: the node before which new nodes are inserted.
        """
        base, own = self.order(node)
        wanted: Order = tuple(None if axis is None else own[axis] for axis in order)
        sizes = value_of(base).shape
        shape = [1 if axis is None else sizes[axis] for axis in wanted]
        axes = [axis for axis in wanted if axis is not None]
        if axes == sorted(axes) and shape == list(sizes):
            return base
        with self.graph.inserting_before(before):
            made = base
            ones = [axis for axis, size in enumerate(sizes) if size == 1]
            if ones and axes != sorted(axes):
                made = self.call(aten.squeeze.dims, made, ones)
            places = {axis: place for place, axis in enumerate(sorted(axes))}
            if axes != sorted(axes):
                made = self.call(aten.permute.default, made, [places[axis] for axis in axes])
            if list(value_of(made).shape) != shape:
                made = self.call(aten.view.default, made, shape)
        return made

    def call(self, target: Any, source: Node, given: Any) -> Node:
        made = self.graph.call_function(target, (source, given))
        value = value_of(source)
        looks = (tuple(value.shape), value.stride(), value.storage_offset(), value.dtype, value.device)
        made.meta = {**source.meta, "val": self._value((target, looks, tuple(given)), lambda: target(value, given))}
        return made

    def empty(self, like: torch.Tensor, sizes: Sequence[int], strides: Sequence[int]) -> torch.Tensor:
        """A value of these sizes and strides, with the dtype and device of another one."""
        key = tuple(sizes), tuple(strides), like.dtype, like.device
        return self._value(key, lambda: like.new_empty_strided(key[0], key[1]))

    def _value(self, key: Any, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        found = self._values.get(key)
        if found is None:
            found = self._values[key] = make()
        return found

    def is_chain(self, node: Node) -> bool:
        """True if each view of a chain has one reader."""
        while self.step(node) is not None:
            if len(node.users) != 1:
                return False
            (node,) = node.all_input_nodes
        return True

    def erase_unread(self, view: Node) -> None:
        """Erases a view if it has no readers, and the views that only it reads."""
        if not view.users:
            self.erase(view)

    def erase(self, node: Node) -> None:
        """Erases a node, and the views that only it reads."""
        waiting = {node: None}  # a view and a view of it may have the same reader
        while waiting:
            unread, _ = waiting.popitem()
            if not unread.users and (unread is node or is_view(unread) or unread in self.turned):
                waiting.update(dict.fromkeys(unread.all_input_nodes))
                self.graph.erase_node(unread)


def _elementwise(views: _Views, node: Node, computed: set[Node]) -> tuple[Node, Node] | None:
    """The node in the axis order of a computed value that it reads through views, and its result in its own order."""
    if not is_elementwise(node):
        return None
    lead: tuple[Node, Order] | None = None
    others = []
    for operand in _whole(node):
        base, order = views.order(operand)
        if base in computed and base is not operand:
            lead = lead or (base, order)
        elif base in computed:
            others.append(operand)
    if lead is None or _is_plain(lead[1], value_of(lead[0]).shape):
        return None
    if not all(_may_turn(operand, computed) for operand in others):
        return None  # the node has the axis order of an operand that may not be reordered
    return _turned(views, node, value_of(lead[0]).shape, lead[1], computed)


def _without_views(views: _Views, node: Node, operand: Node, computed: set[Node]) -> None:
    """Makes a node read a computed value directly, if the views between them cancel out. Computes a smaller value, if
    this node alone reads it, in the axis order in which the node reads it."""
    base, order = views.order(operand)
    if base is operand or base not in computed:
        return
    if value_of(base).shape == value_of(operand).shape and _is_plain(order, value_of(base).shape):
        node.replace_input_with(operand, base)
        views.erase_unread(operand)
    elif 1 < value_of(base).numel() < value_of(node).numel() and views.is_chain(operand) and _may_turn(base, computed):
        turned = {axis: place for place, axis in enumerate(order) if axis is not None}
        back = tuple(turned.get(axis) for axis in range(value_of(base).dim()))
        new, _ = _turned(views, base, value_of(operand).shape, back, computed)
        views.turned.add(base)
        computed.discard(base)
        computed.add(new)
        node.replace_input_with(operand, new)
        views.erase_unread(operand)


def _whole(node: Node) -> list[Node]:
    """The operands of a node that have its shape, if that has more than one element."""
    value = value_of(node)
    return [n for n in node.all_input_nodes if value_of(n).shape == value.shape and value.numel() > 1]


def _made_of(node: Node, computed: set[Node]) -> Iterator[Node]:
    """The computed values from which a value is computed, readers first; one with several readers comes as often."""
    waiting = [node]
    while waiting:
        for operand in _whole(waiting.pop()):
            if operand in computed:
                yield operand
                waiting.append(operand)


def _may_turn(node: Node, computed: set[Node]) -> bool:
    """True if a computed value, and all values it is computed from, may have any axis order: each has one reader."""
    return all(len(n.users) == 1 and is_elementwise(n) for n in chain((node,), _made_of(node, computed)))


def _turned(views: _Views, node: Node, sizes: Sequence[int], order: Order, computed: set[Node]) -> tuple[Node, Node]:
    """A copy of a node with the axes that `order` names, of these sizes, and its result in the old order. The values
    from which the node is computed are replaced by values in the new order."""
    for operand in reversed(list(_made_of(node, computed))):
        new, result = _turned_alone(views, operand, sizes, order)
        computed.discard(operand)
        computed.add(new)
        operand.replace_all_uses_with(result)
        views.erase(operand)
    return _turned_alone(views, node, sizes, order)


def _turned_alone(views: _Views, node: Node, sizes: Sequence[int], order: Order) -> tuple[Node, Node]:
    """As `_turned`, but the node's operands are not replaced."""
    value = value_of(node)
    back = {axis: place for place, axis in enumerate(order) if axis is not None}  # axes of the base -> of the node
    rank = value.dim()

    def operand_of(operand: Node) -> Node:
        own = value_of(operand)
        if own.dim() == 0:
            return operand
        places = [back[axis] - (rank - own.dim()) if axis in back else -1 for axis in range(len(sizes))]
        return views.reordered(operand, tuple(p if p >= 0 and own.shape[p] != 1 else None for p in places), node)

    operands = {n: operand_of(n) for n in node.all_input_nodes}
    with views.graph.inserting_before(node):
        made = views.graph.node_copy(node, lambda n: operands[n])
    made.kwargs = {name: given for name, given in made.kwargs.items() if name != "memory_format"}  # for the old axes
    strides = [value.stride(back[axis]) if axis in back else 1 for axis in range(len(sizes))]
    made.meta = {**node.meta, "val": views.empty(value, sizes, strides)}
    return made, _as(views, made, order, node)


def _is_plain(order: Order, sizes: Sequence[int]) -> bool:
    return order == tuple(axis if size != 1 else None for axis, size in enumerate(sizes))


def _as(views: _Views, made: Node, order: Order, node: Node) -> Node:
    """The replacement of a node, viewed with the node's axes."""
    result = views.reordered(made, order, node)
    if list(value_of(result).shape) != list(value_of(node).shape):
        with views.graph.inserting_before(node):
            result = views.call(aten.view.default, result, list(value_of(node).shape))
    if result is not made:
        result.meta = {**result.meta, "val": node.meta["val"]}
    return result


def _reduction(views: _Views, node: Node, computed: set[Node]) -> tuple[Node, Node] | None:
    """The reduction of the computed value behind a view, with all axes kept, and its result in its own shape."""
    (operand,) = node.all_input_nodes
    source: Node = operand
    reduced = {axis for axis in reduced_axes(node) if value_of(operand).shape[axis] != 1}
    while is_view(source) and source not in computed:
        moved = _moved(views, source, reduced)
        if moved is None:
            break
        reduced, (source,) = moved, source.all_input_nodes
    if source not in computed:
        source, reduced = operand, set(reduced_axes(node))
    if not reduced or (source is operand and keeps_axes(node)):
        return None
    sizes = value_of(source).shape
    kept = [1 if axis in reduced else size for axis, size in enumerate(sizes)]
    with views.graph.inserting_before(node):
        target = _WITH_AXES.get(node.target, node.target)
        made = views.graph.call_function(target, (source, sorted(reduced), True), _dtype_of(node))
        made.meta = {**node.meta, "val": value_of(node).new_empty(kept)}
        if kept == list(value_of(node).shape):
            return made, made
        result = views.call(aten.view.default, made, list(value_of(node).shape))
        result.meta = {**result.meta, "val": node.meta["val"]}
    return made, result


def _dtype_of(node: Node) -> dict[str, Any]:
    return {name: value for name, value in node.kwargs.items() if name == "dtype"}


def _moved(views: _Views, view: Node, reduced: set[int]) -> set[int] | None:
    """The axes of a view's source that a reduction of some axes of the view reduces; None if they are parts of axes,
    or if the other axes change their order."""
    (source,) = view.all_input_nodes
    if not isinstance(value_of(source), torch.Tensor):  # an element of a tuple
        return None
    sizes, own = list(value_of(source).shape), list(value_of(view).shape)
    order = views.step(view)
    if order is not None:
        left = [axis for place, axis in enumerate(order) if axis is not None and place not in reduced]
        return {order[place] for place in reduced if order[place] is not None} if left == sorted(left) else None  # type: ignore[misc]
    if packet(view) not in _RESHAPES or math.prod(sizes) != math.prod(own):
        return None
    found: set[int] = set()
    there = [axis for axis, size in enumerate(sizes) if size != 1]
    here = [axis for axis, size in enumerate(own) if size != 1]
    while there:  # runs of axes with equal numbers of elements
        read, wrote = [there.pop(0)], [here.pop(0)]
        while (left := math.prod(sizes[a] for a in read)) != (right := math.prod(own[a] for a in wrote)):
            if left < right:
                read.append(there.pop(0))
            else:
                wrote.append(here.pop(0))
        inside = {axis in reduced for axis in wrote}
        if len(inside) > 1:
            return None
        found |= set(read) if inside == {True} else set()
    return found
