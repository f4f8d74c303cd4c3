"""The ops of the forward pass that the backward pass recomputes: their modules, and the bytes that this saves."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from torch.fx import Node

from opgraph.torch.graph.aten import bytes_of, packet
from opgraph.torch.graph.node_origin import RECOMPUTED, Origin
from opgraph.torch.graph.program import Program
from opgraph.torch.graph.views import base_of, is_view, readers


@dataclass(frozen=True, slots=True)
class Run:
    """A run of a captured graph's program.

    Attributes:
        program: the program that ran.
        in_backward: True if it ran in the backward pass.
        origins: the origins of the program's nodes, with the names that modules have in the model.
    """

    program: Program
    in_backward: bool
    origins: dict[Node, Origin]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recomputed:
    """An op of the forward pass that the backward pass runs again.

    Attributes:
        module, module_class: the module of the op; `module` is "" for the whole model.
        op: the ATen op.
        call: the torch function in the source that it is a part of.
        where, code: the line of the user's source, as `file:line`, and its text.
        times: the number of times that such an op runs again.
        saves: bytes of its results that backward reads, and that are kept if the op does not run again; 0 for an op
            whose results are read only by other recomputed ops.
    """

    module: str
    module_class: str
    op: str
    call: str
    where: str
    code: str
    times: int = 1
    saves: int = 0


def recomputed_ops(runs: Iterable[Run]) -> tuple[Recomputed, ...]:
    """The ops that the programs recomputed, equal ops of one line merged, in the order of their first run."""
    found: dict[Recomputed, tuple[int, int]] = {}
    for run in runs:
        for node, saves in _again(run):
            at = run.origins[node]
            key = Recomputed(
                module=at.module, module_class=at.module_class, op=str(packet(node)).removeprefix("aten."),
                call=at.call, where=at.line, code=at.code,
            )  # fmt: skip
            times, size = found.get(key, (0, 0))
            found[key] = times + 1, size + saves
    return tuple(replace(key, times=times, saves=size) for key, (times, size) in found.items())


def _again(run: Run) -> Iterator[tuple[Node, int]]:
    """The nodes that a run recomputes, each with the bytes that are not kept for this reason."""
    nodes = [n for n in run.program.module.graph.nodes if n.op == "call_function" and not _is_part(n)]
    if run.program.phase == "backward":
        copies: dict[str, list[Node]] = {}
        for node in nodes:
            if RECOMPUTED in node.meta:
                copies.setdefault(node.meta[RECOMPUTED], []).append(node)
        for same in copies.values():  # they are computed instead of one that is kept
            saves = [sum(bytes_of(value) for value in _values(node) if _is_read(value)) for node in same]
            yield from zip(same, [max(saves), *[0] * (len(same) - 1)], strict=True)
    elif run.in_backward:  # a checkpointed part of the model
        kept = {base_of(n) for n in run.program.saved}
        for node in nodes:
            yield node, sum(bytes_of(value) for value in _values(node) if value in kept)


def _is_part(node: Node) -> bool:
    """True if a node has the memory of another one: a view, or an element of the results of a call."""
    return is_view(node) or node.target is operator.getitem


def _values(node: Node) -> list[Node]:
    """The node itself; for a call that returns several values, the nodes of these."""
    parts = [user for user in node.users if user.target is operator.getitem and not is_view(user)]
    return [found for part in parts for found in _values(part)] if parts else [node]


def _is_read(value: Node) -> bool:
    """True if anything but recomputed ops reads a value, or a view of it."""
    return any(RECOMPUTED not in user.meta for _, user, _ in readers(value))
