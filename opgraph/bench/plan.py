"""The plan of a run: the entries, their sizes and dtypes, and the memory that they need."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from opgraph.bench.entries import ENTRIES, Entry, chosen
from opgraph.errors import InvalidArguments
from opgraph.ir import dtypes

K, M = 1_000, 1 << 20
#: Suites of entries, and suites that measure something else.
ENTRY_SUITES = tuple(dict.fromkeys(e.suite for e in ENTRIES))
OTHER_SUITES = ("host", "compile", "scale", "models")
#: Suites that take too long to be part of "all": half an hour, minutes for a network.
BY_NAME = ("networks",)
#: Several suites under one name.
GROUPS = {
    "all": (*ENTRY_SUITES, *OTHER_SUITES),
    "entries": ENTRY_SUITES,
    "gpu": (*ENTRY_SUITES, "host", "compile"),
}
#: Entries for which `--quick` includes torch.compile: those for which torch has no function.
WAITS = ("swish, alpha per channel", "fractional (NAF1)", "chain of 12")
COMPILER = "torch.compile"
#: Peers that compile for seconds, and are left out of rows that repeat others in another dtype or size.
SLOW_TO_BUILD = (COMPILER, "Triton", "jiterator", "cupy.fuse")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One row to be measured.

    Attributes:
        without: peers that the plan leaves out of it.
    """

    entry: Entry
    direction: str
    dtype: str
    size: int
    without: tuple[str, ...] = ()


def suites_of(names: tuple[str, ...]) -> tuple[str, ...]:
    """The suites of these names, each once.

    Raises:
        InvalidArguments: a name is neither a suite nor a group.
    """
    found: dict[str, None] = {}
    for name in names:
        known = (*GROUPS["all"], *BY_NAME, *GROUPS)
        if name not in known:
            raise InvalidArguments(f"there is no suite {name!r}", where="--suite", fix=f"use {', '.join(known)}")
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
        suites: as `suites_of` returns them.
        entries: patterns; all entries of the suites if empty.
        sizes, types: the requested ones. If there are none: on a CPU 1K, 1M and 32M in f32 and 1M in bf16 and f16
            (--quick: 1M in f32); on a GPU 64M in bf16 and f32, activations also in f16 and over 1M, and swish in bf16
            over 2^31.

    Raises:
        InvalidArguments: as `chosen`.
    """
    wanted = set(suites) & set(ENTRY_SUITES)
    found = chosen(wanted, entries) if wanted else ()
    if device == "cuda" and not (sizes or types):
        return _on_gpu(found)
    if sizes or types:
        pairs = [(t, n) for t in types or ("f32",) for n in sizes or (M,)]
    elif quick:
        pairs = [("f32", M)]
    else:
        pairs = [("f32", K), ("f32", M), ("f32", 32 * M), ("bf16", M), ("f16", M)]
    return [
        replace(job, without=(COMPILER,) if quick and job.entry.name not in WAITS else ())
        for t, n in pairs
        for job in _rows(found, t, n)
    ]


def _rows(entries: tuple[Entry, ...], dtype: str, size: int, without: tuple[str, ...] = ()) -> list[Job]:
    return [
        Job(entry=e, direction=d, dtype=dtype, size=size, without=without)
        for e in entries
        if dtype in e.dtypes
        for d in e.directions
    ]


def _on_gpu(entries: tuple[Entry, ...]) -> list[Job]:
    """The rows on a GPU, the most important first: the time of a run may end before its rows do."""
    activations = tuple(e for e in entries if e.suite == "activation")
    return [
        *_rows(entries, "bf16", 64 * M),
        *_rows(entries, "f32", 64 * M),
        *_rows(tuple(e for e in entries if e.name == "swish"), "bf16", 2**31 + M, SLOW_TO_BUILD),
        *_rows(activations, "f16", 64 * M, SLOW_TO_BUILD),
        *_rows(activations, "f32", M, SLOW_TO_BUILD),
    ]


def needed_bytes(job: Job) -> int:
    """The approximate memory of a row: its arrays, those of the copy, and two results of peers that allocate."""
    space = job.entry.dims(job.size)
    item = dtypes.get(job.dtype).itemsize
    full = sum(o.shape == "full" for o in job.entry.operands)
    arrays = full + 1 if job.direction == "forward" else 2 * full + 2
    elements = 1
    for dim in space:
        elements *= dim
    return elements * item * (2 * arrays + 2)


def available_bytes(device: str) -> int:
    """The free memory of a device."""
    if device == "cuda":
        import torch

        unused = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()  # torch reuses it
        return int(torch.cuda.mem_get_info()[0]) + int(unused)
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 1 << 62
    found = (line.split()[1] for line in lines if line.startswith("MemAvailable:"))
    return int(next(found, 1 << 52)) << 10
