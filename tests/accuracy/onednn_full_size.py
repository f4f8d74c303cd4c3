"""Runs oneDNN's graph files at their own sizes; test_files_run.py does the same with smaller tensors.

    python tests/accuracy/onednn_full_size.py [PART_OF_A_NAME] [--above 3e5] [--memory 8] [--seconds 300] [--table FILE]

Every file runs in a separate process, which is killed beyond that many GB or seconds: in float64 the largest file takes
many times the memory of its tensors. `--table` writes the results as a table and keeps the rows of earlier runs.
"""

from __future__ import annotations

import argparse
import math
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from onednn_files import RUNNABLE
from onednn_fill import feeds_of
from onednn_run import mistakes, prepared
from onednn_shrink import work_of

#: The interval in seconds at which the memory of a process is measured.
PAUSE = 0.05


@dataclass(frozen=True, slots=True)
class Result:
    """The result of one file."""

    name: str
    elements: int
    said: str
    seconds: float
    gigabytes: float

    @property
    def row(self) -> str:
        """The result as a line of the table."""
        return f"| {self.name} | {self.elements / 1e6:.1f} | {self.said} | {self.seconds:.0f} | {self.gigabytes:.1f} |"


HEAD = "| File | Million elements | Result | Seconds | GB |\n|---|---|---|---|---|\n"


def elements_of(name: str) -> int:
    """The number of elements of all tensors of a file."""
    tensors = {t.id: t for op in prepared(name, None).ops for t in (*op.inputs, *op.outputs)}
    return sum(math.prod(t.shape) for t in tensors.values() if t.has_known_shape)


def run_here(name: str) -> int:
    graph = prepared(name, None)
    found = mistakes(graph, feeds_of(graph))
    print("\n".join(found))
    return 1 if found else 0


def run_apart(name: str, most_gigabytes: float, most_seconds: float) -> Result:
    """Runs a file in a separate process, and kills it beyond its limits."""
    start = time.monotonic()
    process = subprocess.Popen([sys.executable, __file__, "--here", name], stdout=subprocess.PIPE, text=True)
    peak, said = 0.0, ""
    while process.poll() is None and not said:
        time.sleep(PAUSE)
        peak = max(peak, _gigabytes(process.pid))
        if peak > most_gigabytes:
            said = f"not run: more than {most_gigabytes:g} GB"
        elif time.monotonic() - start > most_seconds:
            said = f"not run: more than {most_seconds:g} s"
    if said:
        process.kill()
    lines = process.communicate()[0].strip()
    if not said:
        said = {0: "agrees", 1: "WRONG: " + " ".join(lines.split())[:160]}.get(
            process.returncode, f"FAILED: {process.returncode}"
        )
    return Result(name, elements_of(name), said, time.monotonic() - start, peak)


def _gigabytes(pid: int) -> float:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:  # the process has just ended
        return 0.0
    return next((int(line.split()[1]) / 1e6 for line in status.splitlines() if line.startswith("VmRSS")), 0.0)


def write_table(path: Path, results: list[Result]) -> None:
    """Writes rows to the table of a file, sorted by size; they replace older rows with the same names."""
    rows = {line.split(" | ")[0]: line for line in path.read_text().splitlines()[2:]} if path.exists() else {}
    rows |= {result.row.split(" | ")[0]: result.row for result in results}
    by_size = sorted(rows.values(), key=lambda row: float(row.split(" | ")[1]))
    path.write_text(HEAD + "\n".join(by_size) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description="oneDNN's graph files at their own sizes")
    parser.add_argument("part", nargs="?", default="", help="part of a file's name")
    parser.add_argument("--above", type=float, default=0, help="only files of more work than this")
    parser.add_argument("--memory", type=float, default=8, help="GB that a process may take")
    parser.add_argument("--seconds", type=float, default=300, help="seconds that a file may take")
    parser.add_argument("--table", type=Path, help="file to write a table to")
    parser.add_argument("--here", action="store_true", help="run the one file of this name in this process")
    args = parser.parse_args()
    if args.here:
        return run_here(args.part)
    work = {name: work_of(prepared(name, None)) for name in RUNNABLE if args.part in name}
    results = []
    for name in sorted((n for n in work if work[n] > args.above), key=work.__getitem__):
        results.append(run_apart(name, args.memory, args.seconds))
        print(results[-1].row, flush=True)
        if args.table:
            write_table(args.table, results)
    wrong = sum(r.said.startswith(("WRONG", "FAILED")) for r in results)
    print(f"{len(results)} files, {wrong} wrong, {sum(r.said.startswith('not') for r in results)} not run")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
