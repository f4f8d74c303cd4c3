"""Compile time: from a graph or function to its first result, in new processes; first uncached, then from the disk."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence

from opgraph.bench.entries import BACKWARD, FORWARD
from opgraph.bench.machine import fresh_process
from opgraph.bench.results import Figure
from opgraph.bench.suites.timed import Say

#: Entry, direction. The first three for `--quick`.
SUBJECTS = (
    ("swish, alpha per channel", FORWARD),
    ("chain of 12", FORWARD),
    ("fractional (NAF1)", BACKWARD),
    ("fractional (NAF1)", FORWARD),
    ("chain of 12", BACKWARD),
    ("chain of 60", FORWARD),
)
#: Ops of graphs on 40 inputs with 20 outputs (`opgraph.bench.large`), direction.
LARGE = ((300, FORWARD), (300, BACKWARD), (1000, FORWARD))
#: The approximate seconds of a pair of processes with torch.compile.
_PAIR = 20.0
#: Elements: so few that the kernel's run time is negligible.
SIZE = 1 << 16
#: The entry that is compiled first, which loads the modules of the compiler.
FIRST = "hardswish"
_CODE = """
import time
from opgraph.bench.case import make
from opgraph.bench.entries import ENTRIES
from opgraph.bench.peers.{module} import PEER
{device_up}
def seconds(name, direction):
    entry = next(e for e in ENTRIES if e.name == name)
    case = make(entry, direction, "f32", {size}, {device!r}, {threads})
    start = time.perf_counter()
    PEER.build(case).call()
    {wait}
    return time.perf_counter() - start
print(seconds({first!r}, "forward"), seconds({name!r}, {direction!r}))
"""
#: The graph and its gradient are built before the timing starts.
_LARGE_CODE = """
import time
import numpy as np, opgraph as og
from opgraph.bench.large import large
{device_up}
def seconds(graph):
    feeds = {{t.name: np.ones((256, 256), np.float32) for t in graph.inputs}}
    if {device!r} != "cpu":
        feeds = {{name: torch.from_numpy(a).to({device!r}) for name, a in feeds.items()}}
    start = time.perf_counter()
    og.compile(graph, device={device!r})(feeds)
    {wait}
    return time.perf_counter() - start
graph = large({count})
if {direction!r} == "backward":
    graph = og.gradient(graph, wrt=[t.name for t in graph.inputs])
print(seconds(large(1, inputs=1, outputs=1)), seconds(graph))
"""


def measured(
    device: str, threads: int, *, quick: bool, with_torch: bool, seconds: float | None, say: Say
) -> list[Figure]:
    """Milliseconds, cold and warm, of compiling a partition alone and of the first compilation in a process.

    Args:
        with_torch: torch.compile is measured too, which takes some 20 s for each pair.
        seconds: the remaining time of the run; None for no limit.
    """
    import time

    end = None if seconds is None else time.perf_counter() + seconds
    say("import opgraph")
    figures = _imports(3 if quick else 9)
    for name, direction in SUBJECTS[:3] if quick else SUBJECTS:
        subject = name if direction == FORWARD else f"{name}, {direction}"
        if end is not None and time.perf_counter() > end:
            break
        rounds = 1 if quick or end is not None else 3
        say(f"{subject}: opgraph")
        figures += _both(subject, "opgraph", "ours", name, direction, device, threads, rounds)
        if not with_torch or (end is not None and end - time.perf_counter() < _PAIR):
            continue
        say(f"{subject}: torch.compile")
        figures += _both(subject, "torch.compile", "torch_compiled", name, direction, device, threads, 1)
    return [*_first_ones(figures), *_large_ones(device, quick, end, say)]


def _large_ones(device: str, quick: bool, end: float | None, say: Say) -> list[Figure]:
    """The figures of large graphs."""
    import time

    figures = []
    for count, direction in LARGE[:1] if quick else LARGE:
        if end is not None and time.perf_counter() > end:
            break
        subject = f"{count} ops, 40 inputs" + ("" if direction == FORWARD else f", {direction}")
        say(f"{subject}: opgraph")
        code = _LARGE_CODE.format(count=count, direction=direction, **_on(device))
        cold, warm = _cold_and_warm(code, 1 if quick else 3)
        figures += [
            _figure(subject, f"opgraph, {how}", [one[1] for one in values])
            for how, values in (("cold", cold), ("from disk", warm))
        ]
    return figures


_IMPORT = "import time; t = time.perf_counter(); import {what}; print(time.perf_counter() - t)"


def _imports(rounds: int) -> list[Figure]:
    """Milliseconds of `import opgraph` with the modules that a graph loads on first use, and of NumPy's part of it."""
    found = []
    for subject, what in (
        ("import opgraph", "opgraph.ops, opgraph.ir.parse"),
        ("of which NumPy and ml_dtypes", "numpy, ml_dtypes"),
    ):
        taken = [fresh_process(_IMPORT.format(what=what), tempfile.gettempdir())[0] for _ in range(rounds)]
        found.append(_figure(subject, "opgraph, from disk", taken))
    return found


def _first_ones(figures: list[Figure]) -> list[Figure]:
    """The figures, with those of the first compilation of each process merged into one row."""
    head = f"the first of a process: {FIRST}"
    firsts = [f for f in figures if f.subject == FIRST]
    found = [
        _figure(head, column, [f.value for f in firsts if f.column == column])
        for column in dict.fromkeys(f.column for f in firsts)
    ]
    return [*found, *(f for f in figures if f.subject != FIRST)]


def _both(
    subject: str, who: str, module: str, name: str, direction: str, device: str, threads: int, rounds: int
) -> list[Figure]:
    code = _CODE.format(
        module=module,
        name=name,
        direction=direction,
        size=SIZE,
        threads=threads,
        first=FIRST,
        **_on(device),
    )
    cold, warm = _cold_and_warm(code, rounds)
    return [
        _figure(what, f"{who}, {how}", [one[index] for one in values])
        for index, what in enumerate((FIRST, subject))
        for how, values in (("cold", cold), ("from disk", warm))
    ]


def _on(device: str) -> dict[str, str]:
    """The parts of the code that depend on the device."""
    on_gpu = device == "cuda"
    return {
        "device": device,
        "device_up": "import torch; torch.ones(1, device='cuda')" if on_gpu else "",
        "wait": "torch.cuda.synchronize()" if on_gpu else "",
    }


def _cold_and_warm(code: str, rounds: int) -> tuple[list[list[float]], list[list[float]]]:
    """The output of code: the two processes of a round share a cache folder that is empty at first."""
    cold, warm = [], []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory(prefix="opgraph-bench-") as cache:
            # CuPy and torch have separate variables for their caches.
            more = dict.fromkeys(("CUPY_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"), cache)
            cold.append(fresh_process(code, cache, more))
            warm.append(fresh_process(code, cache, more))
    return cold, warm


def _figure(subject: str, column: str, values: Sequence[float]) -> Figure:
    return Figure(suite="compile", subject=subject, column=column, value=statistics.median(values), unit="ms")
