"""The entry of fused models into Dynamo: torch.compile of a function, with opgraph's guards and errors; graph breaks.

Texts for disabled logs are not written. Dynamo tokenizes each source file of a model to name the functions that it
traces, and AOTAutograd prints its graphs, even if no log is enabled. In the first step of a Llama of four layers this
takes 0.2 s.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any

from opgraph.errors import OpGraphError
from opgraph.ir.pause_gc import no_collector
from opgraph.torch.graph.torch_internals import (
    compile_lock,
    graph_break_reasons,
    has_code,
    log_writers,
    optimized,
    reached_limit,
    run_frame,
    with_all_guards,
)


class CompiledMeanwhileError(Exception):
    """Another thread has compiled the function since this call looked for compiled code: the call must begin again."""


def compiled(
    call: Callable[..., Any],
    backend: Callable[..., Any],
    failed: Callable[[BaseException], bool] = lambda error: False,
    limited: Callable[[str], None] = lambda what: None,
) -> Callable[..., Any]:
    """torch.compile of a function, independent of other compilations of the same source.

    Dynamo stores compiled code, the number of compilations, and the sizes that differed, by the code object and its
    place in a file. So a copy of the function's code, with its own place, runs. Its guards detect hooks that are added
    to a submodule later, separate parameters that become one, and parameters that are frozen.

    Args:
        call: the function.
        backend: the backend for its graphs.
        failed: called with Dynamo's error if it cannot capture a frame. If it returns True, the frame runs as it was
            written, and no graph that ran before it in the same call runs again; if False, the error is raised.
        limited: called with a function's name, its place and the last difference, when Dynamo stops compiling it after
            `torch._dynamo.config.recompile_limit` times.

    Raises, when the result is called:
        CompiledMeanwhileError: the caller must call it again.
    """
    written: Any = call if isinstance(call, FunctionType) else lambda *args, **kwargs: call(*args, **kwargs)
    code = written.__code__.replace(co_filename=f"{__file__}#{next(_numbers)}")
    function = FunctionType(code, written.__globals__, "forward", written.__defaults__, written.__closure__)
    with no_collector():  # torch imports its compilers here, 400 modules
        return optimized(function, backend, lambda callback: _with_all_guards(callback, code, failed, limited))


_numbers = itertools.count()


def _with_all_guards(
    callback: Callable[..., Any],
    code: CodeType,
    failed: Callable[[BaseException], bool],
    limited: Callable[[str], None],
) -> Callable[..., Any]:
    """Dynamo's callback for frames without compiled code, with the guards that Dynamo would omit.

    All threads that call the function for the first time, or with new sizes, come here. One compiles and the others
    begin again; Dynamo would compile for each of them, up to its limit.

    Args:
        code: the code of the function. Frames of other functions, which may have run in part, do not begin again.
    """
    times = 0

    @functools.wraps(callback)  # with the attributes by which Dynamo finds the backend
    def compile(*args: Any, **kwargs: Any) -> Any:
        nonlocal times
        is_own, before = args[0].f_code is code, times
        with compile_lock():
            if is_own and times != before:
                raise CompiledMeanwhileError
            try:
                with no_collector(), with_all_guards(), _without_unread_logs():
                    found = callback(*args, **kwargs)
            except Exception as error:  # guards that Dynamo cannot write raise an AssertionError, for example
                if isinstance(error, OpGraphError):
                    raise
                result = run_frame(error)
                if result is None or not failed(error):
                    raise
                return result
            times += is_own and has_code(found)
        limit = reached_limit(found)
        if limit:
            limited(f"{_name(args[0].f_code)} {limit}")
        return found

    return compile


_leaves_out: ContextVar[bool] = ContextVar("leaves_out", default=False)


@contextmanager
def _without_unread_logs() -> Iterator[None]:
    """Within this context, texts for disabled logs are not written; other backends in other threads write theirs."""
    _wrap_log_writers()
    token = _leaves_out.set(True)
    try:
        yield
    finally:
        _leaves_out.reset(token)


@functools.cache
def _wrap_log_writers() -> None:
    for module, name, instead, logs in log_writers():
        setattr(module, name, _where_read(getattr(module, name), instead, logs))


def _where_read(write: Callable[..., Any], instead: Any, logs: Sequence[logging.Logger]) -> Callable[..., Any]:
    """Wraps a function that writes for logs: it returns `instead` if all of them are disabled."""
    structured = logging.getLogger("torch.__trace")  # torch's trace for tools, which has a handler if it is enabled

    @functools.wraps(write)
    def writes(*args: Any, **kwargs: Any) -> Any:
        is_unread = not structured.handlers and not any(log.isEnabledFor(logging.INFO) for log in logs)
        return instead if _leaves_out.get() and is_unread else write(*args, **kwargs)

    return writes


def _name(code: CodeType) -> str:
    """A function and its place; the function that `compiled` copies is named as the forward of a model."""
    own = code.co_filename.startswith(__file__)
    return "its forward was" if own else f"{code.co_name} ({code.co_filename}:{code.co_firstlineno}) was"


@dataclass(frozen=True, slots=True)
class GraphBreak:
    """A line at which Dynamo ended a graph: ops before and after it cannot fuse.

    Attributes:
        line: `file:line` and its code.
        reason: Dynamo's reason.
        hints: Dynamo's advice for this kind of line.
    """

    line: str
    reason: str
    hints: tuple[str, ...] = ()

    def __str__(self) -> str:
        hints = (f"\n    hint: {hint}" for hint in self.hints)
        return f"  {self.line}\n    {self.reason}{''.join(hints)}"


@contextmanager
def graph_breaks() -> Iterator[list[GraphBreak]]:
    """Collects Dynamo's graph breaks within this context: afterwards the list has each line once."""
    reasons = graph_break_reasons()
    before = len(reasons)
    found: list[GraphBreak] = []
    try:
        yield found
    finally:
        by_line: dict[str, GraphBreak] = {}
        for reason in reasons[before:]:
            if reason.user_stack and getattr(reason, "graph_break", True):
                frame = reason.user_stack[-1]
                where, text = f"{frame.filename}:{frame.lineno}: {frame.line}", str(reason.reason)
                if text.startswith(_JUMP):  # for a branch, Dynamo records this in addition, or alone
                    by_line.setdefault(where, GraphBreak(where, *_BRANCH))
                else:
                    by_line[where] = GraphBreak(where, text.splitlines()[0], tuple(_hints(text)))
        found += by_line.values()


#: The instruction at which a branch on the value of a tensor ends, and Dynamo's words for it elsewhere.
_JUMP, _BRANCH = "generic_jump", ("Data-dependent branching", ("Use `torch.cond` to express dynamic control flow.",))
#: The beginnings of hints that Dynamo gives for many kinds of lines.
_GENERAL_HINTS = ("This graph break", "This is likely", "It may be possible", "Please report", "Your code may")


def _hints(text: str) -> Iterator[str]:
    for line in text.splitlines():
        found, _, hint = line.partition("  Hint: ")
        if not found and hint and not hint.startswith(_GENERAL_HINTS):
            yield hint
