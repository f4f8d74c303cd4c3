"""The README and the pages in specs/: their examples run, their links lead to files, and their names exist."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from opgraph.cli import main
from opgraph.cli.demo import MODELS
from opgraph.ir.opdef import all_ops

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
MEASURED = (ROOT / "specs" / "measured.md").read_text()
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")] + sorted(
    (ROOT / "specs").glob("*.md")
)


def blocks(language: str, page: str = README) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)


def test_python_example_of_the_readme_runs(tmp_path: Path) -> None:
    _, code = blocks("python")
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "1 partition" in done.stdout and "struct Fused" in done.stdout
    assert done.stderr == ""


def test_training_example_runs_and_saves_the_stated_memory(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    code, _ = blocks("python")
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert "8.0 MiB kept for backward" in done.stdout and " kernels" in done.stdout


@pytest.mark.slow
def test_memory_tables_shown_are_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    (shown,) = blocks("console")
    for run in shown.split("$ opgraph ")[1:]:
        command, *lines = (line for line in run.splitlines() if line.strip() != "...")
        assert main(command.split()) == 0
        printed = capsys.readouterr().out.splitlines()
        assert [line for line in lines if line not in printed] == []


def test_every_command_shown_exists_with_its_options(capsys: pytest.CaptureFixture[str]) -> None:
    shown = re.findall(r"^(?:.*&& )?(?:\.venv/bin/)?opgraph (.*?)(?: *#.*)?$", "\n".join(blocks("sh")), re.MULTILINE)
    assert len(shown) >= 6
    for line in shown:
        command, *rest = line.split()
        assert main([command, "--help"]) == 0
        text = capsys.readouterr().out
        for option in (word for word in rest if word.startswith("-")):
            assert re.search(rf"(?<![\w-]){re.escape(option)}(?![\w-])", text), line


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_link_target_exists(page: Path) -> None:
    text = page.read_text()
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", text) + re.findall(r'src="([^"]+)"', text)
    missing = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert not missing


def test_picture_equals_what_show_draws(tmp_path: Path) -> None:
    source = ROOT / "specs" / "images" / "gated_mlp.txt"
    assert main(["show", str(source), "--draw", str(tmp_path / "again.svg")]) == 0
    assert (tmp_path / "again.svg").read_bytes() == source.with_suffix(".svg").read_bytes()


def test_demo_table_has_the_rows_that_the_demo_prints() -> None:
    (shown,) = blocks("text", MEASURED)
    assert all(name in shown for name in MODELS)
    for row in ("nodes in the file", "units found", "original in onnxruntime", "compiled by opgraph, CPU"):
        assert row in shown


def test_extras_and_python_version_match_pyproject() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    last = README[README.index("Extras:") :]
    named = set(re.findall(r"`([\w-]+)`", last))
    assert named == set(project["optional-dependencies"])
    assert f"Python {project['requires-python'].removeprefix('>=')} or newer" in README


def test_number_of_op_kinds_is_current() -> None:
    assert f"[{len(all_ops())} kinds of ops]" in README


def test_readme_kernel_table_is_part_of_the_measured_page() -> None:
    """One set of numbers: the README shows some rows of the page."""
    rows = README[README.index("| | 1M |") : README.index('<img src="specs/images/bench-peers')].split("\n\n")[0]
    assert len(rows.splitlines()) > 8
    assert [row for row in rows.splitlines() if row not in MEASURED.splitlines()] == []


def test_every_page_in_specs_is_listed() -> None:
    listed = (ROOT / "specs" / "README.md").read_text()
    assert all(f"({p.name})" in listed for p in (ROOT / "specs").glob("*.md") if p.name != "README.md")


def test_no_gpu_figure_is_claimed() -> None:
    """Until a figure has been measured, no line about a GPU contains a time, rate or ratio."""
    figure = re.compile(r"\d\s*(?:ms|us|µs|GB/s|TB/s|x faster|times faster)\b")
    for name in ("README.md", "specs/measured.md", "specs/support.md", "specs/when-to-use-something-else.md"):
        for line in (ROOT / name).read_text().splitlines():
            assert not (re.search(r"\b(?:GPU|CUDA|H100|H200)\b", line) and figure.search(line)), line
