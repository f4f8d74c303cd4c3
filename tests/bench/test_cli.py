"""`opgraph bench`: its printed output, its files and pictures, and the arguments that it refuses."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

import opgraph as og
from opgraph.bench.report import Table, legend
from opgraph.bench.results import Results, read
from opgraph.bench.run import Settings
from opgraph.cli import main
from opgraph.errors import DeviceError

GRAPH = """\
graph(x: f32[4,64]) -> (y)
  s = Sigmoid(x)
  y = Multiply(x, s)
"""


EMPTY = Results(machine={}, settings={})


def run(*args: object) -> int:
    return main(["bench", *map(str, args)])


def error_lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    lines = capsys.readouterr().err.strip().splitlines()
    assert [line[:8] for line in lines[-3:]] == [lines[-3][:8], "  where:", "  fix:  "], lines
    assert "Traceback" not in "\n".join(lines)
    return lines[-3:]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with results of two entries in two sizes."""
    path = tmp_path_factory.mktemp("bench") / "results.json"
    assert (
        run(
            "--suite", "activation", "--entries", "swish", "--entries", "mish", "--sizes", "500,1000",
            "--budget", "1.5", "--without", "torch.compile", "--json", path,
        )
        == 0
    )  # fmt: skip
    return path


def test_run_measures_the_requested_entries(measured: Path) -> None:
    found = read(str(measured))
    assert [(r.label, r.size, r.dtype) for r in found.rows] == [
        (name, size, "f32")
        for size in (500, 1000)
        for name in ("swish", "swish, backward", "mish", "mish, backward")
    ]  # fmt: skip
    for row in found.rows:
        assert row.ours.us is not None and row.ours.us > 0, row
        assert row.copy is not None and row.copy.ratio is not None and row.copy.ratio.median > 0
    assert found.machine["opgraph"] and found.machine["date"] and found.machine["cpu"]
    assert found.complete and found.peers["NumPy"] and "runs on a GPU" in found.absent["Triton"]
    assert json.loads(measured.read_text())["settings"]["threads"] >= 1


def test_stored_results_are_shown_and_drawn_reproducibly(
    measured: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    for folder in ("a", "b"):
        assert run("--from", measured, "--plot", tmp_path / folder) == 0
    printed = capsys.readouterr().out
    assert "to best peer" in printed and "absent: Triton" in printed and "swish, backward" in printed
    files = sorted(p.name for p in (tmp_path / "a").iterdir())
    assert files == ["copy-f32.svg", "peers-1K-f32.svg", "peers-500-f32.svg"]
    for name in files:
        text = (tmp_path / "a" / name).read_text()
        assert text == (tmp_path / "b" / name).read_text()
        ElementTree.fromstring(text)
        assert "prefers-color-scheme: dark" in text and "var(--ink)" in text
        # A viewer without support for variables uses the declaration before; without one, everything is black.
        told = re.findall(r"(?:([\w-]+): (#\w+); )?([\w-]+): var\(--(\w+)\)", text)
        light = dict(re.findall(r"--(\w+): (#\w+)", text.partition("@media")[0]))
        assert told and all(before == of and colour == light[name] for before, colour, of, name in told)


def test_empty_results_print_a_note_and_draw_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "none.json").write_text(EMPTY.to_json())
    assert run("--from", tmp_path / "none.json", "--plot", tmp_path / "pictures") == 0
    assert "note: nothing is drawn" in capsys.readouterr().err


def test_missing_matplotlib_is_reported_before_measuring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert run("--suite", "activation", "--plot", tmp_path / "p", "--json", tmp_path / "j") == 1
    assert error_lines(capsys)[2] == "  fix:   pip install 'opgraph[plot]'"
    assert not list(tmp_path.iterdir())


