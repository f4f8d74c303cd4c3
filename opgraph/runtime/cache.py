"""The disk cache of compiled kernels: `$XDG_CACHE_HOME/opgraph`, private to the user.

An entry is a file that ends with a checksum of itself. It is written under another name and renamed, so processes that
build the same kernel at once both succeed. A truncated or damaged entry is detected and rebuilt, not loaded.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import warnings
from contextlib import suppress
from functools import cache
from pathlib import Path

_MAGIC = b"opgraph-entry-1\0"


@cache
def folder() -> Path:
    """The cache folder. If the usual one cannot be used: a temporary one, removed at exit, with one warning."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):  # the XDG Base Directory Specification ignores a relative path
        base = os.path.join(os.path.expanduser("~"), ".cache")
    wanted = Path(base) / "opgraph"
    problem = _problem(wanted)
    if problem is None:
        return wanted
    made = _temporary()
    warnings.warn(
        f"the kernel cache {wanted} cannot be used ({problem}); kernels are compiled anew in each process. "
        "Set XDG_CACHE_HOME to a folder that you own and can write.",
        stacklevel=2,
    )
    return made


def _problem(path: Path) -> str | None:
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        state = path.stat()
        if state.st_uid != os.getuid() or state.st_mode & 0o022:
            return "others may write to it"  # a library loaded from there would run their code
        return None if os.access(path, os.W_OK | os.X_OK) else "it is read-only"
    except OSError as error:
        return error.strerror or str(error)


def key(*parts: str) -> str:
    """The name of an entry: a hash of everything that its content depends on."""
    h = hashlib.sha256()
    for part in parts:
        h.update(part.encode())
        h.update(b"\0")
    return h.hexdigest()[:32]


def find(name: str) -> Path | None:
    """Returns the path of an intact entry, or None; a damaged entry is removed."""
    path = folder() / name
    try:
        content = path.read_bytes()
    except OSError:
        return None
    body, trailer = content[: -len(_MAGIC) - 32], content[-len(_MAGIC) - 32 :]
    if trailer == _MAGIC + hashlib.sha256(body).digest():
        return path
    drop(name)
    return None


def content(entry: Path) -> bytes:
    """Returns the content passed to `store`, for an entry that `find` returned."""
    return entry.read_bytes()[: -len(_MAGIC) - 32]


def drop(name: str) -> None:
    """Removes an entry, if it is there."""
    with suppress(OSError):  # a read-only folder: the entry is rebuilt elsewhere
        (folder() / name).unlink(missing_ok=True)


def store(name: str, content: bytes) -> Path:
    """Writes an entry atomically and returns its path; to a temporary folder if the cache cannot be written.

    ELF files may be followed by other data, so the checksum is at the end.
    """
    entry = content + _MAGIC + hashlib.sha256(content).digest()
    try:
        return _write(folder(), name, entry)
    except OSError as error:
        warnings.warn(
            f"the kernel cache {folder()} cannot be written ({error.strerror}); this kernel is not kept.", stacklevel=2
        )
        return _write(_temporary(), name, entry)


def _temporary() -> Path:
    """Creates a folder that is removed at exit."""
    import shutil  # rarely needed, and slow to load
    import tempfile

    made = Path(tempfile.mkdtemp(prefix="opgraph-"))
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return made


def _write(where: Path, name: str, entry: bytes) -> Path:
    import tempfile  # not needed to find an entry

    handle, temporary = tempfile.mkstemp(dir=where, prefix=".new-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(entry)
        os.replace(temporary, where / name)
    except BaseException:
        os.unlink(temporary)
        raise
    return where / name
