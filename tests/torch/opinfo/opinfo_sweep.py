"""PyTorch's OpInfo database through opgraph.torch, against eager torch: `python tests/torch/opinfo/opinfo_sweep.py`.

Every op, alone and amid arithmetic, in each way of capture: forward, gradients, second derivatives, dtypes, forms and
layouts, and calls that torch refuses. A line tells of each op, and what is wrong is printed below it.

    python tests/torch/opinfo/opinfo_sweep.py --interpret --log all.jsonl    # what is in the log is not run again
    python tests/torch/opinfo/opinfo_sweep.py --dtypes float32 --shard 0/8
    python tests/torch/opinfo/opinfo_sweep.py --ops clamp,nn.functional.gelu --ways module
    python tests/torch/opinfo/opinfo_sweep.py --summary all.jsonl other.jsonl

With `--interpret` nothing is compiled: kernels' loops are run op by op (`opinfo_interpreted.py`), many times faster.

Of calls that differ in the values of tensors alone one is run (`opinfo_calls.distinct`). Captured ways are given many
calls at once, each alone and amid arithmetic: a graph of them takes little longer to capture than one of them does. A
call that comes out wrong there is run once more by itself.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parent)]

from opinfo_calls import (
    DTYPES,
    Call,
    all_ops,
    distinct,
    dtypes_of,
    form_of,
    forward_calls,
    gradient_calls,
    second_calls,
    wrong_calls,
)
from opinfo_interpreted import interpreted
from opinfo_judge import Judge
from opinfo_refusals import TABLE, Refusal, listed
from opinfo_run import Outcome, run, run_together
from opinfo_ways import TOGETHER, WAYS, Program, Programs, forget

import opgraph
from opgraph.errors import OpGraphError
from opgraph.torch.graph.backend import observed

#: Calls that are captured at once.
TOGETHER_AT_MOST = 16
#: Ops that return memory as it is found.
UNDEFINED = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "empty_permuted")


def _trigamma(x: torch.Tensor) -> torch.Tensor:
    """In float64: its series at x + 20, and the steps down from there."""
    steps = sum((1 / (x + i) ** 2 for i in range(20)), torch.zeros_like(x))
    inverse = 1 / (x + 20)
    factors = (1 / 6, -1 / 30, 1 / 42, -1 / 30, 5 / 66, -691 / 2730)
    return steps + inverse + inverse**2 / 2 + sum(f * inverse ** (2 * k + 3) for k, f in enumerate(factors))


class _Digamma(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return torch.digamma(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0] * _trigamma(*ctx.saved_tensors)


class _Lgamma(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return torch.lgamma(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0] * _Digamma.apply(*ctx.saved_tensors)


def _polygamma(x: torch.Tensor, n: int, **kwargs: Any) -> torch.Tensor:
    return _trigamma(x.double()) if n == 1 else torch.polygamma(n, x)


#: What ops mean in float64, where torch's own are not near enough to tell.
EXACT: dict[str, Callable[..., Any]] = {
    # Its gradient is 1/6 rounded to float32 in torch.
    "nn.functional.hardsigmoid": lambda x, inplace=False: torch.nn.functional.relu6(x + 3) / 6,
    # 1 + erf(x) loses the tail.
    "special.ndtr": lambda x: torch.erfc(x * -(0.5**0.5)) / 2,
    # torch rounds float64 to float32 first, and that to 16 bits.
    "half": lambda x, **kwargs: x,
    "bfloat16": lambda x, **kwargs: x,
    # torch's trigamma has an error of 4e-11 in float64, and is the derivative of digamma.
    "digamma": lambda x: _Digamma.apply(x),
    "lgamma": lambda x: _Lgamma.apply(x),
    "polygamma": _polygamma,
    "special.polygamma": _polygamma,
}


@dataclass(frozen=True)
class Finding:
    """Something that is not as in eager torch.

    Attributes:
        op, way, dtype, form, source: which call.
        amid: whether arithmetic stands around the call.
        derivative: how often it was differentiated.
        kind: "wrong", "raw error", "refused" (and no row of the table lists it), "answered" (where torch raises) or
            "unfused" (runs as it was written, with a warning).
        text: what is wrong.
    """

    op: str
    way: str
    dtype: str
    form: str
    source: str
    amid: bool
    derivative: int
    kind: str
    text: str

    def __str__(self) -> str:
        place = "amid arithmetic" if self.amid else "alone"
        order = ("", ", gradient", ", second derivative")[self.derivative]
        return f"{self.kind}: {self.dtype} {self.form}, {self.way} {place}{order}, {self.source}: {self.text}"


@dataclass
class Case:
    """A call of an op, alone or amid arithmetic, with the judge of what comes out of it."""

    call: Call
    amid: bool
    program: Program
    judge: Judge


class Sweep:
    """Runs the calls of ops.

    Args:
        ways: names of ways of capture.
        most: how many inputs are taken of each source.

    Attributes:
        calls: how many calls there were, of those that differ.
        ran: how many runs there were.
        refused: how often each row of the table of refusals was met.
        fused: the torch ops that kernels of captured graphs computed, and "function" where a function was fused.
    """

    def __init__(self, ways: list[str], most: int | None = None) -> None:
        self.ways = ways
        self.most = most
        self.calls = self.ran = 0
        self.refused: collections.Counter[Refusal] = collections.Counter()
        self.fused: set[str] = set()

    def findings(self, op: Any, dtypes: list[torch.dtype], checks: str = "fgse") -> Iterator[Finding]:
        """What is found of an op.

        Args:
            checks: letters: forward, gradients, second derivatives, errors.
        """
        captured: dict[Any, Any] = {}
        for dtype in dtypes:
            forget()
            calls: list[tuple[int, Iterator[Call]]] = []
            if "f" in checks:
                calls.append((0, forward_calls(op, dtype, self.most)))
            if "g" in checks:
                calls.append((1, gradient_calls(op, dtype, self.most)))
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
                            told = [(case, *self._alone(op, case, derivative, way, captured)) for case in cases]
                        elif derivative < 2:
                            told = self._captured(op, cases, derivative, way)
                        else:
                            continue
                        yield from self._found(op, dtype, way, derivative, told)

    def _found(
        self, op: Any, dtype: torch.dtype, way: str, derivative: int, told: list[tuple[Case, str, str]]
    ) -> Iterator[Finding]:
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

    def _alone(self, op: Any, case: Case, derivative: int, way: str, captured: dict[Any, Any]) -> tuple[str, str]:
        """What is wrong with a case that is run by itself: kind and text."""
        key = case.call.form, case.amid, way
        if key not in captured or way in TOGETHER:
            captured[key] = WAYS[way](case.program)
        self.ran += 1
        got = run(captured[key], case.call, derivative)
        kind, text = self._verdict(op, case.judge, got, way)
        if not kind and not derivative and got.error is None and case.call.source.startswith("sample"):
            kind, text = self._verdict(op, case.judge, run(captured[key], case.call), way)
            text = f"second call: {text}"
        if got.error is None and way == "function":
            self.fused.add(way)
        return kind, text

    def _captured(self, op: Any, cases: list[Case], derivative: int, way: str) -> list[tuple[Case, str, str]]:
        """What is wrong with cases that a way captures as one program."""
        raising = [case for case in cases if case.judge.eager.error is not None]
        told = [(case, *self._alone(op, case, derivative, way, {})) for case in raising]
        cases = [case for case in cases if case.judge.eager.error is None]
        if not cases:
            return told
        self.ran += len(cases)
        calls = [case.call for case in cases]
        program = Programs([case.program for case in cases])
        fused = WAYS[way](program)
        graphs: list[Any] = []
        with observed(graphs.append):
            outcomes = run_together(fused, calls, derivative)
        self.fused.update(_computed(graphs))
        again = [] if derivative or outcomes[0].error is not None else run_together(fused, calls, derivative)
        if outcomes[0].error is not None or outcomes[0].unfused:
            if len(cases) == 1:
                return [*told, (cases[0], *self._alone(op, cases[0], derivative, way, {}))]
            for some in (cases[::2], cases[1::2]):
                told += self._captured(op, some, derivative, way)
            return told
        suspects = []
        for i, case in enumerate(cases):
            problem, number = self._verdict(op, case.judge, outcomes[i], way), ""
            if not problem[0] and again:
                problem, number = self._verdict(op, case.judge, again[i], way), "second call: "
            if problem[0]:
                suspects.append((i, case, problem[0], number + problem[1]))
        if not suspects:
            return told
        eager = run_together(Programs([case.program for case in cases]), calls, derivative)
        for i, case, kind, text in suspects:
            found = self._alone(op, case, derivative, way, {})
            # Of calls that draw random numbers, the second one draws others than it does by itself.
            if not found[0] and not self._verdict(op, case.judge, eager[i], way)[0]:
                found = kind, f"among {len(cases)} calls: {text}"
            told.append((case, *found))
        return told

    def _verdict(self, op: Any, judge: Judge, got: Outcome, way: str) -> tuple[str, str]:
        expected = judge.eager.error
        if isinstance(got.error, OpGraphError):
            if str(got.error).count("\n") < 2:
                return "raw error", f"not three lines: {got.error}"
            return ("refused", str(got.error)) if expected is None else ("", "")
        if got.error is not None:
            # Torch's rules for tensors without data raise other classes of errors than its kernels do.
            if expected is not None and (isinstance(got.error, type(expected)) or not is_of_opgraph(got.error)):
                return "", ""
            return "raw error", told_of(got.error)
        if expected is not None:
            return "answered", f"torch raises {told_of(expected, 0)}"
        problem = judge.problem(got, gradient_strides=way == "function")
        if problem.startswith("value") and op.name in UNDEFINED:
            problem = ""
        if problem or not got.unfused:
            return ("wrong", problem) if problem else ("", "")
        return "unfused", got.unfused


def _computed(graphs: list[Any]) -> Iterator[str]:
    """The torch ops that kernels of captured graphs compute."""
    for captured in graphs:
        for program in (captured.inference, captured.forward, captured.backward):
            for launch in getattr(program, "launches", ()):
                yield from (str(node.target) for node in launch.nodes)


def _cases(op: Any, calls: list[Call], derivative: int) -> Iterator[Case]:
    exact = EXACT.get(op.name)
    for call in calls:
        function = form_of(op, call.form)
        assert function is not None
        for amid in (False, True):
            if derivative and not amid and call.form.startswith("in place"):
                continue  # torch refuses to write into what it differentiates by
            program = Program(function, amid)
            judge = Judge(program, call, derivative, None if exact is None else Program(exact, amid))
            yield Case(call, amid, program, judge)


#: Through these a fused module is called and enters Dynamo.
ENTRANCES = ("fuse_module.py", "torch_internals.py")


def is_of_opgraph(error: BaseException) -> bool:
    """Whether an error came up in opgraph's own code, or in what that called, rather than while Dynamo captured."""
    root = Path(opgraph.__file__).parent
    files = [Path(frame.filename.partition("#")[0]) for frame in traceback.extract_tb(error.__traceback__)]
    return any(file.is_relative_to(root) and file.name not in ENTRANCES for file in files)


