"""Tensors in data files next to the model: checks which files may be read, and maps them.

A model is untrusted input, and the path of its data comes from the model. After all symbolic links are followed, a
data file must be in the model's own folder. If the model file is itself a link (the cache of a model hub links model
and data into one store), the folder of the real model file is allowed too. The data file must be a regular file with
one name: a second hard link could be a file from another folder.
"""

from __future__ import annotations

import mmap
import os
import stat
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath, PureWindowsPath

import numpy as np

from opgraph.errors import ModelError


@dataclass(frozen=True, slots=True)
class Extent:
    """The location of one tensor: a file next to the model, and a range of bytes."""

    location: str
    offset: int
    nbytes: int


@dataclass(slots=True)
class DataFolder:
    """The folder of a model, with its data files, each mapped once.

    Args:
        folder: the base of all locations.
        model: the model's file, if there is one.
    """

    folder: Path
    model: Path | None = None
    _files: dict[str, _Mapped] = field(default_factory=dict)

    def read(self, extent: Extent, where: str) -> np.ndarray:
        """Returns the bytes of one tensor as a read-only u8 array, which is mapped, not read.

        Raises:
            ModelError: the location is outside the folder, or the file is missing, not a regular file, or too short.
        """
        if extent.location not in self._files:
            self._files[extent.location] = _mapped(self._path(extent.location, where), extent.location, where)
        data = self._files[extent.location].data
        if extent.offset < 0 or extent.offset + extent.nbytes > data.size:
            raise ModelError(
                f"{extent.location!r} has {data.size} bytes, the tensor wants bytes {extent.offset} to "
                f"{extent.offset + extent.nbytes}",
                where=where,
                fix="fetch the data file again: it is truncated, or belongs to another model",
            )
        return data[extent.offset : extent.offset + extent.nbytes]

    def is_current(self) -> bool:
        """True if every mapped file is still at its location, and was not written since it was mapped."""
        try:
            return all(_state(os.stat(self.folder / name)) == file.state for name, file in self._files.items())
        except OSError:
            return False

    def _path(self, location: str, where: str) -> Path:
        parts = (*PurePosixPath(location).parts, *PureWindowsPath(location).parts)
        absolute = PurePosixPath(location).is_absolute() or PureWindowsPath(location).anchor
        if not location or "\0" in location or absolute or ".." in parts:
            raise _outside(location, where)
        try:
            found = Path(os.path.realpath(self.folder / location))
            allowed = [Path(os.path.realpath(self.folder))]
            if self.model is not None:
                allowed.append(Path(os.path.realpath(self.model)).parent)
        except OSError as error:
            raise _unreadable(location, where, error) from None
        if not any(found.is_relative_to(folder) for folder in allowed):
            raise _outside(location, where)
        return found


@dataclass(frozen=True, slots=True)
class _Mapped:
    """A mapped file: its bytes, and the file system's numbers for it."""

    data: np.ndarray
    state: tuple[int, ...]


def _state(found: os.stat_result) -> tuple[int, ...]:
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _mapped(path: Path, location: str, where: str) -> _Mapped:
    try:
        # Non-blocking: opening a named pipe must not hang.
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    except OSError as error:
        raise _unreadable(location, where, error) from None
    try:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode):
            raise ModelError(f"the data file {location!r} is no plain file", where=where, fix="put the data file there")
        if found.st_nlink > 1:
            raise ModelError(
                f"the data file {location!r} has {found.st_nlink} names (hard links)",
                where=where,
                fix="copy the file: under a second name it could be a file from outside the model's folder",
            )
        if found.st_size == 0:
            return _Mapped(np.empty(0, np.uint8), _state(found))
        data = np.frombuffer(mmap.mmap(handle, 0, access=mmap.ACCESS_READ), np.uint8)
        return _Mapped(data, _state(found))
    except OSError as error:
        raise _unreadable(location, where, error) from None
    finally:
        os.close(handle)


def _outside(location: str, where: str) -> ModelError:
    return ModelError(
        f"the data file {location[:200]!r} is outside the model's folder",
        where=where,
        fix="keep data files beside the model, under plain relative names",
    )


def _unreadable(location: str, where: str, error: OSError) -> ModelError:
    return ModelError(
        f"the data file {location[:200]!r} cannot be read: {error.strerror or error}",
        where=where,
        fix="put the data file beside the model, under the name that the model gives",
    )
