"""The command line: its printed output, its exit status, and the files that it leaves."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import opgraph as og
from opgraph.cli import main
from opgraph.errors import InvalidArguments, ModelError
from opgraph.ir.opdef import all_ops
from opgraph.onnx import samples

SWIGLU = """\
graph(x: f32[batch,64], up: f32[batch,64]) -> (y)
  s = Sigmoid(x)
  g = Multiply(x, s)
  y = Multiply(g, up)
"""
#: A name that a model may have: it must not reach the terminal raw, and must not break a picture.
NASTY = "a\x1b[31m<script>alert(1)</script>&\"'\u202e\r\n]]>" + "n" * 10_000


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    path = tmp_path / "swiglu.txt"
    path.write_text(SWIGLU)
    return path


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A small model with a convolution between two swishes, weights in a data file."""
    return write_model(tmp_path / "model.onnx")


def write_model(path: Path, *, scale: float = 1.0, name: str = "x") -> Path:
    net = samples.builder.Builder("net", seed=7)
    x = net.input(name, TensorProto.FLOAT, ("batch", 4, 8, 8))
    x = net("Mul", x, net("Sigmoid", x), name="silu")
    x = net("Conv", x, net.weight("w", (8, 4, 3, 3), 0.2 * scale), kernel_shape=[3, 3], pads=[1, 1, 1, 1], name="conv")
    x = net("Mul", x, net("Sigmoid", net("Mul", x, net.value(1.5))), name="y")
    samples.write(net.model(x, TensorProto.FLOAT, ("batch", 8, 8, 8)), path)
    return path


def run(*args: object) -> int:
    return main([str(a) for a in args])


def error_lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    lines = capsys.readouterr().err.strip().splitlines()
    assert [line[:8] for line in lines[-3:]] == [lines[-3][:8], "  where:", "  fix:  "], lines
    assert "Traceback" not in "\n".join(lines)
    return lines[-3:]


