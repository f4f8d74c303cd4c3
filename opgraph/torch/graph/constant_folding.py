"""Constant folding: values that depend on no input of a graph (masks, positions) are computed once, at compile time."""

from __future__ import annotations

import operator
import sys
from collections.abc import Collection, Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from opgraph.runtime.providers.torch_internals import OpOverload
from opgraph.torch.graph.aten import is_computed, is_fill, value_of
from opgraph.torch.graph.size_expressions import SYMBOLIC, number_of
from opgraph.torch.graph.torch_internals import is_size
from opgraph.torch.graph.views import base_of, is_view

#: The most bytes of constants that a graph holds; in a graph with symbolic sizes, for each set of sizes.
MOST_BYTES, MOST_BYTES_OF_SIZES = 2**26, 2**20


def fold_constants(
    module: GraphModule, most: int | None = None, names: Collection[str] | None = None
) -> dict[str, str]:
    """Replaces nodes that depend on no input by their values, as attributes of the module.

    Returned nodes are not replaced, because the caller might write into their values. Neither are fills, which kernels
    read as numbers, and nodes of symbolic sizes. The graph is changed; torch calls must run for real (no fake mode).

    Args:
        module: its graph has one node for equal calls, so that equal constants are one attribute.
        most: the most bytes of all constants; MOST_BYTES if None.
        names: the names of the only nodes to replace, however many bytes they have.

    Returns: name of an attribute's node -> name of the node whose value it has.
    """
    most = MOST_BYTES if most is None else most
    graph = module.graph
    returned = {base_of(n) for n in graph.output_node().all_input_nodes}
    constants = _small_constants(graph, most if names is None else sys.maxsize)
    readers = {n: [u for u in n.users if u not in constants] for n in constants}
    folded = [
        n for n, read in readers.items()
        if read and n.op != "get_attr" and isinstance(value_of(n), torch.Tensor) and not is_fill(n)
        and base_of(n) not in returned and (names is None or n.name in names)
    ]  # fmt: skip
    needed = set(folded)
    for node in reversed(constants):
        if node in needed:
            needed.update(node.all_input_nodes)
    values = _evaluated(module, [n for n in constants if n in needed], {})
    made: dict[str, str] = {}
    held = 0
    for node in folded:
        held += values[node].numel() * values[node].itemsize
        if names is None and held > most:
            break
        kept = values[node].clone()
        if kept.stride() != value_of(node).stride() and any(map(is_view, readers[node])):
            continue  # its views depend on its strides
        name = f"constant_{node.name}"
        module.register_buffer(name, kept, persistent=False)
        with graph.inserting_before(node):
            attribute = graph.get_attr(name)
        attribute.meta = {**node.meta, "val": node.meta["val"].new_empty_strided(kept.shape, kept.stride())}
        made[attribute.name] = node.name
        for user in readers[node]:
            user.replace_input_with(node, attribute)
    graph.eliminate_dead_code()
    return made


class SizedConstants:
    """Constants of a graph with symbols, which follow from the sizes of a call.

    Args:
        names: the names of the nodes whose values `values` returns.
    """

    def __init__(self, module: GraphModule, names: Iterable[str]) -> None:
        self._module = module
        self._wanted = set(names)
        needed = {n for n in module.graph.nodes if n.name in self._wanted}
        for node in reversed(module.graph.nodes):
            if node in needed and not isinstance(value_of(node), SYMBOLIC):
                needed.update(node.all_input_nodes)
        self._nodes = [n for n in module.graph.nodes if n in needed]

    def values(self, sizes: Mapping[Any, int]) -> dict[str, torch.Tensor]:
        """The values of the nodes, by name.

        Args:
            sizes: symbol -> value.
        """
        values = _evaluated(self._module, self._nodes, sizes)
        return {n.name: values[n].clone() for n in self._nodes if n.name in self._wanted}


def _small_constants(graph: Graph, most: int) -> dict[Node, None]:
    """The constants of at most `most` bytes that are computed from such constants alone, in order."""
    constants = constants_of(graph)
    found: dict[Node, None] = {}
    for node in graph.nodes:
        if node in constants and (
            node.op == "get_attr"
            or (
                (size := _size(value_of(node))) is not None
                and size <= most
                and all(n in found for n in node.all_input_nodes)
            )
        ):
            found[node] = None
    return found


def _evaluated(module: GraphModule, nodes: Iterable[Node], sizes: Mapping[Any, int]) -> dict[Node, Any]:
    """The values of nodes, each computed from earlier ones.

    Args:
        sizes: symbol -> value.
    """
    values: dict[Node, Any] = {}
    for node in nodes:
        if isinstance(value_of(node), SYMBOLIC):
            values[node] = number_of(value_of(node), sizes)
        elif node.op == "get_attr":
            values[node] = _attribute(module, node)
        else:
            args, kwargs = torch.fx.map_arg((node.args, node.kwargs), values.__getitem__)
            call: Any = node.target
            values[node] = call(*args, **kwargs)
    return values


def move_fills(graph: Graph) -> None:
    """Copies a number on the CPU to the GPU, for each kernel that reads it together with data of the GPU."""
    for node in graph.nodes:
        if not is_computed(node):
            continue
        made_here = value_of(node)
        for fill in node.all_input_nodes:
            number = value_of(fill)
            if number.device != made_here.device:
                with graph.inserting_before(node):
                    made = graph.node_copy(fill)
                made.kwargs = {**fill.kwargs, "device": made_here.device}
                made.meta["val"] = made_here.new_empty(number.shape, dtype=number.dtype)
                node.replace_input_with(fill, made)


def _attribute(module: GraphModule, node: Node) -> torch.Tensor:
    found: torch.Tensor = operator.attrgetter(str(node.target))(module)
    return found


def _size(value: Any) -> int | None:
    """Bytes of a value; None if it has a symbolic size."""
    values = value if isinstance(value, (list, tuple)) else [value]
    total = 0
    for tensor in values:
        if not isinstance(tensor, torch.Tensor) or not all(type(s) is int for s in tensor.shape):
            return None
        total += tensor.numel() * tensor.itemsize
    return total


def constants_of(graph: Graph) -> set[Node]:
    """The nodes that have the same value at every call on the same sizes."""
    found: set[Node] = set()
    for node in graph.nodes:
        if _is_constant(node, found):
            found.add(node)
    return found


def _is_constant(node: Node, constants: AbstractSet[Node]) -> bool:
    value = value_of(node)
    if isinstance(value, torch.SymInt):
        return is_size(value)
    if node.op == "get_attr":
        return isinstance(value, torch.Tensor)
    is_fixed = node.target is operator.getitem or _is_fixed(node.target) or isinstance(value, SYMBOLIC)
    return node.op == "call_function" and is_fixed and all(n in constants for n in node.all_input_nodes)


def _is_fixed(target: Any) -> bool:
    """True if an op gives the same result for the same arguments, and does nothing else."""
    return (
        isinstance(target, OpOverload)
        and torch.Tag.nondeterministic_seeded not in target.tags
        and not target._schema.is_mutable
        and target.namespace in ("aten", "prims")
    )


def share_constants(module: GraphModule) -> None:
    """Makes deep copies of the graph share its constants: under fake tensors, as in a dry run, AOTAutograd's deep copy
    of the backward graph would fail to copy them."""
    for node in module.graph.nodes:
        constant = operator.attrgetter(str(node.target))(module) if node.op == "get_attr" else None
        if isinstance(constant, torch.Tensor):
            constant.__deepcopy__ = lambda memo, shared=constant: shared  # type: ignore[method-assign, misc]