def told_of(error: BaseException, frames: int = 3) -> str:
    lines = str(error).strip().splitlines() or [""]
    places = traceback.extract_tb(error.__traceback__)[-frames:] if frames else []
    where = " < ".join(f"{Path(f.filename).name}:{f.lineno}" for f in reversed(places))
    return f"{type(error).__name__}: {lines[0][:160]}" + (f" ({where})" if where else "")


def chosen(names: str, shard: str) -> list[Any]:
    """Ops by name, or a part of all: "k/n" is every n-th from the k-th."""
    part, parts = map(int, shard.split("/"))
    ops = all_ops()
    if names:
        wanted = names.split(",")
        ops = [op for op in ops if op.formatted_name in wanted or op.name in wanted]
    return ops[part::parts]


def swept(sweep: Sweep, op: Any, dtype: torch.dtype, checks: str) -> dict[str, Any]:
    """A record of the log: what came of an op in one dtype."""
    start, used, calls, ran, before = (
        time.monotonic(),
        time.process_time(),
        sweep.calls,
        sweep.ran,
        sweep.refused.copy(),
    )
    sweep.fused.clear()
    found = list(sweep.findings(op, [dtype], checks))
    return {
        "op": op.formatted_name,
        "dtype": str(dtype).removeprefix("torch."),
        "ways": ",".join(sweep.ways),
        "checks": checks,
        "most": sweep.most,
        "calls": sweep.calls - calls,
        "runs": sweep.ran - ran,
        "seconds": round(time.monotonic() - start, 1),
        "processor_seconds": round(time.process_time() - used, 1),
        "fused": sorted(sweep.fused),
        "refused": [[TABLE.index(row), n] for row, n in (sweep.refused - before).items()],
        "found": [[f.kind, str(f)] for f in found],
    }


