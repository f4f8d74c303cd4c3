"""PyTorch's OpInfo database through opgraph.torch, against eager torch: `python tests/torch/opinfo/opinfo_sweep.py`.

Every op, alone and amid arithmetic, in each way of capture: forward, gradients, second derivatives, dtypes, forms and
layouts, and calls that torch refuses. A line tells of each op, and what is wrong is printed below it.

    python tests/torch/opinfo/opinfo_sweep.py --dtypes float32 --shard 0/8
    python tests/torch/opinfo/opinfo_sweep.py --ops clamp,nn.functional.gelu --ways module
    PATH= .venv/bin/python tests/torch/opinfo/opinfo_sweep.py    # without a compiler: op by op, many times faster
"""

from __future__ import annotations

import argparse
import collections
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
    dtypes_of,
    form_of,
    forward_calls,
    gradient_calls,
    second_calls,
    wrong_calls,
)
from opinfo_judge import Judge
from opinfo_refusals import TABLE, Refusal, listed
from opinfo_run import Outcome, run
from opinfo_ways import ANEW, WAYS, Program

from opgraph.errors import OpGraphError

#: Ops that return memory as it is found.
UNDEFINED = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "empty_permuted")
#: What ops mean in float64, where torch's own are not near enough to tell.
EXACT: dict[str, Callable[..., Any]] = {
    # Its gradient is 1/6 rounded to float32 in torch.
    "nn.functional.hardsigmoid": lambda x, inplace=False: torch.nn.functional.relu6(x + 3) / 6,
    # 1 + erf(x) loses the tail.
    "special.ndtr": lambda x: torch.erfc(x * -(0.5**0.5)) / 2,
    # torch rounds float64 to float32 first, and that to 16 bits.
    "half": lambda x, **kwargs: x,
    "bfloat16": lambda x, **kwargs: x,
}


@dataclass(frozen=True)
class Finding:
    """Something that is not as in eager torch.

    Attributes:
        op, way, dtype, form, source: which call.
        amid: whether arithmetic stands around the call.
        derivative: how often it was differentiated.
        kind: "wrong", "raw error", "refused" (and no row of the table lists it) or "answered" (where torch raises).
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


class Sweep:
    """Runs the calls of ops.

    Args:
        ways: names of ways of capture.
        most: how many inputs are taken of each source.

    Attributes:
        ran: how many runs there were.
        refused: how often each row of the table of refusals was met.
    """

    def __init__(self, ways: list[str], most: int | None = None) -> None:
        self.ways = ways
        self.most = most
        self.ran = 0
        self.refused: collections.Counter[Refusal] = collections.Counter()

    def findings(self, op: Any, dtypes: list[torch.dtype], checks: str = "fgse") -> Iterator[Finding]:
        """What is found of an op.

        Args:
            checks: letters: forward, gradients, second derivatives, errors.
        """
        captured: dict[Any, Any] = {}
        for dtype in dtypes:
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
                for call in some:
                    for amid in (False, True):
                        yield from self._judged(op, dtype, call, amid, derivative, captured)

    def _judged(
        self, op: Any, dtype: torch.dtype, call: Call, amid: bool, derivative: int, captured: dict[Any, Any]
    ) -> Iterator[Finding]:
        function = form_of(op, call.form)
        assert function is not None
        if derivative and not amid and call.form.startswith("in place"):
            return  # torch refuses to write into what it differentiates by
        program = Program(function, amid)
        exact = EXACT.get(op.name)
        judge = Judge(program, call, derivative, None if exact is None else Program(exact, amid))
        for way in self.ways:
            key = call.form, amid, way
            if key not in captured or way in ANEW:
                captured[key] = WAYS[way](program)
            self.ran += 1
            got = run(captured[key], call, derivative)
            kind, text = self._verdict(op, judge, got, way)
            if not kind and not derivative and got.error is None and call.source.startswith("sample"):
                kind, text = self._verdict(op, judge, run(captured[key], call), way)
                text = f"second call: {text}"
            if not kind:
                continue
            name = str(dtype).removeprefix("torch.")
            finding = Finding(op.formatted_name, way, name, call.form, call.source, amid, derivative, kind, text)
            row = listed(finding) if kind == "refused" else None
            if row is None:
                yield finding
            else:
                self.refused[row] += 1

    def _verdict(self, op: Any, judge: Judge, got: Outcome, way: str) -> tuple[str, str]:
        expected = judge.eager.error
        if isinstance(got.error, OpGraphError):
            if str(got.error).count("\n") < 2:
                return "raw error", f"not three lines: {got.error}"
            return ("refused", str(got.error)) if expected is None else ("", "")
        if got.error is not None:
            if expected is not None and isinstance(got.error, type(expected)):
                return "", ""
            return "raw error", _told(got.error)
        if expected is not None:
            return "answered", f"torch raises {_told(expected, 0)}"
        problem = judge.problem(got, gradient_strides=way == "function")
        if problem.startswith("value") and op.name in UNDEFINED:
            return "", ""
        return ("wrong", problem) if problem else ("", "")


def _told(error: BaseException, frames: int = 3) -> str:
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
    given = parser.parse_args()
    sweep = Sweep(given.ways.split(","), given.most)
    wanted = given.dtypes.split(",") if given.dtypes else [str(d).removeprefix("torch.") for d in DTYPES]
    total: collections.Counter[str] = collections.Counter()
    for op in chosen(given.ops, given.shard):
        start, before = time.monotonic(), sweep.ran
        dtypes = [d for d in dtypes_of(op) if str(d).removeprefix("torch.") in wanted]
        found = list(sweep.findings(op, dtypes, given.checks))
        kinds = collections.Counter(f.kind for f in found)
        total += kinds
        told = ", ".join(f"{n} {kind}" for kind, n in kinds.items())
        print(f"{op.formatted_name}: {sweep.ran - before} runs, {time.monotonic() - start:.1f} s. {told}", flush=True)
        shown: collections.Counter[str] = collections.Counter()
        for finding in found:
            shown[finding.kind] += 1
            if shown[finding.kind] <= given.lines:
                print("    " + str(finding).replace("\n", " | "), flush=True)
    whole = not (given.ops or given.dtypes or given.most) and given.shard == "0/1" and given.checks == "fgse"
    for row in TABLE if whole else ():
        if not sweep.refused[row]:
            print(f"refused no more: {row.says} ({row.reason})")
    print(f"{sum(sweep.refused.values())} refusals that the table lists")
    print(f"{sweep.ran} runs: " + (", ".join(f"{n} {kind}" for kind, n in total.items()) or "nothing found"))
    return 1 if total else 0


if __name__ == "__main__":
    sys.exit(main())
