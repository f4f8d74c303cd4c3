"""Compiles a library and writes it to disk."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np

from opgraph.errors import DeviceError, InvalidArguments, ModelError
from opgraph.onnx.atomic_write import Pending, checked_place, file_path, reported
from opgraph.onnx.library import nvrtc
from opgraph.onnx.library.ops import LibraryOp
from opgraph.onnx.library.text import LibraryText, image_file, library_text
from opgraph.onnx.origin import Origin
from opgraph.onnx.write import data_place
from opgraph.runtime import cpu_compiler
from opgraph.runtime.build_library import NOTHING, library_at

#: In the flags of kernels, -march=native is for this machine; a library may be built for another one.
NATIVE = "native"


def compiled(ops: Sequence[LibraryOp], march: str = NATIVE) -> bytes:
    """Returns the shared library of these ops.

    Args:
        march: the processors, by the compiler's name: "native" for those like this machine's, or "x86-64-v3".

    Raises:
        InvalidArguments: there are no ops, or `march` is no valid name.
        DeviceError: there is no compiler or, for GPUs, no NVRTC; or one refused the source (the log is included).
    """
    if not ops:
        raise InvalidArguments(
            "the model has nothing that a library would run",
            where="ort_library",
            fix="save it without one: single nodes, an f32 SiLU by itself, short rows and what `keep` names are "
            "onnxruntime's",
        )
    if not isinstance(march, str) or not re.fullmatch(r"[\w.+-]+", march):
        raise InvalidArguments(f"{march!r} names no processors", where="march", fix='use "native" or "x86-64-v3"')
    compiler = cpu_compiler.find_compiler()
    if compiler is None:
        raise DeviceError(
            cpu_compiler.no_compiler(),
            where="ort_library",
            fix="install g++ or clang, or: pip install 'opgraph[compiler]'",
        )
    return _built(library_text(ops), march, compiler.command)


@lru_cache(maxsize=4)  # a model may be compiled again when it gets its final name
def _built(source: LibraryText, march: str, command: tuple[str, ...]) -> bytes:
    images = nvrtc.compiled(source.kernels) if source.kernels else {}
    flags = [
        f"-march={march}" if flag.startswith("-march=") else flag for flag in (*cpu_compiler.LEVEL, *cpu_compiler.FLAGS)
    ]
    flags += ["-fvisibility=hidden", *(["-DOG_NO_RUNTIME"] if "-nostdlib" in command else [])]
    with tempfile.TemporaryDirectory(prefix="opgraph-") as folder:
        text, made = os.path.join(folder, "library.cpp"), os.path.join(folder, "library.so")
        Path(text).write_text(source.code, encoding="utf-8")
        for architecture, image in images.items():
            Path(folder, image_file(architecture)).write_bytes(image)
        environment = {**os.environ, "ZIG_GLOBAL_CACHE_DIR": folder, "ZIG_LOCAL_CACHE_DIR": folder}
        whole = [*command, *flags, "-o", made, text]
        done = subprocess.run(
            whole, capture_output=True, text=True, errors="replace", check=False, env=environment, cwd=folder
        )
        library = library_at(made) if done.returncode == 0 else None
        if library is not None:
            return library
    said = NOTHING if done.returncode == 0 else done.stderr
    log = "\n".join(f"    {line}" for line in said.strip().splitlines()[:20])
    raise DeviceError(
        f"the C++ compiler refused the library:\n{log}",
        where=command[0],
        fix="check the compiler and march; if both are sound, this is a bug of opgraph: report it with the model",
    )


def library_place(path: object, model: Path | None, origin: Origin | None) -> Path:
    """Checks the path of a library, and returns it.

    Args:
        path: as the caller gave it.
        model: the model that is written with it, if any.
        origin: the model that was read: its data may still be needed.

    Raises:
        InvalidArguments: `path` is not a path.
        ModelError: the path is not writable, or is that of one of the models' own files.
    """
    place = file_path(path, "ort_library")
    found = checked_place(place, "library")
    taken = [] if model is None else [model, data_place(model)]
    with reported("library", place):
        if found in {*map(os.path.realpath, taken), *(origin.files() if origin is not None else ())}:
            raise ModelError(
                "the library cannot be written: that is a file of the model",
                where=f"{str(place)!r}",
                fix="give another file name",
            )
    return place


@contextlib.contextmanager
def pending_library(place: Path, ops: Sequence[LibraryOp], march: str = NATIVE) -> Iterator[Pending]:
    """Writes the library of these ops under a temporary name. A process that has loaded an old library keeps that one.

    Raises:
        InvalidArguments, DeviceError: as `compiled`.
        ModelError: it cannot be written.
    """
    with Pending(place, "library", 0o777) as library:
        library.write_at(0, np.frombuffer(compiled(ops, march), np.uint8))
        yield library
