"""Profiles the slow rows of a GPU benchmark: `python tests/gpu/profiled.py bench-*.json`, on the same GPU.

These are the rows that are slower than a copy of as many bytes allows (`GOALS` of bounds.py), the slowest first. ncu,
from the CUDA toolkit, runs each of them in a separate process that launches no other kernels of these names. Clocks are
not locked, so compare the reported bytes, instructions and stalls, not times.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1])]

import opgraph as og  # noqa: E402
from opgraph.bench.entries import ENTRIES  # noqa: E402
from opgraph.bench.results import Row, read  # noqa: E402

#: The project's goals, as parts of a copy's speed.
GOALS = {"f32": 0.95, "bf16": 0.90, "f16": 0.90}
#: Sections of ncu: a kernel's bound, the sources of its bytes, the number of threads, and the reasons of their stalls.
SECTIONS = ("SpeedOfLight", "MemoryWorkloadAnalysis", "Occupancy", "LaunchStats", "WarpStateStats")


def slow(rows: Iterable[Row], count: int) -> list[Row]:
    """The rows that are furthest below the goal, at most `count` of them."""
    found = [(row.copy.us / row.ours.us / GOALS[row.dtype], row) for row in rows if row.copy and row.cells
             and row.copy.us and row.ours.us and row.dtype in GOALS]  # fmt: skip
    return [row for part, row in sorted(found, key=lambda each: each[0]) if part < 1][:count]


def command(ncu: str, row: Row) -> list[str]:
    """The command that profiles the kernels of a row, after they have run."""
    chosen = ["--run", row.entry, row.direction, row.dtype, str(row.size)]
    sections = [word for name in SECTIONS for word in ("--section", name)]
    kernels = ["--clock-control", "none", "--kernel-name", "regex:^og_", "--launch-skip", "8", "--launch-count", "8"]
    return [ncu, *kernels, *sections, sys.executable, str(HERE / "profiled.py"), *chosen]


def run(entry: str, direction: str, dtype: str, size: int) -> None:
    """Calls a row's function 16 times."""
    import torch

    found = next(e for e in ENTRIES if e.name == entry)
    graph = found.graph(found.dims(size), dtype, direction)
    kinds = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
    feeds = {str(t.name): torch.randn(t.shape, device="cuda").to(kinds[t.dtype]) for t in graph.inputs}
    f = og.compile(graph, device="cuda")
    for _ in range(16):
        f(feeds)
    torch.cuda.synchronize()


def main(arguments: list[str] | None = None) -> int:
    """Profiles the rows of the files; returns 0 if all profiles succeeded."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--ncu", default="ncu")
    parser.add_argument("--count", type=int, default=6)
    parser.add_argument("--run", nargs=4, metavar=("ENTRY", "DIRECTION", "DTYPE", "SIZE"), help="what ncu runs")
    given = parser.parse_args(arguments)
    if given.run:
        run(*given.run[:3], int(given.run[3]))
        return 0
    rows = [row for path in given.files if path.exists() for row in read(path).rows]
    chosen = slow(rows, given.count)
    print(f"{len(rows)} rows, of which {len(chosen)} are profiled", flush=True)
    failed = 0
    for row in chosen:
        print(f"== {row.label} {row.dtype}: {row.ours.us:.1f} us, a copy {row.copy.us:.1f} us", flush=True)  # type: ignore[union-attr]
        failed += subprocess.run(command(given.ncu, row), check=False).returncode != 0
    return 1 if failed or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
