"""Text files that appear whole or not at all."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path


def write_whole(path: str | os.PathLike[str], text: str) -> None:
    """Writes a text under another name beside its own, and renames it; what was there stays until then.

    A link stays one: the file that it names is written. What is no file (/dev/stdout, a pipe) is written to. The rights
    are those of the file that was there, or of a new one.

    Raises:
        OSError, ValueError: it cannot be written (the second: a null byte in the name). Nothing has changed then. The
            first names the file.
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
        os.chmod(temporary, _mode(target))  # mkstemp's own rights are the owner's alone
        os.replace(temporary, target)
    except BaseException as error:
        if temporary is not None:
            with suppress(OSError):
                os.unlink(temporary)
        if isinstance(error, OSError):
            error.filename = os.fspath(path)  # a write to a full disk names none, the rest the temporary one
        raise


def _mode(target: Path) -> int:
    if target.exists():
        return target.stat().st_mode & 0o777
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask
