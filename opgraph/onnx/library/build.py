"""Compiling a library and putting it on the disk."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from opgraph.errors import DeviceError, InvalidArguments, ModelError
from opgraph.onnx.library.ops import LibraryOp
from opgraph.onnx.library.text import library_text
from opgraph.runtime import host

#: -march=native in the flags of kernels is for the machine itself; a library may be meant for another one.
NATIVE = "native"


def compiled(ops: Sequence[LibraryOp], march: str = NATIVE) -> bytes:
    """The shared library of these ops.

    Args:
        march: for which processors, as the compiler calls them: "native" for those like this machine's, "x86-64-v3".

    Raises:
        InvalidArguments: there are no ops, or `march` is no name of processors.
        DeviceError: there is no compiler, or it refused the source; with its log.
    """
    if not ops:
        raise InvalidArguments(
            "the model has nothing that a library would run",
            where="ort_library",
            fix="save it without one: no fused partition of several nodes, and no swish",
        )
    if not re.fullmatch(r"[\w.+-]+", march):
        raise InvalidArguments(f"{march!r} names no processors", where="march", fix='use "native" or "x86-64-v3"')
    compiler = host.find_compiler()
    if compiler is None:
        raise DeviceError(
            host.no_compiler(),
            where="ort_library",
            fix="install g++ or clang, or: pip install 'opgraph[compiler]'",
        )
    return _built(library_text(ops), march, compiler.command)


@lru_cache(maxsize=4)  # a model is tried before it gets its name
def _built(source: str, march: str, command: tuple[str, ...]) -> bytes:
    flags = [f"-march={march}" if flag.startswith("-march=") else flag for flag in host.FLAGS]
    flags += ["-fvisibility=hidden", *(["-DOG_NO_RUNTIME"] if "-nostdlib" in command else [])]
    with tempfile.TemporaryDirectory(prefix="opgraph-") as folder:
        text, made = os.path.join(folder, "library.cpp"), os.path.join(folder, "library.so")
        Path(text).write_text(source, encoding="utf-8")
        environment = {**os.environ, "ZIG_GLOBAL_CACHE_DIR": folder, "ZIG_LOCAL_CACHE_DIR": folder}
        whole = [*command, *flags, "-o", made, text]
        done = subprocess.run(whole, capture_output=True, text=True, errors="replace", check=False, env=environment)
        if done.returncode == 0:
            return Path(made).read_bytes()
    log = "\n".join(f"    {line}" for line in done.stderr.strip().splitlines()[:20])
    raise DeviceError(
        f"the C++ compiler refused the library:\n{log}",
        where=command[0],
        fix="check the compiler and march; if both are sound, this is a bug of opgraph: report it with the model",
    )


class PendingLibrary:
    """A library under a temporary name in the folder where it is to be; gone at the end unless it took its name."""

    def __init__(self, path: Path, content: bytes) -> None:
        self._final, self._content = path, content

    def __enter__(self) -> PendingLibrary:
        try:
            handle, name = tempfile.mkstemp(prefix=f".{self._final.name[:80]}.", suffix=".tmp", dir=self._final.parent)
        except OSError as error:
            raise self._refused(error) from error
        self._temporary = Path(name)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(self._content)
            os.chmod(name, 0o755)
        except BaseException as error:
            self._temporary.unlink(missing_ok=True)
            if isinstance(error, OSError):
                raise self._refused(error) from error
            raise
        return self

    def take_name(self) -> None:
        """Replaces the final file. A process that has the old one loaded keeps it.

        Raises:
            ModelError: it cannot be replaced.
        """
        try:
            os.replace(self._temporary, self._final)
        except OSError as error:
            raise self._refused(error) from error

    def _refused(self, error: OSError) -> ModelError:
        return ModelError(
            f"the library cannot be written: {error.strerror or error}",
            where=f"{str(self._final)!r}",
            fix="check folder, rights and free space",
        )

    def __exit__(self, *_: object) -> None:
        self._temporary.unlink(missing_ok=True)
