"""Writes files under temporary names, then renames all files of a group to their final names, or none."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from google.protobuf.message import EncodeError

from opgraph.errors import InvalidArguments, ModelError


def file_path(path: object, argument: str) -> Path:
    """Converts a caller's path: text, bytes or os.PathLike.

    Raises:
        InvalidArguments: the path has another type.
    """
    if isinstance(path, (str, bytes, os.PathLike)):
        return Path(os.fsdecode(path))
    raise InvalidArguments(f"a {type(path).__name__} is no path", where=argument, fix="give a file's path")


def checked_place(path: Path, kind: str) -> str:
    """Returns the final path of a file, with links resolved.

    Args:
        kind: the kind of file, for messages: "model", "library".

    Raises:
        ModelError: the folder does not exist, or the existing file is not a regular file or is write-protected. As
            with `cp`, a write-protected file stays, although a rename would replace it.
    """
    with reported(kind, path):
        if not path.parent.is_dir() or (path.exists() and not path.is_file()):
            found = "a folder" if path.is_dir() else "no file"
            reason = f"that is {found}" if path.exists() else f"there is no folder {str(path.parent)!r}"
            raise ModelError(
                f"the {kind} cannot be written: {reason}", where=f"{str(path)!r}", fix="give a file's path"
            )
        if path.exists() and not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return os.path.realpath(path)


@contextlib.contextmanager
def reported(kind: str, path: Path) -> Iterator[None]:
    """Converts errors of file operations into a ModelError that names the file."""
    try:
        yield
    except (OSError, EncodeError, ValueError) as error:
        if isinstance(error, ModelError):
            raise
        reason = getattr(error, "strerror", None) or error
        raise ModelError(
            f"the {kind} cannot be written: {reason}", where=f"{str(path)!r}", fix="check folder, rights and free space"
        ) from error


class Pending:
    """A file under a temporary name in its final folder; deleted on exit unless it was renamed.

    Args:
        path: the final path.
        kind: the kind of file, for messages.
        mode: the mode of a new file, before the umask.

    Methods that write raise ModelError if a file operation fails.
    """

    def __init__(self, path: Path, kind: str = "model", mode: int = 0o666) -> None:
        self.path, self.kind, self._mode = path, kind, mode
        # A symbolic link is kept; the file that it points to is replaced.
        with reported(kind, path):
            self.final = Path(os.path.realpath(path))
        self.backup: Path | None = None

    def __enter__(self) -> Pending:
        checked_place(self.path, self.kind)
        with reported(self.kind, self.path):
            handle, name = tempfile.mkstemp(prefix=f".{self.final.name[:80]}.", suffix=".tmp", dir=self.final.parent)
        self.temporary = Path(name)
        self._file = os.fdopen(handle, "wb")
        return self

    def write_at(self, offset: int, data: np.ndarray) -> None:
        """Writes bytes; a gap before them reads as zeros."""
        with reported(self.kind, self.path):
            self._file.seek(offset)
            self._file.write(np.ascontiguousarray(data).data)

    def close(self) -> None:
        """Flushes the file to disk, and gives it the mode of the old file or, without one, of a new file."""
        with reported(self.kind, self.path):
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            mask = os.umask(0)
            os.umask(mask)
            mode = self.final.stat().st_mode & 0o777 if self.final.exists() else self._mode & ~mask
            os.chmod(self.temporary, mode)

    def take_name(self) -> None:
        """Replaces the final file; the old one is kept until exit, for `give_back`."""
        with reported(self.kind, self.path):
            if self.final.exists():
                self.backup = self.temporary.with_suffix(".old")
                os.link(self.final, self.backup)
            os.replace(self.temporary, self.final)

    def give_back(self) -> None:
        """Undoes `take_name`."""
        if self.backup is not None:
            os.replace(self.backup, self.final)
            self.backup = None
        else:
            self.final.unlink()

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):  # `close` flushes first, and fails again on a full disk
            self._file.close()
        for leftover in (self.temporary, self.backup):
            if leftover is not None:
                leftover.unlink(missing_ok=True)


def commit(files: Sequence[Pending]) -> None:
    """Renames all files to their final names, or none.

    Raises:
        ModelError: one of them cannot be renamed; then nothing has changed.
    """
    for file in files:
        file.close()
    done: list[Pending] = []
    try:
        for file in files:
            file.take_name()
            done.append(file)
    except ModelError:
        for file in reversed(done):
            file.give_back()
        raise
