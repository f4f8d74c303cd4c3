"""Modes of gradients and autocast, which calls in Dynamo's graphs turn on and off."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, GraphModule

from opgraph.torch.graph.torch_internals import SET_GRAD_ENABLED


def records_gradients(graph: Graph) -> bool:
    """True if autograd records at least a part of a graph: gradients are enabled now, or the graph enables them."""
    modes = graph.find_nodes(op="call_function", target=SET_GRAD_ENABLED)
    return torch.is_grad_enabled() or any(mode.args[0] for mode in modes)


def as_written(graph: GraphModule) -> Callable[..., Any]:
    """Returns a function that runs a graph of Dynamo as it is. After an error, it restores the modes of gradients and
    autocast, because the graph has calls that change them, but no `finally`.
    """
    modes = {n.target for n in graph.graph.nodes if n.op == "call_function"}
    if not any(m is SET_GRAD_ENABLED or getattr(m, "__name__", "") == "_enter_autocast" for m in modes):
        return graph.forward
    return with_modes_restored(graph.forward)


def with_modes_restored(call: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function, extended to restore the modes of gradients and autocast if it raises an error."""

    def run(*args: Any) -> Any:
        gradients, nesting = torch.is_grad_enabled(), _autocast_nesting()
        devices = [(d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda")]
        try:
            return call(*args)
        except BaseException:
            torch.set_grad_enabled(gradients)
            for device, enabled, dtype in devices:
                torch.set_autocast_enabled(device, enabled)
                torch.set_autocast_dtype(device, dtype)
            while _autocast_nesting() > nesting:
                torch.autocast_decrement_nesting()
            if not nesting:
                torch.clear_autocast_cache()
            raise

    return run


def _autocast_nesting() -> int:
    """The number of nested autocast contexts that are active."""
    torch.autocast_increment_nesting()
    return int(torch.autocast_decrement_nesting())
