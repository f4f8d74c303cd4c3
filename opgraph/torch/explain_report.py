"""The report of explain: what was fused where, and what was left to torch for which reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeAlias, TypeVar

Shape: TypeAlias = tuple[int, ...]
#: Rows of the table of kept tensors; the largest are shown.
_MOST_KEPT = 20


@dataclass(frozen=True, slots=True)
class FusedCalls:
    """Ops that run in one kernel.

    Attributes:
        path: the innermost module that all of them are in; "" for the whole.
        calls: the ATen ops, in order.
        units: the named units found among them: swish, swiglu, gelu ...
        inputs, outputs: the shapes read and written.
        phase: "forward", "backward", or "inference" for a call without gradients.
        times: how often such a kernel is in the model.
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
        times: how often.
    """

    path: str
    name: str
    why: str
    times: int = 1


@dataclass(frozen=True, slots=True)
class KeptTensor:
    """A tensor kept for backward; parameters and buffers, which exist anyway, are not listed.

    Attributes:
        path: the module that makes it.
        call: the call that makes it, or "input".
        shape, dtype, bytes: what it is.
    """

    path: str
    call: str
    shape: Shape
    dtype: str
    bytes: int


@dataclass(frozen=True, slots=True)
class GraphBreak:
    """A line where Dynamo ended a graph: what stands on both sides of it cannot fuse.

    Attributes:
        line: `file:line` and its code.
        reason: Dynamo's.
    """

    line: str
    reason: str


Entry = TypeVar("Entry", FusedCalls, LeftCall)


@dataclass(frozen=True, slots=True)
class Guess:
    """What is known of a module before it runs.

    Attributes:
        path, kind: the module's name in the model, and its class.
        calls: the pointwise ops that its forward is made of; empty where running decides.
        units: the named units among them.
        why: what decides when it runs.
    """

    path: str
    kind: str
    calls: tuple[str, ...]
    units: tuple[str, ...]
    why: str = ""


@dataclass(frozen=True, slots=True)
class FusionReport:
    """What `fuse` does to a model: `print` shows tables, `.to_dict()` gives data.

    Attributes:
        subject: the model's or function's name.
        fused: the kernels.
        left: the ops that torch runs.
        kept_tensors: what is kept for backward.
        recomputed: how many forward ops backward computes again.
        peak: bytes above the weights over a forward and a backward pass, at most; None of a run without gradients.
        eager_kept, eager_peak: the same of the model as it is written; None where a dry run of it needs values.
        breaks: where the captured graph ends before the forward does.
        guesses: in a report without a run, what is known of the modules.
    """

    subject: str
    fused: tuple[FusedCalls, ...] = ()
    left: tuple[LeftCall, ...] = ()
    kept_tensors: tuple[KeptTensor, ...] = ()
    recomputed: int = 0
    breaks: tuple[GraphBreak, ...] = ()
    guesses: tuple[Guess, ...] = ()
    peak: int | None = None
    eager_kept: int | None = None
    eager_peak: int | None = None

    @property
    def units(self) -> dict[str, int]:
        """How often each named unit was found."""
        found: Counter[str] = Counter()
        for entry in self.fused:
            if entry.phase != "backward":
                found.update({unit: entry.units.count(unit) * entry.times for unit in entry.units})
        for guess in self.guesses:
            found.update(guess.units)
        return dict(sorted(found.items()))

    @property
    def kept(self) -> int:
        """Bytes kept for backward."""
        return sum(t.bytes for t in self.kept_tensors)

    def to_dict(self) -> dict[str, Any]:
        """Everything, as plain data."""
        return {**asdict(self), "units": self.units, "kept": self.kept}

    def __str__(self) -> str:
        lines = [self._headline(), *self._memory()]
        if self.fused:
            rows = [(e.phase, e.path or ".", str(e.times), " ".join(e.calls), ", ".join(e.units)) for e in self.fused]
            lines += ["", "kernels", *_table(("phase", "module", "times", "ops", "units"), rows)]
        if self.kept_tensors:
            largest = sorted(self.kept_tensors, key=lambda t: -t.bytes)
            kept = [(t.path or ".", t.call, f"{t.dtype}{list(t.shape)}", _mib(t.bytes)) for t in largest[:_MOST_KEPT]]
            if len(largest) > _MOST_KEPT:
                rest = largest[_MOST_KEPT:]
                kept.append((f"{len(rest)} more", "", "", _mib(sum(t.bytes for t in rest))))
            lines += ["", "kept for backward", *_table(("module", "call", "tensor", "MiB"), kept)]
        if self.left:
            left = [(name, why, str(n), _some(paths)) for (name, why), (n, paths) in self._left_by_call().items()]
            lines += ["", "left to torch", *_table(("op", "why", "times", "modules"), left)]
        if self.breaks:
            lines += ["", "graph breaks", *_table(("line", "reason"), [(b.line, b.reason) for b in self.breaks])]
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
        text = f"{self.subject}: {calls} ops in {sum(e.times for e in self.fused)} kernels"
        if self.units:
            text += "; " + ", ".join(f"{name} x{count}" for name, count in self.units.items())
        return text

    def _memory(self) -> list[str]:
        if self.peak is None:
            return []
        eager = ("", "") if self.eager_kept is None else (f", eager {_mib(self.eager_kept)}",
                                                          f", eager {_mib(self.eager_peak or 0)}")  # fmt: skip
        return [
            f"  kept for backward, MiB: {_mib(self.kept)}{eager[0]}; {self.recomputed} ops computed again there",
            f"  peak over both passes, MiB: {_mib(self.peak)}{eager[1]}; weights aside",
        ]


def merged(entries: Iterable[Entry]) -> tuple[Entry, ...]:
    """Equal entries as one, with the number of times."""
    found: dict[Entry, int] = {}
    for entry in entries:
        found[entry] = found.get(entry, 0) + 1
    return tuple(replace(entry, times=times) for entry, times in found.items())


def _some(paths: Sequence[str]) -> str:
    return ", ".join(paths[:3]) + (f" and {len(paths) - 3} more" if len(paths) > 3 else "")


def _mib(size: int) -> str:
    return f"{size / 2**20:.2f}" if size else "-"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    cut = [[c if len(c) <= 60 else c[:57] + "..." for c in row] for row in [columns, *rows]]
    widths = [max(len(row[i]) for row in cut) for i in range(len(columns))]
    return ["  " + "  ".join(c.ljust(w) for c, w in zip(row, widths)).rstrip() for row in cut]
