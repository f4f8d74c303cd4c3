"""Random graphs through every way of computing: `python tests/accuracy/random_graphs.py --seeds 0:200`.

A seed is a graph over the whole registry with arrays for it. Every way to call it, its gradients, its ONNX files, and
the same function in torch are compared with the reference, within the error that rounding allows. Problems are printed
with the seed and, with --shrink, with the smallest part of the graph that shows them. `tests/fuzz/README.md` has more.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import select
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
# Threads sleep until the next parallel loop: spinning ones take two thirds of a busy core's time. The reference's
# products are small. The setting is read when torch and NumPy are imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np
import random_truth
from random_again import again
from random_calls import calls
from random_files import files
from random_gradients import gradients
from random_known import found_once
from random_large import large_scenario
from random_scenario import Scenario, axes_scenario, scenario, square_scenario
from random_shrink import shrunk
from random_sizes import sizes
from random_teams import teams
from random_together import Together
from random_torch import torch_calls
from random_written import written

from opgraph.runtime import cpu_compiler

Check = Callable[[Scenario, random.Random], Iterator[str]]
CHECKS: dict[str, Check] = {
    "calls": calls,
    "gradients": gradients,
    "files": files,
    "torch": torch_calls,
    "sizes": sizes,
    "written": written,
    "again": again,
    "teams": teams,
}
#: Generators of graphs. With large arrays the check of files gives no further information.
DRAWS: dict[str, Callable[[int], Scenario]] = {
    "small": scenario,
    "square": square_scenario,
    "axes": axes_scenario,
    "large": large_scenario,
    "huge": partial(large_scenario, huge=True),
}
_SMALL = ("small", "square", "axes")
#: The maximum number of problems printed for one check.
_MOST = 5
#: Seconds between two progress lines.
_EVERY = 60.0
#: Python seconds of one core beyond which a seed is reported, and bytes beyond which a process is.
_LONG, _LARGE = 60.0, 4 << 30
#: The number of seeds that run concurrently, so that their kernels are compiled together, and of seeds per process.
_BESIDE, _OF_A_PROCESS = 150, 150
#: The same for large arrays, which take more memory.
_LARGE_BESIDE, _LARGE_OF_A_PROCESS = 40, 80


def problems(found: Scenario, check: Check, seed: int) -> list[str]:
    """The problems that a check finds, including an exception."""
    told: list[str] = []
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        try:
            for problem in check(found, random.Random(seed)):
                told.append(problem)
                if len(told) == _MOST:
                    break
        except Exception as error:
            frames = traceback.extract_tb(error.__traceback__)[-3:]
            places = " < ".join(f"{Path(f.filename).name}:{f.lineno}" for f in reversed(frames))
            told.append(f"{type(error).__name__}: {error} ({places})")
    return told


@dataclass
class Run:
    """Checks of many seeds.

    Args:
        names: the names of the checks.
        shrink: True to search for the smallest part that shows a problem.
        optimized: seeds divisible by it compile each kernel separately, with the flags of all kernels. The kernels of
            the others are compiled with -O0, those of many seeds at once.
        arrays: the generator of graphs, one of DRAWS.
        clang: the command of a clang for the kernels of many seeds, at -O0 in a third of GCC's time; empty: GCC's.
    """

    names: list[str]
    shrink: bool = False
    optimized: int = 1
    arrays: str = "small"
    clang: Sequence[str] = ()

    def of(self, seeds: Sequence[int]) -> Iterator[bool]:
        """Runs all checks on the scenarios of seeds and prints what they find.

        Returns: for each seed, as soon as it has run, True if it showed problems.
        """
        alone = [seed for seed in seeds if cpu_compiler.find_compiler() is None or seed % self.optimized == 0]
        others = [seed for seed in seeds if seed not in alone]
        with found_once():
            for seed in alone:
                yield self._one(seed, self.names)
            if others:
                with _at_level("-O0"):
                    # Dynamo holds a lock while it compiles a function, which would block all other threads.
                    beside = [name for name in self.names if name != "torch"]
                    wrong: dict[int, bool] = {}
                    at_once = _BESIDE if self.arrays in _SMALL else _LARGE_BESIDE
                    Together(at_once, self.clang).run(partial(self._into, wrong, seed, beside) for seed in others)
                    for seed in others:
                        yield ("torch" in self.names and self._one(seed, ["torch"])) or wrong[seed]

    def _into(self, wrong: dict[int, bool], seed: int, names: Sequence[str]) -> None:
        wrong[seed] = self._one(seed, names)

    def _one(self, seed: int, names: Sequence[str]) -> bool:
        used = time.thread_time()
        drawn = DRAWS[self.arrays](seed)
        told = {name: problems(_copied(drawn), CHECKS[name], seed) for name in names}
        used = time.thread_time() - used
        if used > _LONG:
            print(f"seed {seed} took {used:.0f} s", flush=True)
        for name, lines in told.items():
            for line in lines:
                print(f"seed {seed}, {name}: {line}", flush=True)
            if lines and self.shrink:
                small = shrunk(DRAWS[self.arrays](seed), _shows(name, seed, lines[0]))
                print(small.graph)
                print({n: f"{a.dtype}{list(a.shape)}" for n, a in small.feeds[0].items()}, flush=True)
        return any(told.values())


def _copied(found: Scenario) -> Scenario:
    """The same scenario with its own arrays."""
    return replace(found, feeds=[{n: a.copy() for n, a in feeds.items()} for feeds in found.feeds])


def in_processes(run: Run, seeds: Iterable[int], jobs: int, until: float) -> tuple[int, int, int]:
    """Runs checks on the scenarios of seeds in processes, each of which starts with everything imported.

    Every minute it prints the number of seeds that ran, and the first seed that a process is working on: pass it to
    `--seeds` to continue an interrupted run. A process that takes much memory is reported, and one that a signal ends
    counts as a seed with problems.

    Args:
        jobs: the number of concurrent processes.
        until: the time after which no process is started, by `time.monotonic`.

    Returns: the number of seeds that ran, the number of them that showed problems, and the first one that did not run.
    """
    ran = wrong = 0
    coming, start = iter(seeds), time.monotonic()
    most = _OF_A_PROCESS if run.arrays in _SMALL else _LARGE_OF_A_PROCESS
    told_at, next_seed = start, -1
    going: dict[int, tuple[int, list[int]]] = {}  # the process and its seeds, by the pipe that it writes to
    while True:
        while len(going) < jobs and time.monotonic() < until and (own := list(islice(coming, most))):
            next_seed = own[-1] + 1
            out, into = os.pipe()
            pid = os.fork()
            if pid == 0:
                for is_wrong in run.of(own):
                    os.write(into, b"w" if is_wrong else b"r")
                sys.stdout.flush()
                os._exit(0)
            os.close(into)
            going[out] = pid, own
        if not going:
            return ran, wrong, next_seed
        for out in select.select(list(going), [], [], _EVERY)[0]:
            told = os.read(out, most)
            ran, wrong = ran + len(told), wrong + told.count(b"w")
            if not told:
                pid, own = going.pop(out)
                os.close(out)
                _, status, usage = os.wait4(pid, 0)
                if status:
                    print(f"seeds {own[0]}:{own[-1] + 1}: their process ended with status {status}", flush=True)
                    wrong += 1
                if (peak := usage.ru_maxrss * 1024) > _LARGE:
                    print(f"seeds {own[0]}:{own[-1] + 1} took {peak / 2**20:.0f} MiB", flush=True)
        now = time.monotonic()
        if now > told_at + _EVERY:
            told_at = now
            first = min((own[0] for _, own in going.values()), default=next_seed)
            print(f"{ran} seeds in {now - start:.0f} s, {wrong} with problems; next: --seeds {first}:", flush=True)


@contextmanager
def _at_level(level: str) -> Iterator[None]:
    """A context that compiles kernels at this level: the arithmetic is the same, only GCC's effort differs."""
    usual = cpu_compiler.LEVEL, cpu_compiler.GCC_LEVEL
    cpu_compiler.LEVEL = cpu_compiler.GCC_LEVEL = (level,)
    try:
        yield
    finally:
        cpu_compiler.LEVEL, cpu_compiler.GCC_LEVEL = usual


