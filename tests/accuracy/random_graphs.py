"""Random graphs through everything that computes: `python tests/accuracy/random_graphs.py --seeds 0:200`.

A seed is a graph over the whole registry with arrays for it, every way to call it, its gradients, its ONNX files, and
the same function in torch, each against the reference and what rounding allows. What goes wrong is printed with the
seed and, with --shrink, with the smallest part of the graph that shows it. `tests/fuzz/README.md` has more.
"""

from __future__ import annotations

import argparse
import random
import re
import resource
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

import random_truth
from random_again import again
from random_calls import calls
from random_files import files
from random_gradients import gradients
from random_scenario import Scenario, scenario
from random_shrink import shrunk
from random_sizes import sizes
from random_torch import torch_calls
from random_written import written

from opgraph.runtime import host

Check = Callable[[Scenario, random.Random], Iterator[str]]
CHECKS: dict[str, Check] = {
    "calls": calls,
    "gradients": gradients,
    "files": files,
    "torch": torch_calls,
    "sizes": sizes,
    "written": written,
    "again": again,
}
#: Of one check, how many problems are told.
_MOST = 5
#: Seconds between two lines that say how far a run is.
_EVERY = 60.0
#: Seconds of one core in Python, and bytes, beyond which a seed is named: none of these graphs should need so much.
_LONG, _LARGE = 60.0, 1 << 30


def problems(found: Scenario, check: Check, seed: int) -> list[str]:
    """What a check finds, an exception among it."""
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


def run(
    seeds: range, names: list[str], *, until: float = float("inf"), shrink: bool = False, optimized: int = 1
) -> tuple[int, int]:
    """Runs checks on the scenarios of seeds and prints what they find.

    Every minute it tells the next seed, from which `--seeds` goes on where a run was ended. Seeds that take long, or
    much memory, are named too.

    Args:
        optimized: seeds that it divides have kernels compiled with the flags of all kernels, the others with -O0.

    Returns: how many seeds ran, and how many of them showed problems.
    """
    ran = wrong = 0
    start = told_at = time.monotonic()
    for seed in seeds:
        now = time.monotonic()
        if now > until:
            break
        if now > told_at + _EVERY:
            told_at = now
            print(f"{ran} seeds in {now - start:.0f} s, {wrong} with problems; next: --seeds {seed}:", flush=True)
        used, largest = time.process_time(), _peak()
        with _flags("-O0" if seed % optimized else "-O2"):
            told = {name: problems(scenario(seed), CHECKS[name], seed) for name in names}
        used = time.process_time() - used
        if used > _LONG or _peak() > largest + _LARGE:
            print(
                f"seed {seed} took {used:.0f} s, and {(_peak() - largest) / 2**20:.0f} MiB more than others", flush=True
            )
        ran += 1
        wrong += any(told.values())
        for name, lines in told.items():
            for line in lines:
                print(f"seed {seed}, {name}: {line}", flush=True)
            if lines and shrink:
                small = shrunk(scenario(seed), _shows(name, seed, lines[0]))
                print(small.graph)
                print({n: f"{a.dtype}{list(a.shape)}" for n, a in small.feeds[0].items()}, flush=True)
    return ran, wrong


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@contextmanager
def _flags(level: str) -> Iterator[None]:
    """While this lasts, kernels are compiled at this level: the arithmetic is the same, GCC's work on it is not."""
    usual = host.FLAGS
    host.FLAGS = tuple(level if flag == "-O2" else flag for flag in usual)
    try:
        yield
    finally:
        host.FLAGS = usual


def _shows(name: str, seed: int, line: str) -> Callable[[Scenario], bool]:
    """Whether a scenario shows a problem of the same kind: one that begins alike, names and numbers left out."""

    def begin(text: str) -> str:
        return re.sub(r"\(.*?\)|\w*\d\w*", "", text)[:25]

    return lambda found: any(begin(p) == begin(line) for p in problems(found, CHECKS[name], seed))


def main() -> int:
    """The command; its exit status is 1 where a seed showed a problem."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0:100", metavar="A:B", help="from A up to, but not, B; A: without an end")
    parser.add_argument("--checks", default=",".join(CHECKS), help="which, of " + ", ".join(CHECKS))
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stops after so long")
    parser.add_argument("--shrink", action="store_true", help="print the smallest part that shows a problem")
    parser.add_argument("--no-compiler", action="store_true", help="kernels run op by op: many more graphs in a minute")
    parser.add_argument(
        "--optimized", type=int, default=1, metavar="N", help="of N seeds one has kernels of -O2, the others of -O0"
    )
    given = parser.parse_args()
    if given.no_compiler:
        host.find_compiler = lambda: None  # type: ignore[assignment]
        random_truth.COARSE = 64.0
    begin, _, end = given.seeds.partition(":")
    first, last = int(begin), int(end or sys.maxsize)
    start = time.monotonic()
    until = start + 60 * given.minutes
    ran, wrong = run(
        range(first, last), given.checks.split(","), until=until, shrink=given.shrink, optimized=given.optimized
    )
    print(f"{ran} seeds from {first} in {time.monotonic() - start:.0f} s: {wrong} with problems")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
