"""Tables, progress and text that is safe to print: names of models are untrusted, and may hold escape sequences."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from opgraph.errors import DeviceError

if TYPE_CHECKING:
    from rich.console import Console


def printable(text: str, limit: int | None = None) -> str:
    """`text` on one line, with control characters shown as escapes, shortened in the middle to `limit` characters.

    Terminal escapes, newlines and the marks that reverse the direction of writing would let a name draw over its
    surroundings.
    """
    if not text.isprintable():
        text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    if limit is not None and len(text) > limit:
        head = (limit - 1) * 2 // 3
        text = f"{text[:head]}…{text[len(text) - (limit - 1 - head) :]}"
    return text


def note(text: str) -> None:
    """Says something on stderr that is no error."""
    print(f"note: {printable(text)}", file=sys.stderr)


def console(*, stderr: bool = False) -> Console:
    """A console that prints what it is given: no markup, no guessed highlighting, no emoji codes.

    Raises:
        DeviceError: rich is not installed.
    """
    try:
        from rich.console import Console
    except ImportError:
        raise DeviceError(
            "the command line prints its tables with rich, which is not installed",
            where="opgraph.cli",
            fix="pip install 'opgraph[cli]'",
        ) from None

    class Piped(Console):
        """rich would end the process with status 1 where nobody reads on; `main` has an answer of its own."""

        def on_broken_pipe(self) -> None:
            raise BrokenPipeError

    made = Piped(stderr=stderr, markup=False, highlight=False, emoji=False, soft_wrap=False)
    if not made.is_terminal:
        # A file has no width; 80 columns would cut every table for nobody's benefit.
        made.width = 130
    return made


def table(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[object]],
    *,
    right: Sequence[str] = (),
    fold_at: int | None = None,
) -> Any:
    """A table for `console().print`.

    Args:
        columns: headings. One that starts with "~" may be folded onto several lines, others stay whole.
        right: headings of the columns that hold numbers.
        fold_at: the width of columns that may be folded; as wide as there is room when left out.
    """
    from rich import box
    from rich.table import Table

    made = Table(title=title or None, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, title_style="bold")
    for heading in columns:
        name = heading.removeprefix("~")
        folds = name != heading
        made.add_column(
            name,
            justify="right" if name in right else "left",
            no_wrap=not folds,
            overflow="fold",
            header_style="",
            max_width=fold_at if folds else None,
        )
    for row in rows:
        made.add_row(*(printable_cell(cell) for cell in row))
    return made


def printable_cell(cell: object) -> str:
    """A cell's text; line breaks that the caller put there stay."""
    return "\n".join(printable(line) for line in str(cell).split("\n"))


@contextmanager
def progress(total: int | None = None) -> Iterator[Step]:
    """Shows on stderr what is being done: a bar where the number of steps is known, else a spinner.

    Nothing is shown where stderr is no terminal.
    """
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    shown = console(stderr=True)
    columns = [SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn()]
    if total is not None:
        columns.insert(2, BarColumn(bar_width=24))
    with Progress(*columns, console=shown, transient=True, disable=not shown.is_terminal) as bar:
        yield Step(bar, bar.add_task("", total=total))


class Step:
    """What a progress display is told: `step("compiling")` names the work that begins, and ends the one before."""

    def __init__(self, bar: Any, task: Any) -> None:
        self._bar = bar
        self._task = task
        self._begun = False

    def __call__(self, what: str) -> None:
        """Begins a step."""
        self._bar.update(self._task, description=printable(what, 60), advance=1 if self._begun else 0)
        self._begun = True
