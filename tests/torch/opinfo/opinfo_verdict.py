"""Findings of a run, and their kinds."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from pathlib import Path

import torch
from opinfo_judge import Judge
from opinfo_run import Outcome

import opgraph
from opgraph.errors import OpGraphError

#: The files through which a call of a fused module enters Dynamo.
ENTRANCES = ("fuse_module.py", "dynamo_entry.py", "torch_internals.py")


@dataclass(frozen=True)
class Finding:
    """A difference from eager torch.

    Attributes:
        op, way, dtype, form, source: the call.
        amid: True if arithmetic surrounds the call.
        derivative: the number of times it was differentiated.
        kind: "wrong", "raw error", "refused" (and no row of the table lists it), "answered" (where torch raises),
            "unfused" (runs as it was written, with a warning), "not compiled" (no graph was captured, no warning), or
            "torch.compile" (its backend "aot_eager" gives the same).
        text: a description.
    """

    op: str
    way: str
    dtype: str
    form: str
    source: str
    amid: bool
    derivative: int
    kind: str
    text: str

    def __str__(self) -> str:
        place = "amid arithmetic" if self.amid else "alone"
        order = ("", ", gradient", ", second derivative")[self.derivative]
        return f"{self.kind}: {self.dtype} {self.form}, {self.way} {place}{order}, {self.source}: {self.text}"


def verdict(judge: Judge, got: Outcome, way: str, *, undefined: bool = False) -> tuple[str, str]:
    """The kind and the text of an outcome's problem; both empty if there is none.

    Args:
        undefined: the result is uninitialized memory.
    """
    expected = judge.eager.error
    if isinstance(got.error, OpGraphError):
        if str(got.error).count("\n") < 2:
            return "raw error", f"not three lines: {got.error}"
        return ("refused", str(got.error)) if expected is None else ("", "")
    if got.error is not None:
        excused = expected is not None and is_error_of_torch(got.error, expected)
        return ("", "") if excused else ("raw error", told_of(got.error))
    if expected is not None:
        return "answered", f"torch raises {told_of(expected, 0)}"
    problem = judge.problem(got, gradient_strides=way == "function")
    if problem.startswith("value") and undefined:
        problem = ""
    if problem or not got.unfused:
        return ("wrong", problem) if problem else ("", "")
    return "unfused", got.unfused


def is_torchs(judge: Judge, found: tuple[str, str], runs: list[Outcome], way: str) -> bool:
    """True if torch.compile itself gives the same for these calls.

    Args:
        runs: outcomes of the same calls with its backend "aot_eager".
    """
    kind, text = found
    if kind == "unfused":
        return " runs unfused: torch.compile " in text or any(
            isinstance(run.error, torch._dynamo.exc.BackendCompilerFailed) for run in runs
        )
    said = [verdict(judge, run, way) for run in runs]
    return kind in ("wrong", "answered") and any(k == kind and _what(t) == _what(text) for k, t in said)


def _what(text: str) -> str:
    """The beginning of a judge's line: the property and the result that differ."""
    return text.removeprefix("second call: ").partition(":")[0]


def is_error_of_torch(error: BaseException, expected: BaseException) -> bool:
    """True if an error that is not of opgraph's classes is torch's own, in a case where eager torch raises one too.

    An error raised before opgraph's code is reached may be of any class: Dynamo's rules for tensors without data raise
    other classes than torch's kernels do. An error raised in opgraph's code must have eager's class. If torch's Python
    code did not raise it itself, it must also have eager's message.
    """
    root = Path(opgraph.__file__).parent
    files = [Path(frame.filename.partition("#")[0]) for frame in traceback.extract_tb(error.__traceback__)]
    own = [file.is_relative_to(root) and file.name not in ENTRANCES for file in files]
    if not any(own):
        return True
    return isinstance(error, type(expected)) and (not own[-1] or first_line(error).startswith(first_line(expected)))


def first_line(error: BaseException) -> str:
    """The first line of an error's message."""
    return (str(error).strip().splitlines() or [""])[0]


def told_of(error: BaseException, frames: int = 3) -> str:
    """An error in a line, with the innermost frames of its traceback."""
    places = traceback.extract_tb(error.__traceback__)[-frames:] if frames else []
    where = " < ".join(f"{Path(f.filename).name}:{f.lineno}" for f in reversed(places))
    return f"{type(error).__name__}: {first_line(error)[:160]}" + (f" ({where})" if where else "")
