"""The log of a compilation: each stage sends its value to `logging.getLogger("opgraph.<stage>")`.

- partition: the ops of each partition of a graph.
- loop: the loop of a fused partition after lowering, and after each rewriting that changed it.
- schedule: the schedule of a kernel, and why it was chosen.
- source: the specific part of a kernel's source, without the shared code.
- run: each call of a kernel: its entry point, the shapes of its operands, and the threads.

All are records of level DEBUG. The environment variable OPGRAPH_DEBUG names stages, or all of them, and prints their
records on stderr: `OPGRAPH_DEBUG=loop,schedule python model.py`. It is read once, when this module is imported.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

STAGES = ("partition", "loop", "schedule", "source", "run")
VARIABLE = "OPGRAPH_DEBUG"


def is_on(stage: str) -> bool:
    """True if the records of a stage are enabled."""
    if "logging" not in sys.modules:  # no level or handler can be set yet, and the import takes 4 ms
        return False
    import logging

    return logging.getLogger(f"opgraph.{stage}").isEnabledFor(logging.DEBUG)


def log(stage: str, title: str, value: object = "") -> None:
    """Logs one value of a stage.

    Args:
        title: one line.
        value: printed below the title; converted to text only if the record is handled.
    """
    if is_on(stage):
        import logging

        logging.getLogger(f"opgraph.{stage}").debug("%s\n%s" if value != "" else "%s%s", title, value)


@dataclass(frozen=True, slots=True)
class Logged:
    """An entry point whose calls are logged.

    Attributes:
        function: the entry point.
        title: its name, and the shapes of its calls.
        threads: returns a text with the number of threads, from the arguments of a call.
    """

    function: Any
    title: str
    threads: Callable[..., str]

    def __call__(self, *args: Any) -> Any:
        """Logs the call, then makes it."""
        log("run", f"{self.title}, {self.threads(*args)}")
        return self.function(*args)


#: The shapes of the inputs and of the results of a call.
Shapes: TypeAlias = tuple[Sequence[tuple[int, ...]], Sequence[tuple[int, ...]]]


def logged(function: Any, name: str, shapes: Shapes, threads: Callable[..., str]) -> Any:
    """The entry point for a plan: unchanged, or a `Logged` if calls are logged at the time the plan is made.

    Calls that are not logged therefore have no overhead. A native loop over several kernels cannot call a `Logged`; its
    kernels are then launched from Python.
    """
    return Logged(function, f"{name}: {shapes_text(shapes)}", threads) if is_on("run") else function


def shapes_text(shapes: Shapes) -> str:
    """The shapes as text, such as: [8,100] [100] -> [8,100]."""
    return " -> ".join(" ".join(f"[{','.join(map(str, shape))}]" for shape in some) for some in shapes)


def _print_stages(names: str) -> None:
    """Prints the records of the stages that OPGRAPH_DEBUG names."""
    import logging

    chosen = [name for part in names.split(",") if (name := part.strip())]
    unknown = [name for name in chosen if name not in (*STAGES, "all")]
    if unknown:
        warnings.warn(
            f"the environment variable {VARIABLE} names a stage {unknown[0]!r}, which there is not. "
            f"Name some of {', '.join(STAGES)} with commas between them, or all.",
            stacklevel=2,
        )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
    for stage in STAGES:
        if stage in chosen or "all" in chosen:
            logger = logging.getLogger(f"opgraph.{stage}")
            logger.setLevel(logging.DEBUG)
            logger.addHandler(handler)


if os.environ.get(VARIABLE):
    _print_stages(os.environ[VARIABLE])
