"""Plots of a run: time relative to a copy, over size; peers relative to opgraph. SVG, equal bytes for equal results."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from opgraph.bench.report import size_text
from opgraph.bench.results import COLD, Results, Row
from opgraph.errors import DeviceError
from opgraph.ir.whole_file import write_whole

#: Colours of the light and of the dark theme: paper, ink, faint ink, grid, then lines. The file holds the light ones
#: directly and as variables, and a rule that replaces the variables where the reader's screen is dark.
_COLOURS = {
    "paper": ("#ffffff", "#14181f"), "ink": ("#1f2733", "#e3e8ef"), "faint": ("#5a6675", "#9aa6b5"),
    "grid": ("#d5dbe3", "#343c48"), "c0": ("#2f9e5f", "#4cc483"), "c1": ("#3b7dc4", "#5b9be0"),
    "c2": ("#c9822b", "#e0a050"), "c3": ("#b0475f", "#e07f95"), "c4": ("#7d5bb5", "#a98be0"),
    "c5": ("#2a9aa5", "#55c3cd"), "c6": ("#8a8f2a", "#bcc24f"), "c7": ("#8a5a3c", "#c2916f"),
    "c8": ("#6f7b8a", "#98a4b3"), "c9": ("#c2568f", "#e58cbb"),
}  # fmt: skip
_LINES = [light for name, (light, _) in _COLOURS.items() if name.startswith("c")]
_MARKS = "osD^vPX*<>"


def draw(results: Results, folder: str) -> list[Path]:
    """Writes the plots for which the results have enough data.

    Args:
        folder: created if it does not exist.

    Returns: the files: `copy-<dtype>.svg` (opgraph's time as a multiple of the copy's, over size) for each dtype with
        several sizes, and `peers-<size>-<dtype>.svg` (each peer's time, and the copy's, as a multiple of opgraph's,
        entry by entry) for each size and dtype; `-cold` where caches were emptied.

    Raises:
        DeviceError: matplotlib is not installed.
    """
    pyplot = require()
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    written = []
    timed = [row for row in results.rows if row.copy is not None and row.copy.ratio is not None]
    for kind in dict.fromkeys(_kind(row) for row in timed):
        rows = [row for row in timed if _kind(row) == kind]
        if len({row.size for row in rows}) > 1:
            written.append(_saved(_copy(pyplot, rows), target / f"copy-{kind}.svg"))
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in results.rows:
        if row.best is not None and row.elements:
            groups.setdefault((size_text(row.size), _kind(row)), []).append(row)
    for (size, kind), rows in groups.items():
        if len(rows) > 1:
            name = f"peers-{size.replace(',', '')}-{kind}.svg"
            written.append(_saved(_peers(pyplot, rows, f"{size} elements, {kind.replace('-', ', ')}"), target / name))
    return written


def _kind(row: Row) -> str:
    """The group of rows in one plot, such as "f32" or "bf16-cold"."""
    return f"{row.dtype}-{COLD}" if row.cache == COLD else row.dtype


def require() -> Any:
    """matplotlib's pyplot.

    Raises:
        DeviceError: it is not installed.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise DeviceError(
            f"plots are drawn by matplotlib, which cannot be imported ({error})",
            where="opgraph bench --plot",
            fix="pip install 'opgraph[plot]'",
        ) from None
    matplotlib.use("Agg", force=False)
    from matplotlib import pyplot

    return pyplot


_STYLE: Any = {
    "svg.hashsalt": "opgraph",  # without it, names inside the file are random
    "svg.fonttype": "none",
    "font.family": "monospace",
    "font.size": 8,
    "axes.edgecolor": _COLOURS["faint"][0],
    "axes.labelcolor": _COLOURS["ink"][0],
    "axes.titlecolor": _COLOURS["ink"][0],
    "axes.titlesize": 9,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.facecolor": _COLOURS["paper"][0],
    "text.color": _COLOURS["ink"][0],
    "xtick.color": _COLOURS["faint"][0],
    "ytick.color": _COLOURS["faint"][0],
    "grid.color": _COLOURS["grid"][0],
    "legend.frameon": False,
    "legend.fontsize": 7,
}


