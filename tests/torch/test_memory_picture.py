"""The picture of kept memory: it is complete, nothing is cut off, and names are shown as plain text."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import opgraph.torch as ogt  # noqa: E402
from opgraph.errors import InvalidArguments  # noqa: E402
from opgraph.torch import zoo  # noqa: E402
from opgraph.torch.memory.picture import MAX_BARS  # noqa: E402
from opgraph.torch.memory.report_text import size  # noqa: E402

SVG = "{http://www.w3.org/2000/svg}"
NASTY = "a<script>alert(1)</script>&\"'" + "n" * 200


def parsed(report: ogt.MemoryReport) -> ElementTree.Element:
    return ElementTree.fromstring(report.svg())


def texts(svg: ElementTree.Element) -> list[str]:
    return [text.text or "" for text in svg.iter(f"{SVG}text")]


@pytest.fixture(scope="module")
def compared() -> ogt.MemoryReport:
    x = torch.randn(2, 3, 32, 32)
    after = ogt.saved_tensors(zoo.resnet18(nn.ReLU), x, dry_run=True)
    return ogt.saved_tensors(zoo.resnet18(nn.SiLU), x, dry_run=True, after=after)


@pytest.mark.slow
def test_picture_elements_stay_inside_the_edges(compared: ogt.MemoryReport) -> None:
    reports = [
        compared,
        ogt.saved_tensors(zoo.resnet50(), torch.randn(2, 3, 32, 32), dry_run=True),
        ogt.saved_tensors(torch.exp, torch.randn(())),
        ogt.saved_tensors(nn.Sequential(nn.SiLU(), nn.SiLU()), torch.randn(3)),
    ]
    for report in reports:
        svg = parsed(report)
        width, height = float(svg.get("width", 0)), float(svg.get("height", 0))
        for text in svg.iter(f"{SVG}text"):
            wide = {"title": 9.1}.get(text.get("class", ""), 6.7) * len(text.text or "")
            assert float(text.get("x", -1)) >= 0 and float(text.get("x", -1)) + wide <= width, text.text
            assert 10 <= float(text.get("y", -1)) <= height - 4, text.text
        for rect in svg.iter(f"{SVG}rect"):
            assert float(rect.get("x", 0)) + float(rect.get("width", -1)) <= width
            assert float(rect.get("y", 0)) + float(rect.get("height", -1)) <= height


def test_css_has_fallback_colours_for_viewers_without_variables(compared: ogt.MemoryReport) -> None:
    style = parsed(compared).findtext(f"{SVG}style") or ""
    light = dict(re.findall(r"--([\w-]+): (#\w+)", style.partition("@media")[0]))
    told = re.findall(r"(?:([\w-]+): (#\w+); )?([\w-]+): var\(--([\w-]+)\)", style)
    assert {name for *_, name in told} == set(light)
    assert all(before == of and colour == light[name] for before, colour, of, name in told)


def test_bar_lengths_are_proportional_to_saved_bytes(compared: ogt.MemoryReport) -> None:
    svg = parsed(compared)
    largest = max(group.kept for group in compared.modules)
    bars = [r for r in svg.iter(f"{SVG}rect") if r.get("height") in ("8.0",)]
    drawn: dict[tuple[str, str], list[float]] = {}
    for bar in bars:
        drawn.setdefault((bar.get("y", ""), bar.get("class", "")), []).append(float(bar.get("width", 0)))
    before = sorted(sum(w) for (_, kind), w in drawn.items() if kind in ("own", "shared"))
    after = sorted(sum(w) for (_, kind), w in drawn.items() if kind == "after")
    shown = [group for group in compared.modules if max(group.kept, group.after or 0) >= compared.totals.kept // 1000]
    unit = before[-1] / largest
    assert before == pytest.approx(sorted(g.kept * unit for g in shown if g.kept), abs=0.11)
    assert after == pytest.approx(sorted((g.after or 0) * unit for g in shown if g.after), abs=0.11)


def test_small_layers_are_summed_in_one_line(compared: ogt.MemoryReport) -> None:
    report = ogt.saved_tensors(zoo.resnet50(), torch.randn(2, 3, 32, 32), dry_run=True)
    rest = sorted((group.kept for group in report.modules), reverse=True)[MAX_BARS:]
    assert f"and {len(rest)} smaller: {size(sum(rest))}" in texts(parsed(report))


def test_picture_names_op_and_module_of_the_peak(compared: ogt.MemoryReport) -> None:
    assert compared.after is not None
    lines = texts(parsed(compared))
    for peak in (compared.peak, compared.after.peak):
        assert any(line.startswith("peak ") and line.endswith(f": {peak.op} {peak.module}") for line in lines)


def test_module_names_are_escaped_in_svg(tmp_path: Path) -> None:
    model = nn.Sequential()
    model.add_module(NASTY, nn.SiLU())
    model.add_module("b\x1b[31m", nn.SiLU())
    report = ogt.saved_tensors(model, torch.randn(3))
    report.plot(tmp_path / "kept.svg")
    svg = ElementTree.fromstring((tmp_path / "kept.svg").read_text(encoding="utf-8"))
    assert not list(svg.iter(f"{SVG}script"))
    assert any(text.startswith("a<script>") for text in texts(svg))
    assert [p.name for p in tmp_path.iterdir()] == ["kept.svg"]


def test_other_file_suffix_is_refused(compared: ogt.MemoryReport, tmp_path: Path) -> None:
    with pytest.raises(InvalidArguments, match=r"cannot draw to \.png"):
        compared.plot(tmp_path / "kept.png")
    assert not list(tmp_path.iterdir())
