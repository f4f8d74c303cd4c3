"""How the benchmarks measure: two sides in turns, the median of the ratios of neighbouring runs, and the machine."""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np
import torch

import opgraph as og

ROUNDS = 31


def once(call: Callable[[], object], repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - start) / repeats


def compare(ours: Callable[[], object], theirs: Callable[[], object], rounds: int = ROUNDS) -> dict[str, float]:
    """Median microseconds of both, and quartiles of the ratio ours / theirs."""
    ours(), theirs()
    repeats = max(1, int(2e-3 / max(once(ours, 3), 1e-7)))
    pairs = [(once(ours, repeats), once(theirs, repeats)) for _ in range(rounds)]
    low, middle, high = statistics.quantiles([a / b for a, b in pairs], n=4)
    return {
        "ours_us": statistics.median(a for a, _ in pairs) * 1e6,
        "theirs_us": statistics.median(b for _, b in pairs) * 1e6,
        "ratio": middle,
        "low": low,
        "high": high,
    }


def fresh_process(code: str, cache: str) -> list[float]:
    """The seconds that a new process prints, as milliseconds."""
    env = {**os.environ, "XDG_CACHE_HOME": cache}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    return [float(word) * 1e3 for word in done.stdout.split()]


def machine() -> dict[str, object]:
    with open("/proc/cpuinfo") as file:
        model = next(
            (line.split(":")[1].strip() for line in file if line.startswith("model name")), platform.processor()
        )
    commit = subprocess.run(
        ["git", "-C", os.path.dirname(__file__), "rev-parse", "--short", "HEAD"],
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    return {
        "cpu": model,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "torch": torch.__version__,
        "opgraph": og.__version__,
        "commit": commit,
        "date": time.strftime("%Y-%m-%d"),
    }
