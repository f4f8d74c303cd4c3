"""Writes specs/sass.md: `python tests/benchmarks/sass_table.py`.

It needs NVRTC and nvdisasm, but no GPU. `tests/cuda/test_sass_table.py` compares the kernels with the page.
"""

from __future__ import annotations

import argparse
import ctypes
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

import budget
import nvrtc
import sass
import sass_suite

from opgraph.codegen.prune_source import needed

ARCH = "sm_90"
DIRECTIONS = ("forward", "backward")
PAGE = Path(__file__).resolve().parents[2] / "specs" / "sass.md"
REWRITE = "python tests/benchmarks/sass_table.py"
#: CUB's tuning of an H200 for copies: bytes that a multiprocessor requests at a time.
WANTED_IN_FLIGHT = 48 * 1024
_TEXT = """\
# Machine code, kernel by kernel

What the kernels of the performance goals cost on an H200, derived from their machine code (sm_90, NVRTC {version}):
**no figure on this page was measured.** `{rewrite}` writes it, and a test
fails where a change of the sources makes an entry worse.

- *instructions*, *special*: what one thread executes for each element, on the way that nearly all take: whole tiles, no
  slow path of a division. Where parameter gradients are added up, one turn of the loop over the data. Of a row of 8192
  (softmax, norms) all of it, with what is done once a row. Special functions (MUFU) are exponentials, reciprocals,
  roots.
- *bytes*: read and written for each element. Operands along columns and channels stay in a cache.
- *of memory's time*: how long arithmetic takes, as a part of the time that memory takes for the bytes at 4.3 TB/s (a
  copy's, seen on an H200). Up to 1.00 memory decides. The unit that needs longest is named: *issue* of instructions
  (128 lanes a clock), *compare* (64: comparisons, selections, integers, conversions), *f64* (64), *special* (16).
  `tests/support/budget.py` has the figures and their source. For one bf16 in and out 1.00 is 31 instructions, or 3.9
  special ones.
- *threads*: resident on a multiprocessor, of 2048, as registers allow. *in flight*: KiB that they ask for before the
  first of them waits; an H200 wants 48 (CUB's tuning).
- Every access to whole operands is 16 bytes wide. No kernel uses local memory, but f64, whose divisions call a function
  around which a register may be put aside, and the backward of swish with a factor per channel in 16 bits, which puts
  one aside in each turn of its loop: all of this is tested.

{outside}

"""
_COLUMNS = "kernel direction dtype bytes registers instructions special of_memory's_time threads in_flight"
_HEAD = "| " + " | ".join(c.replace("_", " ") for c in _COLUMNS.split()) + " |"


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the page. Several kernels of one entry are joined: sums, or the largest where no sum exists."""

    name: str
    direction: str
    dtype: str
    bytes: float
    registers: int
    instructions: float
    special: float
    share: float
    limit: str
    threads: int
    in_flight: float
    wide: bool = True
    local: int = 0

    @property
    def key(self) -> tuple[str, str, str]:
        return self.name, self.direction, self.dtype

    def __str__(self) -> str:
        cells = [self.name, self.direction, self.dtype, f"{self.bytes:g}", str(self.registers)]
        cells += [f"{self.instructions:.1f}", f"{self.special:.1f}", f"{self.share:.2f} ({self.limit})"]
        return f"| {' | '.join([*cells, str(self.threads), f'{self.in_flight:g}'])} |"


def version() -> str:
    """The version of NVRTC."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    library = nvrtc.library()
    assert library is not None
    library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return f"{major.value}.{minor.value}"


def measured(dtypes: Iterable[str] = sass_suite.DTYPES) -> Iterator[Row]:
    """The rows of the page, measured from the current sources."""
    for dtype in dtypes:
        made = [(e, d, sass_suite.kernels(e, d, dtype)) for e in sass_suite.entries(dtype) for d in DIRECTIONS]
        compiled = _programs([k for _, _, kernels in made for k in kernels])
        for entry, direction, kernels in made:
            yield _joined(entry.name, direction, dtype, [(k, compiled[k.source.entry]) for k in kernels])


