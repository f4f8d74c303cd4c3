"""Atomic writes of text files."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path


def write_whole(path: str | os.PathLike[str], text: str) -> None:
    """Writes a text to a temporary file in the same folder, then renames that; an existing file stays until then.

    A link stays a link: its target is replaced. A path that is not a regular file (/dev/stdout, a pipe) is written to
    directly. The permissions are those of the existing file, or of a new file.

    Raises:
        OSError, ValueError: the file cannot be written (ValueError: a null byte in the name); nothing has changed. The
            OSError names the file.
    """
    target = Path(path)
    if target.exists() and not target.is_file() and not target.is_dir():
        target.write_text(text, encoding="utf-8")
        return
    target = Path(os.path.realpath(target))
    temporary = None
    try:
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name[:80]}.", suffix=".tmp")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(temporary, _mode(target))  # mkstemp's files are accessible to their owner only
        os.replace(temporary, target)
    except BaseException as error:
        if temporary is not None:
            with suppress(OSError):
                os.unlink(temporary)
        if isinstance(error, OSError):
            error.filename = os.fspath(path)  # a full disk: no name; other errors: the temporary file's name
        raise


def _mode(target: Path) -> int:
    if target.exists():
        return target.stat().st_mode & 0o777
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask
