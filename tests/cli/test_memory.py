"""`opgraph memory`: its arguments, its printed output, and its error messages."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

pytest.importorskip("torch")

from opgraph.cli import main
from opgraph.cli.memory import MODELS

SVG = "{http://www.w3.org/2000/svg}"
ACTIVATIONS = """\
import torch
from beside import SCALE

class Swish(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a = torch.nn.Parameter(torch.tensor(SCALE))

    def forward(self, x):
        return x * torch.sigmoid(self.a * x)

class Wants(torch.nn.Module):
    def __init__(self, width, depth=2):
        super().__init__()

def gate(x, up):
    return torch.nn.functional.silu(x) * up

def asks(x):
    return x.exp() if x.sum() > 0 else x

def fails(x):
    return x.reshape(7)

made = torch.nn.Sequential(torch.nn.Linear(8, 8), Swish())
number = 3
Plain = dict

class Outer:
    class Inner(Swish):
        pass
"""


@pytest.fixture
def act(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "beside.py").write_text("SCALE = 1.5\n")
    (tmp_path / "act.py").write_text(ACTIVATIONS)
    return str(tmp_path / "act.py")


def run(*args: object) -> int:
    return main([str(a) for a in args])


def report(capsys: pytest.CaptureFixture[str], *args: object) -> dict[str, Any]:
    assert run("memory", *args, "--json") == 0
    data: dict[str, Any] = json.loads(capsys.readouterr().out)
    return data


def error(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[int, list[str]]:
    status = run("memory", *args)
    lines = capsys.readouterr().err.strip().splitlines()
    assert [line[:8] for line in lines[-3:]] == [lines[-3][:8], "  where:", "  fix:  "], lines
    assert "Traceback" not in "\n".join(lines)
    return status, [line.partition(": ")[2].strip() if i == 0 else line[9:] for i, line in enumerate(lines[-3:])]


def test_classes_functions_and_modules_of_a_file_are_measured(act: str, capsys: pytest.CaptureFixture[str]) -> None:
    mib = 2**20
    data = report(capsys, f"{act}:Swish", "--input", "128,64,32,32")
    assert data["totals"]["kept"] == 2 * 32 * mib  # x and the sigmoid
    assert data["after"]["totals"]["kept"] == 32 * mib  # fused: only x
    data = report(capsys, f"{act}:gate", "--input", "4,8", "--input", "4,8", "--dtype", "bf16")
    assert (data["totals"]["kept"], data["totals"]["inputs"]) == (3 * 64, 2 * 64)
    assert {k["dtype"] for k in data["kept"]} == {"bf16"}
    data = report(capsys, f"{act}:made", "--input", "4,8", "--run")
    assert [g["of"][0] for g in data["modules"]] == ["0", "1"]
    data = report(capsys, f"{act}:made", "--input", "4,8", "--dtype", "bf16")  # its parameters have that dtype too
    assert {k["dtype"] for k in data["kept"]} == {"bf16"}
    data = report(capsys, "torch.nn.functional:silu", "--input", "4,8")
    assert data["totals"]["kept"] == 128


def test_input_larger_than_memory_is_measured(act: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shape, pictures = "1000000,1000,1000", (tmp_path / "plot.svg", tmp_path / "graph.svg")
    assert run("memory", f"{act}:Swish", "--input", shape, "--plot", pictures[0], "--graph", pictures[1]) == 0
    assert "Swish, 1000000x1000x1000 f32: 7629394.5 MiB kept" in capsys.readouterr().out
    assert all(path.stat().st_size for path in pictures)


@pytest.mark.slow
def test_activation_is_measured_inside_a_network(act: str, capsys: pytest.CaptureFixture[str]) -> None:
    kept = {}
    for target in (["torch.nn:ReLU"], ["torch.nn:SiLU"], ["torch.nn.functional:silu"], []):
        data = report(capsys, *target, "--model", "resnet18", "--no-fuse")
        kept["".join(target).rpartition(":")[2]] = round(data["totals"]["kept"] / 2**20)
    assert kept == {"ReLU": 574, "SiLU": 846, "silu": 846, "": 574}
    data = report(capsys, f"{act}:Swish", "--model", "resnet18")
    # When fused, any network keeps the outputs of its convolutions, and the images.
    assert [round(d["totals"]["kept"] / 2**20) for d in (data, data["after"])] == [1118, 302]
    assert data["after"]["peak"]["bytes"] < data["peak"]["bytes"] / 2
    assert report(capsys, "--model", "resnet18", "--batch", "2", "--no-fuse")["subject"] == "resnet18, 2x3x32x32 f32"


def test_model_choices_equal_the_zoo() -> None:
    from opgraph.cli.memory import DTYPES
    from opgraph.ir import dtypes
    from opgraph.torch import zoo

    assert tuple(zoo.MODELS) == MODELS
    assert set(DTYPES) == set(dtypes.FLOATS)


def test_tables_list_saved_tensors(act: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "kept.svg"
    assert run("memory", f"{act}:Swish", "--input", "128,64,32,32", "--all", "--plot", picture) == 0
    out = capsys.readouterr().out
    assert "Swish, 128x64x32x32 f32: 64.0 MiB kept for backward" in out
    assert "return x * torch.sigmoid(self.a * x)" in out
    assert "SigmoidBackward0" in out and "weight a" in out
    assert picture.read_text().startswith("<svg")


def test_graphs_of_both_passes_are_drawn_with_saved_tensors(
    act: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "joint.svg"
    assert run("memory", f"{act}:Swish", "--input", "128,64,32,32", "--graph", path) == 0
    svg = ElementTree.parse(path).getroot()
    titles = [(rect.get("class"), text) for rect, text in pills(svg)]
    # The trainable scalar is kept too, and has no separate line.
    assert titles.count(("kept", "x")) == 2
    assert ("output", "out") in titles and ("output", "d_x") in titles and ("input", "d_out") in titles
    assert sum(p.get("class") == "edge keeps" for p in svg.iter(f"{SVG}path")) == 1
    assert any("kept for backward: x 32.0 MiB, 1 scalar" in (t.text or "") for t in svg.iter(f"{SVG}text"))


def pills(svg: ElementTree.Element) -> list[tuple[ElementTree.Element, str]]:
    """The rectangles that are in one group with a text, and the text."""
    found = []
    for group in svg.iter(f"{SVG}g"):
        rect, text = group.find(f"{SVG}rect"), group.find(f"{SVG}text")
        if rect is not None and text is not None:
            found.append((rect, text.text or ""))
    return found


@pytest.mark.parametrize(
    ("args", "status", "what", "fix"),
    [
        ("", 2, "nothing to measure", "give FILE.py:NAME"),
        ("ACT:Swish", 2, "no input", "--input 128,64,32,32"),
        ("ACT --input 2", 2, "no name in a Python file", "FILE.py:Name"),
        ("ACT:Nothing --input 2", 2, "there is no Nothing in it", "it defines Swish, Wants, gate"),
        ("ACT:Wants --input 2", 2, "takes arguments: width", "made = Wants"),
        ("ACT:Plain --input 2", 2, "a class, but not of modules", "torch.nn.Module"),
        ("ACT:number --input 2", 2, "number is of type int", "a function"),
        ("ACT:Swish --input 2,x", 2, "no dimensions", "whole numbers from 0 on"),
        ("ACT:Swish --input 2 --batch 2", 2, "--batch goes with --model", "--input"),
        ("ACT:Swish --input 2 --model resnet18", 2, "brings its own input", "--batch N"),
        ("ACT:Swish --model resnet18 --batch 0", 2, "at least one image", "positive"),
        ("ACT:Swish --input 2 --plot a.png", 2, "SVG", ".svg"),
        ("ACT:Swish --input 2 --plot no-such-folder/a.svg", 2, "no folder 'no-such-folder'", "a file's path"),
        ("ACT:Outer.Other --input 2", 2, "there is no Outer.Other in it", "it defines Swish"),
        ("ACT:Swish --model resnet18 --graph a.svg", 2, "not a network", "--input"),
        ("nowhere.py:Swish --input 2", 1, "is not there", "check the path"),
        ("no.such.module:Swish --input 2", 1, "there is no module no", "FILE.py:Name"),
        ("model.onnx --input 2", 1, "not of graph files", "opgraph show"),
        ("ACT:gate --input 2", 1, "TypeError", "check --input"),
        ("ACT:fails --input 2", 1, "RuntimeError", "check --input"),
        ("ACT:asks --input 2", 1, "asks for one", "--run"),
    ],
)
def test_unmeasurable_target_gives_a_three_line_error(
    act: str, capsys: pytest.CaptureFixture[str], args: str, status: int, what: str, fix: str
) -> None:
    found, (said, _, mend) = error(capsys, *args.replace("ACT", act).split())
    assert found == status
    assert what in said
    assert fix in mend


def test_error_names_the_line_of_the_file(act: str, capsys: pytest.CaptureFixture[str]) -> None:
    line = ACTIVATIONS.splitlines().index("    return x.reshape(7)") + 1
    _, (_, where, _) = error(capsys, f"{act}:fails", "--input", "2")
    assert where == f"{act}:{line}: return x.reshape(7)"


@pytest.mark.parametrize("text", ["def (", "1 / 0", "import sys; sys.exit(3)", "import not_a_module_of_anybody"])
def test_file_that_fails_to_run_gives_a_three_line_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    path = tmp_path / "broken.py"
    path.write_text(f"import torch\n{text}\n")
    status, (what, where, _) = error(capsys, f"{path}:Swish", "--input", "2")
    assert status == 1
    assert what.startswith("running it raised")
    assert where == f"{path}:2"


def test_function_calling_sys_exit_gives_a_three_line_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "ends.py"
    file.write_text("import sys\n\n\ndef act(x):\n    sys.exit(3)\n")
    status, lines = error(capsys, f"{file}:act", "--input", "4")
    assert status == 1 and "raised SystemExit" in lines[0]


def test_one_file_for_two_pictures_is_refused(act: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = tmp_path / "a.svg"
    status, lines = error(capsys, f"{act}:Swish", "--input", "4", "--plot", place, "--graph", place)
    assert status == 2 and "name one file" in lines[0] and not place.exists()


def test_file_with_relative_import_suggests_the_module_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    path = tmp_path / "inside.py"
    path.write_text("from . import beside\n")
    _, (_, where, mend) = error(capsys, f"{path}:Swish", "--input", "2")
    assert where == f"{path}:1"
    assert "package.module:Name" in mend


def test_nested_class_is_named_by_its_qualified_name(act: str, capsys: pytest.CaptureFixture[str]) -> None:
    inner, plain = (report(capsys, f"{act}:{name}", "--input", "4,8") for name in ("Outer.Inner", "Swish"))
    assert [k["shape"] for k in inner["kept"]] == [k["shape"] for k in plain["kept"]] != []


def test_without_torch_the_error_names_the_extra() -> None:
    code = (
        "import sys; sys.modules['torch'] = None; from opgraph.cli import main;"
        "sys.exit(main(['memory', 'json:dumps', '--input', '2']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "pip install 'opgraph[torch]'" in done.stderr and "Traceback" not in done.stderr
    assert done.stderr.count("fix:") == 1