def _programs(kernels: list[sass_suite.Kernel]) -> dict[str, sass.Program]:
    """Compiles all kernels of one skeleton as one text, so that the shared headers are compiled once."""
    groups: dict[str, dict[str, str]] = {}
    for kernel in kernels:
        groups.setdefault(kernel.source.skeleton, {})[kernel.source.entry] = kernel.source.own
    found: dict[str, sass.Program] = {}
    for skeleton, bodies in groups.items():
        text = needed(skeleton, "".join(bodies.values())) + "".join(
            f"\nnamespace n{i} {{{body}}}\n" for i, body in enumerate(bodies.values())
        )
        found |= sass.programs(nvrtc.disassemble(nvrtc.compile_text(text, ARCH, nvrtc.OPTIONS)))
    return found


def _joined(name: str, direction: str, dtype: str, parts: list[tuple[sass_suite.Kernel, sass.Program]]) -> Row:
    rows = [_row(kernel, program) for kernel, program in parts]
    worst = max(rows, key=lambda r: r.share)
    moved = sum(r.bytes for r in rows)
    return Row(
        name,
        direction,
        dtype,
        moved,
        max(r.registers for r in rows),
        sum(r.instructions for r in rows),
        sum(r.special for r in rows),
        worst.share,
        worst.limit,
        min(r.threads for r in rows),
        min(r.in_flight for r in rows),
        all(r.wide for r in rows),
        sum(r.local for r in rows),
    )


def _row(kernel: sass_suite.Kernel, program: sass.Program) -> Row:
    path = program.main_loop(kernel.turns) if kernel.loops else program.main_path(kernel.turns)
    elements: float = kernel.elements
    if kernel.loops and kernel.loaded:  # the compiler may have merged several turns
        elements *= sum(x.bytes_moved for x in path if x.is_load and x.bytes_moved == 16) / kernel.loaded
    share = budget.share(path, elements, kernel.moved)
    threads = kernel.block * budget.resident_blocks(program.registers, kernel.block, kernel.shared)
    accesses = [x.bytes_moved for x in path if x.kind in ("LDG", "STG")]
    local = program.frame + sum(x.kind in ("LDL", "STL") for x in program.instructions)
    return Row(
        "",
        "",
        "",
        kernel.moved,
        program.registers,
        len(path) / elements,
        sum(x.kind == "MUFU" for x in path) / elements,
        share.of_memory,
        share.limit,
        threads,
        threads * sass.asked_first(path) / 1024,
        sum(n == 16 for n in accesses) * 16 >= elements * kernel.moved * 0.99,
        local,
    )


def read() -> list[Row]:
    """The rows of the existing page."""
    found = []
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        cells = [c.strip() for c in line.strip("|").split("|")]
        if len(cells) == 10 and re.fullmatch(r"[\d.]+", cells[3]):
            share, limit = cells[7].rstrip(")").split(" (")
            numbers = (float(cells[3]), int(cells[4]), float(cells[5]), float(cells[6]), float(share))
            found.append(Row(*cells[:3], *numbers, limit, int(cells[8]), float(cells[9])))  # type: ignore[arg-type]
    return found


def written_version() -> str:
    """The NVRTC version that the page was written with."""
    match = re.search(r"NVRTC (\d+\.\d+)", PAGE.read_text(encoding="utf-8"))
    assert match is not None
    return match[1]


def page(rows: list[Row]) -> str:
    """The text of specs/sass.md."""
    slow = [r for r in rows if r.share > 1.005]
    lines = [f"Arithmetic, not memory, would decide for {len(slow)} of {len(rows)} rows:", ""]
    for dtype in dict.fromkeys(r.dtype for r in slow):
        names = ", ".join(f"{r.name} {r.direction} {r.share:.2f}" for r in slow if r.dtype == dtype)
        lines.append(textwrap.fill(f"- {dtype}: {names}", 120, subsequent_indent="  "))
    outside = "\n".join(lines)
    text = _TEXT.format(version=version(), rewrite=REWRITE, outside=outside)
    return text + "\n".join([_HEAD, "|---" * 10 + "|", *map(str, rows)]) + "\n"


def main(arguments: list[str] | None = None) -> None:
    """Writes the page."""
    argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0]).parse_args(arguments)
    PAGE.write_text(page(list(measured())), encoding="utf-8")


if __name__ == "__main__":
    main()