def line_of(record: dict[str, Any], most: int) -> str:
    """A record in a line, with up to so many findings of each kind below it."""
    kinds = collections.Counter(kind for kind, _ in record["found"])
    told = ", ".join(f"{n} {kind}" for kind, n in kinds.items())
    lines = [f"{record['op']} {record['dtype']}: {record['runs']} runs, {record['seconds']} s. {told}"]
    shown: collections.Counter[str] = collections.Counter()
    for kind, text in record["found"]:
        shown[kind] += 1
        if shown[kind] <= most:
            lines.append("    " + text.replace("\n", " | "))
    return "\n".join(lines)


def summary(records: list[dict[str, Any]]) -> str:
    """What ran, by dtype, what was found, and how often each row of the table of refusals was met."""
    lines = []
    for dtype in sorted({r["dtype"] for r in records}):
        some = [r for r in records if r["dtype"] == dtype]
        calls, runs, seconds = (sum(r[name] for r in some) for name in ("calls", "runs", "processor_seconds"))
        ops = len({r["op"] for r in some})
        lines.append(f"{dtype}: {ops} ops, {calls} calls, {runs} runs, {seconds / 60:.0f} processor minutes")
    met: collections.Counter[int] = collections.Counter()
    for record in records:
        met.update(dict(record["refused"]))
    lines += [f"{met[i]} refused: {row.says} [{row.reason}]" for i, row in enumerate(TABLE)]
    kinds = collections.Counter(kind for r in records for kind, _ in r["found"])
    total = sum(r["runs"] for r in records)
    return "\n".join([*lines, f"{total} runs: " + (", ".join(f"{n} {k}" for k, n in kinds.items()) or "nothing found")])


