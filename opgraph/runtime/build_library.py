"""A kernel's text becomes a library: by one call of the compiler, or by two at once where it has two halves."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass

from opgraph.codegen.kernel import KernelSource
from opgraph.schedule.cpu_body import Form

#: What a source is called while it is compiled.
FILE = "kernel.cpp"
#: Of a kernel that takes long: what calls, and the functions that are called (OG_SHARED in kernels/config.h).
CALLS, FUNCTIONS = "-DOG_CALLS", "-DOG_FUNCTIONS"
#: What is said of a compiler that reports success without a result.
NOTHING = "it ended without an error, and wrote no library"
#: The compilers that run now, of all threads.
_running: set[subprocess.Popen[bytes]] = set()


@dataclass(frozen=True, slots=True)
class Built:
    """What came of it.

    Attributes:
        library: the bytes of a shared library; None where the compiler refused.
        log: what it said then.
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
        libraries: what is linked to, last on the command line.
        functions: more flags, for a half that has nothing but functions of 16 floats at a time.

    Raises:
        OSError: no room for the files in between, or the compiler does not start.
    """
    with tempfile.TemporaryDirectory(prefix="opgraph-") as folder:
        made = os.path.join(folder, "kernel.so")
        begin = [*command, *flags]
        if source.form is not Form.LOOP and len(os.sched_getaffinity(0)) - len(_running) > 1:
            # One of the halves has all that calls, the other one no more than the functions: it ends where those do.
            more = functions if source.form is Form.LANE_STRIPS else ()
            halves = [(CALLS,), (FUNCTIONS, *more)]
            parts = source.code, source.code[: source.code.rindex('extern "C"')]
            texts = [_written(os.path.join(folder, half[0][2:]), t) for half, t in zip(halves, parts, strict=True)]
            objects = [text + ".o" for text in texts]
            stages = [
                [[*begin, *half, "-c", "-o", o, t] for half, o, t in zip(halves, objects, texts, strict=True)],
                # Calls from one half to the other need no table of symbols.
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
    """The library that a compiler says it wrote; None where there is none."""
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
    """Runs some at once; what those say that fail, or None."""
    # zig keeps a cache of its own, which needs a home folder that can be written.
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
