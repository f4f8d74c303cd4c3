"""explain: runs a model or function once and tells what was fused, where, and why the rest was not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.fx import Node
from torch.utils._pytree import tree_leaves

from opgraph.errors import InvalidArguments, OpGraphError
from opgraph.torch.explain_report import FusedCalls, FusionReport, GraphBreak, Guess, KeptTensor, LeftCall, merged
from opgraph.torch.fuse_module import FusedForward, forward_of, unfused
from opgraph.torch.graph.aten import packet, value_of
from opgraph.torch.graph.backend import Captured, new_compiler, observed
from opgraph.torch.graph.dynamo_entry import compiled
from opgraph.torch.graph.launches import Launch
from opgraph.torch.graph.origin import origin_of
from opgraph.torch.graph.program import Program
from opgraph.torch.graph.saved import PARAMETER, Memory
from opgraph.torch.graph.sizes import SizedPrograms
from opgraph.torch.graph.steps import watched_by
from opgraph.torch.graph.torch_internals import graph_breaks
from opgraph.torch.graph.views import is_view
from opgraph.torch.memory.measure import saved_tensors
from opgraph.torch.memory.report import MemoryReport
from opgraph.torch.memory.watch import Watch, existing_storages, storage_of
from opgraph.torch.tracing.reads import written
from opgraph.torch.tracing.trace import trace


def explain(model_or_fn: Callable[..., Any], /, *inputs: Any, **kwargs: Any) -> FusionReport:
    """Runs a module or a function once as `fuse` would, forward and, where it has gradients, backward, and reports.

    Args:
        model_or_fn: a module, fused or not, or a function of torch tensors; it is left as it is.
        inputs, kwargs: what it is called with.

    Returns: per module what was fused, the named units found, and for each call left to torch the reason; what is
        kept for backward, what is computed again there, and graph breaks with line and reason. Forward side effects
        (running statistics, random numbers) happen; gradients of parameters stay as they are.

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
    memory: Memory = "least"
    rounding = "store"
    forward = written(model_or_fn)
    given = inputs
    if isinstance(model_or_fn, nn.Module):
        wrapper = model_or_fn.__dict__.get("forward")
        if isinstance(wrapper, FusedForward):
            forward, memory, rounding = forward_of, wrapper.memory, wrapper.rounding
            given = model_or_fn, wrapper.instead, *inputs
    captured: list[Captured] = []
    with observed(captured.append), graph_breaks() as breaks:
        peak = _run(compiled(forward, new_compiler(memory, rounding)), given, kwargs)
    eager = None if peak is None else _eager(model_or_fn, forward, inputs, kwargs)
    fused: list[FusedCalls] = []
    left: list[LeftCall] = []
    kept: list[KeptTensor] = []
    again: set[str] = set()
    for graph in captured:
        names: set[str] = set()
        for phase in ("inference", "forward", "backward"):
            for program in _programs(getattr(graph, phase)):
                fused += [_fused(launch, phase) for launch in program.launches]
                left += [_left(node) for node in program.library_calls]
                own = {n.name for n in program.module.graph.nodes if n.op == "call_function" and not is_view(n)}
                if phase == "forward":
                    names, kept = own, [*kept, *_kept(program)]
                elif phase == "backward":
                    again |= {n.name for n in program.module.graph.nodes if n.name in names & own}
    return FusionReport(
        name, fused=merged(fused), left=merged(left), kept_tensors=tuple(kept), recomputed=len(again),
        breaks=tuple(GraphBreak(line, reason) for line, reason in breaks), peak=peak,
        eager_kept=None if eager is None else eager.totals.kept, eager_peak=None if eager is None else eager.peak.bytes,
    )  # fmt: skip


def _run(call: Callable[..., Any], inputs: Any, kwargs: Any) -> int | None:
    """Runs a compiled call forward, and backward where it has gradients: the peak in bytes, or None."""
    given = {s._cdata: s.nbytes() for t in tree_leaves((inputs, kwargs)) if isinstance(t, torch.Tensor)
             if (s := storage_of(t)) is not None}  # fmt: skip
    watch = Watch(existing_storages(), lambda: "", dry_run=False, meta=False)
    watch.bytes = sum(given.values())
    with watch, watched_by(watch):
        has_gradients = _differentiate(call(*inputs, **kwargs))
    return max((s.bytes for s in watch.samples), default=watch.bytes) if has_gradients else None


def _eager(model_or_fn: Any, forward: Callable[..., Any], inputs: Any, kwargs: Any) -> MemoryReport | None:
    """What the model keeps as it is written, counted on shapes; None where it asks for values."""
    subject = model_or_fn if isinstance(model_or_fn, nn.Module) else forward
    try:
        with unfused(model_or_fn):
            return saved_tensors(subject, *inputs, dry_run=True, **kwargs)
    except (OpGraphError, RuntimeError, NotImplementedError):
        return None


def _programs(compiled: Program | SizedPrograms | None) -> list[Program]:
    if isinstance(compiled, SizedPrograms):
        return list(compiled.programs.values())
    return [] if compiled is None else [compiled]


def _differentiate(outputs: Any) -> bool:
    """Runs backward without touching the gradients of parameters; whether there was any."""
    found = [t for t in tree_leaves(outputs) if isinstance(t, torch.Tensor) and t.requires_grad and t.grad_fn]
    leaves, seen, waiting = [], set(), [t.grad_fn for t in found]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            leaves.append(node.variable)
        waiting += [following for following, _ in node.next_functions]
    if leaves:
        torch.autograd.grad(found, leaves, [torch.ones_like(t) for t in found], allow_unused=True)
    return bool(leaves)


def _fused(launch: Launch, phase: str) -> FusedCalls:
    origins = [origin_of(n) for n in launch.nodes]
    return FusedCalls(
        path=_common([o.module for o in origins]),
        calls=tuple(str(packet(n)).removeprefix("aten.") for n in launch.nodes),
        units=launch.units,
        inputs=tuple(p.size for p in launch.reads),
        outputs=tuple(p.size for p in launch.writes),
        phase=phase,
    )


def _left(node: Node) -> LeftCall:
    return LeftCall(origin_of(node).module, str(packet(node)).removeprefix("aten."), _reason(node))


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


def _kept(program: Program) -> list[KeptTensor]:
    found = []
    for node in program.saved:
        value = value_of(node)
        if not isinstance(value, torch.Tensor) or PARAMETER in node.meta:
            continue
        origin = origin_of(node)
        call = "input" if node.op == "placeholder" else origin.call
        found.append(KeptTensor(origin.module, call, tuple(value.shape), str(value.dtype)[6:], value.nbytes))
    return found


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
