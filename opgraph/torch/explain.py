"""explain: runs a model or function once and tells what was fused, where, and why the rest was not."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import torch
from torch import nn

from opgraph.errors import InvalidArguments, OpGraphError
from opgraph.torch.explain_kept import kept_by_op, kept_by_torch
from opgraph.torch.explain_reasons import reads_values, reason
from opgraph.torch.explain_report import FusedCalls, FusionReport, Guess, LeftCall, LeftKey, merged
from opgraph.torch.fuse_module import FusedForward
from opgraph.torch.lazy.mode import run_lazily
from opgraph.torch.lazy.node import Node
from opgraph.torch.lazy.observer import Observer
from opgraph.torch.lazy.shape import NO_DIMENSION
from opgraph.torch.tracing.reads import written
from opgraph.torch.tracing.trace import trace
from opgraph.torch.tracing.watch import function_name


def explain(model_or_fn: Callable[..., Any], /, *inputs: Any, **kwargs: Any) -> FusionReport:
    """Runs a module or a function once as `fuse` would, and reports.

    Args:
        model_or_fn: a module, fused or not, or a function of torch tensors; it is left as it is.
        inputs, kwargs: what it is called with.

    Returns: per module what was fused, the named units found, what is kept for backward and what torch keeps; and
        for each call left to torch the reason. Forward side effects (running statistics, random numbers) happen once.

    Raises:
        InvalidArguments: neither a module nor a function.
    """
    if not callable(model_or_fn):
        raise InvalidArguments(
            f"an object of type {type(model_or_fn).__name__} cannot be called",
            where="explain",
            fix="pass a module or a function, then its inputs",
        )
    name = getattr(model_or_fn, "__name__", type(model_or_fn).__name__)
    listener = _Listener(model_or_fn)
    forward = written(model_or_fn)
    run_lazily(lambda: forward(*inputs, **kwargs), listener)
    return FusionReport(name, merged(listener.fused), tuple(listener.left_calls.values()))


def foresee(model: nn.Module) -> FusionReport:
    """What is known of a model without running it: which of its modules are pointwise by themselves."""
    guesses = []
    for path, module in model.named_modules():
        if any(module.children()):
            continue
        calls = _calls_of(module)
        kind = type(module).__name__
        if calls is None:
            guesses.append(Guess(path, kind, (), (), "left to torch, or decided by what its forward calls"))
        else:
            graph, units = calls
            guesses.append(Guess(path, kind, graph, units))
    return FusionReport(type(model).__name__, guesses=tuple(guesses))


def _calls_of(module: nn.Module) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
    """The ops and units of a module whose forward takes one tensor and is pointwise; None for all others."""
    forward = module.forward.original if isinstance(module.forward, FusedForward) else module.forward
    sizes = [p.numel() for p in module.parameters() if p.dim() == 1]
    like = next(module.parameters(), torch.empty(0))
    if not like.is_floating_point():
        return None
    try:
        sample = torch.ones((2, max(sizes, default=3), 2, 2), dtype=like.dtype, device=like.device)
        graph = trace(forward, sample).graph
    except (OpGraphError, TypeError, RuntimeError, ValueError, IndexError, AttributeError):
        return None  # not of one tensor, or not pointwise
    units = tuple(u for p in graph.get_partitions() for u in p.units)
    return tuple(op.kind for op in graph.ops), units


class _Listener(Observer):
    def __init__(self, model: Any) -> None:
        modules = model.named_modules() if isinstance(model, nn.Module) else ()
        self._names = {id(module): name for name, module in modules}
        self.fused: list[FusedCalls] = []
        self.left_calls: dict[LeftKey, LeftCall] = {}

    def site(self) -> str:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            owner = frame.f_locals.get("self") if frame.f_code.co_argcount else None
            if isinstance(owner, nn.Module) and id(owner) in self._names:
                return str(self._names[id(owner)])
            frame = frame.f_back
        return ""

    def runs(self, nodes: list[Node], outputs: list[Node], kernel: Any, tensors: list[torch.Tensor]) -> None:
        if kernel is None or kernel.op is None:
            why = "on its own it is one kernel in torch too" if kernel is None else kernel.why
            for node in nodes:
                self._count(node.site, node.spec.name, why)
            return
        grad = nodes[0].state[0] and any(t.requires_grad for t in tensors)
        entry = FusedCalls(
            path=_common([n.site for n in nodes]),
            calls=tuple(n.spec.name for n in nodes),
            units=tuple(u for p in kernel.op.graph.get_partitions() for u in p.units),
            inputs=tuple(tuple(t.shape) for t in tensors),
            outputs=tuple(tuple(n.shape) for n in outputs),
            kept=kept_by_op(kernel, tensors, outputs) if grad else 0,
            kept_by_torch=kept_by_torch(nodes, outputs) if grad else 0,
        )
        self.fused.append(entry)

    def left(self, func: Callable[..., Any], why: str, result: Any) -> None:
        name = function_name(func)
        why = why or reason(name)
        # Counters (of a batch norm's batches) and arithmetic of parameters of no dimension are nobody's question.
        told = isinstance(result, torch.Tensor) and (result.dim() > 0 or result.is_floating_point())
        if why and why != NO_DIMENSION and (told or reads_values(name)):
            self._count(self.site(), name, why)

    def _count(self, path: str, name: str, why: str) -> None:
        key = (path, name, why)
        known = self.left_calls.get(key)
        self.left_calls[key] = LeftCall(path, name, why, 1 if known is None else known.times + 1)


def _common(paths: Sequence[str]) -> str:
    """The path of the innermost module that all of these are in."""
    parts = [path.split(".") if path else [] for path in paths]
    count = 0
    while all(len(p) > count and p[count] == parts[0][count] for p in parts):
        count += 1
    return ".".join(parts[0][:count])
