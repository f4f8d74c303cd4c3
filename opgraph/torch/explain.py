"""explain: runs a model or function once and tells what was fused, where, and why the rest was not."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.fx import Node

from opgraph.errors import InvalidArguments, OpGraphError
from opgraph.torch.explain_report import FusedCalls, FusionReport, GraphBreak, Guess, LeftCall, merged
from opgraph.torch.fuse_module import FusedForward, fused_apart, reached_limits, unfused
from opgraph.torch.graph.aten import packet, value_of
from opgraph.torch.graph.backend import new_compiler
from opgraph.torch.graph.dynamo_entry import compiled, graph_breaks
from opgraph.torch.graph.launches import Launch
from opgraph.torch.memory.measure import measured, saved_tensors
from opgraph.torch.memory.recomputed import Run
from opgraph.torch.memory.report import MemoryReport
from opgraph.torch.tracing.guard_discovery import written
from opgraph.torch.tracing.trace import trace


def explain(model_or_fn: Callable[..., Any], /, *inputs: Any, **kwargs: Any) -> FusionReport:
    """Runs a module or a function once as `fuse` would, forward and, where it has gradients, backward, and reports.

    Args:
        model_or_fn: a module, fused or not, or a function of torch tensors; it is left as it is.
        inputs, kwargs: what it is called with.

    Returns: per module what was fused, the named units found, and for each call left to torch the reason; what is
        kept for backward, what is computed again there, and the peak, as `saved_tensors` measures them; graph breaks
        with line and reason; where calls of a fused model reached Dynamo's recompile limit. Buffers, gradients and the
        state of random number generators are what they were.

    Raises:
        InvalidArguments: neither a module nor a function.
    """
    if not callable(model_or_fn):
        raise InvalidArguments(
            f"an object of type {type(model_or_fn).__name__} cannot be called",
            where="explain",
            fix="pass a module or a function, then its inputs",
        )
    subject: Callable[..., Any] = written(model_or_fn)
    apart: AbstractContextManager[None] = nullcontext()
    if isinstance(model_or_fn, nn.Module):
        apart = fused_apart(model_or_fn)
    else:
        subject = functools.wraps(subject)(compiled(subject, new_compiler()))
    with apart, graph_breaks() as breaks:
        memory, runs = measured(subject, inputs, kwargs, differentiates=False)
    has_gradients = any(run.program.phase == "forward" for run in runs) or bool(memory.kept)
    fused: list[FusedCalls] = []
    left: list[LeftCall] = []
    for run in runs:
        fused += [_fused(launch, run) for launch in run.program.launches]
        left += [_left(node, run) for node in run.program.library_calls]
    return FusionReport(
        memory.subject, fused=merged(fused), left=merged(left), memory=memory if has_gradients else None,
        eager=_eager(model_or_fn, inputs, kwargs) if has_gradients else None,
        breaks=tuple(GraphBreak(line, reason) for line, reason in breaks), limits=reached_limits(model_or_fn),
    )  # fmt: skip


def _eager(model_or_fn: Callable[..., Any], inputs: Any, kwargs: Any) -> MemoryReport | None:
    """What the model keeps as it is written, counted on shapes as far as these tell; None where it asks for values."""
    call = written(model_or_fn)
    try:
        with unfused(model_or_fn):
            report = saved_tensors(call, *inputs, dry_run=True, **kwargs)
            return saved_tensors(call, *inputs, **kwargs) if report.uncounted else report
    except (OpGraphError, RuntimeError, NotImplementedError):
        return None


def _fused(launch: Launch, run: Run) -> FusedCalls:
    return FusedCalls(
        path=_common([run.origins[n].module for n in launch.nodes]),
        calls=tuple(str(packet(n)).removeprefix("aten.") for n in launch.nodes),
        units=launch.units,
        inputs=tuple(p.size for p in launch.reads),
        outputs=tuple(p.size for p in launch.writes),
        phase=run.program.phase,
    )


def _left(node: Node, run: Run) -> LeftCall:
    return LeftCall(run.origins[node].module, str(packet(node)).removeprefix("aten."), _reason(node))


def _reason(node: Node) -> str:
    tags = getattr(node.target, "tags", ())
    if torch.Tag.nondeterministic_seeded in tags:
        return "it draws random numbers"
    value = value_of(node)
    if isinstance(value, torch.Tensor) and not value.dtype.is_floating_point and value.dtype is not torch.bool:
        return "integers: positions and indices"
    schema = getattr(node.target, "_schema", None)
    if schema is not None and schema.is_mutable:
        return "it writes into a tensor that exists"
    return "not pointwise: a library op" if torch.Tag.pointwise not in tags else "opgraph has no op for it"


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


def _common(paths: Sequence[str]) -> str:
    """The path of the innermost module that all of these are in."""
    parts = [path.split(".") if path else [] for path in paths]
    count = 0
    while all(len(p) > count and p[count] == parts[0][count] for p in parts):
        count += 1
    return ".".join(parts[0][:count])
