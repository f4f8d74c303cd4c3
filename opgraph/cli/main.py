"""`opgraph COMMAND ...`: the code shared by all commands. Exit status 0: done; 1: the work failed; 2: bad usage."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from opgraph import __version__
from opgraph.errors import InvalidArguments, OpGraphError

#: Command -> one line of help. Each is a module of this package with `arguments(parser)` and `run(args) -> int`.
COMMANDS = {
    "show": "the graph, its partitions, and why anything stayed unfused",
    "fuse": "fuse an ONNX file, check and time the result against it",
    "check": "compare with the float64 reference, or one file with another",
    "memory": "what PyTorch keeps for backward, and the peak, of an activation or a network",
    "bench": "this machine, or a model on it, against what you would use instead",
    "ops": "the op set, or one op's page",
    "demo": "an activation in PyTorch and four models: fuse them, run them, print what changed",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        argv: the arguments. Default: those of the process.

    Returns: the exit status. Errors are three lines on stderr; `--traceback` shows where they came from.
    """
    args = list(sys.argv[1:] if argv is None else argv)
    with warnings.catch_warnings(), _escaping(sys.stdout), _escaping(sys.stderr), _stoppable() as signals:
        warnings.showwarning = _show_warning
        return _guarded(lambda: _run(args), show_traceback="--traceback" in args, signals=signals)


@contextlib.contextmanager
def _escaping(stream: Any) -> Iterator[None]:
    """Lets a stream write escapes for characters that its encoding lacks: names in models may have any."""
    before = getattr(stream, "errors", None)
    if before != "strict" or not hasattr(stream, "reconfigure"):
        yield
        return
    stream.reconfigure(errors="backslashreplace")
    try:
        yield
    finally:
        stream.reconfigure(errors=before)


def _run(args: Sequence[str]) -> int:
    try:
        parsed = _parser(args).parse_args(args)
    except SystemExit as stop:  # argparse has printed help, the version, or an error
        return stop.code if isinstance(stop.code, int) else 2
    status: int = _command(parsed.command).run(parsed)
    return status


def _parser(args: Sequence[str]) -> argparse.ArgumentParser:
    parser = _Parser(
        prog="opgraph",
        description="Fuse the pointwise runs of a graph into one kernel each. MODEL: an ONNX file, a graph file of "
        "oneDNN, or a graph's text.",
    )
    parser.add_argument("--version", action="version", version=f"opgraph {__version__}")
    _add_traceback(parser, default=False)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    wanted = {a for a in args if a in COMMANDS}
    for name, text in COMMANDS.items():
        sub = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        _add_traceback(sub, default=argparse.SUPPRESS)
        if name in wanted:
            _command(name).arguments(sub)
    return parser


class _Value(argparse.Action):
    """One value, None if left out. An empty or a second value is refused, because it would have no effect.

    A shell passes an empty value for an unset variable, as in `--inputs "$FILE"`.
    """

    _given = False

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        """Stores the value.

        Raises:
            UsageError: it is empty, or not the first.
        """
        if values == "":
            where = option or str(self.metavar or self.dest)
            raise UsageError(f"{where} is empty", where=where, fix="give a value, or leave it out")
        if option is not None and self._given:
            raise UsageError(f"{option} is given twice", where=f"{option} {values}", fix="give it once")
        self._given = option is not None
        setattr(namespace, self.dest, values)


class _Parser(argparse.ArgumentParser):
    """The parser of one command or of all. Values are parsed by `_Value`, and option names must be written in full."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{**settings, "allow_abbrev": False})
        for action in (None, "store"):
            self.register("action", action, _Value)


def _add_traceback(parser: argparse.ArgumentParser, default: Any) -> None:
    # The option may be before or after the command: the second parser must not reset the first.
    parser.add_argument("--traceback", action="store_true", default=default, help="show where an error came from")


def _command(name: str) -> Any:
    return importlib.import_module(f"opgraph.cli.{name}")


def _guarded(run: Callable[[], int], *, show_traceback: bool, signals: Sequence[int] = ()) -> int:
    """Runs a command, and prints errors in three lines.

    Args:
        signals: the received signals that end the process; filled during the run.
    """
    try:
        status = run()
        if sys.stdout is not None:  # the caller closed it
            sys.stdout.flush()  # here, where a closed pipe can still be handled
        return status
    except OpGraphError as error:
        if show_traceback:
            raise
        return _failed(error, status=2 if isinstance(error, UsageError) else 1)
    except KeyboardInterrupt as stop:
        return _stopped(stop)
    except BrokenPipeError:  # `opgraph ops | head`: the pipe was closed
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if show_traceback:
            raise
        where = str(error.filename) if error.filename else "standard output, or a file"
        return _failed(
            OpGraphError(error.strerror or str(error), where=where, fix="check the path, its rights and the free space")
        )
    except MemoryError as error:
        if show_traceback:
            raise
        fix = "give smaller sizes or inputs; `opgraph COMMAND --help` lists the options for them"
        return _failed(OpGraphError(str(error) or "there is not enough memory", where="this machine", fix=fix))
    except Exception as error:
        if show_traceback:
            raise
        if signals or _is_interrupt(error):
            return _stopped(_Stopped(*signals[-1:]))
        what = f"{type(error).__name__}: {error}"
        return _failed(
            OpGraphError(what, where="inside opgraph", fix="this is a bug: run it with --traceback and report that")
        )


def _is_interrupt(error: BaseException | None) -> bool:
    """True if Ctrl-C caused an error: while classes and C modules are set up, Python and NumPy raise other errors."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


