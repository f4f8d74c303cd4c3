"""Networks: a step, inference, the host's time, memory and the first step, in the ways that a user can choose from.

Every question is measured in separate processes (`opgraph.bench.network_process`), which share one cache folder. It is
empty at first, so earlier runs have no effect; later rows use what earlier rows have compiled.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from opgraph.bench.networks import (
    BRANCHES,
    COMPILED,
    FIRST,
    MEMORY,
    MEMORY_BUDGETS,
    NETWORKS,
    OURS,
    Network,
)
from opgraph.bench.results import Cell, Figure, Results, Row, cell_of
from opgraph.bench.suites.timed import Say
from opgraph.errors import InvalidArguments

SUITE = "networks"
#: Seconds of timing for one row; and the time limit of one process.
TIMING, LIMIT = 20.0, 600.0
#: glibc then returns freed memory at once, so that resident memory is memory in use.
_EXACT = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}


def asked_for(patterns: Sequence[str]) -> list[tuple[Network, str]]:
    """Networks and questions whose label, such as "Llama, training step", or name matches; all without a pattern.

    Raises:
        InvalidArguments: a pattern matches none.
    """
    every = [(net, question) for net in NETWORKS for question in net.questions]

    def matches(net: Network, question: str, pattern: str) -> bool:
        return any(fnmatchcase(text.lower(), pattern.lower()) for text in (net.name, label(net, question)))

    for pattern in patterns:
        if not any(matches(*row, pattern) for row in every):
            names = "; ".join(net.name for net in NETWORKS)
            raise InvalidArguments(
                f"no network matches {pattern!r}", where="--entries",
                fix=f'use a name, or a name and a question, as in "Llama, memory": {names}',
            )  # fmt: skip
    return [row for row in every if not patterns or any(matches(*row, pattern) for pattern in patterns)]


def label(net: Network, question: str) -> str:
    """The label of a row, such as "Llama, training step"."""
    return f"{net.name}, {question}"


def measured(
    rows: Sequence[tuple[Network, str]],
    results: Results,
    *,
    device: str,
    threads: int,
    compiles: bool,
    left: Callable[[], float | None],
    say: Say,
    keep: Callable[[Results], None],
) -> None:
    """Measures rows into results.

    Args:
        device: "cpu" or "cuda".
        compiles: torch.compile is included.
        left: returns the remaining seconds; rows are left out once there are none.
        keep: receives the results after each row.
    """
    with caches() as env:
        for net, question in rows:
            name, rest = label(net, question), left()
            if net.package and importlib.util.find_spec(net.package) is None:
                results.absent[name] = f"{net.package} is not installed; pip install {net.package}"
                continue
            if rest is not None and rest <= 0:
                results.absent[name] = "no time was left"
                continue
            ways = [way for way in net.ways(question) if compiles or not way.startswith(COMPILED)]
            asked = {"network": net.name, "device": device, "threads": threads}
            if question in (MEMORY, MEMORY_BUDGETS):
                _memory(net, name, ways, asked, env, results, say)
            elif question == FIRST:
                _first(name, ways, asked, results, say)
            elif question == BRANCHES:
                _branches(net, name, asked, env, results, say)
            else:
                say(f"{name}: {', '.join(ways)}, in turns")
                asked |= {"question": question, "ways": ways, "seconds": TIMING if rest is None else min(TIMING, rest)}
                results.rows.append(_row(net, question, {**asked, "ask": "turns"}, env))
            keep(results)


def _row(net: Network, question: str, asked: Mapping[str, Any], env: Mapping[str, str]) -> Row:
    row = Row(suite=SUITE, entry=f"{net.name}, batch {net.batch}" if net.batch > 1 else net.name, direction=question)
    try:
        return replace(row, cells=tuple(cell_of(cell) for cell in _answer(asked, env)["cells"]))
    except RuntimeError as error:
        return replace(row, cells=(Cell(peer="opgraph", failed=f"error: {error}"),))


def _memory(
    net: Network,
    name: str,
    ways: Sequence[str],
    asked: Mapping[str, Any],
    env: Mapping[str, str],
    results: Results,
    say: Say,
) -> None:
    """MiB saved for backward, and the real peak of a step: of the process, or of torch's allocations on the GPU."""
    for way in ways:
        say(f"{name}: {way}")
        try:
            found = _answer({**asked, "ask": "memory", "way": way}, {**env, **_EXACT})
        except RuntimeError as error:
            results.absent[f"{name}: {way}"] = str(error)
            continue
        subject = f"{net.name}, batch {net.counted}: {way}"
        for column, value in found.items():
            results.figures.append(Figure(suite=SUITE, subject=subject, column=column, value=value, unit="MiB"))


def _first(name: str, ways: Sequence[str], asked: Mapping[str, Any], results: Results, say: Say) -> None:
    """Seconds of the first training step, with empty cache folders and with those that it filled."""
    for way in ways:
        with caches() as env:
            for column in ("cold", "warm"):
                say(f"{name}: {way}, {column}")
                try:
                    found = _answer({**asked, "ask": "first", "way": way}, env)
                except RuntimeError as error:
                    results.absent[f"{name}: {way}, {column}"] = str(error)
                    continue
                results.figures.append(
                    Figure(suite=SUITE, subject=f"{name}: {way}", column=column, value=found["seconds"], unit="s")
                )


def _branches(
    net: Network, name: str, asked: Mapping[str, Any], env: Mapping[str, str], results: Results, say: Say
) -> None:
    """Microseconds that a training step needs to check its branches on parameters."""
    say(f"{name}: {OURS}")
    try:
        found = _answer({**asked, "ask": "branches", "way": OURS}, env)
    except RuntimeError as error:
        results.absent[name] = str(error)
        return
    subject = f"{net.name}, batch {net.batch}: {OURS}"
    results.figures.append(Figure(suite=SUITE, subject=subject, column="branches", value=found["us"], unit="us"))


@contextmanager
def caches() -> Iterator[dict[str, str]]:
    """Environment variables that give opgraph and torch.compile empty cache folders."""
    with tempfile.TemporaryDirectory(prefix="opgraph-bench-") as folder:
        yield {"XDG_CACHE_HOME": folder, "TORCHINDUCTOR_CACHE_DIR": str(Path(folder) / "inductor")}


def _answer(asked: Mapping[str, Any], env: Mapping[str, str]) -> dict[str, Any]:
    """The result of a new process.

    Raises:
        RuntimeError: it failed, or took longer than LIMIT.
    """
    command = [sys.executable, "-m", "opgraph.bench.network_process", json.dumps(asked)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=LIMIT, env={**os.environ, **env}
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"it took longer than {LIMIT:.0f} s") from None
    if done.returncode:
        raise RuntimeError(" ".join(done.stderr.strip()[-300:].split()) or f"it ended with {done.returncode}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found
