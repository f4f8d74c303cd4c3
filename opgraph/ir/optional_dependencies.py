"""Parts of opgraph that need a package which is not installed: the error names the extra."""

from __future__ import annotations

import importlib.util

from opgraph.errors import Unimplemented


class NotInstalled(Unimplemented, ImportError):  # noqa: N818 - named as opgraph's other errors
    """A package is missing. An ImportError too, which is what whoever imports a part in a `try` expects."""


def require(package: str, extra: str, what: str, where: str) -> None:
    """Raises NotInstalled where a package is missing.

    Args:
        package: as it is imported.
        extra: of opgraph's, that brings it.
        what: cannot be done without it, as the beginning of a sentence.
        where: for the message.
    """
    if importlib.util.find_spec(package) is None:
        raise NotInstalled(
            f"{what} {package}, which is not installed", where=where, fix=f"pip install 'opgraph[{extra}]'"
        )