class _Stopped(KeyboardInterrupt):
    """A signal that ends a process, as an exception, so that temporary files are deleted."""


@contextlib.contextmanager
def _stoppable() -> Iterator[list[int]]:
    """Handles the signals of `kill` and of a closed terminal like Ctrl-C, unless they already have a handler.

    Yields: the numbers of the signals received.
    """
    came: list[int] = []

    def stop(number: int, frame: object) -> None:
        came.append(number)
        raise _Stopped(number)

    plain = (signal.SIG_DFL, signal.default_int_handler)
    before = {one: signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    in_main = threading.current_thread() is threading.main_thread()  # the only one that may set handlers
    taken = {one: handler for one, handler in before.items() if in_main and handler in plain}
    for one in taken:
        signal.signal(one, stop)
    try:
        yield came
    finally:
        for one, handler in taken.items():
            signal.signal(one, handler)


def _stopped(stop: KeyboardInterrupt) -> int:
    print("stopped", file=sys.stderr)
    number = stop.args[0] if isinstance(stop, _Stopped) and stop.args else signal.SIGINT
    return 128 + int(number)


def _failed(error: OpGraphError, status: int = 1) -> int:
    from opgraph.cli.terminal import printable

    text = "\n".join(printable(line) for line in str(error).splitlines())
    print(f"error: {text}", file=sys.stderr)
    return status


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    from opgraph.cli.terminal import note

    note(str(message))


class UsageError(InvalidArguments):
    """An invalid argument of the command line; exit status 2."""


@contextlib.contextmanager
def usage(options: Mapping[str, str]) -> Iterator[None]:
    """Converts the library's InvalidArguments for a command-line argument into a UsageError.

    Args:
        options: the `where` of an error -> the option.
    """
    try:
        yield
    except InvalidArguments as error:
        where = options.get(error.where, error.where)
        raise UsageError(error.what, where=where, fix=error.fix) from error


def refuse_passed_over(given: Mapping[str, Any], why: str, fix: str = "leave it out") -> None:
    """Refuses options that would have no effect together with the others.

    Args:
        given: option -> its value; None, False or an empty list means that it was not given.
        why: the reason why they have no effect.

    Raises:
        UsageError: one was given.
    """
    for option, value in given.items():
        if value is not None and value is not False and value != []:
            raise UsageError(f"{option} would be passed over: {why}", where=option, fix=fix)


def check_place(path: str, option: str, regular: bool = False, reads: Iterable[str | None] = ()) -> None:
    """Checks, before the work is done, that the file for its result can be written.

    Args:
        regular: if True, refuses a device or a pipe.
        reads: the files that the command reads and must not overwrite; None and missing files are ignored.

    Raises:
        UsageError: the file cannot be written.
    """
    for read in reads:
        if read and os.path.isfile(path) and os.path.isfile(read) and os.path.samefile(path, read):
            raise UsageError(
                f"that is {read!r}, which is read", where=f"{option} {path}", fix="give another file's path"
            )
    folder = os.path.dirname(path) or os.curdir
    if os.path.isdir(path or os.curdir):
        raise UsageError("that is a folder", where=f"{option} {path}", fix="give a file's path")
    if regular and os.path.exists(path) and not os.path.isfile(path):
        raise UsageError("that is no file", where=f"{option} {path}", fix="give a file's path")
    if os.path.exists(path) and not os.access(path, os.W_OK):
        raise UsageError("the file there is write-protected", where=f"{option} {path}", fix="choose another name")
    if not os.path.isdir(folder):
        raise UsageError(f"there is no folder {folder!r}", where=f"{option} {path}", fix="give a file's path")
    if not os.access(folder, os.W_OK):
        raise UsageError(f"nothing can be written in {folder!r}", where=f"{option} {path}", fix="choose another folder")
