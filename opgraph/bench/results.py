"""What a run of the benchmark found, as values, and as JSON that says all that it takes to read it later."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from opgraph.bench.timing import Ratio
from opgraph.errors import ModelError

#: Of the file; a reader refuses others.
FORMAT = 1
OURS = "opgraph"
WARM, COLD = "warm", "cold"
#: How `Cell.failed` begins for a model that a peer has no words for.
TAKES_NOT = "does not take it:"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One peer in one row.

    Attributes:
        peer: its name.
        us: microseconds of one run, the median; None where it was not timed.
        ratio: opgraph's time as a part of this peer's; None for opgraph itself, and where one of them was not timed.
        off: how far its result was from the truth before it was timed, in units in the last place at the largest value.
        first_ms: milliseconds of building it and of its first run, with all that was compiled for it.
        allocates: whether the time includes allocating the result.
        note: what to know of it.
        failed: why it was not timed.
    """

    peer: str
    us: float | None = None
    ratio: Ratio | None = None
    off: float | None = None
    first_ms: float | None = None
    allocates: bool = False
    note: str = ""
    failed: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One thing that several peers did in turns.

    Attributes:
        size: elements that were asked for; 0 for whole models.
        elements, bytes: of the result, near that; and what is read and written.
        cache: WARM: data may be in the caches; COLD: they were driven out before each run.
        cells: opgraph's first.
        copy: the best copy of as many bytes; None where there is nothing to compare with one.
    """

    suite: str
    entry: str
    direction: str = "forward"
    dtype: str = "f32"
    size: int = 0
    elements: int = 0
    bytes: int = 0
    cache: str = WARM
    cells: tuple[Cell, ...] = ()
    copy: Cell | None = None

    @property
    def ours(self) -> Cell:
        """Opgraph's."""
        return self.cells[0]

    @property
    def best(self) -> Cell | None:
        """The fastest peer, by the ratio; None where none was timed."""
        timed = [c for c in self.cells[1:] if c.ratio is not None]
        return max(timed, key=_ratio, default=None)

    @property
    def label(self) -> str:
        """As in "swish, backward"."""
        return self.entry if self.direction == "forward" else f"{self.entry}, {self.direction}"


def _ratio(cell: Cell) -> float:
    return cell.ratio.median if cell.ratio is not None else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One number of a suite that is no row: `column` of `subject`."""

    suite: str
    subject: str
    column: str
    value: float
    unit: str = ""


@dataclass(slots=True, kw_only=True)
class Results:
    """A run.

    Attributes:
        machine: `opgraph.bench.machine.machine()`.
        settings: what was asked for.
        peers: name -> version of those that took part.
        absent: name -> why it did not, and how to get it.
        complete: False where the run was stopped before its end.
    """

    machine: Mapping[str, Any]
    settings: Mapping[str, Any]
    peers: dict[str, str] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    complete: bool = True

    def to_json(self) -> str:
        """The text of a file; equal results give equal text."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n"


def from_json(text: str, where: str = "a results file") -> Results:
    """What `to_json` wrote.

    Raises:
        ModelError: something else, or a file of another format.
    """
    try:
        data = json.loads(text)
        if data.pop("format") != FORMAT:
            raise ValueError(f"not format {FORMAT}")
        data["rows"] = [_row(row) for row in data["rows"]]
        data["figures"] = [Figure(**figure) for figure in data["figures"]]
        return Results(**data)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(
            f"no results of opgraph bench: {error}", where=where, fix="write them with `opgraph bench --json FILE`"
        ) from None


def read(path: str) -> Results:
    """The results in a file.

    Raises:
        ModelError: it cannot be read, or is something else.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"the file cannot be read: {error}", where=path, fix="check the path") from None
    return from_json(text, path)


def _row(data: dict[str, Any]) -> Row:
    cells = tuple(cell_of(cell) for cell in data.pop("cells"))
    copy = data.pop("copy")
    return Row(**data, cells=cells, copy=None if copy is None else cell_of(copy))


def cell_of(data: dict[str, Any]) -> Cell:
    """The cell that `dataclasses.asdict` made this of."""
    ratio = data.pop("ratio")
    return Cell(**data, ratio=None if ratio is None else Ratio(**ratio))
