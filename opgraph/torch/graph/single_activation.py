"""Modules that are one activation and nothing else: they run as fused functions, which take less host time.

Measurements with `x * sigmoid(a * x)` at 1,024 elements, forward and backward: specs/decisions/0031.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.fx import Node

from opgraph.torch.graph.aten import is_reduction
from opgraph.torch.graph.program import Program
from opgraph.torch.tracing.guard_discovery import NotKnown, reads_of

if TYPE_CHECKING:
    from opgraph.torch.graph.backend import Captured


def is_single(module: nn.Module, captured: Sequence[Captured]) -> bool:
    """True if a call captured one pointwise kernel for one result, without arithmetic on parameters alone, and if a
    fused function does not have to run the module's Python at each call.

    Such arithmetic (NAF1's gamma functions) is part of a captured graph's kernel; a fused function leaves it to torch.
    """
    if len(captured) != 1:
        return False
    try:
        reads_of(MethodType(type(module).forward, module), {})
    except NotKnown:
        return False
    program = captured[0].forward or captured[0].inference
    if not isinstance(program, Program) or program.library_calls or len(program.launches) != 1:
        return False
    if any(map(is_reduction, program.launches[0].nodes)):
        return False
    graph = captured[0].graph.graph
    output = graph.output_node()
    return len(output.all_input_nodes) == 1 and _reads_data(list(graph.nodes))


def _reads_data(nodes: Sequence[Node]) -> bool:
    """True if every call of Dynamo's graph reads an argument of one dimension or more, directly or not."""
    readers: set[Node] = set()
    for node in nodes:
        if node.op == "placeholder":
            value = node.meta.get("example_value")
            if isinstance(value, torch.Tensor) and value.dim() and not isinstance(value, nn.Parameter):
                readers.add(node)
        elif readers.isdisjoint(node.all_input_nodes):
            return False
        else:
            readers.add(node)
    return True


class NotAlone(Exception):  # noqa: N818 - it ends one way to run a module, and is no error
    """This call cannot run as a function: the module's forward is another one, or its Python code must run."""


class Single:
    """A module's own forward as a fused function.

    Args:
        module: the module of the forward.
        rounding: see `fuse`.
    """

    __slots__ = ("_class", "_forward", "_function", "_is_traced", "_module")

    def __init__(self, module: nn.Module, rounding: str) -> None:
        from opgraph.torch.fuse import fuse  # which fuses modules with this class

        self._module = module
        self._class = type(module)
        self._forward = self._class.forward
        self._function: Any = fuse(MethodType(self._forward, module), rounding=rounding)
        self._is_traced = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the result of the module's forward.

        Raises:
            NotAlone, before anything runs.
            OpGraphError: the forward is not pointwise for these arguments.
        """
        is_same = type(self._module) is self._class and self._class.forward is self._forward
        if not is_same or self._function.why_rerun:
            raise NotAlone
        if self._is_traced:  # what Python does on another way through may have effects, and would have them twice
            return self._function.planned(args, kwargs, NotAlone)
        self._is_traced = True
        return self._function(*args, **kwargs)
