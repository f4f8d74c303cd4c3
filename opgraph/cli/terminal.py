"""Tables, progress and text that is safe to print: names in models are untrusted, and may contain escape sequences."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from opgraph.errors import DeviceError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

#: The minimum width of a folded column of words, or its longest word if that is shorter. Most shapes stay whole.
_FOLDED = 20


def printable(text: str, limit: int | None = None) -> str:
    """`text` on one line, with control characters shown as escapes, shortened in the middle to `limit` characters.

    Terminal escapes, newlines and the marks that reverse the direction of writing would let a name overwrite its
    surroundings.
    """
    if not text.isprintable():
        text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    if limit is not None and len(text) > limit:
        head = (limit - 1) * 2 // 3
        text = f"{text[:head]}…{text[len(text) - (limit - 1 - head) :]}"
    return text


def note(text: str) -> None:
    """Prints a note to stderr; a note is not an error."""
    print(f"note: {printable(text)}", file=sys.stderr)


def console(*, stderr: bool = False) -> Console:
    """A console that prints texts unchanged: no markup, no guessed highlighting, no emoji codes.

    Raises:
        DeviceError: rich is not installed.
    """
    _require_rich()
    from rich.console import Console
    from rich.segment import Segment
    from rich.table import Table

    class Whole(Console):
        """Truncates no table: on a narrow terminal its lines wrap, because a truncated number would be wrong."""

        def print(self, *objects: Any, **options: Any) -> None:
            """Prints like rich; a single table is at least as wide as its columns require."""
            if len(objects) != 1 or not isinstance(objects[0], Table):
                return super().print(*objects, **options)
            terminal = self.width
            self.width = max(terminal, _narrowest(objects[0]))
            try:
                super().print(*objects, **{**options, "width": self._asked(objects[0])})
            finally:
                self.width = terminal

        def _asked(self, made: Table) -> int:
            """The width to pass to rich so that the table is no wider than the console.

            rich makes all columns that fold equally narrow, and then widens those too narrow for their words.
            """
            asked, least = self.width, _narrowest(made, folded=1)
            while asked > least:
                lines = Segment.split_lines(self.render(made, self.options.update(width=asked)))
                over = max(sum(part.cell_length for part in line) for line in lines) - self.width
                if over <= 0:
                    break
                asked = max(asked - over, least)
            return asked

        def on_broken_pipe(self) -> None:
            """Raises BrokenPipeError, which `main` handles; rich would end the process with status 1."""
            raise BrokenPipeError

    made = Whole(stderr=stderr, markup=False, highlight=False, emoji=False, soft_wrap=False)
    if not made.is_terminal:
        # A file has no width; 80 columns would truncate every table needlessly.
        made.width = 130
    return made


def _require_rich() -> None:
    """Raises DeviceError if rich is not installed; a core install does not include it."""
    try:
        import rich  # noqa: F401
    except ImportError:
        raise DeviceError(
            "the command line prints its tables with rich, which is not installed",
            where="opgraph.cli",
            fix="pip install 'opgraph[cli]'",
        ) from None


def _narrowest(made: Table, folded: int | None = None) -> int:
    """The width of a table with columns as narrow as possible, or with columns that fold `folded` wide."""
    least = [(column.min_width or 0) if column.no_wrap or folded is None else folded for column in made.columns]
    # In addition to the text: a space on either side of each cell, and the box's lines between and around columns.
    return sum(width + 3 for width in least)


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
        fold_at: the width of columns that may be folded. Default: as wide as there is room.

    Raises:
        DeviceError: rich is not installed.
    """
    _require_rich()
    from rich import box
    from rich.table import Table

    made = Table(title=title or None, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, title_style="bold")
    texts = [[printable_cell(cell) for cell in row] for row in rows]
    for heading, *cells in zip(columns, *texts, strict=True):
        name = heading.removeprefix("~")
        folds = name != heading
        made.add_column(
            name,
            justify="right" if name in right else "left",
            no_wrap=not folds,
            # rich would truncate columns that must not fold, and narrow the others until nothing is left.
            min_width=_least([name, *cells], folds, name in right),
            overflow="fold",
            header_style="",
            max_width=fold_at if folds else None,
        )
    for row in texts:
        made.add_row(*row)
    return made


def _least(cells: Sequence[str], folds: bool, numbers: bool) -> int:
    """The minimum width of a column: its longest line, or longest word of numbers, or enough to read names."""
    from rich.cells import cell_len

    whole = [part for cell in cells for part in (cell.split() if folds else cell.split("\n"))]
    longest = max(map(cell_len, whole), default=0)
    return min(longest, _FOLDED) if folds and not numbers else longest


def printable_cell(cell: object) -> str:
    """A cell's text; line breaks that the caller put there stay."""
    return "\n".join(printable(line) for line in str(cell).split("\n"))


@contextmanager
def progress(total: int | None = None) -> Iterator[Step]:
    """Shows the current work on stderr: a bar if the number of steps is known, else a spinner.

    Nothing is shown if stderr is no terminal.

    Raises:
        DeviceError: rich is not installed.
    """
    shown = console(stderr=True)  # first: if rich is missing, its error names the package to install
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = [SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn()]
    if total is not None:
        columns.insert(2, BarColumn(bar_width=24))
    with Progress(*columns, console=shown, transient=True, disable=not shown.is_terminal) as bar:
        yield Step(bar, bar.add_task("", total=total))


class Step:
    """The steps of a progress display: `step("compiling")` begins a step with that name, and ends the previous one."""

    def __init__(self, bar: Any, task: Any) -> None:
        self._bar = bar
        self._task = task
        self._begun = False

    def __call__(self, what: str) -> None:
        """Begins a step."""
        self._bar.update(self._task, description=printable(what, 60), advance=1 if self._begun else 0)
        self._begun = True
