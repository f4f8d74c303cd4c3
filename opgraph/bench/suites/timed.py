"""One row: the call of every peer is built for a case, checked, and timed in turns with the others and with a copy."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from opgraph.bench.case import Case
from opgraph.bench.peers.copies import copies
from opgraph.bench.peers.peer import Built, Peer, Refused
from opgraph.bench.peers.table import OURS
from opgraph.bench.results import TAKES_NOT, Cell, Row
from opgraph.bench.timing import Call, Clock, Times, in_turns, ratio
from opgraph.bench.truth import Truth
from opgraph.errors import DeviceError, OpGraphError

Say = Callable[[str], None]

#: Classes of onnxruntime's exceptions for models that it does not take.
_NOT_TAKEN = ("NotImplemented", "InvalidGraph")


def measured(case: Case, peers: Sequence[Peer], clock: Clock, budget: float, cache: str, say: Say) -> Row:
    """Times a case.

    Args:
        peers: those on the machine, without opgraph.
        budget: seconds of timing, without building and checking.
        say: receives a description of the current step.
    """
    say("the truth")
    truth = Truth(case)
    cells: dict[str, Cell] = {}
    calls: dict[str, Call] = {}
    for peer in (OURS, *peers):
        say(peer.name)
        cells[peer.name], built = checked(case, peer, truth)
        if built is not None:
            calls[peer.name] = built.call
    if OURS.name not in calls:
        return _row(case, cache, list(cells.values()), None)
    say("timing")
    yardsticks = copies(case)
    times = in_turns({**calls, **yardsticks}, clock, budget)
    copied = {name: times.pop(name) for name in yardsticks}
    best = min(copied, key=lambda name: _median(copied[name]))
    return _row(
        case,
        cache,
        [with_times(cell, times) for cell in cells.values()],
        with_times(Cell(peer=best), {OURS.name: times[OURS.name], best: copied[best]}),
    )


def _row(case: Case, cache: str, cells: list[Cell], copy: Cell | None) -> Row:
    return Row(
        suite=case.entry.suite,
        entry=case.entry.name,
        direction=case.direction,
        dtype=case.dtype,
        elements=case.elements,
        bytes=case.bytes,
        cache=cache,
        cells=tuple(cells),
        copy=copy,
    )


def checked(case: Case, peer: Peer, truth: Truth) -> tuple[Cell, Built | None]:
    """Builds a peer's call and compares its first results with the truth; no call if the peer refuses or is wrong."""
    start = time.perf_counter()
    try:
        built = peer.build(case)
        truth.restore()
        results = results_of(case, built)
    except Refused as answer:
        return Cell(peer=peer.name, failed=str(answer)), None
    except Exception as error:  # peers raise any exception; it goes into the row, and the others continue
        return Cell(peer=peer.name, failed=told(error)), None
    found = truth.check(results)
    first = (time.perf_counter() - start) * 1e3
    cell = Cell(
        peer=peer.name,
        off=found.off,
        first_ms=first,
        allocates=built.allocates,
        note=built.note,
        failed=f"wrong: {found.wrong}" if found.wrong else "",
    )
    return cell, None if found.wrong else built


def told(error: Exception) -> str:
    """An error in one line."""
    text = error.what if isinstance(error, OpGraphError) else f"{type(error).__name__}: {error}"
    return "error: " + " ".join(text.split())[:300]


def answered(error: Exception) -> str:
    """A peer's exception for a model, in one line: an error, or that the peer lacks a part of the model."""
    said = error.what if isinstance(error, OpGraphError) else str(error)
    takes_not = isinstance(error, (Refused, OpGraphError)) or type(error).__name__ in _NOT_TAKEN
    if not takes_not or isinstance(error, DeviceError):
        return told(error)
    return f"{TAKES_NOT} " + " ".join(said.split())[:300]


def results_of(case: Case, built: Built) -> Mapping[str, Any]:
    """Runs a call once; returns its results by the names of the graph's outputs."""
    returned = built.call()
    if not built.returns:
        return case.outs
    return dict(zip(built.returns, returned if isinstance(returned, (tuple, list)) else (returned,), strict=True))


def with_times(cell: Cell, times: Times, ours: str = OURS.name) -> Cell:
    """A cell with its time, and the ratio of ours to it."""
    row = times.get(cell.peer)
    if row is None:
        return cell
    found = None if cell.peer == ours else ratio([t for t in times[ours] if t is not None], row)
    return Cell(
        peer=cell.peer,
        us=_median(row) * 1e6,
        ratio=found,
        off=cell.off,
        first_ms=cell.first_ms,
        allocates=cell.allocates,
        note=cell.note,
        failed=cell.failed,
    )


def _median(row: Sequence[float | None]) -> float:
    return statistics.median(t for t in row if t is not None)
