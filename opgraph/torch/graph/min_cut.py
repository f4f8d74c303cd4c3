"""Chooses the tensors saved for backward: the fewest bytes for which no library op runs twice.

A minimum cut between forward and backward, weighted by bytes, finds the values to save. Pointwise ops, views, casts,
fills and copies may be recomputed in backward; library ops and random ops never are. Of equal cuts, the one nearest the
backward is taken, so that the shortest chains are recomputed. The values are tagged in the graph
(`CheckpointPolicy.MUST_SAVE`) for torch's partitioner, which splits the graph, but weighs values by its own rules: a
value that would be written for backward alone counts twice. If it saves more than 1 in 128 beyond the least number of
bytes, all other values are tagged, too, and it has no choice. Tags of activation checkpointing are obeyed. With a
budget, torch's own rules decide, which may run library ops again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container
from collections.abc import Set as AbstractSet
from typing import Any, Literal, TypeAlias

import torch
from torch.fx import Graph, GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from opgraph.errors import InvalidArguments
from opgraph.runtime.providers.torch_internals import OpOverload, without_modes
from opgraph.torch.graph.aten import is_random, packet, value_of
from opgraph.torch.graph.common_subexpressions import share_common_subexpressions
from opgraph.torch.graph.constant_folding import constants_of, fold_constants, share_constants
from opgraph.torch.graph.layouts import channels_last
from opgraph.torch.graph.selections import COMPUTED_ONCE, comparisons_with_selections
from opgraph.torch.graph.torch_internals import (
    hint,
    inputs_written_afterwards,
    min_cut,
    recompute_in_backward,
)
from opgraph.torch.graph.views import base_of, is_alias, is_view

aten, prims = torch.ops.aten, torch.ops.prims

Memory: TypeAlias = Literal["least", "fast"] | float

#: Ops that are not pointwise, and whose recomputation costs only the bytes that they read and write.
_COPIES = frozenset(
    (
        aten.arange, aten.cat, aten.clone, aten.constant_pad_nd, aten.copy, aten.empty, aten.eye, aten.flip, aten.full,
        aten.full_like, aten.lift_fresh_copy, aten.masked_fill, aten.new_empty, aten.new_zeros, aten.ones,
        aten.ones_like, aten.repeat, aten.roll, aten.scalar_tensor, aten.slice_scatter, aten.stack, aten.tril,
        aten.triu, aten.where, aten.zeros, aten.zeros_like, aten._to_copy, prims.convert_element_type, prims.iota,
    )
)  # fmt: skip
#: In the meta of an input that is a parameter or a buffer, which stays alive whatever is saved.
PARAMETER = "opgraph_parameter"
#: In the meta of the copies that `hold_compared` makes.
_HELD = "opgraph_held"
#: If torch's partitioner saves up to this times the least number of bytes, its choice is taken: it prefers values that
#: are in memory in any case.
_NEARLY = 129 / 128
_KEPT, _RECOMPUTED = CheckpointPolicy.MUST_SAVE, (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)


def check_memory(memory: object) -> None:
    """Raises InvalidArguments if this is no choice of saved tensors."""
    is_budget = isinstance(memory, (int, float)) and not isinstance(memory, bool) and 0 <= memory <= 1
    if memory not in ("least", "fast") and not is_budget:
        raise InvalidArguments(
            f"memory={memory!r} is no choice", where="fuse", fix='use "least", "fast", or a budget from 0.0 to 1.0'
        )


def partitioner(memory: Memory, written_later: Container[int] = ()) -> Callable[..., Any]:
    """A function that splits a joint graph into forward and backward, as AOTAutograd calls it.

    Args:
        memory: "least", "fast", or torch's activation memory budget.
        written_later: the places of inputs that another graph writes to before backward.

    Raises:
        InvalidArguments: `memory` is none of these.
    """
    check_memory(memory)

    def split(joint: GraphModule, inputs: Any, **arguments: Any) -> Any:
        def cut(**settings: Any) -> Any:
            parts = min_cut(joint, inputs, arguments, **settings)
            for part in parts:
                _remove_held(part.graph)
            return parts

        places = [n for n in joint.graph.nodes if n.op == "placeholder"]
        free = {places[i] for i in arguments.get("static_lifetime_input_indices") or ()}
        for node in free:
            node.meta[PARAMETER] = True
        share_common_subexpressions(joint.graph)
        with without_modes():
            fold_constants(joint)
            channels_last(joint, has_gradients=True)
        share_constants(joint)
        for node in reading_what_is_written(joint.graph, written_later) | clones_of_inputs(joint.graph):
            node.meta.setdefault("recompute", _KEPT)
        joint.graph.eliminate_dead_code()
        if memory != "least":
            hold_compared(joint.graph)
        if memory == "fast":
            return cut()
        if memory != "least":
            for node in joint.graph.nodes:
                if is_random(node):
                    node.meta.setdefault("recompute", _KEPT)
            return _within_budget(cut, float(memory), arguments["num_fwd_outputs"])
        keep, again = kept_values(joint.graph, arguments["num_fwd_outputs"], free)
        if hold_compared(joint.graph, keep):
            keep, again = kept_values(joint.graph, arguments["num_fwd_outputs"], free)
        constants = constants_of(joint.graph)
        untagged = [n for n in joint.graph.nodes if "recompute" not in n.meta]
        for node in untagged:
            if node in keep or not (node in constants or _may_be_recomputed(node)):
                node.meta["recompute"] = _KEPT
        settings = {
            "aggressive_recomputation": True,
            "recompute_views": True,
            "ban_recompute_reductions": False,
            "activation_memory_budget": 1.0,
        }
        parts = cut(**settings)
        kept, _, _ = _kept_bytes(parts[0].graph, arguments["num_fwd_outputs"])
        if kept <= _NEARLY * sum(_weight(n, free) for n in keep):
            return parts
        for node in untagged:
            if node not in again:
                node.meta["recompute"] = _KEPT
            elif isinstance(value_of(node), torch.Tensor):
                recompute_in_backward(node)
        return cut(**settings)

    return split


#: The most splits of one graph, with ever smaller budgets, until the saved bytes are within the requested budget.
_MOST_SPLITS = 6


def _within_budget(cut: Callable[..., Any], budget: float, results: int) -> Any:
    """A split by torch's rules, with no more bytes than the budget allows: torch estimates, and some of its values are
    large.

    Args:
        cut: splits a joint graph.
        budget: the fraction of the bytes saved without a budget; inputs and random numbers are saved with any budget.
        results: the number of the forward graph's results; its further outputs are saved for backward.
    """
    whole, inputs, drawn = _kept_bytes(cut()[0].graph, results)
    limit = inputs + budget * (whole - inputs - drawn)
    share = budget
    found: list[tuple[float, Any]] = []
    for _ in range(_MOST_SPLITS):
        # At a budget of 0 torch saves inputs alone and replays random ops; at the next number above 0 it obeys tags.
        parts = cut(activation_memory_budget=max(share, math.ulp(0.0)))
        kept, _, _ = _kept_bytes(parts[0].graph, results)
        found.append((kept, parts))
        if kept <= limit or share == 0:
            break
        share *= min(limit / kept, 0.95)
    return min(found, key=lambda one: one[0])[1]


def _kept_bytes(forward: Graph, results: int) -> tuple[float, float, float]:
    """Bytes that a forward graph saves: of all values but parameters; of inputs; and of values that depend on random
    numbers alone, such as a mask of dropout."""
    returned: Any = forward.output_node().args[0]
    kept = {base_of(n) for n in returned[results:] if isinstance(n, Node)}
    sizes = {n: _weight(n, frozenset()) for n in kept if not n.meta.get(PARAMETER)}
    inputs = sum(size for node, size in sizes.items() if node.op == "placeholder")
    drawn: set[Node] = set()
    for node in forward.nodes:
        if is_random(node) or (node.all_input_nodes and drawn.issuperset(node.all_input_nodes)):
            drawn.add(node)
    return sum(sizes.values()), inputs, sum(size for node, size in sizes.items() if node in drawn)


def reading_what_is_written(joint: Graph, written_later: Container[int]) -> set[Node]:
    """The calls that read the memory of inputs that the graph, or a later one, writes into: in backward, that memory
    has other values."""
    found: set[Node] = set()
    waiting: list[Any] = [node.args[0] for node in joint.nodes if node.target is aten.copy_.default]
    waiting += inputs_written_afterwards(joint, written_later)
    while waiting:
        for user in waiting.pop().users:
            if is_view(user) or is_alias(user):
                waiting.append(user)
            elif user.op == "call_function":
                found.add(user)
    return found


def clones_of_inputs(joint: Graph) -> set[Node]:
    """The calls of `clone()` on inputs: programs copy inputs that they overwrite before backward (a queue of keys)."""
    nodes = joint.find_nodes(op="call_function", target=aten.clone.default)
    given = {n: base_of(n.args[0]) for n in nodes if not n.kwargs}
    return {n for n, base in given.items() if base.op == "placeholder" and "tangents" not in str(base.target)}


def hold_compared(joint: Graph, keep: AbstractSet[Node] = frozenset()) -> bool:
    """Makes comparisons of values with elements that were selected from them read values that are computed once.

    They and their selections read a copy, which backward does not recompute: the copy, or the comparison, is saved.

    Args:
        joint: the graph to which copies are added.
        keep: values that backward does not recompute in any case.

    Returns: True if there is such a comparison.
    """
    copies: dict[Node, Node] = {}
    for value, readers in comparisons_with_selections(joint).items():
        value.meta[COMPUTED_ONCE] = True
        if value in keep or not _may_be_recomputed(value):
            continue
        if value not in copies:
            with joint.inserting_after(value):
                copies[value] = joint.call_function(aten.clone.default, (value,))
            copies[value].meta = {"val": value.meta["val"], "recompute": _KEPT, _HELD: True}
        for reader in readers:
            reader.replace_input_with(value, copies[value])
    return bool(copies)


def _remove_held(graph: Graph) -> None:
    """Removes the copies of `hold_compared` from a part of the graph for which it was called."""
    for node in graph.find_nodes(op="call_function", target=aten.clone.default):
        if _HELD in node.meta:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def kept_values(
    joint: Graph, forward_outputs: int, free: AbstractSet[Node] = frozenset()
) -> tuple[set[Node], set[Node]]:
    """The values of the fewest bytes from which backward can be computed, and the calls of the forward that backward
    repeats.

    Args:
        joint: forward and backward in one graph; backward is all that depends on a placeholder `tangents_...`.
        forward_outputs: the number of the graph's outputs that are the forward's; they come first.
        free: inputs that stay alive in any case, as parameters do.
    """
    import networkx  # a dependency of torch; 0.1 s

    nodes = [n for n in joint.nodes if n.op != "output"]
    backward = _backward(joint, forward_outputs)
    constants = constants_of(joint)  # those of symbolic sizes: others have been folded
    forward = _computed_forward(joint, forward_outputs)
    flow = networkx.DiGraph()
    flow.add_nodes_from(("forward", "backward"))
    for node in nodes:
        if node in backward:
            continue
        is_checkpointed = node.meta.get("recompute") in _RECOMPUTED and isinstance(node.target, OpOverload)
        weight = math.inf if is_checkpointed else _weight(node, free)
        flow.add_edge((node, "in"), (node, "out"), capacity=weight)
        for user in node.users:
            if user in backward:
                flow.add_edge((node, "out"), "backward", capacity=math.inf)
            elif user.op != "output":
                flow.add_edge((node, "out"), (user, "in"), capacity=math.inf)
        is_free_to_move = node in constants or node not in forward or _may_be_recomputed(node)
        if node.op == "placeholder" or not is_free_to_move:
            flow.add_edge("forward", (node, "in"), capacity=math.inf)
    # The second part of networkx has all nodes that reach the sink: this cut is the one nearest the backward.
    _, (before, after) = networkx.minimum_cut(flow, "forward", "backward")
    keep = {n for n in nodes if (n, "in") in before and (n, "out") in after}
    return keep, {n for n in nodes if n.op == "call_function" and (n, "in") in after}


def _backward(joint: Graph, forward_outputs: int) -> set[Node]:
    """The nodes that depend on given gradients."""
    found: set[Node] = set()
    for node in joint.nodes:
        is_tangent = node.op == "placeholder" and "tangents" in str(node.target)
        if is_tangent or (node.op != "output" and any(n in found for n in node.all_input_nodes)):
            found.add(node)
    returned: Any = joint.output_node().args[0]
    for gradient in returned[forward_outputs:]:
        if isinstance(gradient, Node):
            found.add(gradient)  # one that is a value of the forward: nothing else would be computed from it
    return found - {n for n in returned[:forward_outputs] if isinstance(n, Node)}


def _computed_forward(joint: Graph, forward_outputs: int) -> set[Node]:
    """The nodes from which the forward's outputs are computed. Only backward reads others: these run there, once."""
    returned: Any = joint.output_node().args[0]
    found = {n for n in returned[:forward_outputs] if isinstance(n, Node)}
    for node in reversed(joint.nodes):
        if node in found:
            found.update(node.all_input_nodes)
    return found


def _may_be_recomputed(node: Node) -> bool:
    """True if a node may run again in backward."""
    tag = node.meta.get("recompute")
    if tag is not None:
        return tag in _RECOMPUTED
    if is_random(node):
        return False
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return node.op != "placeholder"  # arithmetic on sizes; an element of a tuple: the call that made it decides
    return torch.Tag.pointwise in node.target.tags or is_view(node) or packet(node) in _COPIES


def _weight(node: Node, free: AbstractSet[Node]) -> float:
    """The cost of saving a value: its bytes."""
    value = value_of(node)
    if node in free or node.op == "get_attr":
        return 0
    if isinstance(value, torch.SymInt):
        return 1
    if not isinstance(value, torch.Tensor) or is_view(node):
        return math.inf
    return max(1, math.prod(hint(s) for s in value.shape) * value.dtype.itemsize)
