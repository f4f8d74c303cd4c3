"""explain: runs a model or function once and reports what was fused, where, and why the rest was not."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from itertools import takewhile
from typing import Any, TypeAlias, TypeVar

import torch
from torch import nn
from torch.fx import Node

from opgraph.errors import InvalidArguments, OpGraphError
from opgraph.runtime import cpu_compiler
from opgraph.runtime.providers.torch_internals import tensors_in
from opgraph.torch.fuse_module import FusedForward, fused_apart, reached_limits, unfused
from opgraph.torch.graph.aten import packet, value_of
from opgraph.torch.graph.backend import new_compiler
from opgraph.torch.graph.dynamo_entry import GraphBreak, compiled, graph_breaks
from opgraph.torch.graph.launches import Launch
from opgraph.torch.memory.measure import measured, saved_tensors
from opgraph.torch.memory.recomputed import Recomputed, Run
from opgraph.torch.memory.report import Kept, MemoryReport
from opgraph.torch.memory.report_text import aligned, plural, recomputed_rows, size
from opgraph.torch.tracing.guard_discovery import written
from opgraph.torch.tracing.trace import trace

Shape: TypeAlias = tuple[int, ...]
#: The text for graph breaks without any kernel.
_NOTHING = """\
  torch.compile captures nothing of a function with a graph break inside of a loop. What that function calls is
  captured by itself: make the body of the loop a method, or fuse the modules that it calls: ogt.fuse(model.part)."""
#: The number of rows in the tables of kept tensors and of recomputed ops; the largest are shown.
_MOST_ROWS = 20


def explain(model_or_fn: Callable[..., Any], /, *inputs: Any, **kwargs: Any) -> FusionReport:
    """Runs a module or a function once as `fuse` would, forward and, where it has gradients, backward, and reports.

    Args:
        model_or_fn: a module, fused or not, or a function of torch tensors; it is not changed.
        inputs, kwargs: its arguments.

    Returns: the fused ops per module, the named units found, and the reason for each call left to torch; the tensors
        kept for backward, the ops recomputed there, and the peak, as `saved_tensors` measures them; graph breaks with
        line and reason; the functions of a fused model that reached Dynamo's recompile limit. Buffers, gradients and
        the state of random number generators do not change.

    Raises:
        InvalidArguments: neither a module nor a function, or a module with lazy parameters that was not called yet.
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
        breaks=tuple(breaks), limits=reached_limits(model_or_fn),
    )  # fmt: skip


def _eager(model_or_fn: Callable[..., Any], inputs: Any, kwargs: Any) -> MemoryReport | None:
    """Memory of the original model, counted on shapes as far as these suffice; None where it needs values."""
    call = written(model_or_fn)
    has_shapes = not any(tensor.is_nested for tensor in tensors_in((inputs, kwargs)))
    try:
        with unfused(model_or_fn):
            report = saved_tensors(call, *inputs, dry_run=has_shapes, **kwargs)
            return saved_tensors(call, *inputs, **kwargs) if report.uncounted else report
    except (OpGraphError, RuntimeError, NotImplementedError):
        return None


