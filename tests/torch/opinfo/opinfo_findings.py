"""The calls of an op through opgraph.torch, and the differences from eager torch that they show.

Many calls are captured as one graph, each alone and amid arithmetic: such a graph takes little longer to capture than
a graph of one call. A call whose outcome is wrong there is run once more on its own.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from opinfo_calls import (
    PARTLY,
    SPREAD,
    TURNED,
    Call,
    distinct,
    form_of,
    forward_calls,
    gradient_calls,
    second_calls,
    wrong_calls,
)
from opinfo_exact import DRAWN, exact, is_undefined
from opinfo_judge import Judge
from opinfo_refusals import Refusal, listed
from opinfo_run import Outcome, run, run_together
from opinfo_verdict import Finding, is_torchs, verdict
from opinfo_ways import TOGETHER, WAYS, Program, Programs, by_torch, forget, nothing_compiled
from torch import nn

from opgraph.torch.graph.backend import observed

#: The maximum number of calls that are captured as one graph.
TOGETHER_AT_MOST = 16


@dataclass
class Case:
    """A call of an op, alone or amid arithmetic, with the judge of its outcome."""

    call: Call
    amid: bool
    program: Callable[..., Any]
    judge: Judge


#: A case, with the kind and the text of its problem.
Told = tuple[Case, str, str]


class Sweep:
    """Runs the calls of ops.

    Args:
        ways: names of ways of capture.
        most: the maximum number of inputs from each source.

    Attributes:
        calls: the number of distinct calls.
        ran: the number of runs.
        refused: for each row of the table of refusals, the number of findings that it lists.
        fused: the torch ops that kernels of captured graphs computed, and "function" where a function was fused.
    """

    def __init__(self, ways: list[str], most: int | None = None) -> None:
        self.ways = ways
        self.most = most
        self.calls = self.ran = 0
        self.refused: collections.Counter[Refusal] = collections.Counter()
        self.fused: set[str] = set()

    def findings(self, op: Any, dtypes: list[torch.dtype], checks: str = "fgse") -> Iterator[Finding]:
        """Runs the calls of an op and yields the findings.

        Args:
            checks: letters: forward (f), gradients (g), second derivatives (s), errors (e); forward and gradients of
                turned inputs (t) and of other layouts (l); inputs with one gradient where several could have one (p).
        """
        functions: dict[Any, Any] = {}
        for dtype in dtypes:
            calls: list[tuple[int, Iterator[Call]]] = []
            if "f" in checks:
                calls.append((0, forward_calls(op, dtype, self.most)))
            if "g" in checks:
                calls.append((1, gradient_calls(op, dtype, self.most)))
            for letter, sources in (("t", TURNED), ("l", SPREAD)):
                if letter in checks:
                    calls.append((0, forward_calls(op, dtype, self.most, sources)))
                    calls.append((1, gradient_calls(op, dtype, self.most, sources)))
            if "p" in checks:
                calls.append((1, gradient_calls(op, dtype, self.most, PARTLY)))
            if "s" in checks and dtype == torch.float64:
                calls.append((2, second_calls(op, self.most)))
            if "e" in checks and dtype == torch.float32:
                calls.append((0, wrong_calls(op)))
            for derivative, some in calls:
                kept = distinct(some)
                self.calls += len(kept)
                for first in range(0, len(kept), TOGETHER_AT_MOST):
                    cases = list(_cases(op, kept[first : first + TOGETHER_AT_MOST], derivative))
                    for way in self.ways:
                        if way not in TOGETHER:
                            told = [self._function(op, case, derivative, way, functions) for case in cases]
                        elif derivative < 2:
                            told = self._captured(op, cases, derivative, way)
                        else:
                            continue
                        yield from self._found(op, dtype, way, derivative, told)

    def _found(self, op: Any, dtype: torch.dtype, way: str, derivative: int, told: list[Told]) -> Iterator[Finding]:
        name = str(dtype).removeprefix("torch.")
        for case, kind, text in told:
            if not kind:
                continue
            call = case.call
            finding = Finding(op.formatted_name, way, name, call.form, call.source, case.amid, derivative, kind, text)
            row = listed(finding)
            if row is None:
                yield finding
            else:
                self.refused[row] += 1

    def _function(self, op: Any, case: Case, derivative: int, way: str, functions: dict[Any, Any]) -> Told:
        """Runs a case in a way that keeps its capture for later calls with other arguments."""
        key = case.call.form, case.amid, way
        if key not in functions:
            functions[key] = WAYS[way](case.program)
        self.ran += 1
        got = run(functions[key], case.call, derivative)
        kind, text = self._verdict(op, case, got, way)
        if not kind and not derivative and got.error is None and case.call.source.startswith("sample"):
            kind, text = self._verdict(op, case, run(functions[key], case.call), way)
            text = f"second call: {text}"
        if got.error is None:
            self.fused.add(way)
        return case, kind, text

    def _captured(self, op: Any, cases: list[Case], derivative: int, way: str) -> list[Told]:
        """Runs cases in a way that captures whole programs: all answered calls as one, each raising call on its own."""
        raising = [case for case in cases if case.judge.eager.error is not None]
        answered = [case for case in cases if case.judge.eager.error is None]
        told = [told for case in raising for told in self._together(op, [case], derivative, way)]
        return told + (self._together(op, answered, derivative, way) if answered else [])

    def _together(self, op: Any, cases: list[Case], derivative: int, way: str) -> list[Told]:
        """Runs calls that are captured as one program; where a problem shows, runs the calls in question separately."""
        self.ran += len(cases)
        calls = [case.call for case in cases]
        runs, graphs = _runs(self._capture(cases, WAYS[way]), calls, derivative)
        self.fused.update(_computed(graphs))
        problems = []
        for i, case in enumerate(cases):
            kind, text = self._verdict(op, case, runs[0][i], way)
            if not kind and len(runs) > 1:
                kind, text = self._verdict(op, case, runs[1][i], way)
                text = f"second call: {text}"
            if not kind and not graphs and case.judge.eager.error is None:
                kind, text = "not compiled", "no graph was captured, and there was no warning"
            problems.append((kind, text))
        if not any(kind for kind, _ in problems):
            return []
        lost = runs[0][0].error is not None or runs[0][0].unfused or not graphs
        if lost and len(cases) > 1:  # find the call that causes it
            halves = cases[::2], cases[1::2]
            return [told for some in halves for told in self._together(op, some, derivative, way)]
        by_itself: dict[int, list[Told]] = {}
        if len(cases) > 1:
            suspects = [i for i, (kind, _) in enumerate(problems) if kind]
            by_itself = {i: self._together(op, [cases[i]], derivative, way) for i in suspects}
            # A call that Dynamo leaves to torch when it is alone may still give a wrong result among others.
            for i in suspects:
                if problems[i][0] != "not compiled":
                    by_itself[i] = [told for told in by_itself[i] if told[1] != "not compiled"]
            if all(by_itself.values()):
                return [told for found in by_itself.values() for told in found]
        eager = run_together(self._capture(cases, lambda program: program), calls, derivative)
        torchs, _ = _runs(self._capture(cases, partial(by_torch, way)), calls, derivative)
        told = []
        for i, (case, (kind, text)) in enumerate(zip(cases, problems, strict=True)):
            if by_itself.get(i):
                told += by_itself[i]
            elif kind and not (len(cases) > 1 and self._verdict(op, case, eager[i], way)[0]):
                mine = is_torchs(case.judge, (kind, text), [run[i] for run in torchs], way)
                number = f"among {len(cases)} calls: " if len(cases) > 1 else ""
                told.append((case, "torch.compile" if mine else kind, number + text))
        return told

    def _capture(self, cases: list[Case], how: Callable[[nn.Module], Callable[..., Any]]) -> Callable[..., Any]:
        """Captures the programs of the cases as one program, which takes (args, kwargs) of each."""
        return how(Programs([case.program for case in cases]))

    def _verdict(self, op: Any, case: Case, got: Outcome, way: str) -> tuple[str, str]:
        return verdict(case.judge, got, way, undefined=is_undefined(op.name, case.call.source))


def _runs(program: Any, calls: list[Call], derivative: int) -> tuple[list[list[Outcome]], list[Any]]:
    """The outcomes of a run, and of a second one after a successful forward, which must compile nothing; the graphs."""
    forget()  # also that Dynamo left a piece of code to torch
    graphs: list[Any] = []
    with observed(graphs.append):
        runs = [run_together(program, calls, derivative)]
    if not derivative and runs[0][0].error is None:
        with nothing_compiled():
            runs.append(run_together(program, calls, derivative))
    return runs, graphs


def _computed(graphs: list[Any]) -> Iterator[str]:
    """The torch ops that kernels of captured graphs compute."""
    for captured in graphs:
        for program in (captured.inference, captured.forward, captured.backward):
            for launch in getattr(program, "launches", ()):
                yield from (str(node.target) for node in launch.nodes)


def _cases(op: Any, calls: list[Call], derivative: int) -> Iterator[Case]:
    for call in calls:
        meant = exact(op.name, call.form)
        function = form_of(op, call.form)
        assert function is not None
        for amid in (False, True):
            if derivative and not amid and call.form.startswith("in place"):
                continue  # torch does not allow in-place writes to leaves that require a gradient
            program = Program(function, amid)
            truth = None if meant is None else Program(meant, amid)
            yield Case(call, amid, program, Judge(program, call, derivative, truth, drawn=op.name in DRAWN))
