"""Tries a fused model in onnxruntime: it must agree with its source, and be no slower. Slower units stay unfused."""

from __future__ import annotations

import argparse
import contextlib
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from opgraph.cli.agreement import Judged, judged, numpy_outputs, true_outputs
from opgraph.cli.compare import number
from opgraph.cli.feeds import feeds_for
from opgraph.cli.terminal import Step, note
from opgraph.errors import DeviceError, OpGraphError
from opgraph.ir.graph import Graph

if TYPE_CHECKING:
    from opgraph.cli.onnx_file import OnnxFile, Timing
    from opgraph.onnx.draft import Draft
    from opgraph.onnx.request import Request

#: Seconds for one timing comparison; a suspected slowdown is measured again for three times as long.
BUDGET = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A model that was tried.

    Attributes:
        draft: the model.
        request: the request, with the units that turned out slower added to `keep`.
        rows: the comparison of its outputs with the source's; empty if nothing was run.
        timing: the source, the model, and, with a library, the model without it; None if the source did not run.
    """

    draft: Draft
    request: Request
    rows: tuple[Judged, ...] = ()
    timing: Timing | None = None

    @property
    def agrees(self) -> bool:
        """True if every output agrees."""
        return all(row.agrees for row in self.rows)


def march_of(args: argparse.Namespace) -> str:
    """The processors that a library supports, by the C++ compiler's name."""
    return args.march or "native"


@dataclass(slots=True)
class Trial:
    """Writes files under temporary names next to OUT, and compares them with the source."""

    args: argparse.Namespace
    graph: Graph
    target: Path
    step: Step
    original: OnnxFile | None = None
    feeds: Mapping[str, np.ndarray] | None = None

    def best(self, request: Request) -> Outcome:
        """Returns the requested model, without the units that make it slower than its source."""
        outcome = self.tried(request)
        if outcome.timing is None or not outcome.agrees or not outcome.timing.is_slower(1):
            return outcome
        slow, kept = outcome, request.keep
        names = [n for n, count in outcome.draft.summary.units.items() if count]
        for name in names[::-1]:  # whole partitions first: they may prevent onnxruntime's own fusions
            self.step(f"slower than IN: trying without {name}")
            other = self.tried(replace(request, keep=kept | {name}))
            if not other.agrees or other.timing is None:
                continue
            if not other.timing.is_slower(1):
                return _noted(other, slow)
            if outcome.timing is None or other.timing.ratios[1] < outcome.timing.ratios[1]:
                outcome, kept = other, kept | {name}
        self.step("slower than IN: keeping every unit")
        return _noted(self.tried(replace(request, keep=request.keep | frozenset(names))), slow)

    def tried(self, request: Request) -> Outcome:
        """Writes and checks the model for one request, and times it if it agrees."""
        from opgraph.onnx.save import drafted, put

        self.step("fusing and writing")
        draft = drafted(self.graph, request)
        outcome = Outcome(draft=draft, request=request)
        if self.args.unchecked:
            return outcome
        model = self.target.with_name(f".{self.target.name[:80]}.{secrets.token_hex(4)}.onnx")
        # A process that has loaded a library keeps it under that name, so each trial has its own name.
        library = model.with_suffix(".so") if draft.library else None
        try:
            with self._named(model):
                put(draft, model, library, march_of(self.args))
            return self._compared(outcome, model, library)
        finally:
            for leftover in (model, model.with_name(f"{model.name}.data"), library):
                if leftover is not None:
                    leftover.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _named(self, model: Path) -> Iterator[None]:
        """Replaces the temporary names in errors by the names of the requested files."""
        try:
            yield
        except OpGraphError as error:
            library = self.args.ort_library or ""
            error.where = error.where.replace(str(model.with_suffix(".so")), library).replace(
                str(model), str(self.target)
            )
            raise

    def _compared(self, outcome: Outcome, model: Path, library: Path | None) -> Outcome:
        from opgraph.cli.onnx_file import OnnxFile, check_same_ports, timed

        self.step("checking in onnxruntime")
        fused = OnnxFile(str(model), library=str(library) if library else None, label=str(self.target))
        feeds = self.feeds = self.feeds if self.feeds is not None else feeds_for(self.args, fused.inputs)
        try:
            self.original = original = self.original or OnnxFile(self.args.model)
        except DeviceError as error:
            # For example, onnxruntime before 1.31 refuses f64 models with a swish, but may run opgraph's form of them.
            note(f"{error.what}: OUT is compared with the same formulas in NumPy instead")
            want, got = numpy_outputs(self.graph, feeds), fused.run(feeds)
            return replace(outcome, rows=tuple(judged(fused.outputs, want, got, self._truth)))
        check_same_ports(original, fused)
        ways = [fused]
        if library is not None:
            try:
                ways.append(OnnxFile(str(model), label=str(self.target)))
            except DeviceError as error:
                note(f"{error.what}: without the library, OUT does not run")
        want = original.run(feeds)
        rows: list[Judged] = []
        for way in ways:
            rows += judged(original.outputs, want, way.run(feeds), self._truth)
        outcome = replace(outcome, rows=tuple(_farther(rows)))
        if not outcome.agrees:
            return outcome
        self.step("timing in onnxruntime")
        calls = [way.caller(feeds) for way in (original, *ways)]
        timing = timed(calls, BUDGET)
        if timing.is_slower(1):  # again, and longer: other work on the machine has the same effect
            timing = timed(calls, 3 * BUDGET, 600)
        return replace(outcome, timing=timing)

    def _truth(self) -> dict[str, np.ndarray]:
        assert self.feeds is not None
        return true_outputs(self.graph, self.feeds)


def _farther(rows: Sequence[Judged]) -> list[Judged]:
    """For each output, the worse row of two runs of a model, with and without its library."""
    worst: dict[str, Judged] = {}
    for row in rows:
        known = worst.get(row.name)
        if known is None or (known.agrees, -known.apart.absolute) > (row.agrees, -row.apart.absolute):
            worst[row.name] = row
    return list(worst.values())


def _noted(outcome: Outcome, slow: Outcome) -> Outcome:
    kept = sorted(outcome.request.keep - slow.request.keep)
    assert slow.timing is not None
    ratio = number(slow.timing.ratios[1])
    outcome.draft.summary.notes.append(f"kept as spelled: {', '.join(kept)}; with them OUT took {ratio} times as long")
    return outcome
