"""The sources in `kernels/`, spliced into one text.

They are spliced, never included: the key of CuPy's disk cache is the source text alone, so an edited header would leave
a stale binary.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from opgraph.errors import DeviceError

_INCLUDE = re.compile(r'^#include "(?P<name>[\w./]+)"$', re.MULTILINE)
_PRAGMA = re.compile(r"^#pragma once\n", re.MULTILINE)
_FUNCTION = re.compile(r"^template <class F> OG_FN F (\w+)\(", re.MULTILINE)
_COMMENT = re.compile(r"^\s*//.*\n", re.MULTILINE)


@cache
def kernel_folder() -> Path:
    """The folder of the sources: inside the package in a wheel, at the top of a checkout.

    Raises:
        DeviceError: they are in neither place.
    """
    package = Path(__file__).parent.parent
    packaged, checkout = package / "_kernels", package.parent / "kernels"
    for folder in (packaged, checkout):
        if (folder / "config.h").is_file():
            return folder
    raise DeviceError(
        "the kernel sources are missing",
        where=f"{packaged} and {checkout}",
        fix="install opgraph again (pip install --force-reinstall opgraph)",
    )


@cache
def spliced(*names: str) -> str:
    """The text of some sources after everything that they include, each once, without comments."""
    order: list[str] = []
    pending = [(name, False) for name in reversed(names)]
    while pending:
        current, expanded = pending.pop()
        if current in order:
            continue
        if expanded:
            order.append(current)
            continue
        pending.append((current, True))
        pending.extend((inner, False) for inner in reversed(_INCLUDE.findall(_read(current))))
    return "\n".join(_stripped(_read(n)) for n in order)


@cache
def reduced_functions() -> frozenset[str]:
    """Names of the functions that have a form in og::reduced."""
    return frozenset(_FUNCTION.findall(_read("math/reduced_precision.h")))


@cache
def _read(name: str) -> str:
    return (kernel_folder() / name).read_text(encoding="utf-8")


def _stripped(text: str) -> str:
    # Comments are for readers of kernels/. Without them the text in every kernel is half as long.
    return _COMMENT.sub("", _PRAGMA.sub("", _INCLUDE.sub("", text))).strip("\n")
