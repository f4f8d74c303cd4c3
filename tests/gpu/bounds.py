"""The part of the possible speed that each row of a GPU benchmark reached: `python tests/gpu/bounds.py bench-*.json`.

The shortest possible time is that of a copy of as many bytes in the same rounds, or that of the kernels' arithmetic,
whichever is longer. Arithmetic is derived from machine code (tests/support/budget.py), operands row by row, at the
GPU's highest clocks, which are in the file: a GPU that ran slower reached more than is printed here. It needs NVRTC and
nvdisasm, but no GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE), *(str(HERE.parent / name) for name in ("support", "benchmarks"))]

import budget  # noqa: E402
import profiled  # noqa: E402
import sass_suite  # noqa: E402
import sass_table  # noqa: E402

from opgraph.bench.entries import ENTRIES  # noqa: E402
from opgraph.bench.results import Results, Row, read  # noqa: E402
from opgraph.ir.logical_tensor import row_major  # noqa: E402
from opgraph.loops.layout import bind  # noqa: E402
from opgraph.loops.lower import lower  # noqa: E402


def kernels(row: Row) -> list[sass_suite.Kernel]:
    """The kernels of a row that process its data, at its sizes."""
    entry = next(e for e in ENTRIES if e.name == row.entry)
    bound = []
    for partition in entry.graph(entry.dims(row.size), row.dtype, row.direction).get_partitions():
        lowered = lower(partition)
        shapes = [() if t is None else t.shape for t in lowered.loads]
        bound.append((lowered.loop, bind(lowered.loop, shapes, [row_major(s) for s in shapes])))
    largest = max(layout.size for _, layout in bound)
    return [k for loop, layout in bound if layout.size * 64 > largest for k in sass_suite._kernels(loop, layout)]


@dataclass(frozen=True, slots=True)
class Reached:
    """A row: microseconds of the copy and of arithmetic, and the GPU unit that needs the latter."""

    row: Row
    copy: float
    arithmetic: float
    limit: str

    @property
    def part(self) -> float:
        """The reached part of the possible speed."""
        return max(self.copy, self.arithmetic) / (self.row.ours.us or 1.0)

    @property
    def is_good(self) -> bool:
        """True if it reaches the goal and no peer was faster."""
        best = self.row.best
        return self.part >= profiled.GOALS[self.row.dtype] and (
            best is None or best.ratio is None or best.ratio.median <= 1
        )

    def __str__(self) -> str:
        row, best = self.row, self.row.best
        peer = "" if best is None or best.ratio is None else f"{best.ratio.median:.2f} of {best.peer}"
        of = f"{row.label:34} {row.dtype:5} {row.elements / 2**20:7.0f}M {row.ours.us:9.1f} us"
        found = f"copy {self.copy:9.1f}  arithmetic {self.arithmetic:9.1f} ({self.limit:7})  reached {self.part:.2f}"
        return f"{of}  {found}  {'good' if self.is_good else 'LESS'}  {peer}"


def clocks(machine: Mapping[str, Any]) -> float:
    """Clocks of all multiprocessors in a second.

    Raises:
        SystemExit: the file does not contain them.
    """
    if "multiprocessors" not in machine or not isinstance(machine.get("gpu_mhz"), int):
        raise SystemExit("the file does not say how many multiprocessors the GPU has, and their clock")
    return float(machine["multiprocessors"] * machine["gpu_mhz"] * 1e6)


def reached(results: Results) -> Iterator[Reached]:
    """Every row that has a copy, except those that fit into a cache."""
    slower = budget.CLOCKS_A_SECOND / clocks(results.machine)
    rows = [r for r in results.rows if r.copy and r.copy.us and r.cells and r.ours.us and r.elements >= 1 << 24]
    found = [kernels(row) for row in rows]
    programs = sass_table._programs([k for made in found for k in made])
    for row, made in zip(rows, found, strict=True):
        parts = [sass_table._row(k, programs[k.source.entry]) for k in made]
        times = {p.limit: p.share * p.bytes * row.elements / budget.BYTES_A_SECOND * 1e6 * slower for p in parts}
        assert row.copy is not None and row.copy.us is not None
        yield Reached(row, row.copy.us, sum(times.values()), max(times, key=lambda name: times[name]))


def main(paths: Sequence[str]) -> int:
    """Prints a line for each row; returns 0 if all are good."""
    found = []
    for path in paths:
        results = read(path)
        print(", ".join(f"{name} {value}" for name, value in results.machine.items()))
        for one in reached(results):
            print(one, flush=True)
            found.append(one)
    print(f"{sum(one.is_good for one in found)} of {len(found)} rows are good")
    return 0 if all(one.is_good for one in found) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
