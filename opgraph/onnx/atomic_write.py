"""Files under temporary names: all that belong together get their own, or none does."""

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
    """A path as a caller gave it: text, bytes or os.PathLike.

    Raises:
        InvalidArguments: it is none of these.
    """
    if isinstance(path, (str, bytes, os.PathLike)):
        return Path(os.fsdecode(path))
    raise InvalidArguments(f"a {type(path).__name__} is no path", where=argument, fix="give a file's path")


def checked_place(path: Path, kind: str) -> str:
    """Where a file is to be, links resolved.

    Args:
        kind: what the file is, for messages: "model", "library".

    Raises:
        ModelError: there is no such folder, or what is there already is no regular file, or is write-protected: a file
            that its owner may not write to stays, as with `cp`, though a rename would replace it.
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
    """Turns what goes wrong with a file into a ModelError that names it."""
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
    """A file under a temporary name in the folder where it is to be; gone at the end unless it took its name.

    Args:
        path: where it is to be.
        kind: what it is, for messages.
        mode: of a new file, before the umask.

    Every method raises ModelError where the disk refuses.
    """

    def __init__(self, path: Path, kind: str = "model", mode: int = 0o666) -> None:
        self.path, self.kind, self._mode = path, kind, mode
        # A symbolic link stays one: the file that it points to is replaced.
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
        """Puts everything on the disk, with the mode that a new file (or the old one) has."""
        with reported(self.kind, self.path):
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            mask = os.umask(0)
            os.umask(mask)
            mode = self.final.stat().st_mode & 0o777 if self.final.exists() else self._mode & ~mask
            os.chmod(self.temporary, mode)

    def take_name(self) -> None:
        """Replaces the final file; the old one is kept until the end, for `give_back`."""
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
        with contextlib.suppress(OSError):  # it writes what is left first, and fails again on a full disk
            self._file.close()
        for leftover in (self.temporary, self.backup):
            if leftover is not None:
                leftover.unlink(missing_ok=True)


def commit(files: Sequence[Pending]) -> None:
    """Gives every file its name, or none.

    Raises:
        ModelError: one of them cannot take it; then nothing has changed.
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