def _fused(launch: Launch, run: Run) -> FusedCalls:
    levels = zip(*(run.origins[n].module.split(".") for n in launch.nodes))
    return FusedCalls(
        path=".".join(names[0] for names in takewhile(lambda names: len(set(names)) == 1, levels)),
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
    if torch.Tag.pointwise not in tags:
        return "not pointwise: a library op"
    if isinstance(value, torch.Tensor) and value.is_cpu and not cpu_compiler.is_available():
        return "there is no C++ compiler"
    return "opgraph has no op for it"


def foresee(model: nn.Module) -> FusionReport:
    """The report on a model without running it: the modules that are pointwise on their own."""
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


@dataclass(frozen=True, slots=True)
class FusedCalls:
    """Ops that run in one kernel.

    Attributes:
        path: the innermost module that contains all of them; "" for the whole.
        calls: the ATen ops, in order.
        units: the named units found among them: swish, swiglu, gelu ...
        inputs, outputs: the shapes read and written.
        phase: "forward", "backward", or "inference" for a call without gradients.
        times: the number of such kernels in the model.
    """

    path: str
    calls: tuple[str, ...]
    units: tuple[str, ...]
    inputs: tuple[Shape, ...]
    outputs: tuple[Shape, ...]
    phase: str
    times: int = 1


@dataclass(frozen=True, slots=True)
class LeftCall:
    """An op that torch runs.

    Attributes:
        path: the module that calls it.
        name: the op.
        why: the reason.
        times: the number of such calls.
    """

    path: str
    name: str
    why: str
    times: int = 1


Entry = TypeVar("Entry", FusedCalls, LeftCall)


@dataclass(frozen=True, slots=True)
class Guess:
    """Information on a module before it runs.

    Attributes:
        path, kind: the module's name in the model, and its class.
        calls: the pointwise ops of its forward; empty if only a run decides.
        units: the named units among them.
        why: what decides in a run.
    """

    path: str
    kind: str
    calls: tuple[str, ...]
    units: tuple[str, ...]
    why: str = ""


@dataclass(frozen=True, slots=True)
class FusionReport:
    """The effects of `fuse` on a model: `print` shows tables, `.to_dict()` returns data.

    Attributes:
        subject: the model's or function's name.
        fused: the kernels.
        left: the ops that torch runs.
        memory: the tensors kept for backward, the ops recomputed there, and the peak; None for a run without gradients.
        eager: the same for the original model; None if a dry run of it needs values.
        breaks: the places where the captured graph ends before the forward ends.
        limits: functions of a fused model whose calls reached Dynamo's recompile limit before this report.
        guesses: in a report without a run, the information on the modules.
    """

    subject: str
    fused: tuple[FusedCalls, ...] = ()
    left: tuple[LeftCall, ...] = ()
    memory: MemoryReport | None = None
    eager: MemoryReport | None = None
    breaks: tuple[GraphBreak, ...] = ()
    guesses: tuple[Guess, ...] = ()
    limits: tuple[str, ...] = ()

    @property
    def units(self) -> dict[str, int]:
        """The number of times that each named unit was found."""
        found: Counter[str] = Counter()
        for entry in self.fused:
            if entry.phase != "backward":
                found.update({unit: entry.units.count(unit) * entry.times for unit in entry.units})
        for guess in self.guesses:
            found.update(guess.units)
        return dict(sorted(found.items()))

    @property
    def kept(self) -> int:
        """Bytes kept for backward: `memory.totals.kept`."""
        return 0 if self.memory is None else self.memory.totals.kept

    @property
    def kept_tensors(self) -> tuple[Kept, ...]:
        """The tensors kept for backward that take memory; parameters and buffers, which exist anyway, do not."""
        return () if self.memory is None else tuple(k for k in self.memory.kept if k.counted)

    @property
    def recomputed(self) -> tuple[Recomputed, ...]:
        """The forward ops that backward recomputes."""
        return () if self.memory is None else self.memory.recomputed

    @property
    def peak(self) -> int | None:
        """The most bytes above the weights in a forward and a backward pass; None for a run without gradients."""
        return None if self.memory is None else self.memory.peak.bytes

    @property
    def eager_kept(self) -> int | None:
        """Bytes that the original model keeps for backward."""
        return None if self.eager is None else self.eager.totals.kept

    @property
    def eager_peak(self) -> int | None:
        """The peak of the original model."""
        return None if self.eager is None else self.eager.peak.bytes

    def to_dict(self) -> dict[str, Any]:
        """The whole report as plain data."""
        found = {
            name: [asdict(entry) for entry in getattr(self, name)] for name in ("fused", "left", "breaks", "guesses")
        }
        memory = {name: None if report is None else report.to_dict()
                  for name, report in (("memory", self.memory), ("eager", self.eager))}  # fmt: skip
        rest = {"units": self.units, "kept": self.kept, "peak": self.peak, "limits": list(self.limits)}
        return {"subject": self.subject, **found, **memory, **rest}

    def __str__(self) -> str:
        lines = [self._headline(), *self._memory()]
        if self.fused:
            rows = [(e.phase, e.path or ".", str(e.times), " ".join(e.calls), ", ".join(e.units)) for e in self.fused]
            lines += ["", "kernels", *_table(("phase", "module", "times", "ops", "units"), rows)]
        if self.kept_tensors:
            largest = sorted(self.kept_tensors, key=lambda t: -t.counted)
            kept = [(t.module or ".", t.op, f"{t.dtype}{list(t.shape)}", t.counted) for t in largest]
            lines += ["", "kept for backward", *_largest(("module", "call", "tensor", "bytes"), kept)]
        if self.recomputed:
            again = recomputed_rows(self.recomputed)
            lines += ["", "computed again in backward", *_largest(("module", "ops", "times", "saves"), again)]
        if self.left:
            left = [(name, why, str(n), _some(paths)) for (name, why), (n, paths) in self._left_by_call().items()]
            lines += ["", "left to torch", *_table(("op", "why", "times", "modules"), left)]
        if self.breaks:
            lines += ["", "graph breaks", *map(str, self.breaks)]
            lines += [] if self.fused else [_NOTHING]
        if self.limits:
            lines += ["", "recompile limits", *(f"  {limit}" for limit in self.limits)]
        if self.guesses:
            seen = [(g.path or ".", g.kind, " ".join(g.calls), ", ".join(g.units) or g.why) for g in self.guesses]
            lines += ["", "modules", *_table(("module", "class", "calls", "units, or what decides"), seen)]
        return "\n".join(lines)

    def _left_by_call(self) -> dict[tuple[str, str], tuple[int, list[str]]]:
        found: dict[tuple[str, str], tuple[int, list[str]]] = {}
        for entry in self.left:
            times, paths = found.get((entry.name, entry.why), (0, []))
            found[entry.name, entry.why] = (times + entry.times, [*paths, entry.path or "."])
        return found

    def _headline(self) -> str:
        if self.guesses:
            known = sum(bool(g.calls) for g in self.guesses)
            return f"{self.subject}: {known} of {len(self.guesses)} modules are known to be pointwise before they run"
        calls = sum(len(e.calls) * e.times for e in self.fused)
        text = f"{self.subject}: {plural(calls, 'op')} in {plural(sum(e.times for e in self.fused), 'kernel')}"
        if self.units:
            text += "; " + ", ".join(f"{name} x{count}" for name, count in self.units.items())
        return text

    def _memory(self) -> list[str]:
        if self.peak is None:
            return []
        eager = ("", "") if self.eager is None else (f", eager {size(self.eager.totals.kept)}",
                                                     f", eager {size(self.eager.peak.bytes)}")  # fmt: skip
        times, saved = sum(r.times for r in self.recomputed), sum(r.saves for r in self.recomputed)
        again = f"; {plural(times, 'op')} computed again there instead of keeping {size(saved)}" if times else ""
        return [
            f"  kept for backward: {size(self.kept)}{eager[0]}{again}",
            f"  peak over both passes: {size(self.peak)}{eager[1]}; weights aside",
        ]


def merged(entries: Iterable[Entry]) -> tuple[Entry, ...]:
    """Merges equal entries into one, with the number of times."""
    found: dict[Entry, int] = {}
    for entry in entries:
        found[entry] = found.get(entry, 0) + 1
    return tuple(replace(entry, times=times) for entry, times in found.items())


def _some(paths: Sequence[str]) -> str:
    return ", ".join(paths[:3]) + (f" and {len(paths) - 3} more" if len(paths) > 3 else "")


def _largest(columns: Sequence[str], rows: Sequence[tuple[str, str, str, int]]) -> list[str]:
    """The table of the first rows, and one for the rest; the last column is bytes."""
    shown = [(*row[:3], size(row[3])) for row in rows[:_MOST_ROWS]]
    rest = rows[_MOST_ROWS:]
    if rest:
        shown.append((f"{len(rest)} more", "", "", size(sum(row[3] for row in rest))))
    return _table(columns, shown)


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return aligned(columns, [[c if len(c) <= 60 else c[:57] + "..." for c in row] for row in rows])