def _shows(name: str, seed: int, line: str) -> Callable[[Scenario], bool]:
    """A test for a scenario with a problem of the same kind: the beginning is equal without names and numbers."""

    def begin(text: str) -> str:
        return re.sub(r"\(.*?\)|\w*\d\w*", "", text)[:25]

    return lambda found: any(begin(p) == begin(line) for p in problems(found, CHECKS[name], seed))


def main() -> int:
    """The command; its exit status is 1 if a seed showed a problem."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0:100", metavar="A:B", help="from A up to, but not, B; A: without an end")
    parser.add_argument("--checks", default=",".join(CHECKS), help="which, of " + ", ".join(CHECKS))
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stops after so long")
    parser.add_argument("--shrink", action="store_true", help="print the smallest part that shows a problem")
    parser.add_argument("--no-compiler", action="store_true", help="kernels run op by op: many more graphs in a minute")
    parser.add_argument(
        "--optimized", type=int, default=1, metavar="N", help="of N seeds one has optimized kernels, the others of -O0"
    )
    parser.add_argument(
        "--clang", default="", metavar="COMMAND", help="compiles the kernels of -O0 in a third of GCC's time"
    )
    parser.add_argument(
        "--arrays",
        choices=tuple(DRAWS),
        default="small",
        help="how large most arrays are, or that all axes have one size, or few; a seed is another graph in each",
    )
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    given = parser.parse_args()
    if given.no_compiler:
        cpu_compiler.find_compiler = lambda: None  # type: ignore[assignment]
        random_truth.COARSE = 64.0
    begin, _, end = given.seeds.partition(":")
    first, last = int(begin), int(end or sys.maxsize)
    start = time.monotonic()
    run = Run(given.checks.split(","), given.shrink, given.optimized, given.arrays, given.clang.split())
    ran, wrong, after = in_processes(run, range(first, last), given.jobs, start + 60 * given.minutes)
    print(f"{ran} seeds from {first} to {after} in {time.monotonic() - start:.0f} s: {wrong} with problems")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
