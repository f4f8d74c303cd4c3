"""The results of a benchmark run, as values, and as JSON that holds all that is needed to read it later."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from opgraph.bench.timing import Ratio
from opgraph.errors import ModelError

#: The format of the file; a reader rejects others.
FORMAT = 1
OURS = "opgraph"
WARM, COLD = "warm", "cold"
#: The beginning of `Cell.failed` for a model that a peer does not support.
TAKES_NOT = "does not take it:"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One peer in one row.

    Attributes:
        peer: its name.
        us: microseconds of one run, the median; None if it was not timed.
        ratio: opgraph's time divided by this peer's; None for opgraph itself, and if one of them was not timed.
        off: the error of its result before it was timed, in units in the last place at the largest value.
        first_ms: milliseconds of building it and of its first run, including all compilation for it.
        allocates: the time includes allocating the result.
        note: a remark.
        failed: the reason why it was not timed.
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
    """One computation that several peers ran in turns.

    Attributes:
        size: the requested number of elements; 0 for whole models.
        elements, bytes: the elements of the result, near `size`; and the bytes that are read and written.
        cache: WARM: data may be in the caches; COLD: they were evicted before each run.
        cells: the cells of the peers, opgraph's first.
        copy: the best copy of as many bytes; None if there is nothing to compare with a copy.
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
        """Opgraph's cell."""
        return self.cells[0]

    @property
    def best(self) -> Cell | None:
        """The fastest peer, by the ratio; None if none was timed."""
        timed = [c for c in self.cells[1:] if c.ratio is not None]
        return max(timed, key=_ratio, default=None)

    @property
    def label(self) -> str:
        """The label of the row, such as "swish, backward"."""
        return self.entry if self.direction == "forward" else f"{self.entry}, {self.direction}"


def _ratio(cell: Cell) -> float:
    return cell.ratio.median if cell.ratio is not None else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One number of a suite that is not part of a row: `column` of `subject`."""

    suite: str
    subject: str
    column: str
    value: float
    unit: str = ""


@dataclass(slots=True, kw_only=True)
class Results:
    """The results of a run.

    Attributes:
        machine: `opgraph.bench.machine.machine()`.
        settings: the settings of the run.
        peers: name -> version of those that took part.
        absent: name -> why it did not take part, and how to get it.
        complete: False if the run was stopped before its end.
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
    """The results that `to_json` wrote.

    Raises:
        ModelError: the text is something else, or has another format.
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
        ModelError: the file cannot be read, or is something else.
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
    """The cell from which `dataclasses.asdict` made this."""
    ratio = data.pop("ratio")
    return Cell(**data, ratio=None if ratio is None else Ratio(**ratio))
