"""The picture of a report: bytes kept by each layer, and memory over the forward and the backward pass."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

from opgraph.errors import InvalidArguments
from opgraph.ir.whole_file import write_whole
from opgraph.torch.memory.report import Group, MemoryReport
from opgraph.torch.memory.report_text import size
from opgraph.torch.memory.storage_trace import BACKWARD, FORWARD

#: Bars are drawn for at most this many layers, the largest; one more entry stands for the rest.
MAX_BARS = 60

_WIDTH, _MARGIN, _CHAR = 960.0, 24.0, 6.7  # advance of one character of the 11 px monospaced text
_AREA_HEIGHT = 240.0

_STYLE = """
svg { --paper: #ffffff; --ink: #1f2733; --faint: #5a6675; --line: #d5dbe3; --own: #3b7dc4; --shared: #a9cbee;
  --after: #2f9e5f; --fill: #3b7dc433; --after-fill: #2f9e5f33; }
@media (prefers-color-scheme: dark) { svg { --paper: #14181f; --ink: #e3e8ef; --faint: #9aa6b5; --line: #343c48;
  --own: #5b9be0; --shared: #2f5580; --after: #4cc483; --fill: #5b9be033; --after-fill: #4cc48333; } }
.paper { fill: var(--paper); }
text { font: 11px 'DejaVu Sans Mono', ui-monospace, Menlo, Consolas, monospace; fill: var(--ink); }
.title { font-size: 15px; font-weight: bold; } .head { font-weight: bold; } .faint { fill: var(--faint); }
.own { fill: var(--own); } .shared { fill: var(--shared); } .after { fill: var(--after); }
.grid { stroke: var(--line); stroke-width: 1; } .middle { stroke: var(--faint); stroke-dasharray: 4 3; }
.area { fill: var(--fill); stroke: var(--own); stroke-width: 1.5; }
.area2 { fill: var(--after-fill); stroke: var(--after); stroke-width: 1.5; }
.halo { paint-order: stroke; stroke: var(--paper); stroke-width: 4px; stroke-linejoin: round; }
"""


def write_picture(report: MemoryReport, path: Path) -> None:
    """Writes the picture of a report; the file appears whole or not at all.

    Args:
        path: ends in .svg.

    Raises:
        InvalidArguments: another ending.
    """
    if path.suffix.lower() != ".svg":
        what = f"cannot draw to {path.suffix}" if path.suffix else "cannot draw to a file without ending"
        raise InvalidArguments(what, where=str(path), fix="use .svg")
    write_whole(path, svg_text(report))


def svg_text(report: MemoryReport) -> str:
    """The picture as the text of an SVG file."""
    svg = ElementTree.Element("svg", {"xmlns": "http://www.w3.org/2000/svg", "width": f"{_WIDTH:.0f}"})
    ElementTree.SubElement(svg, "style").text = with_light(_STYLE)
    paper = ElementTree.SubElement(svg, "rect", {"class": "paper", "width": f"{_WIDTH:.0f}"})
    _text(svg, _MARGIN, 30, f"{_shown(report.subject, 60)}: what is kept for backward", "title")
    y = _summary(svg, report, 50)
    y = _bars(svg, report, y + 24)
    y = _timeline(svg, report, y + 34)
    height = f"{y + _MARGIN:.0f}"
    svg.set("height", height)
    svg.set("viewBox", f"0 0 {_WIDTH:.0f} {height}")
    paper.set("height", height)
    return ElementTree.tostring(svg, encoding="unicode")


def with_light(style: str) -> str:
    """A style with colour variables, with the first value of each variable before its use: otherwise a viewer without
    support for variables paints all black."""
    light = dict(reversed(re.findall(r"--([\w-]+): (#\w+)", style)))
    return re.sub(r"([\w-]+): var\(--([\w-]+)\)", lambda m: f"{m[1]}: {light[m[2]]}; {m[0]}", style)


def _summary(svg: ElementTree.Element, report: MemoryReport, y: float) -> float:
    told = [("before" if report.after else "", report)] + (
        [(_shown(report.after_name, 20), report.after)] if report.after else []
    )
    for name, one in told:
        x = _MARGIN
        if report.after:
            _rect(svg, x, y - 9, 10, 10, "own" if one is report else "after")
            x += 16
        text = f"{size(one.totals.kept)} kept, peak {size(one.peak.bytes)} above the weights"
        _text(svg, x, y, f"{name}: {text}" if name else text)
        y += 17
    return y - 17


def _bars(svg: ElementTree.Element, report: MemoryReport, y: float) -> float:
    """Horizontal bars, one for each layer (or line, or op, if there is one layer); returns the y of their end."""
    title, labelled, rest = _rows(report)
    largest = max((_length(g) for _, g in labelled), default=1)
    left = _MARGIN + min(44, max((len(label) for label, _ in labelled), default=0)) * _CHAR + 10
    full = _WIDTH - _MARGIN - left - (24 if report.after else 12) * _CHAR
    _text(svg, _MARGIN, y, title, "head")
    x = _WIDTH - _MARGIN
    for kind, text in (("shared", "also kept by another"), ("own", "kept by this alone")):
        x -= len(text) * _CHAR
        _text(svg, x, y, text, "faint")
        _rect(svg, x - 15, y - 9, 10, 10, kind)
        x -= 30
    y += 10
    for label, group in labelled:
        compares = group.after is not None
        tall = 8.0 if compares else 12.0
        _text(svg, _MARGIN, y + (13 if compares else 11), _shown(label, 44), "faint")
        own = min(group.alone, group.kept)
        _rect(svg, left, y + 2, full * own / largest, tall, "own")
        _rect(svg, left + full * own / largest, y + 2, full * (group.kept - own) / largest, tall, "shared")
        end = left + full * group.kept / largest + 6
        if group.after is not None:
            _rect(svg, left, y + 11, full * group.after / largest, tall, "after")
            end = max(end, left + full * group.after / largest + 6)
            _text(svg, end, y + 13, f"{size(group.kept)} → {size(group.after)}", "faint halo")
        else:
            _text(svg, end, y + 11, size(group.kept), "faint halo")
        y += 22 if compares else 16
    if rest:
        _text(svg, _MARGIN, y + 11, f"and {len(rest)} smaller: {size(sum(g.kept for g in rest))}", "faint")
        y += 16
    return y


def _rows(report: MemoryReport) -> tuple[str, list[tuple[str, Group]], list[Group]]:
    """A title, the groups to draw, and the groups that are too small or too many for that."""
    if len(report.modules) > 1:
        title, groups = "by module", [(f"{g.of[0] or '(itself)'} {g.of[2]}", g) for g in report.modules]
    elif report.lines:
        title, groups = "by line of source", [(f"{os.path.basename(g.of[0])} {g.of[1]}", g) for g in report.lines]
    else:
        title, groups = "by op", [(g.of[0] or "(not in the graph)", g) for g in report.ops]
    # Bars that are far too small to be seen would only push the rest down the page.
    seen = [i for i, (_, g) in enumerate(groups) if _length(g) >= max(report.totals.kept // 1000, 1)]
    drawn = set(sorted(seen, key=lambda i: -_length(groups[i][1]))[:MAX_BARS])
    rest = [g for i, (_, g) in enumerate(groups) if i not in drawn]
    return title, [groups[i] for i in sorted(drawn)], rest


def _length(group: Group) -> int:
    return max(group.kept, group.after or 0)


def _timeline(svg: ElementTree.Element, report: MemoryReport, y: float) -> float:
    """Bytes over the two passes, each pass stretched to half of the width."""
    _text(svg, _MARGIN, y, "memory above the weights, op after op", "head")
    top, bottom = y + 26, y + 26 + _AREA_HEIGHT
    reports = [report] + ([report.after] if report.after else [])
    highest = max(max(one.peak.bytes for one in reports), 1)
    step = _tick(highest)
    scale = _AREA_HEIGHT / (-(-highest // step) * step)
    labels = [size(value).replace(".0 ", " ") for value in range(0, -(-highest // step) * step + 1, step)]
    left = _MARGIN + max(len(label) for label in labels) * _CHAR + 8
    right = _WIDTH - _MARGIN
    middle = (left + right) / 2
    for index, label in enumerate(labels):
        at = bottom - index * step * scale
        _line(svg, left, at, right, at, "grid")
        _text(svg, left - 8 - len(label) * _CHAR, at + 4, label, "faint")
    for one, kind in zip(reports, ("area", "area2"), strict=False):
        points = _course(one, left, middle, right)
        path = "".join(f" {x:.1f} {bottom - value * scale:.1f}" for x, value in points)
        ElementTree.SubElement(
            svg, "path", {"class": kind, "d": f"M{left:.1f} {bottom:.1f} L{path} L{points[-1][0]:.1f} {bottom:.1f}"}
        )
    _line(svg, middle, top - 8, middle, bottom, "middle")
    for text, centre in (("forward", (left + middle) / 2), ("backward", (middle + right) / 2)):
        _text(svg, centre - len(text) * _CHAR / 2, bottom + 16, text, "faint")
    for one, kind in zip(reports, ("own", "after"), strict=False):
        x, value = max(_course(one, left, middle, right), key=lambda point: point[1])
        place = f" {one.peak.module}" if one.peak.module else ""
        text = _shown(f"peak {size(one.peak.bytes)}: {one.peak.op}{place}", 90)
        start = min(max(x - len(text) * _CHAR / 2, left), right - len(text) * _CHAR)
        ElementTree.SubElement(
            svg, "circle", {"class": kind, "cx": f"{x:.1f}", "cy": f"{bottom - value * scale:.1f}", "r": "4"}
        )
        _text(svg, start, bottom - value * scale - 9, text, "halo")
    return bottom + 20


def _course(report: MemoryReport, left: float, middle: float, right: float) -> list[tuple[float, int]]:
    points: list[tuple[float, int]] = []
    for phase, start, end in ((FORWARD, left, middle), (BACKWARD, middle, right)):
        values = [sample[3] for sample in report.timeline if sample[0] == phase]
        points += [(start + (end - start) * (i + 1) / len(values), value) for i, value in enumerate(values)]
    return points or [(left, 0)]


def _tick(highest: int) -> int:
    """A step of 1, 2 or 5 times a power of ten, in the unit that `size` writes, so that 3 to 6 steps fit."""
    unit = 1 if highest < 1024 else 2**10 if highest < 2**20 else 2**20
    step = 1
    factors: Sequence[int] = (2, 5, 10)
    power = 1
    while highest / (step * unit) > 6:
        step = next((f * power for f in factors if f * power > step), step)
        if step == 10 * power:
            power *= 10
    return step * unit


def _shown(text: str, limit: int) -> str:
    """Printable text of at most `limit` characters: names of modules and lines of source may contain anything."""
    text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _text(svg: ElementTree.Element, x: float, y: float, text: str, kind: str = "") -> None:
    made = ElementTree.SubElement(svg, "text", {"x": f"{x:.1f}", "y": f"{y:.1f}", **({"class": kind} if kind else {})})
    made.text = text


def _rect(svg: ElementTree.Element, x: float, y: float, width: float, height: float, kind: str) -> None:
    if width > 0:
        numbers = {"x": x, "y": y, "width": width, "height": height}
        ElementTree.SubElement(svg, "rect", {"class": kind, **{k: f"{v:.1f}" for k, v in numbers.items()}})


def _line(svg: ElementTree.Element, x1: float, y1: float, x2: float, y2: float, kind: str) -> None:
    numbers = {"x1": x1, "y1": y1, "x2": x2, "y2": y2}
    ElementTree.SubElement(svg, "line", {"class": kind, **{k: f"{v:.1f}" for k, v in numbers.items()}})
