"""Checks that a model's functions can be unfolded: each defined once, none calling itself, not too many nodes."""

from __future__ import annotations

from onnx import ModelProto, NodeProto

from opgraph.errors import ModelError, Unimplemented
from opgraph.onnx.nodes import subgraphs

MAX_NODES = 1_000_000
#: The limit on unfolded nodes: a base number, plus a number for each node in the file. Without a limit, 2 KB could cost
#: minutes and gigabytes (131,072 nodes: 29 s and 0.5 GB on a busy machine).
_FREE_NODES, _PER_STATED_NODE = 50_000, 20


def check_functions(model: ModelProto, label: str) -> None:
    """Refuses functions that are defined twice, call each other in a cycle, or unfold to too many nodes.

    Raises:
        ModelError: a function is defined twice, or calls are cyclic.
        Unimplemented: the functions unfold to too many nodes.
    """
    functions = {}
    for function in model.functions:
        key = (function.domain, function.name, function.overload)
        if key in functions:
            raise ModelError(
                f'function "{function.domain}::{function.name}" is defined twice', where=label, fix="keep one of them"
            )
        functions[key] = function
    calls = {key: _calls(list(f.node)) for key, f in functions.items()}
    calls[("", "", "main graph")] = _calls(list(model.graph.node))
    stated = sum(len(found) for found in calls.values())
    limit = min(MAX_NODES, _FREE_NODES + _PER_STATED_NODE * stated)
    unfolded: dict[tuple[str, str, str], int] = {}
    waiting = [(key, False) for key in calls]
    open_keys: set[tuple[str, str, str]] = set()
    while waiting:
        key, done = waiting.pop()
        if done:
            open_keys.discard(key)
            unfolded[key] = sum(unfolded.get(c, 1) for c in calls[key])
            if unfolded[key] > limit:
                raise Unimplemented(
                    f"its functions unfold to more than {limit:,} nodes, from the {stated:,} that it states",
                    where=label,
                    fix="unfold them yourself, with onnx.inliner.inline_local_functions, if you trust the model",
                )
        elif key not in unfolded:
            open_keys.add(key)
            waiting.append((key, True))
            for callee in calls[key]:
                if callee in open_keys:
                    raise ModelError(
                        f'function "{callee[0]}::{callee[1]}" calls itself', where=label, fix="remove the circle"
                    )
                if callee in calls and callee not in unfolded:
                    waiting.append((callee, False))


def _calls(nodes: list[NodeProto]) -> list[tuple[str, str, str]]:
    """The calls in a body, one entry for each node, subgraphs included."""
    found, waiting = [], nodes
    while waiting:
        found += [(n.domain, n.op_type, n.overload) for n in waiting]
        waiting = [inner for n in waiting for g in subgraphs(n) for inner in g.node]
    return found
