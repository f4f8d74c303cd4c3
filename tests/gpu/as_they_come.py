"""A pytest plugin for a run that may be cut off, on a GPU that may be lost: `-p as_they_come`.

What fails is told when it fails, not at the end. After an illegal access CUDA refuses a process everything: a worker of
pytest-xdist that this happened to ends, and another takes its place, so that one test loses one test. And with `--gpu`
a GPU that is not there is a failure, no reason to skip.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest

LOST = 70  # exit status of a worker whose GPU is lost
NEVER_THERE = (34, 35, 100)  # CUDA's errors where there is no driver, one that is too old, no device


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gpu", action="store_true", help="fail, where there is no GPU, instead of skipping")


def pytest_configure(config: pytest.Config) -> None:
    plugin = Worker() if hasattr(config, "workerinput") else Teller(config)
    config.pluginmanager.register(plugin, "as_they_come_here")


class Teller:
    """Of the process that the user sees."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Prints a failure. `--tb=no` leaves it out at the end."""
        if report.failed:
            terminal: Any = self._config.pluginmanager.get_plugin("terminalreporter")
            terminal.ensure_newline()
            terminal.write_line(f"FAILED {report.nodeid} ({report.when})", red=True)
            terminal.write_line(report.longreprtext[-20_000:])


class Worker:
    """Of a worker."""

    def __init__(self) -> None:
        self._failed = False

    def pytest_runtest_makereport(self, call: pytest.CallInfo[None]) -> None:
        self._failed |= call.excinfo is not None and not call.excinfo.errisinstance(pytest.skip.Exception)

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logfinish(self) -> None:
        """After a failure: its report is sent by now, and this test is the one that a worker which ends loses."""
        if self._failed and gpu_is_lost():
            os._exit(LOST)
        self._failed = False


def gpu_is_lost() -> bool:
    """Whether CUDA refuses this process what it refuses nobody."""
    cupy: Any = sys.modules.get("cupy")
    if cupy is None:
        return False
    try:
        cupy.cuda.runtime.memGetInfo()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return error.status not in NEVER_THERE
    return False