# -- options without effect, files that are both read and written ------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "option"),
    [
        ("show swiglu.txt --text --draw a.svg", "--draw"),
        ("show swiglu.txt --text --source", "--source"),
        ("show swiglu.txt --text --stages", "--stages"),
        ("show swiglu.txt --text --all", "--all"),
        ("show swiglu.txt --device cuda", "--device"),
        ("check swiglu.txt --ort-library a.so", "--ort-library"),
        ("check swiglu.txt --inputs a.npz --dim batch=4", "--dim"),
        ("check swiglu.txt --dim batch=4 --dim batch=5", "--dim"),
        ("check swiglu.txt --dim batch=\u00b2", "--dim"),
        ("check swiglu.txt --device tpu", "--device"),
        ("check model.onnx model.onnx --device cuda", "--device"),
        ("fuse model.onnx -o b.onnx --unchecked --inputs a.npz", "--inputs"),
        ("fuse model.onnx -o b.onnx --unchecked --dim batch=4", "--dim"),
        ("fuse model.onnx -o b.onnx --march native", "--march"),
        ("fuse model.onnx -o b.onnx --keep nothing", "--keep"),
        ("fuse model.onnx -o b.onnx --target onnxruntime==9.9", "--target"),
        ("fuse model.onnx -o a.npz --inputs a.npz", "-o"),
        ("fuse model.onnx -o b.onnx --inputs a.npz --ort-library a.npz", "--ort-library"),
        ("bench swiglu.txt --json swiglu.txt", "--json"),
        ("bench swiglu.txt --inputs a.npz --json a.npz", "--json"),
        ("bench --list --json a.json", "--json"),
        ("bench --list --plot a", "--plot"),
        ("bench --list --from a.json", "--from"),
        ("bench --from a.json --device cuda", "--device"),
        ("show twin.svg --draw twin.svg", "--draw"),
        ("show swiglu.txt --draw a.svg --draw b.svg", "--draw"),
        ("fuse model.onnx -o b.onnx --output c.onnx --unchecked", "--output"),
        ("bench --list --threads 0", "--threads"),
        ("check swiglu.txt --inputs=", "--inputs"),
        ("check swiglu.txt --device=", "--device"),
        ("show swiglu.txt --draw=", "--draw"),
        ("bench --from=", "--from"),
        ("memory torch.nn:SiLU --input 4_0", "--input"),
        ("bench --sizes \u0664", "--sizes"),
    ],
)
def test_invalid_options_are_refused_and_no_file_changes(
    command: str,
    option: str,
    model: Path,
    text_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = model.parent
    monkeypatch.chdir(folder)
    (folder / "twin.svg").write_text(SWIGLU)
    np.savez(folder / "a.npz", x=np.ones((2, 4, 8, 8), np.float32))
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert run(*command.split()) == 2
    assert option in error_lines(capsys)[1]
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.parametrize(
    ("command", "option", "fix"),
    [
        (["--suite", "networks", "--entries", "A", "B c"], "--suite", "--entries A --entries 'B c'"),
        (["--suite", "activation", "swish"], "--suite", "write --entries swish"),
        (["--suite", "activation", "rows"], "--suite", "--suite activation --suite rows"),
        (["--sizes", "1M", "32M"], "--sizes", "--sizes 1M,32M"),
        (["--quick", "swish"], "--quick", "leave it out, or give the path of a model"),
        (["model.onnx", "--suite", "networks"], "--suite", "leave it out, or leave out the model"),
    ],
)
def test_bench_names_the_word_it_takes_as_the_model(
    command: list[str],
    option: str,
    fix: str,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(model.parent)
    assert run("bench", *command) == 2
    what, where, how = error_lines(capsys)
    word = command[0] if command[0] == "model.onnx" else command[-1]
    assert f"{word!r} is taken as the model to measure" in what and option in where and fix in how


def test_device_file_as_model_is_refused_as_such(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("show", os.devnull) == 1
    assert "is no file, but a device or a pipe" in error_lines(capsys)[0]


# -- the command as a whole --------------------------------------------------------------------------------------------


def test_version_and_help_give_status_0_and_bad_usage_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--version") == 0
    assert og.__version__ in capsys.readouterr().out
    assert run("show", "--help") == 0
    assert "--draw" in capsys.readouterr().out
    assert [run(), run("sing"), run("show"), run("show", "m", "--device", "tpu")] == [2, 2, 2, 2]


def test_empty_argument_is_refused(text_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Example: `opgraph check A "$B"`, which would report that A agrees."""
    assert run("check", text_file, "") == 2
    assert error_lines(capsys)[0] == "error: B is empty"


def test_abbreviated_options_are_refused(text_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An abbreviated --traceback used to be accepted, and showed no traceback."""
    assert run("show", text_file, "--traceb") == 2
    assert "unrecognized arguments: --traceb" in capsys.readouterr().err


def test_python_m_opgraph_runs_the_command_line() -> None:
    done = subprocess.run([sys.executable, "-m", "opgraph", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["opgraph", og.__version__]


def test_help_loads_no_heavy_library() -> None:
    code = (
        "import sys; from opgraph.cli import main; main(['--help']);"
        "print([m for m in ('rich', 'onnx', 'onnxruntime', 'torch') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    "command", ["ops", "show swiglu.txt", "check swiglu.txt", "bench --suite activation", "bench --list"]
)
def test_without_rich_the_error_names_the_extra(text_file: Path, command: str) -> None:
    code = f"import sys; sys.modules['rich'] = None; from opgraph.cli import main; sys.exit(main({command.split()}))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=text_file.parent
    )
    assert done.returncode == 1
    assert "pip install 'opgraph[cli]'" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "command", ["fuse a.onnx -o b.onnx", "demo --folder unused", "check a.onnx b.onnx", "show a.onnx"]
)
def test_without_onnx_the_error_names_the_extra(tmp_path: Path, command: str) -> None:
    for name in ("a.onnx", "b.onnx"):
        (tmp_path / name).write_bytes(b"\x08\x0a")
    code = f"import sys; sys.modules['onnx'] = None; from opgraph.cli import main; sys.exit(main({command.split()!r}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 1
    assert "pip install 'opgraph[onnx]'" in done.stderr and "Traceback" not in done.stderr
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.onnx", "b.onnx"]


@pytest.mark.parametrize("args", [("ops", "Swish"), ("bench", "--list", "--device", "cuda")], ids=" ".join)
def test_closed_pipe_gives_status_0(args: tuple[str, ...]) -> None:
    """The output is a page and a table, for which rich would exit with status 1."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "opgraph", *args]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


def test_unexpected_exception_is_printed_in_three_lines(
    text_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(path: str) -> og.Graph:
        raise KeyError("oops")

    monkeypatch.setattr("opgraph.cli.show.load_model", broken)
    assert run("show", text_file) == 1
    assert "KeyError" in error_lines(capsys)[0]
    with pytest.raises(KeyError):
        run("show", text_file, "--traceback")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "not there"),
        (b"", "empty"),
        (b'{"version": "3.14", "graph": []}', "is no text"),
        (b"graph(x: f32[4]) -> (y)\n  y = Sigmod(x)\n", "Sigmod"),
        (b"graph(x: \xff", "UTF-8"),
        (b"\x08\x07nonsense" * 50, ""),
    ],
)
@pytest.mark.parametrize("command", ["show", "check"])
def test_invalid_model_gives_a_three_line_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, content: bytes | None, says: str
) -> None:
    path = tmp_path / "bad"
    if content is not None:
        path.write_bytes(content)
    assert run(command, path) == 1
    assert says in error_lines(capsys)[0]


# -- show -------------------------------------------------------------------------------------------------------------


def test_show_names_partitions_and_units(text_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("show", text_file) == 0
    out = capsys.readouterr().out
    assert "3 ops in 1 partition: 1 fused; units: 1 swish, 1 swiglu" in out
    assert "data" not in out and "for  cuda" not in out  # no constants, and the default CPU: neither is printed


def test_show_names_device_and_constants(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gpu = og.Graph("cuda")
    gpu.add_op("Abs", gpu.input("x", shape=(2, 3)))
    og.onednn.dump(gpu, tmp_path / "g.json")
    assert run("show", tmp_path / "g.json") == 0
    assert "\nfor  cuda\n\n1 op in 1 partition: 1 fused" in capsys.readouterr().out
    g = og.Graph()
    g.add_op("Add", g.input("x", shape=(2, 3)), g.constant("c", np.ones(3, np.float32)))
    (tmp_path / "g.txt").write_text(str(g.finalize()))
    assert run("show", tmp_path / "g.txt") == 0
    assert "\ndata 0.00 MiB in 1 constant\n\n" in capsys.readouterr().out


def test_show_explains_why_an_op_is_not_fused(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("show", model) == 0
    out = capsys.readouterr().out
    assert "foreign op Conv: runs in onnxruntime" in out


def test_show_source_prints_every_kernel_without_a_compiler(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("opgraph.runtime.cpu_compiler.find_compiler", lambda: None)
    assert run("show", model, "--source") == 0
    out = capsys.readouterr().out
    assert out.count("struct Fused {") == 2 and "Swish" in out and "namespace og" not in out
    assert run("show", model, "--source=full") == 0
    assert "namespace og" in capsys.readouterr().out
    assert run("show", model, "--source", "--device", "cuda") == 0
    assert "(cuda)" in capsys.readouterr().out


def test_shown_source_is_the_source_that_runs(text_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    x = np.ones((1024, 64), np.float32)
    compiled = og.compile(og.parse(SWIGLU))
    compiled(x=x, up=x)
    assert run("show", text_file, "--source=full") == 0
    shown = capsys.readouterr().out
    assert any(code in shown for code in compiled.kernels.values())


def test_show_text_reads_back(model: Path, text_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("show", text_file, "--text") == 0
    assert og.parse(capsys.readouterr().out) == og.parse(SWIGLU)


def test_names_reach_the_terminal_without_control_characters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_model(tmp_path / "model.onnx", name=NASTY)
    assert run("show", path, "--stages") == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out and "\u202e" not in out and "\\x1b[31m" in out


# -- fuse -------------------------------------------------------------------------------------------------------------


def test_fuse_writes_a_model_that_agrees(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out" / "fused.onnx"
    out.parent.mkdir()
    assert run("fuse", model, "-o", out, "--dim", "batch=3", "--form", "function") == 0
    printed = capsys.readouterr().out
    assert "2 swish" in printed and "done:" in printed
    assert [n.op_type for n in onnx.load(str(out)).graph.node].count("Swish") == 2
    assert sorted(p.name for p in out.parent.iterdir()) == ["fused.onnx", "fused.onnx.data"]
    assert run("check", model, out) == 0


@pytest.mark.parametrize("existing", [False, True])
def test_fuse_leaves_nothing_behind_when_the_files_disagree(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], existing: bool
) -> None:
    save = importlib.import_module("opgraph.onnx.save")  # the name opgraph.onnx.save is the function, not the module
    honest = save.put

    def wrong(draft: object, path: Path, *args: object) -> None:
        honest(draft, path, *args)
        write_model(Path(path), scale=1.01)

    monkeypatch.setattr(save, "put", wrong)
    out = tmp_path / "out" / "fused.onnx"
    out.parent.mkdir()
    if existing:
        out.write_bytes(b"precious")
    assert run("fuse", model, "-o", out) == 1
    assert "disagrees" in error_lines(capsys)[0]
    assert [p.name for p in out.parent.iterdir()] == (["fused.onnx"] if existing else [])
    assert not existing or out.read_bytes() == b"precious"


@pytest.mark.parametrize(
    ("options", "status", "says"),
    [
        (("--dim", "batch"), 2, "names no size"),
        (("--dim", "seq=4"), 2, "no input has a dimension"),
        (("--target", "tensorrt"), 2, "target"),
        (("--inputs", "missing.npz"), 1, "not there"),
    ],
)
def test_fuse_refuses_bad_arguments_and_writes_nothing(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], status: int, says: str
) -> None:
    before = sorted(tmp_path.iterdir())
    assert run("fuse", model, "-o", tmp_path / "out.onnx", *options) == status
    assert says in error_lines(capsys)[0]
    assert sorted(tmp_path.iterdir()) == before


def test_fuse_refuses_to_overwrite_its_input(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = model.read_bytes()
    assert run("fuse", model, "-o", model) == 2
    assert model.read_bytes() == before


@pytest.mark.parametrize("kind", ["sequence", "text"])
def test_incomparable_model_is_fused_only_with_unchecked(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = onnx.helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n"])
    element = onnx.helper.make_tensor_type_proto(TensorProto.FLOAT if kind == "sequence" else TensorProto.STRING, ["m"])
    odd = onnx.helper.make_sequence_type_proto(element) if kind == "sequence" else element
    ports = [onnx.helper.make_value_info(name, odd) for name in ("s", "t")]
    nodes = [("Sigmoid", ["x"], ["a"]), ("Mul", ["a", "x"], ["y"]), ("Identity", ["s"], ["t"])]
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node(*node) for node in nodes], "g", [plain, ports[0]],
        [onnx.helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n"]), ports[1]],
    )  # fmt: skip
    source, out = tmp_path / "in.onnx", tmp_path / "out.onnx"
    onnx.save(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 20)], ir_version=9), source)
    assert run("fuse", source, "-o", out) == 1
    what, where, fix = error_lines(capsys)
    assert "cannot be compared" in what and where == f'  where: input "s" of {out}' and "--unchecked" in fix
    assert run("fuse", source, "-o", out, "--unchecked") == 0
    assert [n.op_type for n in onnx.load(out).graph.node] == ["Swish", "Identity"]


def test_model_refused_by_onnxruntime_is_checked_against_float64(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from opgraph.cli import onnx_file

    class Refusing(onnx_file.OnnxFile):
        def __init__(self, path: str, **options: object) -> None:
            if path == str(model):
                raise og.errors.DeviceError("onnxruntime refuses the model: reasons", where=path, fix="none")
            super().__init__(path, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(onnx_file, "OnnxFile", Refusing)
    assert run("fuse", model, "-o", tmp_path / "out.onnx") == 0
    captured = capsys.readouterr()
    assert "onnxruntime refuses the model: reasons" in captured.err and "done:" in captured.out
    assert "farthest from float64" in captured.out and "ms" not in captured.out


def test_fuse_takes_inputs_from_a_file(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.savez(tmp_path / "in.npz", x=np.ones((2, 4, 8, 8), np.float32))
    assert run("fuse", model, "-o", tmp_path / "out.onnx", "--inputs", tmp_path / "in.npz") == 0
    np.savez(tmp_path / "in.npz", other=np.ones(3))
    assert run("fuse", model, "-o", tmp_path / "out2.onnx", "--inputs", tmp_path / "in.npz") == 1
    assert "no array called 'x'" in error_lines(capsys)[0]


def activation(path: Path) -> Path:
    graph = og.parse("graph(x: f32[n,8]) -> (y)\n t = Exp(x)\n u = Add(t, 1.5)\n y = Divide(x, u)")
    og.onnx.save(graph, path, form="decomposed")
    return path


@pytest.mark.parametrize("cuda", [False, True])
def test_fuse_writes_a_library_and_prints_how_to_register_it(
    cuda: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from opgraph.cli import onnx_file

    # This test is not about time.
    monkeypatch.setattr(onnx_file.Timing, "is_slower", lambda self, which: False)
    source, out, library = activation(tmp_path / "in.onnx"), tmp_path / "out.onnx", tmp_path / "act.so"
    if cuda:
        pytest.importorskip("nvidia", reason="NVRTC's wheel is not installed")
    more = ["--cuda"] if cuda else []
    assert run("fuse", source, "-o", out, "--ort-library", library, "--dim", "n=100", *more) == 0
    printed = capsys.readouterr().out
    assert ("and GPUs from sm_80 on; with it:" in " ".join(printed.split())) is cuda
    assert "1 fused" in printed and "without LIB" in printed
    assert f"options.register_custom_ops_library({str(library)!r})" in printed.replace("\n", "")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["act.so", "in.onnx", "out.onnx"]
    assert len(onnx.load(str(out)).graph.node) == 1
    assert run("check", source, out, "--ort-library", library) == 0


def test_fuse_refuses_cuda_without_a_library(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("fuse", model, "-o", tmp_path / "out.onnx", "--cuda") == 2
    assert "it is about a library" in error_lines(capsys)[0]


#: Paths of a library that `fuse` refuses, and its messages.
BAD_LIBRARIES = {
    "folder": "a folder",
    "": "is empty",
    "pipe": "no file",
    "missing/act.so": "no folder",
    "model.onnx": "LIB.so is IN",
    "out.onnx": "LIB.so is IN, OUT",
    "out.onnx.data": "OUT.data",
}


@pytest.mark.parametrize("name", BAD_LIBRARIES)
def test_fuse_refuses_invalid_library_paths_first(
    name: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkdir("folder"), os.mkfifo("pipe")
    before = sorted(os.listdir())
    assert run("fuse", model, "-o", "out.onnx", "--ort-library", name) == 2
    assert BAD_LIBRARIES[name] in error_lines(capsys)[0]
    assert sorted(os.listdir()) == before


def test_fuse_refuses_a_pipe_as_its_output(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert run("fuse", model, "-o", tmp_path / "pipe") == 2
    assert "that is no file" in error_lines(capsys)[0]


def test_fuse_writes_no_library_over_the_data_of_its_input(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("opgraph.cli.fuse.Trial", None)  # the refusal comes before the trial
    (data,) = [p for p in tmp_path.iterdir() if p != model]
    before = data.read_bytes()
    assert run("fuse", model, "-o", tmp_path / "out.onnx", "--ort-library", data) == 1
    assert "a file of the model" in error_lines(capsys)[0]
    assert data.read_bytes() == before and sorted(tmp_path.iterdir()) == sorted([model, data])


@pytest.mark.parametrize("command", [("bench", "--budget", "1", "--json"), ("show", "--draw")], ids=["bench", "show"])
def test_results_do_not_overwrite_the_data_of_a_model(
    command: tuple[str, ...], model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (data,) = [p for p in tmp_path.iterdir() if p != model]
    named = data.rename(data.with_suffix(".svg"))
    proto = onnx.load(model, load_external_data=False)
    for tensor in proto.graph.initializer:
        for entry in tensor.external_data:
            entry.value = named.name if entry.key == "location" else entry.value
    model.write_bytes(proto.SerializeToString())
    before = named.read_bytes()
    name, *options = command
    assert run(name, model, *options, named) == 2
    assert "which is read" in error_lines(capsys)[0]
    assert named.read_bytes() == before


def test_a_terminal_without_unicode_shows_escapes(tmp_path: Path) -> None:
    write_model(tmp_path / "model.onnx", name="é→")
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-m", "opgraph", "show", str(tmp_path / "model.onnx")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert r"\xe9\u2192" in done.stdout


def test_a_text_graph_may_follow_long_remarks(text_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text_file.write_text("# a remark that is repeated\n" * 400 + text_file.read_text())
    assert run("show", text_file) == 0 and "1 swiglu" in capsys.readouterr().out


def test_fuse_keeps_units_decomposed_if_fusing_is_slower(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from opgraph.cli import onnx_file

    asked: list[onnx_file.Timing] = []

    def slow(self: onnx_file.Timing, which: int) -> bool:
        asked.append(self)
        return len(asked) <= 2  # the first trial, and its repetition

    monkeypatch.setattr(onnx_file.Timing, "is_slower", slow)
    assert run("fuse", model, "-o", tmp_path / "out.onnx") == 0
    printed = capsys.readouterr().out
    assert "note: kept as spelled: swish" in printed
    assert "Swish" not in [n.op_type for n in onnx.load(str(tmp_path / "out.onnx")).graph.node]
    assert sorted(p.name for p in tmp_path.iterdir() if p.name.startswith(".")) == []


def test_call_counts_as_slower_by_both_median_and_fastest_run() -> None:
    from opgraph.cli.onnx_file import Timing

    def judged(fastest: float, ratio: float) -> bool:
        return Timing(fastest=(1.0, fastest), ratios=(1.0, ratio), rounds=5).is_slower(1)

    assert judged(1.1, 1.1)
    assert not judged(1.0, 1.3) and not judged(1.3, 1.0) and not judged(1.01, 1.01)


# -- check ------------------------------------------------------------------------------------------------------------


def test_check_compares_each_partition_and_the_whole_model(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("check", model, "--device", "cpu") == 0
    out = capsys.readouterr().out
    assert "cpu: agrees with the float64 reference" in out
    assert all(word in out for word in ("partition 0", "partition 1", "partition 2", "whole model"))


@pytest.mark.parametrize("dtype", ["f8_e4m3", "f8_e5m2"])
def test_check_compares_quantized_outputs(
    dtype: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No arithmetic, but a distance: neighbours are one unit apart, at any distance from 0."""
    g = og.Graph()
    g.add_op("Quantize", g.input("x", shape=(4, 8)), scales=[8.0], dtype=dtype, name="y")
    og.onednn.dump(g.finalize(), tmp_path / "g.json")
    assert run("check", tmp_path / "g.json", "--device", "cpu") == 0
    out = capsys.readouterr().out
    assert out.count(dtype) == 2 and "agrees" in out
    monkeypatch.setattr("opgraph.cli.check.compile", lambda graph, engine: lambda feeds: np.zeros((4, 8), np.float32))
    assert run("check", tmp_path / "g.json", "--device", "cpu") == 1
    assert "the first tensor that differs" in error_lines(capsys)[0]


def test_check_of_an_unsupported_partition_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "g.txt").write_text("graph(x: f32[4]) -> (y)\n  y: f32[4] = Wildcard(x)\n")
    assert run("check", tmp_path / "g.txt") == 1
    assert "nothing runs partition 0" in error_lines(capsys)[0]


def test_check_needs_no_onnx_for_a_text_form(text_file: Path) -> None:
    code = (
        "import sys; sys.modules['onnx'] = sys.modules['onnxruntime'] = None; from opgraph.cli import main;"
        f"sys.exit(main(['check', {str(text_file)!r}, '--device', 'cpu']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_check_names_the_first_tensor_that_differs(
    text_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from opgraph.cli import check

    honest = check.compile

    def wrong(graph: og.Graph, engine: og.Engine) -> object:
        run_it = honest(graph, engine)
        return lambda feeds: run_it(feeds) * np.float32(1.000001)

    monkeypatch.setattr(check, "compile", wrong)
    assert run("check", text_file, "--device", "cpu") == 1
    first, where, _ = error_lines(capsys)
    assert 'the first tensor that differs on cpu is tensor "y"' in first and "ulp" in first
    assert "partition 0" in where


def test_check_of_two_files_names_the_first_value_that_differs(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = write_model(tmp_path / "other.onnx", scale=1.001)
    assert run("check", model, other) == 1
    captured = capsys.readouterr()
    assert "first difference between values of one name: conv (f32)" in captured.out
    assert "first value that is twice as far from float64 in B: conv (f32)" in captured.out
    assert "ulp, element" in captured.out
    assert "B disagrees with A" in captured.err
    assert run("check", model, model) == 0
    assert "the same bits" in capsys.readouterr().out


def test_check_of_two_files_refuses_other_ports(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("check", model, write_model(tmp_path / "other.onnx", name="z")) == 1
    assert "inputs" in error_lines(capsys)[0]


def one_node(path: Path, op_type: str, dtype: int, ins: int = 1, **attributes: int) -> Path:
    names = [f"x{i}" for i in range(ins)]
    graph = helper.make_graph(
        [helper.make_node(op_type, names, ["y"], **attributes)],
        "one",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, [4, 2]) for name in names],
        [helper.make_tensor_value_info("y", dtype, ["a", "b"])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=9)
    onnx.save(model, path)
    return path


@pytest.mark.parametrize(
    ("pair", "dtype", "ins"), [(("Greater", "Less"), TensorProto.BOOL, 2), (("ArgMax", "ArgMin"), TensorProto.INT64, 1)]
)
def test_check_of_two_files_detects_wrong_booleans_and_indices(
    pair: tuple[str, str], dtype: int, ins: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = {"axis": 1} if ins == 1 else {}
    a, b = (one_node(tmp_path / f"{kind}.onnx", kind, dtype, ins, **more) for kind in pair)
    assert run("check", a, b) == 1
    assert "B disagrees with A" in error_lines(capsys)[0]
    assert run("check", a, a) == 0


def test_check_of_two_files_names_outputs_of_other_shapes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = one_node(tmp_path / "a.onnx", "ArgMax", TensorProto.INT64, axis=0)
    b = one_node(tmp_path / "b.onnx", "ArgMax", TensorProto.INT64, axis=1)
    assert run("check", a, b) == 1
    assert "shape [1, 2] in one file and [4, 1] in the other" in error_lines(capsys)[0]


def test_check_runs_bf16_models(tmp_path: Path) -> None:
    x = helper.make_tensor_value_info("x", TensorProto.BFLOAT16, ("n", 8))
    y = helper.make_tensor_value_info("y", TensorProto.BFLOAT16, ("n", 8))
    half = numpy_helper.from_array(np.asarray(0.5, og.ir.dtypes.get("bf16").numpy), "half")
    nodes = [helper.make_node("Mul", ["x", "half"], ["h"]), helper.make_node("Tanh", ["h"], ["y"])]
    proto = helper.make_model(
        helper.make_graph(nodes, "g", [x], [y], [half]), opset_imports=[helper.make_opsetid("", 20)], ir_version=10
    )
    onnx.save(proto, str(tmp_path / "bf16.onnx"))
    assert run("check", tmp_path / "bf16.onnx", "--device", "cpu") == 0


# -- ops --------------------------------------------------------------------------------------------------------------


def test_ops_lists_every_kind_and_prints_a_page_for_each(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("ops") == 0
    listed = {line.split()[0] for line in capsys.readouterr().out.splitlines() if line.strip()}
    kinds = [record.kind for record in all_ops()]
    assert set(kinds) <= listed
    for kind in kinds:
        assert run("ops", kind) == 0
        assert kind in capsys.readouterr().out


def test_ops_suggests_the_nearest_kind(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("ops", "Swsh") == 1
    assert "Swish" in error_lines(capsys)[2]


def test_closed_stdout_is_not_reported_as_a_bug() -> None:
    code = (
        "import os, sys; os.close(1); sys.stdout = None; from opgraph.cli import main; sys.exit(main(['ops', 'Swish']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "this is a bug" not in done.stderr


def test_too_large_size_is_reported(tmp_path: Path) -> None:
    (tmp_path / "g.txt").write_text("graph(x: f32[n,1024]) -> (y)\n  y = Exp(x)\n")
    command = [sys.executable, "-m", "opgraph", "check", "g.txt", "--dim", "n=99999999999999"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 1 and "give smaller sizes" in done.stderr and "bug" not in done.stderr


@pytest.mark.parametrize("command", ("check text", "check model", "check two", "fuse"))
def test_check_of_empty_outputs_is_refused(
    command: str, text_file: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = {
        "check text": ("check", text_file),
        "check model": ("check", model),
        "check two": ("check", model, model),
        "fuse": ("fuse", model, "-o", tmp_path / "out.onnx"),
    }[command]
    assert run(*args, "--dim", "batch=0") == 1
    assert "no output has an element" in error_lines(capsys)[0]
    assert not (tmp_path / "out.onnx").exists()


def test_model_with_empty_outputs_is_not_timed(text_file: Path) -> None:
    from opgraph.bench.suites import models

    empty = np.zeros((0, 64), np.float32)
    with pytest.raises(InvalidArguments, match="no output has an element"):
        models.of_graph("swiglu", og.parse(text_file.read_text()), {"x": empty, "up": empty})


def test_empty_output_beside_others_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "g.txt"
    path.write_text("graph(x: f32[n,4]) -> (y, z)\n  y = Exp(x)\n  z = ReduceSum(x, axes=[0])\n")
    assert run("check", path, "--dim", "n=0") == 0
    shown = capsys.readouterr().out
    assert "no elements" in shown and "agrees with the float64 reference" in shown


def test_byte_order_mark_is_ignored(text_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    marked = tmp_path / "marked.txt"
    marked.write_bytes(b"\xef\xbb\xbf" + text_file.read_bytes())
    assert run("show", marked) == 0 and "1 swiglu" in capsys.readouterr().out
    marked.write_bytes(b'\xef\xbb\xbf{"version": "3.0.0"}')
    assert run("show", marked) == 1 and "ONNX" not in capsys.readouterr().err


def test_size_beyond_numpys_range_is_reported(text_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("check", text_file, "--dim", "batch=99999999999999999999999") == 1
    assert "larger than any memory" in error_lines(capsys)[0]


def test_invalid_inputs_file_error_does_not_suggest_pickle(
    text_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.save(tmp_path / "x.npy", np.zeros(3))
    for path in (text_file, tmp_path / "x.npy"):
        assert run("check", text_file, "--inputs", path) == 1
        what = "\n".join(error_lines(capsys))
        assert "no archive of arrays" in what and "pickle" not in what


def test_library_load_error_names_the_library(model: Path, text_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("check", model, model, "--ort-library", text_file) == 1
    lines = error_lines(capsys)
    assert "cannot load the library" in lines[-3] and str(text_file) in lines[-2]


def test_write_protected_file_is_not_replaced(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = tmp_path / "kept.onnx"
    kept.write_bytes(b"mine")
    may = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: os.path.basename(path) != kept.name and may(path, mode))
    assert run("fuse", model, "-o", kept) == 2
    assert "write-protected" in error_lines(capsys)[0]
    graph = og.onnx.load(model)
    with pytest.raises(ModelError, match="Permission denied"):
        og.onnx.save(graph, kept)
    assert kept.read_bytes() == b"mine"


def test_write_error_names_the_requested_file(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    before = sorted(tmp_path.iterdir())
    assert run("fuse", model, "-o", tmp_path / "out.onnx") == 1
    lines = error_lines(capsys)
    assert "No space left" in lines[-3] and lines[-2].endswith(f"{str(tmp_path / 'out.onnx')!r}")
    assert sorted(tmp_path.iterdir()) == before