def test_list_option_names_entries_and_peers(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--list") == 0
    printed = capsys.readouterr().out
    assert all(word in printed for word in ("fractional (NAF1)", "softmax", "scale", "NumPy"))
    (liger,) = (line for line in printed.splitlines() if line.split()[:1] == ["Liger"])
    assert "runs on a GPU" in liger and "pip install" not in liger  # installing would not help


def test_run_without_available_peers_measures_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--entries", "mish", "--sizes", "500", "--peers", "Triton") == 2
    assert "Triton runs on a GPU (--device cuda) alone" in capsys.readouterr().err


def test_model_is_measured_against_onnxruntime(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("onnxruntime")
    path = tmp_path / "swish.txt"
    path.write_text(GRAPH)
    assert run(path, "--budget", "0.2", "--json", tmp_path / "r.json") == 0
    assert "swish.txt" in capsys.readouterr().out
    (row,) = read(str(tmp_path / "r.json")).rows
    cells = {c.peer: c for c in row.cells}
    assert cells["opgraph"].us and cells["onnxruntime"].ratio and cells["onnxruntime"].off is not None


@pytest.mark.parametrize(
    "args",
    [
        ("--suite", "none"),
        ("--entries", "none"),
        ("--sizes", "many"),
        ("--sizes", "0"),
        ("--sizes", ""),
        ("--sizes", "3.7"),
        ("--sizes", "1M", "--suite", "host"),
        ("--entries", "swish", "--suite", "scale", "--suite", "models"),
        ("--from", "results.json", "--sizes", "1M"),
        ("--from", "results.json", "--budget", "5"),
        ("--list", "--suite", "rows"),
        ("--without", "none"),
        ("--dtypes", "f64"),
        ("--peers", "none"),
        ("--threads", "100000"),
        ("--budget", "-1"),
        ("--budget", "nan"),
        ("--from", "a", "model.onnx"),
        ("--json", "no_such_folder/r.json"),
        ("--json", "."),
        ("--plot", __file__),
        ("--plot", f"{__file__}/pictures"),
        ("model.onnx", "--suite", "host"),
        ("model.onnx", "--sizes", "1M"),
        ("model.onnx", "--quick"),
        ("--dim", "batch=4"),
        ("--inputs", "a.npz"),
    ],
    ids=" ".join,
)
def test_invalid_arguments_give_three_lines_and_status_2(
    args: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error comes before any measurement."""
    monkeypatch.setattr("opgraph.bench.run._Run.all", lambda *_: pytest.fail("it measured"))
    assert run(*args) == 2
    error_lines(capsys)


@pytest.mark.parametrize(
    "stop", [KeyboardInterrupt(), DeviceError("the GPU is lost", where="row 2", fix="start again")]
)
def test_interrupted_run_shows_and_stores_its_results(
    stop: BaseException, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from opgraph.bench.suites import entries

    real, rows = entries.row_of, []

    def second_stops(*args: Any) -> Any:
        rows.append(args[0].direction)
        if len(rows) == 2:
            raise stop
        return real(*args)

    monkeypatch.setattr(entries, "row_of", second_stops)
    path = tmp_path / "r.json"
    status = run("--entries", "mish", "--sizes", "500", "--peers", "NumPy", "--budget", "0.5", "--json", path)
    shown, told = capsys.readouterr()
    assert status == (130 if isinstance(stop, KeyboardInterrupt) else 1) and rows == ["forward", "backward"]
    assert "mish" in shown and "NumPy" in shown and ("stopped" in told or "the GPU is lost" in told)
    kept = read(str(path))
    assert [row.direction for row in kept.rows] == ["forward"] and not kept.complete
    assert run("--from", path) == 0 and "incomplete: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "suites"),
    [
        ((), ("all",)),
        (("--entries", "swish"), ("entries",)),
        (("--sizes", "1M"), ("entries",)),
        (("--dtypes", "f16"), ("entries",)),
        (("--sizes", "1M", "--suite", "host", "--suite", "rows"), ("host", "rows")),
    ],
    ids=str,
)
def test_entries_option_runs_only_their_suites(
    args: tuple[str, ...], suites: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Settings] = []
    monkeypatch.setattr("opgraph.bench.run.run", lambda settings, *_: asked.append(settings) or EMPTY)
    assert run(*args) == 0 and [s.suites for s in asked] == [suites]


def test_results_are_shown_if_the_file_cannot_be_written(
    measured: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (full := tmp_path / "r.json").symlink_to("/dev/full")
    assert run("--from", measured, "--json", full) == 1
    shown = capsys.readouterr()
    assert "swish, backward" in shown.out and "No space left" in shown.err


def test_run_continues_if_first_results_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    went_on = []

    def measure(_: object, __: object, keep: Callable[[Results], None]) -> Results:
        keep(EMPTY)
        went_on.append(True)
        return EMPTY

    monkeypatch.setattr("opgraph.bench.run.run", measure)
    (full := tmp_path / "r.json").symlink_to("/dev/full")
    assert run("--entries", "swish", "--json", full) == 1
    assert went_on and "No space left" in capsys.readouterr().err


def test_legend_explains_only_columns_and_signs_in_use() -> None:
    plain = Table(
        title="models", columns=("models, us", "size", "opgraph", "to best peer"), rows=(("a-b", "", "1", "2"),)
    )
    told = legend([plain])
    assert "to copy" not in told and not any(f"{sign}:" in told for sign in "~+-") and "best peer" in told
    rich = Table(title="x", columns=(*plain.columns, "to copy"), rows=(("a", "", "3+", "~0.9 (0.1-1)", "-"),))
    told = legend([plain, rich])
    assert all(f"{sign}:" in told for sign in ("~", "+", "-", "to copy"))


def test_missing_file_gives_status_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for args in ((tmp_path / "none.onnx",), ("--from", tmp_path / "none.json")):
        assert run(*args) == 1
        error_lines(capsys)


def test_graph_without_onnx_form_is_measured_without_onnxruntime(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A oneDNN graph file; the variances are drawn at random, so some of the truth is NaN."""
    graph = og.parse(
        "graph(x: f32[4,8], d: f32[4,8], m: f32[4], v: f32[4], g: f32[8], b: f32[8]) -> (y, p, q)\n"
        " y, p, q = LayerNormBackward(x, d, m, v, g, b)"
    )
    og.onednn.dump(graph, tmp_path / "graph.json")
    assert run(tmp_path / "graph.json", "--budget", "0.05") == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "wrong" not in shown and "graph.json" in shown
    assert "onnxruntime: does not take it: LayerNormBackward" in shown and "error" not in shown
