"""Views of a captured graph: nodes that alias the memory of other nodes."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch.fx import GraphModule, Node

from opgraph.torch.graph.aten import VIEWS, packet, value_of

aten = torch.ops.aten


#: By identity: the hash of an overload is a Python function, and graphs are walked many times.
_VIEWS = frozenset(
    id(getattr(op, name))
    for op in VIEWS
    for name in op.overloads()  # type: ignore[no-untyped-call]
) - {id(aten.view.dtype)}


def is_view(node: Node) -> bool:
    """True if the node aliases the memory of the node that it reads."""
    if node.op != "call_function":
        return False
    target = node.target
    if target is operator.getitem:
        source = node.args[0]
        return isinstance(source, Node) and is_view(source)
    if id(target) not in _VIEWS:
        return False
    value = value_of(node)
    if value is None or (isinstance(value, torch.Tensor) and (value.is_neg() or value.is_conj())):
        return False  # such a view is more than a place in memory: torch makes it
    if value_of(node.all_input_nodes[0]) is None:
        return False  # AOTAutograd has no fake values for random numbers that are drawn again in backward
    if packet(node) is aten.as_strided:
        # Its offset counts from the beginning of the storage, and no guard checks at which offset an input begins.
        base = base_of(node.all_input_nodes[0])
        return base.op != "placeholder" and not is_alias(base) and _lies_in(value, value_of(base))
    return True


def _lies_in(view: torch.Tensor, base: torch.Tensor) -> bool:
    """True if a view of known sizes does not end after the elements of its base: else torch raises an error."""
    begin = view.storage_offset() - base.storage_offset()
    numbers = (begin, *view.shape, *view.stride(), *base.shape, *base.stride())
    return all(isinstance(n, int) for n in numbers) and 0 <= begin <= _span(base) - _span(view)


def _span(tensor: torch.Tensor) -> int:
    """The number of elements from the first one to the last one, inclusive."""
    if 0 in tensor.shape:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def elements_behind_views(module: GraphModule) -> Iterator[Any]:
    """For each `as_strided`, the number of elements of the base behind the view's last one; negative where it ends
    after them.

    Args:
        module: a graph whose sizes may be symbols. Nothing compares them here, which would fix their values.
    """
    for node in module.graph.nodes:
        source = base_of(node.all_input_nodes[0]) if packet(node) is aten.as_strided else None
        if source is None or source.op == "placeholder":  # torch makes views of inputs
            continue
        view, base = value_of(node), value_of(source)
        if isinstance(view, torch.Tensor) and isinstance(base, torch.Tensor):
            last, end = (
                t.storage_offset() + sum((size - 1) * stride for size, stride in zip(t.shape, t.stride()))
                for t in (view, base)
            )
            yield end - last


def base_of(node: Node) -> Node:
    """The node whose memory a chain of views reads."""
    while is_view(node):
        node = node.all_input_nodes[0]
    return node


def is_alias(node: Node) -> bool:
    """True if a call that is no view may return the memory of an argument, as a view in another dtype does."""
    if node.op != "call_function" or is_view(node):
        return False
    if node.target is operator.getitem:
        (call, *_) = node.all_input_nodes
        return is_alias(call)
    return _gives_back(node.target)


@cache
def _gives_back(target: Any) -> bool:
    schema = getattr(target, "_schema", None)
    return schema is None or any(r.alias_info is not None for r in schema.returns)


def owners(node: Node) -> list[Node]:
    """The nodes whose memory may hold a value: the base of its views, and the arguments of calls on the way that may
    return an argument's memory."""
    found: dict[Node, None] = {}
    waiting = [node]
    while waiting:
        base = base_of(waiting.pop())
        if base not in found:
            found[base] = None
            waiting += base.all_input_nodes if is_alias(base) else ()
    return list(found)


def readers(node: Node) -> list[tuple[Node, Node, bool]]:
    """The readers of the memory of a node, perhaps through views: the node or a view of it that is read; the reader;
    and True if a kernel that makes the node has the elements that are read available."""
    found = []
    waiting = [(node, user) for user in node.users]
    while waiting:
        read, user = waiting.pop()
        if is_view(user):
            waiting += [(user, u) for u in user.users]
        else:
            found.append((read, user, read is node or keeps_elements(read)))
    return found


def keeps_elements(node: Node) -> bool:
    """True if a chain of views at most broadcasts: a kernel that made its base has its elements available."""
    while is_view(node):
        if packet(node) not in (aten.expand, aten.alias, aten.detach):
            return False
        source = node.all_input_nodes[0]
        if value_of(node).dim() != value_of(source).dim():
            return False
        node = source
    return True
