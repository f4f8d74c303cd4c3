"""Calls of a library's CUDA ops in a process with a fake libcuda.so.1, whose kernels are emulated."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from emulator import build
from fake_cuda_driver import FakeDriver
from fake_onnxruntime import FakeOnnxruntime, StatusError

#: Addresses without memory: a context of the GPU, and the provider's stream in it.
CONTEXT, STREAM = 0x5000, 0x5000 + 1000
CUDA = "CUDAExecutionProvider"


@dataclass(frozen=True, slots=True)
class Called:
    """The effects of one call.

    Attributes:
        results: the outputs; none if it was refused.
        refused: code and message of its OrtStatus.
        launches: (kernel, blocks, threads, stream).
        current: the current context afterwards.
        loaded: `FakeDriver.loaded`.
    """

    results: list[np.ndarray] = field(default_factory=list)
    refused: tuple[int, str] | None = None
    launches: list[tuple[str, int, int, int]] = field(default_factory=list)
    current: int = 0
    loaded: tuple[int, str] = (0, "")


class _Process:
    driver: FakeDriver
    codes: Mapping[str, str]
    launches: list[tuple[str, int, int, int]]
    sessions: dict[str, FakeOnnxruntime]


def start(driver: Path, codes: Mapping[str, str]) -> None:
    """Begins the process.

    Args:
        codes: source of each kernel by its name.
    """
    _Process.driver = FakeDriver(driver, _launched)
    _Process.codes, _Process.launches, _Process.sessions = codes, [], {}


def _launched(name: str, blocks: int, threads: int, stream: int, arguments: Any) -> None:
    _Process.launches.append((name, blocks, threads, stream))
    library = build(_Process.codes[name], name)
    count = library.arguments()
    given = (ctypes.c_void_p * count)(*[arguments[i] for i in range(count)])
    if library.run(given, blocks, threads, False):
        _Process.launches.append(("an access that a GPU refuses", 0, 0, 0))


def call(
    path: str,
    name: str,
    arrays: Sequence[np.ndarray],
    kinds: Sequence[Any],
    alpha: float | None = None,
    current: int = CONTEXT,
    offset: int = 0,
    **driver: int,
) -> Called:
    """One node of the CUDA provider.

    Args:
        path: the library; a copy of it under another name has no state of earlier calls.
        kinds: dtype of each output.
        current: the current context.
        offset: where arrays begin, in bytes beyond a multiple of 16.
        driver: the results of the driver, as in `FakeDriver.set`.
    """
    _Process.driver.set(**{"init": 0, "version": 13000, "major": 9, "minor": 0, "load": 0, "loads": 0, **driver})
    _Process.driver.enter(current)
    _Process.launches = []
    session = _Process.sessions.get(path) or _Process.sessions.setdefault(path, FakeOnnxruntime(path))
    session.stream, session.offset = STREAM, offset
    results, refused = [], None
    try:
        results = [np.array(r) for r in session.run(name, CUDA, arrays, kinds, alpha)]
    except StatusError as error:
        refused = error.code, str(error)
    return Called(results, refused, _Process.launches, _Process.driver.current, _Process.driver.loaded)