def _copy(pyplot: Any, rows: Sequence[Row]) -> Any:
    """One panel for each suite and direction: time divided by that of a copy of as many bytes, over size."""
    panels: dict[str, dict[str, list[Row]]] = {}
    for row in rows:
        place = panels.setdefault(f"{row.suite}, {row.direction}", {})
        place.setdefault(row.entry, []).append(row)
    columns = min(len(panels), 2)
    lines = -(-len(panels) // columns)
    with pyplot.rc_context(_STYLE):
        figure, axes = pyplot.subplots(lines, columns, figsize=(5.2 * columns, 3.1 * lines), squeeze=False)
        for axis, (title, entries) in zip(axes.flat, panels.items()):
            axis.set_title(title)
            axis.axhline(1.0, color=_COLOURS["faint"][0], linewidth=1, linestyle="--")
            for index, (name, found) in enumerate(entries.items()):
                _line(axis, index, name, sorted(found, key=lambda row: row.size))
            axis.set_xscale("log")
            axis.set_yscale("log")
            axis.grid(True, linewidth=0.5)
            axis.set_xlabel("elements")
            sizes = {size_text(row.size): row.size for found in entries.values() for row in found}
            axis.set_xticks(list(sizes.values()), list(sizes))
            axis.minorticks_off()
            axis.set_ylabel("time / time of a copy")
            axis.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
            _plain(axis.yaxis)
        for axis in list(axes.flat)[len(panels) :]:
            axis.set_visible(False)
        figure.tight_layout()
    return figure


def _line(axis: Any, index: int, name: str, rows: Sequence[Row]) -> None:
    ratios = [row.copy.ratio for row in rows if row.copy is not None and row.copy.ratio is not None]
    sizes = [row.size for row in rows]
    colour = _LINES[index % len(_LINES)]
    axis.plot(
        sizes,
        [r.median for r in ratios],
        color=colour,
        marker=_MARKS[index % len(_MARKS)],
        markersize=3.5,
        linewidth=1.2,
        label=name,
    )
    axis.vlines(sizes, [r.low for r in ratios], [r.high for r in ratios], color=colour, linewidth=1)


def _peers(pyplot: Any, rows: Sequence[Row], title: str) -> Any:
    """One line for each row: a mark for each peer, at its time as a multiple of opgraph's."""
    marks = [{c.peer: c.ratio for c in row.cells if c.ratio is not None} for row in rows]
    for row, found in zip(rows, marks, strict=True):
        if row.copy is not None and row.copy.ratio is not None:
            found["copy"] = row.copy.ratio
    names = sorted(dict.fromkeys(name for found in marks for name in found), key=lambda name: name == "copy")
    with pyplot.rc_context(_STYLE):
        figure, axis = pyplot.subplots(figsize=(8.0, 1.1 + 0.19 * len(rows)))
        axis.set_title(f"{title}: the peer's time / opgraph's")
        axis.axvline(1.0, color=_LINES[0], linewidth=1.4)
        for index, name in enumerate(names):
            colour = _LINES[1 + index % (len(_LINES) - 1)]
            places = [(line, found[name]) for line, found in enumerate(marks) if name in found]
            lines = [line for line, _ in places]
            axis.hlines(
                lines, [1 / r.high for _, r in places], [1 / r.low for _, r in places], color=colour, linewidth=1
            )
            axis.plot(
                [1 / r.median for _, r in places],
                lines,
                color=_COLOURS["ink"][0] if name == "copy" else colour,
                marker="|" if name == "copy" else _MARKS[index],
                markersize=4,
                linestyle="none",
                label=name,
            )
        axis.set_yticks(range(len(rows)), [row.label for row in rows])
        axis.set_ylim(len(rows) - 0.5, -0.5)
        axis.set_xscale("log")
        _plain(axis.xaxis)
        axis.grid(True, linewidth=0.5)
        axis.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
        axis.set_xlabel("right of 1: opgraph is faster")
        figure.tight_layout()
    return figure


def _plain(axis: Any) -> None:
    """Formats numbers as 0.5, 1, 2, 10, without powers."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high < 100 * low else (1.0,)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def _saved(figure: Any, path: Path) -> Path:
    from matplotlib import pyplot

    buffer = io.StringIO()
    with pyplot.rc_context(_STYLE):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    pyplot.close(figure)
    write_whole(path, _themed(buffer.getvalue(), _COLOURS))
    return path


def _themed(svg: str, colours: Mapping[str, tuple[str, str]]) -> str:
    """Turns colours into variables and adds a set for dark screens; viewers without variables use the light colours."""
    for name, (light, _) in colours.items():
        svg = re.sub(rf"([\w-]+): {light}", rf"\g<0>; \1: var(--{name})", svg)
    rules = ["; ".join(f"--{name}: {pair[i]}" for name, pair in colours.items()) for i in (0, 1)]
    style = f"<style>svg {{ {rules[0]} }} @media (prefers-color-scheme: dark) {{ svg {{ {rules[1]} }} }}</style>\n"
    head, mark, rest = svg.partition("<defs>")
    lines = "\n".join(line.rstrip() for line in f"{head}{style}{mark}{rest}".splitlines())
    return f"{lines}\n"
