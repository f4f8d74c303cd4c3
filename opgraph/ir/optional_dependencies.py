"""The check for packages that parts of opgraph need; the error names the extra that installs them."""

from __future__ import annotations

import importlib.util

from opgraph.errors import Unimplemented


class NotInstalled(Unimplemented, ImportError):  # noqa: N818 - named as opgraph's other errors
    """A package is missing. It is an ImportError as well, for callers that import a part in a `try`."""


def require(package: str, extra: str, what: str, where: str) -> None:
    """Raises NotInstalled if a package is missing.

    Args:
        package: its import name.
        extra: the extra of opgraph that installs it.
        what: the feature, as the beginning of a sentence that continues with the package's name.
        where: for the message.
    """
    if importlib.util.find_spec(package) is None:
        raise NotInstalled(
            f"{what} {package}, which is not installed", where=where, fix=f"pip install 'opgraph[{extra}]'"
        )
