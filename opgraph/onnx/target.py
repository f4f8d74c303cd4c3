"""The target runtime of a written model, and the opsets and formats that it reads."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from opgraph.errors import InvalidArguments

FORMS = ("auto", "decomposed", "function", "standard", "contrib")


@dataclass(frozen=True, slots=True)
class Target:
    """A version of onnxruntime and its limits.

    Attributes:
        name: as the caller wrote it.
        version: (major, minor).
        opset, ir_version: the newest that it reads.
    """

    name: str
    version: tuple[int, int]
    opset: int
    ir_version: int

    @property
    def runs_swish_until(self) -> int:
        """The last opset in which it runs ai.onnx Swish (by expanding it); 0 if it never does."""
        return 24 if self.opset >= 24 else 0


# Measured on 1.16.3, 1.18.1, 1.20.1, 1.23.2, 1.27.0, 1.30.0, 1.31.1 and 1.32.0; the steps in between are from
# onnxruntime's compatibility page. Versions after the last row are assumed to read at least as much.
_LIMITS: tuple[tuple[tuple[int, int], int, int], ...] = (
    ((1, 14), 18, 8),
    ((1, 15), 19, 8),
    ((1, 16), 19, 9),
    ((1, 17), 20, 9),
    ((1, 18), 21, 10),
    ((1, 21), 22, 10),
    ((1, 22), 23, 10),
    ((1, 23), 23, 11),
    ((1, 27), 24, 12),
    ((1, 31), 26, 13),
    ((1, 32), 28, 14),
)


#: The newest measured version; a number more than this many releases later is treated as a typing error.
NEWEST = _LIMITS[-1][0]
_MOST_AHEAD = 20


def target_of(text: str) -> Target:
    """Parses the name of a target: "onnxruntime==1.31", or "onnxruntime" for the newest known.

    Raises:
        InvalidArguments: another runtime, a version before 1.14, or a major version after 1.
    """
    pattern = r"onnxruntime(?:-gpu)?\s*(?:==\s*(\d+)\.(\d+)(?:\.[\w.]+)?)?"
    match = re.fullmatch(pattern, text.strip()) if isinstance(text, str) else None
    if match is None:
        raise InvalidArguments(f"unknown target {text!r}", where="target", fix='write it as "onnxruntime==1.31"')
    version = (int(match[1]), int(match[2])) if match[1] else NEWEST
    if version[0] > NEWEST[0] or version[1] > NEWEST[1] + _MOST_AHEAD:
        raise InvalidArguments(
            f"there is no {text} that opgraph knows of",
            where="target",
            fix=f'the newest that it knows is "onnxruntime=={NEWEST[0]}.{NEWEST[1]}"; name that, or "onnxruntime"',
        )
    fitting = [row for row in _LIMITS if row[0] <= version]
    if not fitting:
        raise InvalidArguments(f"{text} is too old", where="target", fix="use onnxruntime 1.14 or newer")
    return Target(text, version, fitting[-1][1], fitting[-1][2])


def reader_of(opset: int) -> str | None:
    """The first onnxruntime that reads an opset; None if no known version does."""
    return next((f"onnxruntime=={major}.{minor}" for (major, minor), last, _ in _LIMITS if last >= opset), None)


def checked_form(form: str) -> str:
    """Returns the form if it exists.

    Raises:
        InvalidArguments: the form is unknown.
    """
    if form not in FORMS:
        raise InvalidArguments(f"unknown form {form!r}", where="form", fix=f"use one of {', '.join(FORMS)}")
    return form


def checked_opset(opset: object) -> int | None:
    """Returns an opset of ai.onnx; None if no opset was requested.

    Raises:
        InvalidArguments: it is not a positive integer.
    """
    if opset is None:
        return None
    if not isinstance(opset, (int, np.integer)) or isinstance(opset, bool) or opset < 1:
        raise InvalidArguments(f"opset={opset!r} is no version of an opset", where="opset", fix="give one: opset=22")
    return int(opset)
