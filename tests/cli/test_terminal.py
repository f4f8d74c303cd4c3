"""Tables on terminals of any width: no content of a table is lost."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from opgraph.cli import main
from opgraph.cli.terminal import console, table

pytest.importorskip("rich")

GATE = "graph(x: f32[batch,64], up: f32[batch,64]) -> (y)\n  s = Sigmoid(x)\n  y = Multiply(s, up)\n"


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Makes rich see a terminal whose width is COLUMNS."""
    for name, value in {"FORCE_COLOR": "1", "NO_COLOR": "1", "TERM": "xterm"}.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [re.sub("\x1b\\[[0-9;]*m", "", line) for line in capsys.readouterr().out.splitlines()]


def cells(text: list[str]) -> set[str]:
    return {cell for line in text for cell in re.split(" {2,}", line.strip()) if cell and not cell.startswith("─")}


@pytest.mark.parametrize("columns", [80, 60, 40, 10])
def test_check_table_truncates_no_cell(
    columns: int, tmp_path: Path, narrow: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "gate.txt").write_text(GATE)
    narrow.delenv("FORCE_COLOR")
    assert main(["check", str(tmp_path / "gate.txt")]) == 0
    whole = [line for line in lines(capsys) if line.startswith((" partition", " whole"))]
    assert whole
    narrow.setenv("FORCE_COLOR", "1")
    narrow.setenv("COLUMNS", str(columns))
    assert main(["check", str(tmp_path / "gate.txt")]) == 0
    assert cells(whole) <= cells(lines(capsys))


def test_table_wraps_only_between_words(narrow: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["swish of a few", "Multiply Sigmoid Reciprocal Add", "f32[batch,seq,128] and f32[batch,4,seq,32] more"]
    row = ["partition 24", "6.45 ulp", *words, "1 + 0 (0.25)"]
    columns = ("where", "off", "~units", "~kinds", "~writes", "~ratio")
    least = 0
    for width in range(10, 131):
        narrow.setenv("COLUMNS", str(width))
        console().print(table("", columns, [row], right=("off", "ratio")))
        shown = lines(capsys)
        text = "\n".join(shown)
        assert "partition 24" in text and "6.45 ulp" in text
        assert set(" ".join(row).split()) <= set(text.split()), width
        least = least or max(map(len, shown))
        assert max(map(len, shown)) <= max(width, least), width


def test_long_name_is_folded_completely(narrow: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    narrow.setenv("COLUMNS", "40")
    name = "".join(chr(ord("a") + i % 26) for i in range(200))
    console().print(table("", ("id", "~name", "kind"), [(12345678, name, "library")], right=("id",)))
    shown = lines(capsys)
    assert max(map(len, shown)) <= 50
    text = " ".join(shown)
    assert "12345678" in text and "library" in text
    assert name in re.sub("12345678|library|[^a-z]", "", text.replace("name", "").replace("kind", ""))


def test_text_after_a_wide_table_fits_the_terminal(
    narrow: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    narrow.setenv("COLUMNS", "40")
    out = console()
    out.print(table("", ("name",), [("n" * 90,)]))
    assert any("n" * 90 in line for line in lines(capsys))
    out.print("word " * 20)
    assert max(map(len, lines(capsys))) <= 40
