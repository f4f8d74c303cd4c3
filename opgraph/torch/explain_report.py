"""The report of explain: what was fused where, and what was left to torch for which reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeAlias

Shape: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FusedCalls:
    """Calls of torch functions that ran as one fused op.

    Attributes:
        path: the innermost module that all of them are in; "" for the whole.
        calls: the functions, in order.
        units: the named units found among them: swish, swiglu, gelu ...
        inputs, outputs: the shapes read and written.
        kept: bytes kept for backward, parameters not counted; 0 where no gradient is needed.
        kept_by_torch: what the same calls keep in torch.
        times: how often it ran.
    """

    path: str
    calls: tuple[str, ...]
    units: tuple[str, ...]
    inputs: tuple[Shape, ...]
    outputs: tuple[Shape, ...]
    kept: int
    kept_by_torch: int
    times: int = 1


@dataclass(frozen=True, slots=True)
class LeftCall:
    """A torch function that stayed as it was.

    Attributes:
        path: the module that calls it.
        name: the function.
        why: the reason.
        times: how often.
    """

    path: str
    name: str
    why: str
    times: int = 1


LeftKey: TypeAlias = tuple[str, str, str]


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
        fused: calls that ran as fused ops.
        left: calls left to torch.
        guesses: in a report without a run, what is known of the modules.
    """

    subject: str
    fused: tuple[FusedCalls, ...] = ()
    left: tuple[LeftCall, ...] = ()
    guesses: tuple[Guess, ...] = ()

    @property
    def units(self) -> dict[str, int]:
        """How often each named unit was found."""
        found: Counter[str] = Counter()
        for entry in self.fused:
            found.update({unit: entry.units.count(unit) * entry.times for unit in entry.units})
        for guess in self.guesses:
            found.update(guess.units)
        return dict(sorted(found.items()))

    @property
    def kept(self) -> int:
        """Bytes that the fused calls keep for backward."""
        return sum(e.kept * e.times for e in self.fused)

    @property
    def kept_by_torch(self) -> int:
        """Bytes that the same calls keep in torch."""
        return sum(e.kept_by_torch * e.times for e in self.fused)

    def to_dict(self) -> dict[str, Any]:
        """Everything, as plain data."""
        return {**asdict(self), "units": self.units, "kept": self.kept, "kept_by_torch": self.kept_by_torch}

    def __str__(self) -> str:
        lines = [self._headline()]
        if self.fused:
            rows = [
                (
                    e.path or ".",
                    str(e.times),
                    " ".join(e.calls),
                    ", ".join(e.units),
                    _mib(e.kept_by_torch),
                    _mib(e.kept),
                )
                for e in self.fused
            ]
            lines += [
                "",
                "fused",
                *_table(("module", "times", "calls", "units", "torch keeps, MiB", "kept, MiB"), rows),
            ]
        if self.left:
            left = [(name, why, str(n), _some(paths)) for (name, why), (n, paths) in self._left_by_call().items()]
            lines += ["", "left to torch", *_table(("call", "why", "times", "modules"), left)]
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
        text = f"{self.subject}: {calls} calls in {sum(e.times for e in self.fused)} fused ops"
        if self.units:
            text += "; " + ", ".join(f"{name} x{count}" for name, count in self.units.items())
        if self.kept_by_torch:
            text += f"; they keep {_mib(self.kept)} MiB for backward, {_mib(self.kept_by_torch)} in torch"
        return text


def merged(entries: Iterable[FusedCalls]) -> tuple[FusedCalls, ...]:
    """Equal entries as one, with the number of times."""
    found: dict[FusedCalls, int] = {}
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
