"""What a run measures: which entries in which sizes and dtypes, and whether they fit into memory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from opgraph.bench.entries import ENTRIES, Entry, chosen
from opgraph.errors import InvalidArguments
from opgraph.ir import dtypes

K, M = 1_000, 1 << 20
#: Suites of entries, and those that measure something else.
ENTRY_SUITES = tuple(dict.fromkeys(e.suite for e in ENTRIES))
OTHER_SUITES = ("host", "compile", "scale", "models")
#: Several suites under one name.
GROUPS = {
    "all": (*ENTRY_SUITES, *OTHER_SUITES),
    "gpu": (*ENTRY_SUITES, "host", "compile"),
}
#: Entries for which `--quick` waits for torch.compile: those that torch has no function for.
WAITS = ("swish, alpha per channel", "fractional (NAF1)", "chain of 12")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One row to be measured."""

    entry: Entry
    direction: str
    dtype: str
    size: int
    compiles: bool = True


def suites_of(names: tuple[str, ...]) -> tuple[str, ...]:
    """The suites that these names stand for, each once.

    Raises:
        InvalidArguments: a name that is none.
    """
    found: dict[str, None] = {}
    for name in names:
        if name not in GROUPS and name not in GROUPS["all"]:
            raise InvalidArguments(
                f"there is no suite {name!r}", where="--suite", fix=f"use {', '.join((*GROUPS['all'], *GROUPS))}"
            )
        found.update(dict.fromkeys(GROUPS.get(name, (name,))))
    return tuple(found)


def jobs(
    suites: tuple[str, ...],
    entries: tuple[str, ...],
    *,
    device: str,
    quick: bool,
    sizes: tuple[int, ...] = (),
    types: tuple[str, ...] = (),
) -> list[Job]:
    """The rows of a run.

    Args:
        suites: as `suites_of` gives them.
        entries: patterns; all entries of the suites where empty.
        sizes, types: what was asked for; where nothing was: on a CPU 1K, 1M and 32M in f32 and 1M in bf16 and f16
            (--quick: 1M in f32); on a GPU 64M in all three and 1M in f32, and swish in bf16 over 2^31.

    Raises:
        InvalidArguments: as `chosen`.
    """
    found = chosen(set(suites) & set(ENTRY_SUITES), entries) if set(suites) & set(ENTRY_SUITES) else ()
    pairs: list[tuple[str, int]]
    if sizes or types:
        pairs = [(t, n) for t in types or ("f32",) for n in sizes or (M,)]
    elif device == "cuda":
        pairs = [("bf16", 64 * M), ("f32", 64 * M), ("f16", 64 * M), ("f32", M)]
    elif quick:
        pairs = [("f32", M)]
    else:
        pairs = [("f32", K), ("f32", M), ("f32", 32 * M), ("bf16", M), ("f16", M)]
    made = [
        Job(entry=e, direction=d, dtype=t, size=n, compiles=not quick or e.name in WAITS)
        for t, n in pairs
        for e in found
        if t in e.dtypes
        for d in e.directions
    ]
    if device == "cuda" and not (sizes or types):
        made += [
            Job(entry=e, direction=d, dtype="bf16", size=2**31 + 2**20, compiles=False)
            for e in found
            if e.name == "swish"
            for d in e.directions
        ]
    return made


def needed_bytes(job: Job) -> int:
    """What a row takes, about: its arrays, the copy's, and two results of peers that allocate."""
    space = job.entry.dims(job.size)
    item = dtypes.get(job.dtype).itemsize
    full = sum(o.shape == "full" for o in job.entry.operands)
    arrays = full + 1 if job.direction == "forward" else 2 * full + 2
    elements = 1
    for dim in space:
        elements *= dim
    return elements * item * (2 * arrays + 2)


def available_bytes(device: str) -> int:
    """Free memory."""
    if device == "cuda":
        import torch

        return int(torch.cuda.mem_get_info()[0])
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 1 << 62
    found = (line.split()[1] for line in lines if line.startswith("MemAvailable:"))
    return int(next(found, 1 << 52)) << 10