def read_log(path: Path) -> list[dict[str, Any]]:
    """The records of a log."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def main() -> int:
    """The command; its exit status is 1 where something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", default="", help="names, with commas between them; all where there are none")
    parser.add_argument("--dtypes", default="", help="all where there are none")
    parser.add_argument("--ways", default="function,module", help="which, of " + ", ".join(WAYS))
    parser.add_argument("--checks", default="fgse", help="letters: forward, gradients, second derivatives, errors")
    parser.add_argument("--shard", default="0/1", metavar="K/N", help="every N-th op from the K-th")
    parser.add_argument("--most", type=int, default=None, help="inputs of each source; all where this is left out")
    parser.add_argument("--lines", type=int, default=3, help="findings printed of each op and kind")
    parser.add_argument("--interpret", action="store_true", help="compile nothing: run kernels' loops op by op")
    parser.add_argument("--log", type=Path, help="a file to add records to; what it has is not run again")
    parser.add_argument("--summary", type=Path, nargs="+", metavar="LOG", help="print the findings and sums of logs")
    given = parser.parse_args()
    if given.summary:
        records = [r for path in given.summary for r in read_log(path)]
        for record in records:
            if record["found"]:
                print(line_of(record, given.lines))
        print(summary(records))
        return 0
    records = read_log(given.log) if given.log else []
    known = {(r["op"], r["dtype"], r["ways"], r["checks"], r["most"]) for r in records}
    sweep = Sweep(given.ways.split(","), given.most)
    wanted = given.dtypes.split(",") if given.dtypes else [str(d).removeprefix("torch.") for d in DTYPES]
    with interpreted() if given.interpret else contextlib.nullcontext():
        ops = chosen(given.ops, given.shard)
        for name in wanted:
            dtype = getattr(torch, name)
            for op in ops:
                key = op.formatted_name, name, given.ways, given.checks, given.most
                if dtype not in dtypes_of(op) or key in known:
                    continue
                record = swept(sweep, op, dtype, given.checks)
                records.append(record)
                print(line_of(record, given.lines), flush=True)
                if given.log:
                    with given.log.open("a") as log:
                        log.write(json.dumps(record) + "\n")
    print(summary(records))
    return 1 if any(r["found"] for r in records) else 0


if __name__ == "__main__":
    sys.exit(main())
