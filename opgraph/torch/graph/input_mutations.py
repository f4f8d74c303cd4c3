"""Writes to a graph's inputs (running statistics): one call of torch for all of them.

AOTAutograd puts them at the end of a graph, one `copy_` for each. A ResNet-18 in training has 60, and 20 additions for
its counts of batches. Each tensor's version is incremented once, as by a separate write.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from opgraph.torch.graph.aten import is_computed, value_of

aten = torch.ops.aten


def join_writes(graph: Graph) -> None:
    """Replaces the writes at the end of a graph by calls that write several tensors.

    Args:
        graph: a graph of ATen ops with `val` in each node's meta; it is changed.
    """
    copies = _last_copies(graph)
    if len(copies) < 2:
        return
    counts: dict[tuple[Any, Any], list[Node]] = {}
    others = []
    for copy in copies:
        step = _counted_up_by(copy)
        if step is None:
            others.append(copy)
        else:
            counts.setdefault((value_of(copy.args[0]).device, step), []).append(copy)  # type: ignore[arg-type]
    with graph.inserting_before(graph.output_node()):
        for (_, step), found in counts.items():
            _called(graph, aten._foreach_add_.Scalar, [n.args[0] for n in found], step)
        if others:
            _called(graph, aten._foreach_copy_.default, [n.args[0] for n in others], [n.args[1] for n in others])
    for copy in copies:
        sum_ = copy.args[1]
        graph.erase_node(copy)
        if isinstance(sum_, Node) and not sum_.users and copy not in others:
            graph.erase_node(sum_)


def _called(graph: Graph, target: Any, *args: Any) -> None:
    graph.call_function(target, args).meta["val"] = None


def _last_copies(graph: Graph) -> Sequence[Node]:
    """The copies to inputs after all other calls, in order."""
    found = []
    node = graph.output_node().prev
    while node.target is aten.copy_.default and not node.users and len(node.args) == 2 and not node.kwargs:
        found.append(node)
        node = node.prev
    written = [n.args[0] for n in found]
    return found[::-1] if len(set(written)) == len(written) else ()


def _counted_up_by(copy: Node) -> Any:
    """The number by which a copy increments an integer; None if it does something else."""
    written, new = copy.args[:2]
    if not isinstance(new, Node) or new.target is not aten.add.Tensor or new.args[0] is not written or new.kwargs:
        return None
    step = new.args[1]
    is_integer = isinstance(step, int) and not isinstance(step, bool) and value_of(new).dtype == value_of(written).dtype  # type: ignore[arg-type]
    return step if is_integer and not is_computed(new) and len(new.users) == 1 and len(new.args) == 2 else None
