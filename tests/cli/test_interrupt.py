"""Ctrl-C at any time after Python itself has started: one word, status 130, no traceback."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

#: The process interrupts itself when a module is about to be loaded: the time of that is the same on every machine.
INTERRUPTED = """
import os, signal, sys

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[1]:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
from opgraph.cli import main
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.parametrize("module", ["opgraph.ops.bounds", "opgraph.cli.show", "rich.table", "opgraph.partition.cutter"])
def test_ctrl_c_while_modules_load_is_answered_in_a_word(module: str, tmp_path: Path) -> None:
    graph = tmp_path / "g.txt"
    graph.write_text("graph(x: f32[n]) -> (y)\n a = Exp(x)\n y = Tanh(a)\n")
    command = [sys.executable, "-c", INTERRUPTED, module, "show", str(graph)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "stopped\n"), done.stderr


def test_an_error_that_an_interrupt_was_made_into_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    """Python 3.11 makes a RuntimeError of what is raised while a class is set up."""
    from opgraph.cli.main import _guarded

    def run() -> int:
        class Interrupting:
            def __set_name__(self, owner: type, name: str) -> None:
                raise KeyboardInterrupt

        type("Made", (), {"attribute": Interrupting()})
        return 0

    assert _guarded(run, show_traceback=False) == 130
    assert capsys.readouterr().err == "stopped\n"
