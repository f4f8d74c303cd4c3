"""The results of a run as tables of text: one for each suite."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from opgraph.bench.results import COLD, TAKES_NOT, Cell, Figure, Results, Row
from opgraph.bench.timing import Ratio

_LEGEND = (
    "Times are microseconds of one run, the median. Ratios are opgraph's time as a part of the other's: the median "
    "over pairs of neighbouring runs, with its quartiles; below 1 opgraph is faster. best peer: the fastest of them."
)
_COPY = "to copy"
_COPIED = f"{_COPY}: to the best copy of as many bytes as the entry reads and writes."
#: Signs before or after a number, or in place of it.
_SIGNS = (
    ("~", "~: the quartiles lie more than 15% apart, or there are less than 3 pairs."),
    ("+", "+: the time includes allocating the result, where the library takes no buffer for it."),
    ("-", "-: does not take it, or is left out (the JSON says why)."),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table of text.

    Attributes:
        right: headings of the columns that hold numbers.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    right: tuple[str, ...] = ()


def tables(results: Results) -> list[Table]:
    """The tables of all suites."""
    made = []
    # Whole models run first, but are shown last.
    for suite in sorted(
        dict.fromkeys(row.suite for row in results.rows), key=lambda name: name in ("models", "networks")
    ):
        made.append(_entries(suite, [row for row in results.rows if row.suite == suite]))
    for suite in dict.fromkeys(f.suite for f in results.figures):
        made.append(_figures(suite, [f for f in results.figures if f.suite == suite]))
    return made


def _entries(suite: str, rows: Sequence[Row]) -> Table:
    peers = dict.fromkeys(c.peer for row in rows for c in row.cells[1:] if c.us is not None)
    has_copy = any(row.copy is not None for row in rows)
    columns = (f"{suite}, us", "size", "opgraph", *peers, "to best peer", "best peer")
    body = []
    for row in rows:
        cells = {c.peer: c for c in row.cells}
        best = row.best
        body.append((
            row.label,
            f"{size_text(row.elements)} {row.dtype}{', cold' if row.cache == COLD else ''}".strip(),
            _time(row.ours),
            *(_time(cells.get(p)) for p in peers),
            "" if best is None else ratio_text(best.ratio),
            "" if best is None else best.peer,
            *((("" if row.copy is None else ratio_text(row.copy.ratio)),) if has_copy else ()),
        ))  # fmt: skip
    columns += (_COPY,) if has_copy else ()
    return Table(title=suite, columns=columns, rows=tuple(body), right=columns[2:])


def legend(shown: Sequence[Table]) -> str:
    """The legend of the tables of entries: it explains only the signs and columns that they have."""
    cells = [cell for one in shown for row in one.rows for cell in row[2:]]
    said = [_LEGEND, *([_COPIED] if any(_COPY in one.columns for one in shown) else [])]
    said += [text for sign, text in _SIGNS if any(c.startswith(sign) or c.endswith(sign) for c in cells)]
    return textwrap.fill(" ".join(said), 120)


def _time(cell: Cell | None) -> str:
    if cell is None or cell.us is None:
        return "-"
    return f"{number(cell.us)}{'+' if cell.allocates else ''}"


def ratio_text(found: Ratio | None) -> str:
    """Text such as "0.81 (0.80-0.83)", with a tilde if the ratio is noisy."""
    if found is None:
        return ""
    return f"{'~' if found.noisy else ''}{found.median:.2f} ({found.low:.2f}-{found.high:.2f})"


def number(value: float) -> str:
    """Three digits, or all digits before the decimal point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def size_text(elements: int) -> str:
    """Text such as 1K, 32M, 2G; the number itself if it is not near one of these."""
    for unit, name in ((1 << 30, "G"), (1 << 20, "M"), (1000, "K")):
        whole = round(elements / unit)
        if whole and abs(elements - whole * unit) <= 0.05 * elements:
            return f"{whole}{name}"
    return f"{elements:,}" if elements else ""


def _figures(suite: str, figures: Sequence[Figure]) -> Table:
    columns = {f.column: f"{f.column}, {f.unit}" if f.unit not in ("", f.column) else f.column for f in figures}
    cells = {(f.subject, f.column): number(f.value) for f in figures}
    rows = tuple(
        (subject, *(cells.get((subject, column), "") for column in columns))
        for subject in dict.fromkeys(f.subject for f in figures)
    )
    return Table(title=suite, columns=(suite, *columns.values()), rows=rows, right=tuple(columns.values()))


def remarks(results: Results) -> list[str]:
    """One line for each absent peer, each wrong result or failed run, and each peer that does not take a model. Peers
    that do not take an entry are only in the JSON."""
    lines = [] if results.complete else ["incomplete: the run was stopped before its end"]
    lines += [f"absent: {name}: {why}" for name, why in results.absent.items()]
    for row in results.rows:
        for index, cell in enumerate(row.cells):
            if cell.failed and (index == 0 or cell.failed.startswith(("wrong: ", "error: ", TAKES_NOT))):
                what = " ".join(filter(None, (f"{row.label},", size_text(row.elements), row.dtype)))
                lines.append(f"{what}: {cell.peer}: {cell.failed}")
    return lines


def summary(results: Results) -> list[str]:
    """The machine and the versions, in a line each."""
    machine = ", ".join(f"{name} {value}" for name, value in results.machine.items())
    peers = ", ".join(f"{name} {version}" for name, version in results.peers.items())
    return [f"machine: {machine}", f"peers: {peers or 'none'}"]
