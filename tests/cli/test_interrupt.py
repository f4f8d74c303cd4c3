"""Ctrl-C at any time after Python's own start-up: one word, status 130, no traceback."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

import opgraph as og

#: The process interrupts itself just before a module is loaded, so that the point in time is the same on every machine.
INTERRUPTED = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[1]:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
from opgraph.cli import main
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.parametrize("module", ["opgraph.ops.minmax", "opgraph.cli.show", "rich.table", "opgraph.partition.fuser"])
def test_ctrl_c_during_imports_prints_stopped(module: str, tmp_path: Path) -> None:
    graph = tmp_path / "g.txt"
    graph.write_text("graph(x: f32[n]) -> (y)\n a = Exp(x)\n y = Tanh(a)\n")
    command = [sys.executable, "-c", INTERRUPTED, module, "show", str(graph)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "stopped\n"), done.stderr


def test_error_caused_by_an_interrupt_is_an_interrupt(capsys: pytest.CaptureFixture[str]) -> None:
    """Python 3.11 replaces an exception that is raised during a class definition by a RuntimeError."""
    from opgraph.cli.main import _guarded

    def run() -> int:
        class Interrupting:
            def __set_name__(self, owner: type, name: str) -> None:
                raise KeyboardInterrupt

        type("Made", (), {"attribute": Interrupting()})
        return 0

    assert _guarded(run, show_traceback=False) == 130
    assert capsys.readouterr().err == "stopped\n"


#: The process ends itself just before onnxruntime times the model that was written under a temporary name.
ENDED = """
import os, signal, sys
signal.signal(int(sys.argv[1]), signal.SIG_DFL)  # `nohup` ignores one of them
import opgraph.cli.onnx_file as onnx_file
onnx_file.timed = lambda *args: os.kill(os.getpid(), int(sys.argv[1]))
from opgraph.cli import main
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_terminated_process_leaves_no_temporary_file(number: int, tmp_path: Path) -> None:
    og.onnx.save(og.parse("graph(x: f32[4]) -> (y)\n a = Exp(x)\n y = Tanh(a)"), tmp_path / "in.onnx")
    command = [sys.executable, "-c", ENDED, str(number), "fuse", "in.onnx", "-o", "out.onnx"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (128 + number, "stopped\n"), done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["in.onnx"]


def test_error_after_a_signal_is_an_interrupt(capsys: pytest.CaptureFixture[str]) -> None:
    """NumPy's C modules print an exception of their import, and raise a new ImportError."""
    from opgraph.cli.main import _guarded

    def run() -> int:
        raise ImportError("numpy._core.umath failed to import")

    assert _guarded(run, show_traceback=False, signals=[signal.SIGINT]) == 130
    assert capsys.readouterr().err == "stopped\n"
    assert _guarded(run, show_traceback=False) == 1
