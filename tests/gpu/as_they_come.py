"""A pytest plugin for a run that may be cut off, on a GPU that may be lost: `-p as_they_come`.

A failure is printed when it occurs, not at the end, and `--outcomes FILE` gets a line for each test as it ends. With
`--again FILE`, tests that such a file lists as passed or skipped are left out: failures and tests not yet run remain.
After an illegal access CUDA refuses every call of a process. A pytest-xdist worker in this state exits and is replaced,
so that one bad test loses only itself. With `--gpu` a missing GPU is a failure instead of a skip.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

LOST = 70  # exit status of a worker whose GPU is lost
NEVER_THERE = (34, 35, 100)  # CUDA's errors for no driver, a too old driver, no device


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gpu", action="store_true", help="fail, where there is no GPU, instead of skipping")
    parser.addoption("--outcomes", metavar="FILE", help="add a line for each test: its outcome and its name")
    parser.addoption("--again", metavar="FILE", help="run what did not pass, by the outcomes of an earlier run")


def pytest_configure(config: pytest.Config) -> None:
    given: Any = getattr(config, "workerinput", None)
    plugin = Teller(config) if given is None else Worker(set(given["settled"]))
    config.pluginmanager.register(plugin, "as_they_come_here")


def settled(outcomes: str | None) -> set[str]:
    """The tests that need not run again: those whose last line is "passed" or "skipped"."""
    if outcomes is None or not Path(outcomes).exists():
        return set()
    lines = Path(outcomes).read_text(encoding="utf-8").splitlines()
    last = dict(line.split(" ", 1)[::-1] for line in lines if " " in line)
    return {name for name, outcome in last.items() if outcome in ("passed", "skipped")}


class Chooser:
    """Deselects tests. Workers use the set of the process that started them, because the file grows meanwhile."""

    def __init__(self, settled: set[str]) -> None:
        self.settled = settled

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Deselects among the collected tests."""
        if out := [item for item in items if item.nodeid in self.settled]:
            items[:] = [item for item in items if item.nodeid not in self.settled]
            config.hook.pytest_deselected(items=out)


class Teller(Chooser):
    """The plugin of the main process, whose output the user sees."""

    def __init__(self, config: pytest.Config) -> None:
        super().__init__(settled(config.getoption("--again")))
        self._config = config
        self._outcomes: str | None = config.getoption("--outcomes")

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """A hook of pytest-xdist, called for each worker."""
        node.workerinput["settled"] = sorted(self.settled)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Makes a run succeed if no tests are left to run again."""
        if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and self.settled:
            session.exitstatus = pytest.ExitCode.OK

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Prints a failure. `--tb=no` omits it at the end."""
        if self._outcomes is not None and (report.when == "call" or not report.passed):
            with open(self._outcomes, "a", encoding="utf-8") as file:
                file.write(f"{report.outcome} {report.nodeid}\n")
        if report.failed:
            terminal: Any = self._config.pluginmanager.get_plugin("terminalreporter")
            terminal.ensure_newline()
            terminal.write_line(f"FAILED {report.nodeid} ({report.when})", red=True)
            terminal.write_line(report.longreprtext[-20_000:])


class Worker(Chooser):
    """The plugin of a worker."""

    def __init__(self, settled: set[str]) -> None:
        super().__init__(settled)
        self._failed = False

    def pytest_runtest_makereport(self, call: pytest.CallInfo[None]) -> None:
        self._failed |= call.excinfo is not None and not call.excinfo.errisinstance(pytest.skip.Exception)

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logfinish(self) -> None:
        """Exits after a failure if the GPU is lost: the report is sent by now, so that only this test is lost."""
        if self._failed and gpu_is_lost():
            os._exit(LOST)
        self._failed = False


def gpu_is_lost() -> bool:
    """True if CUDA refuses this process a call that always works otherwise."""
    cupy: Any = sys.modules.get("cupy")
    if cupy is None:
        return False
    try:
        cupy.cuda.runtime.memGetInfo()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return error.status not in NEVER_THERE
    return False
