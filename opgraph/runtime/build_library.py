"""Compiles a kernel's source to a library: with one compiler call, or with two in parallel if it has two halves."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass

from opgraph.codegen.kernel import KernelSource
from opgraph.schedule.cpu_body import Form

#: The name of the source file during compilation.
FILE = "kernel.cpp"
#: The halves of a kernel that compiles slowly: the callers, and the called functions (OG_SHARED in kernels/config.h).
CALLS, FUNCTIONS = "-DOG_CALLS", "-DOG_FUNCTIONS"
#: The message for a compiler that reports success without a result.
NOTHING = "it ended without an error, and wrote no library"
#: The compiler processes that run now, of all threads.
_running: set[subprocess.Popen[bytes]] = set()


@dataclass(frozen=True, slots=True)
class Built:
    """The result of a compilation.

    Attributes:
        library: the bytes of a shared library; None if the compiler refused the source.
        log: the compiler's output in that case.
    """

    library: bytes | None
    log: str = ""


def built(
    source: KernelSource,
    command: Sequence[str],
    flags: Sequence[str],
    libraries: Sequence[str],
    functions: Sequence[str] = (),
) -> Built:
    """Compiles a kernel.

    Args:
        command: the compiler.
        flags: for compiling and linking.
        libraries: the libraries to link with, last on the command line.
        functions: additional flags for a half that has only functions on 16 floats at a time.

    Raises:
        OSError: there is no space for intermediate files, or the compiler does not start.
    """
    with tempfile.TemporaryDirectory(prefix="opgraph-") as folder:
        made = os.path.join(folder, "kernel.so")
        begin = [*command, *flags]
        if source.form is not Form.LOOP and len(os.sched_getaffinity(0)) - len(_running) > 1:
            # One half has all callers. The other has only the functions: its text ends after them.
            more = functions if source.form is Form.LANE_STRIPS else ()
            halves = [(CALLS,), (FUNCTIONS, *more)]
            parts = source.code, source.code[: source.code.rindex('extern "C"')]
            texts = [_written(os.path.join(folder, half[0][2:]), t) for half, t in zip(halves, parts, strict=True)]
            objects = [text + ".o" for text in texts]
            stages = [
                [[*begin, *half, "-c", "-o", o, t] for half, o, t in zip(halves, objects, texts, strict=True)],
                # Calls between the halves need no symbol table.
                [[*begin, "-Wl,-Bsymbolic", "-o", made, *objects, *libraries]],
            ]
        else:
            stages = [[[*begin, "-o", made, _written(folder, source.code), *libraries]]]
        for commands in stages:
            log = _run(commands, folder)
            if log is not None:
                return Built(None, log)
        library = library_at(made)
        return Built(library, "" if library else NOTHING)


def library_at(path: str) -> bytes | None:
    """Returns the library that a compiler should have written; None if there is none."""
    try:
        with open(path, "rb") as file:
            return file.read() or None
    except FileNotFoundError:
        return None


def _written(folder: str, text: str) -> str:
    os.makedirs(folder, exist_ok=True)
    path = os.path.join(folder, FILE)
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
    return path


def _run(commands: Sequence[Sequence[str]], folder: str) -> str | None:
    """Runs commands in parallel. Returns their output if any fails, else None."""
    # zig has its own cache, which would need a writable home folder.
    environment = {**os.environ, "ZIG_GLOBAL_CACHE_DIR": folder, "ZIG_LOCAL_CACHE_DIR": folder}
    with tempfile.TemporaryFile("w+", errors="replace", dir=folder) as log:
        started = []
        try:
            for command in commands:
                started.append(subprocess.Popen(command, stdout=log, stderr=log, env=environment))
                _running.add(started[-1])
        finally:
            failed = [process.wait() for process in started]
            _running.difference_update(started)
        if not any(failed):
            return None
        log.seek(0)
        return log.read()
